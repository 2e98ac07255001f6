"""Write a random Qwen3-MoE GGUF of any shape, for measuring llama.cpp beside our runtime.

Weights are Q4_0 (4.5 bits), near the 4.5 bits of an affine 4-bit checkpoint with groups of 64, so
both engines move nearly the same bytes. Values are noise; the vocabulary is made up. The file is
written tensor by tensor and appears complete or not at all. Needs `pip install gguf`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import gguf
import numpy as np

BLOCK, BLOCK_NBYTES = 32, 18  # Q4_0: a float16 scale and 32 nibbles
SCALE = 0.012  # keeps activations finite through many layers
HEAD_DIM = 128
ROWS_AT_ONCE = 64 << 20  # bytes of random blocks made at a time

EXAMPLES = """
\b
Examples:
  python tools/make_gguf.py --out qwen3-8l.gguf
  python tools/make_gguf.py --out small.gguf --layers 2 --experts 16 --hidden 512 --ffn 256
"""


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; letters as everywhere: L, E, D, F, K, V, and H query heads."""

    layers: int
    experts: int
    hidden: int
    ffn: int
    top_k: int
    vocab: int
    heads: int
    kv_heads: int


@dataclass(frozen=True)
class Planned:
    """One tensor to write; `quantized` says Q4_0, else float32."""

    name: str
    shape: tuple[int, ...]
    quantized: bool
    ones: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """In array elements: bytes for Q4_0, floats else."""
        if not self.quantized:
            return self.shape
        return (*self.shape[:-1], self.shape[-1] // BLOCK * BLOCK_NBYTES)

    @property
    def nbytes(self) -> int:
        """As stored."""
        return int(np.prod(self.stored_shape)) * (1 if self.quantized else 4)


def plan_tensors(s: Shape) -> Iterator[Planned]:
    """Every tensor of the model, in file order."""
    yield Planned("token_embd.weight", (s.vocab, s.hidden), True)
    yield Planned("output.weight", (s.vocab, s.hidden), True)
    yield Planned("output_norm.weight", (s.hidden,), False, ones=True)
    for layer in range(s.layers):
        p = f"blk.{layer}."
        for norm, width in (
            ("attn_norm", s.hidden),
            ("ffn_norm", s.hidden),
            ("attn_q_norm", HEAD_DIM),
            ("attn_k_norm", HEAD_DIM),
        ):
            yield Planned(f"{p}{norm}.weight", (width,), False, ones=True)
        yield Planned(p + "attn_q.weight", (s.heads * HEAD_DIM, s.hidden), True)
        yield Planned(p + "attn_k.weight", (s.kv_heads * HEAD_DIM, s.hidden), True)
        yield Planned(p + "attn_v.weight", (s.kv_heads * HEAD_DIM, s.hidden), True)
        yield Planned(p + "attn_output.weight", (s.hidden, s.heads * HEAD_DIM), True)
        yield Planned(p + "ffn_gate_inp.weight", (s.experts, s.hidden), False)
        yield Planned(p + "ffn_gate_exps.weight", (s.experts, s.ffn, s.hidden), True)
        yield Planned(p + "ffn_up_exps.weight", (s.experts, s.ffn, s.hidden), True)
        yield Planned(p + "ffn_down_exps.weight", (s.experts, s.hidden, s.ffn), True)


def _metadata(writer: gguf.GGUFWriter, s: Shape) -> None:
    writer.add_context_length(40960)
    writer.add_embedding_length(s.hidden)
    writer.add_block_count(s.layers)
    writer.add_feed_forward_length(s.ffn)
    writer.add_head_count(s.heads)
    writer.add_head_count_kv(s.kv_heads)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(s.experts)
    writer.add_expert_used_count(s.top_k)
    writer.add_expert_feed_forward_length(s.ffn)
    writer.add_vocab_size(s.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{i}" for i in range(s.vocab)])
    writer.add_token_types([1] * s.vocab)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def _values(tensor: Planned, rng: np.random.Generator) -> np.ndarray:
    if tensor.ones:
        return np.ones(tensor.shape, np.float32)
    if not tensor.quantized:
        return rng.standard_normal(tensor.shape, np.float32) * np.float32(0.05)
    blocks = np.empty((tensor.nbytes // BLOCK_NBYTES, BLOCK_NBYTES), np.uint8)
    step = max(1, ROWS_AT_ONCE // BLOCK_NBYTES)
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step]
        part[:] = np.frombuffer(rng.bytes(part.nbytes), np.uint8).reshape(part.shape)
    blocks[:, :2] = np.frombuffer(np.float16(SCALE).tobytes(), np.uint8)
    return blocks.reshape(tensor.stored_shape)


def make_gguf(out: Path, shape: Shape, seed: int = 0) -> int:
    """Write the file; returns its size in bytes."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}.partial")
    writer = gguf.GGUFWriter(str(temporary), "qwen3moe")
    rng = np.random.default_rng(seed)
    try:
        _metadata(writer, shape)
        for tensor in plan_tensors(shape):
            q4 = gguf.GGMLQuantizationType.Q4_0 if tensor.quantized else None
            kind = np.dtype(np.uint8 if tensor.quantized else np.float32)
            writer.add_tensor_info(tensor.name, tensor.stored_shape, kind, tensor.nbytes, q4)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in plan_tensors(shape):
            writer.write_tensor_data(_values(tensor, rng))
        writer.close()
        os.replace(temporary, out)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return out.stat().st_size


@click.command(
    help=__doc__, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--layers", default=8, show_default=True)
@click.option("--experts", default=128, show_default=True)
@click.option("--hidden", default=2048, show_default=True)
@click.option("--ffn", default=768, show_default=True, help="Width of one expert.")
@click.option("--top-k", default=8, show_default=True)
@click.option("--vocab", default=4096, show_default=True)
@click.option("--heads", default=32, show_default=True)
@click.option("--kv-heads", default=4, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(out: Path, seed: int, **sizes: int) -> None:
    """Check, write, report."""
    for name in ("hidden", "ffn"):
        if sizes[name] % BLOCK:
            raise click.UsageError(f"--{name} must be a multiple of {BLOCK}")
    nbytes = make_gguf(out, Shape(**sizes), seed)
    click.echo(f"{out}: {nbytes / 1e9:.3f} GB")


if __name__ == "__main__":
    main()
