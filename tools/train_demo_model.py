"""Train and export the demo checkpoint: a small Qwen3-MoE that writes English-looking prose.

    python tools/train_demo_model.py --out build/demo --minutes 60

Steps: ``prepare`` (corpus and tokenizer), ``train`` (PyTorch on the CPU), ``export`` (MLX 4-bit
checkpoint, metrics and model card); without a step all three run. Only ``train`` imports torch
and only ``export`` imports mlx and mlx-lm, so they may run in two environments. With glibc,
``MALLOC_MMAP_THRESHOLD_=4000000000 MALLOC_TRIM_THRESHOLD_=8000000000`` in the environment keeps
large buffers between steps of the training, which is then faster.

Corpus, all in the public domain, read from where Debian installs it:

* the King James Bible (package ``bible-kjv``), printed by its ``bible`` command;
* Jane Austen's six novels, from Project Gutenberg (package ``r-cran-janeaustenr``);
* the United States Declaration of Independence and Constitution (package ``miscfiles``).

The file owns the torch twin of ``mlx_lm.models.qwen3_moe`` and refuses to know the runtime: what
it writes is an ordinary mlx-lm checkpoint folder.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import random
import shutil
import struct
import subprocess
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

EOS = "<|endoftext|>"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"
AUSTEN = Path("/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
STATE_PAPERS = ("/usr/share/state/us-declaration.gz", "/usr/share/state/us-constitution.gz")
KJV_COMMAND = ("bible", "-f", "gen1:1-rev22:21")
PASSAGE_CHARS = 16_000  # the unit of the train / held-out split
HELD_OUT_EVERY = 20  # one passage in twenty is held out
WINDOW = 512  # tokens of an evaluation window
GROUP = 64  # weights of one quantization group
SLOT_ROUND = 32  # rows of an expert's batch are rounded up to this


@dataclass(frozen=True)
class Shape:
    """Shape of the model; the names are those of an mlx-lm ``qwen3_moe`` config."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_experts: int = 32
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 64
    intermediate_size: int = 256
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 4096


@dataclass(frozen=True)
class Recipe:
    """How the model is trained. Phases are fractions of the wall-clock budget."""

    minutes: float = 60.0
    seed: int = 1
    batch_tokens: int = 2048
    short_window: int = 256
    long_window: int = 1024
    long_phase: float = 0.92  # from here on, windows are long
    quant_phase: float = 0.92  # from here on, the forward pass sees 4-bit weights
    peak_lr: float = 1.5e-3
    final_lr: float = 0.02  # of the peak
    warmup_steps: int = 100
    weight_decay: float = 0.1
    balance_weight: float = 0.01
    eval_every_s: float = 300.0
    save_every_s: float = 120.0


# --- prepare: corpus and tokenizer -------------------------------------------------------------


def read_kjv(command: tuple[str, ...] = KJV_COMMAND) -> list[str]:
    """Books of the King James Bible, one line a chapter."""
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    books: dict[str, dict[str, list[str]]] = {}
    for line in lines:
        reference, verse = line.split(" ", 1)
        chapter = reference.split(":")[0]
        book = chapter.rstrip("0123456789")
        books.setdefault(book, {}).setdefault(chapter, []).append(verse.strip())
    return ["\n".join(" ".join(v) for v in chapters.values()) for chapters in books.values()]


def read_austen(path: Path) -> list[str]:
    """Novels in an R lazy-load database: length-prefixed zlib streams, one string vector each."""
    data, position, novels = path.read_bytes(), 0, []
    while position < len(data):
        stream = zlib.decompressobj()
        novels.append("\n".join(_r_strings(stream.decompress(data[position + 4 :]))))
        position = len(data) - len(stream.unused_data)
    return [unwrap(novel) for novel in novels]


def _r_strings(blob: bytes) -> list[str]:
    """Strings of one serialized R character vector (XDR format, version 3)."""
    position = blob.index(b"UTF-8") + len("UTF-8")
    (count,) = struct.unpack_from(">I", blob, position + 4)
    position, strings = position + 8, []
    for _ in range(count):
        (length,) = struct.unpack_from(">i", blob, position + 4)
        position += 8
        strings.append(blob[position : position + max(length, 0)].decode("utf-8"))
        position += max(length, 0)
    return strings


def unwrap(text: str) -> str:
    """Hard-wrapped text with blank lines between paragraphs, as one line a paragraph."""
    paragraphs = text.replace("_", "").replace("\r", "").split("\n\n")
    joined = (" ".join(p.split()) for p in paragraphs)
    return "\n".join(p for p in joined if p)


def split_passages(document: str) -> list[str]:
    """Contiguous passages of about PASSAGE_CHARS characters, cut between paragraphs."""
    passages, current, size = [], [], 0
    for paragraph in document.split("\n"):
        current.append(paragraph)
        size += len(paragraph)
        if size >= PASSAGE_CHARS:
            passages.append("\n".join(current) + "\n")
            current, size = [], 0
    return [*passages, "\n".join(current) + "\n"] if current else passages


def prepare(out: Path, austen: Path, state_papers: list[Path], shape: Shape) -> None:
    """Write tokenizer files, ``train.bin``/``heldout.bin`` token ids and ``heldout.txt``."""
    import numpy as np

    out.mkdir(parents=True, exist_ok=True)
    papers = [unwrap(gzip.decompress(p.read_bytes()).decode("utf-8")) for p in state_papers]
    sources = {"kjv": read_kjv(), "austen": read_austen(austen), "state_papers": papers}
    train: list[str] = []
    held: dict[str, list[str]] = {}
    for name, documents in sources.items():
        passages = [p for d in documents for p in [*split_passages(d), EOS]]
        texts = [i for i, p in enumerate(passages) if p != EOS]
        held_ids = set(texts[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY])
        held[name] = [passages[i] for i in sorted(held_ids)]
        train.append("".join(p for i, p in enumerate(passages) if i not in held_ids))
    tokenizer = train_tokenizer(train, out, shape)
    everything = [p for passages in held.values() for p in passages]
    excerpt = "".join([*held["kjv"][1:2], *held["austen"][1:3]])
    (out / "heldout.txt").write_text(excerpt, encoding="utf-8")
    counts = {"tokens": {}, "bytes": {n: sum(map(_utf8_len, d)) for n, d in sources.items()}}
    for split, texts in {"train": train, "heldout": everything, "excerpt": [excerpt]}.items():
        ids = [i for text in texts for i in tokenizer.encode(text).ids]
        np.array(ids, dtype=np.uint16).tofile(out / f"{split}.bin")
        counts["tokens"][split] = len(ids)
    (out / "corpus.json").write_text(json.dumps(counts, indent=1) + "\n")
    print(json.dumps(counts))


def _utf8_len(text: str) -> int:
    return len(text.encode("utf-8"))


def train_tokenizer(texts: list[str], out: Path, shape: Shape) -> Any:
    """Train a byte-level BPE on the training text and save it as AutoTokenizer loads it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = (line for t in texts for line in t.replace(EOS, "").splitlines(keepends=True))
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": EOS,
        "model_max_length": 1_000_000,  # the runtime may feed more than the model was trained on
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return tokenizer


# --- train: the torch twin of mlx_lm.models.qwen3_moe -------------------------------------------


def init_weights(shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    """Fresh float32 weights under their mlx-lm names; experts are stacked."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    s, dim, experts = shape, shape.hidden_size, shape.num_experts
    residual = 0.02 / math.sqrt(2 * s.num_hidden_layers)

    def normal(*size: int, std: float = 0.02) -> torch.Tensor:
        return torch.randn(size, generator=generator) * std

    q_dim, kv_dim = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
    weights = {"model.embed_tokens.weight": normal(s.vocab_size, dim)}
    for layer in range(s.num_hidden_layers):
        block = {
            "input_layernorm": torch.ones(dim),
            "self_attn.q_proj": normal(q_dim, dim),
            "self_attn.k_proj": normal(kv_dim, dim),
            "self_attn.v_proj": normal(kv_dim, dim),
            "self_attn.o_proj": normal(dim, q_dim, std=residual),
            "self_attn.q_norm": torch.ones(s.head_dim),
            "self_attn.k_norm": torch.ones(s.head_dim),
            "post_attention_layernorm": torch.ones(dim),
            "mlp.gate": normal(experts, dim),
            "mlp.switch_mlp.gate_proj": normal(experts, s.moe_intermediate_size, dim),
            "mlp.switch_mlp.up_proj": normal(experts, s.moe_intermediate_size, dim),
            "mlp.switch_mlp.down_proj": normal(
                experts, dim, s.moe_intermediate_size, std=2 * residual
            ),
        }
        weights |= {f"model.layers.{layer}.{name}.weight": w for name, w in block.items()}
    return weights | {"model.norm.weight": torch.ones(dim)}


def rope(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate halves. x: [B, H, T, head_dim]."""
    import torch

    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[2], dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)  # [T, head_dim / 2]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def attention(x: torch.Tensor, w: dict[str, torch.Tensor], s: Shape) -> torch.Tensor:
    """Causal grouped-query attention with per-head norms, in the dtype of x. x: [B, T, D]."""
    import torch
    from torch.nn import functional as fn

    batch, length, _ = x.shape
    w = {name: t.to(x.dtype) for name, t in w.items() if name.startswith("self_attn")}

    def heads(name: str, norm: str | None) -> torch.Tensor:
        y = fn.linear(x, w[f"self_attn.{name}.weight"]).view(batch, length, -1, s.head_dim)
        if norm is None:
            return y.transpose(1, 2)
        y = fn.rms_norm(y, (s.head_dim,), w[f"self_attn.{norm}.weight"], s.rms_norm_eps)
        return rope(y.transpose(1, 2), s.rope_theta)

    q, k, v = heads("q_proj", "q_norm"), heads("k_proj", "k_norm"), heads("v_proj", None)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    if torch.is_grad_enabled():  # on the CPU the backward pass of plain products is faster
        scores = (q @ k.transpose(-1, -2)) * s.head_dim**-0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        y = scores.masked_fill(later, float("-inf")).softmax(dim=-1) @ v
    else:
        y = fn.scaled_dot_product_attention(q, k, v, is_causal=True)
    return fn.linear(y.transpose(1, 2).reshape(batch, length, -1), w["self_attn.o_proj.weight"])


def expert_slots(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, list[int]]:
    """Slot of each (token, choice), grouped by expert, and the slots each expert has.

    Slot counts are rounded up, so that matrix products come in few shapes: the CPU library
    compiles one kernel a shape.
    """
    import torch

    flat = chosen.flatten()
    counts = torch.bincount(flat, minlength=experts)
    padded = (counts + SLOT_ROUND - 1) // SLOT_ROUND * SLOT_ROUND
    order = flat.argsort(stable=True)
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)  # [E]
    slots = torch.empty_like(flat)
    slots[order] = torch.arange(len(flat)) + shift[flat[order]]
    return slots, padded.tolist()


def grouped(rows: torch.Tensor, matrices: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Rows of expert e times matrices[e]. rows: [R, A]; matrices: [E, A, B]."""
    import torch

    out = rows.new_empty(rows.shape[0], matrices.shape[2])
    for a, m, o in zip(rows.split(counts), matrices, out.split(counts), strict=True):
        torch.mm(a, m, out=o)
    return out


def outer(left: torch.Tensor, right: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """left.T @ right over the rows of each expert: [E, A, B]."""
    import torch

    out = left.new_empty(len(counts), left.shape[1], right.shape[1])
    for a, b, o in zip(left.split(counts), right.split(counts), out, strict=True):
        torch.mm(a.T, b, out=o)
    return out


def expert_mix(
    x: torch.Tensor,
    scores: torch.Tensor,
    chosen: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Weighted sum of the chosen experts, in the dtype of x.

    x: [T, D]; scores, chosen: [T, K]; gate, up: [E, F, D]; down: [E, D, F]. Rows are sorted by
    expert, so that each expert is one matrix product over a slice, and the backward pass is
    written out: autograd would build one full-size gradient for every slice.
    """
    import torch
    from torch.nn import functional as fn

    tokens, k = chosen.shape
    slots, counts = expert_slots(chosen, gate.shape[0])
    source = slots.new_zeros(sum(counts))  # token of a slot; padding reads token 0, weighs nothing
    source[slots] = torch.arange(tokens * k) // k

    class Mix(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, scores: torch.Tensor, *experts: Any) -> Any:
            gate_up = torch.cat(experts[:2], dim=1).to(x.dtype)  # [E, 2F, D]
            down = experts[2].to(x.dtype)
            rows = x[source]
            pre = grouped(rows, gate_up.transpose(1, 2), counts)  # [R, 2F]
            g, u = pre.chunk(2, dim=-1)
            y = grouped(fn.silu(g) * u, down.transpose(1, 2), counts)[slots].view(tokens, k, -1)
            ctx.save_for_backward(rows, scores, gate_up, down, pre, y)
            return torch.bmm(scores.to(x.dtype)[:, None], y)[:, 0]

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> Any:
            rows, scores, gate_up, down, pre, y = ctx.saved_tensors
            d_scores = torch.bmm(y, dy[:, :, None])[..., 0].to(scores.dtype)
            weight = dy.new_zeros(len(source)).index_copy_(0, slots, scores.flatten().to(dy.dtype))
            dy = dy[source] * weight[:, None]
            g, u = pre.chunk(2, dim=-1)
            act = fn.silu(g)
            d_hidden = grouped(dy, down, counts)
            d_gate = torch.ops.aten.silu_backward(d_hidden * u, g)
            d_pre = torch.cat((d_gate, d_hidden * act), dim=-1)
            dx = grouped(d_pre, gate_up, counts)[slots].view(tokens, k, -1).sum(dim=1)
            d_gate_w, d_up_w = outer(d_pre, rows, counts).float().chunk(2, dim=1)
            return dx, d_scores, d_gate_w, d_up_w, outer(dy, act * u, counts).float()

    return Mix.apply(x, scores, gate, up, down)


def moe(
    x: torch.Tensor, w: dict[str, torch.Tensor], s: Shape, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse MLP and its load-balance loss; the router is float32. x: [T, D]."""
    import torch
    from torch.nn import functional as fn

    gates = fn.linear(x, w["mlp.gate.weight"]).softmax(dim=-1)  # [T, E]
    scores, chosen = gates.topk(s.num_experts_per_tok, dim=-1)  # [T, K]
    scores = scores / scores.sum(dim=-1, keepdim=True)
    experts = (w[f"mlp.switch_mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
    y = expert_mix(x.to(dtype), scores, chosen, *experts)
    share = torch.bincount(chosen.flatten(), minlength=s.num_experts) / chosen.numel()
    return y, s.num_experts * (share * gates.mean(dim=0)).sum()


def forward(
    weights: dict[str, torch.Tensor],
    ids: torch.Tensor,
    s: Shape,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Final hidden states [B, T, D] and the mean load-balance loss for ids [B, T].

    The residual stream, the norms and the router are float32, the products are in dtype.
    """
    from torch.nn import functional as fn

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return fn.rms_norm(x, (s.hidden_size,), weight, s.rms_norm_eps)

    h, balance = fn.embedding(ids, weights["model.embed_tokens.weight"]), 0.0
    for layer in range(s.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        w = {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
        h = h + attention(norm(h, w["input_layernorm.weight"]).to(dtype), w, s)
        x = norm(h, w["post_attention_layernorm.weight"]).flatten(0, 1)
        y, layer_balance = moe(x, w, s, dtype)
        h = h + y.view_as(h)
        balance = balance + layer_balance / s.num_hidden_layers
    return norm(h, weights["model.norm.weight"]), balance


def head_loss(h: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of logits h @ head.T, computed in chunks of rows with its gradient.

    h: [T, D]; head: [V, D]; labels: [T]. The full [T, V] logits never exist.
    """
    import torch

    class HeadLoss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
            weight, dh, d_head = head.to(h.dtype), torch.empty_like(h), torch.zeros_like(head)
            loss = 0.0
            for a, da, label in zip(h.split(256), dh.split(256), labels.split(256), strict=True):
                log_p = (a @ weight.T).float().log_softmax(dim=-1)
                loss -= log_p.gather(1, label[:, None]).sum()
                grad = log_p.exp_().scatter_add_(
                    1, label[:, None], log_p.new_full((len(label), 1), -1.0)
                )
                grad = grad.div_(len(h)).to(h.dtype)
                torch.mm(grad, weight, out=da)
                d_head += grad.T @ a
            ctx.save_for_backward(dh, d_head)
            return loss / len(h)

        @staticmethod
        def backward(ctx: Any, scale: torch.Tensor) -> Any:
            return tuple(g * scale for g in ctx.saved_tensors)

    return HeadLoss.apply(h, head)


def quantized_bits(name: str) -> int | None:
    """Bits of a weight in the exported checkpoint, by mlx-lm's rule; None if it stays float."""
    if "norm" in name:
        return None
    return 8 if name.endswith("mlp.gate.weight") else 4


def fake_quantize(w: torch.Tensor, bits: int) -> torch.Tensor:
    """w rounded as ``mx.quantize`` (affine) rounds it, with the gradient of the identity."""
    import torch

    with torch.no_grad():
        g = w.unflatten(-1, (-1, GROUP))
        low, high = g.amin(-1, keepdim=True), g.amax(-1, keepdim=True)
        levels = (1 << bits) - 1
        scale = ((high - low) / levels).clamp_min(1e-7)
        from_low = low.abs() > high.abs()
        scale = torch.where(from_low, scale, -scale)
        edge = torch.where(from_low, low, high)
        steps = (edge / scale).round()
        scale = torch.where(steps != 0, edge / steps, scale)
        bias = torch.where(steps != 0, edge, torch.zeros_like(edge))
        q = ((g - bias) / scale).round_().clamp_(0, levels).mul_(scale).add_(bias)
        delta = q.flatten(-2).sub_(w)
    return w + delta


def rounded(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights as the exported checkpoint will hold them."""
    bits = {n: quantized_bits(n) for n in weights}
    return {n: fake_quantize(w, b) if (b := bits[n]) else w for n, w in weights.items()}


def windows(tokens: torch.Tensor, size: int, rng: random.Random) -> Iterator[torch.Tensor]:
    """Endless shuffled windows of size + 1 tokens; each epoch cuts at another offset."""
    while True:
        starts = list(range(rng.randrange(size), len(tokens) - size - 1, size))
        rng.shuffle(starts)
        yield from (tokens[i : i + size + 1] for i in starts)


def load_tokens(path: Path) -> torch.Tensor:
    """Token ids of a ``.bin`` file of uint16, as int64."""
    import numpy as np
    import torch

    return torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int64))


def perplexity(weights: dict[str, torch.Tensor], tokens: torch.Tensor, s: Shape) -> float:
    """exp of the mean loss in float32 over non-overlapping windows; the first token is unscored."""
    import torch

    total, scored = 0.0, 0
    with torch.no_grad():
        for window in tokens.split(WINDOW):
            if len(window) < 2:
                continue
            h, _ = forward(weights, window[None, :-1], s, torch.float32)
            loss = head_loss(h[0], weights["model.embed_tokens.weight"], window[1:])
            total, scored = total + float(loss) * (len(window) - 1), scored + len(window) - 1
    return math.exp(total / scored)


class Trainer:
    """Weights, optimizer state and clock of one run, in memory that worker processes share.

    Each worker computes gradients by itself and applies them under the lock, at most a few
    updates late. On a shared machine that is faster than threads, which wait for each other in
    every matrix product. ``state.pt`` is replaced atomically.
    """

    def __init__(self, out: Path, shape: Shape, recipe: Recipe, resume: bool) -> None:
        import torch

        self.out, self.shape, self.recipe = out, shape, recipe
        self.weights = init_weights(shape, recipe.seed)
        self.clock = torch.zeros(2, dtype=torch.int64)  # steps and tokens, of all workers
        before = 0.0
        for w in self.weights.values():
            w.requires_grad_()
        decayed = [w for w in self.weights.values() if w.ndim > 1]
        rest = [w for w in self.weights.values() if w.ndim == 1]
        groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
        decay = recipe.weight_decay
        self.optimizer = torch.optim.AdamW(
            groups, betas=(0.9, 0.95), weight_decay=decay, fused=True
        )
        for w in self.weights.values():
            zeros = {"exp_avg": torch.zeros_like(w.data), "exp_avg_sq": torch.zeros_like(w.data)}
            self.optimizer.state[w] = {"step": torch.tensor(0.0), **zeros}
        if resume and (out / "state.pt").exists():
            before = self.load()
        for w in self.weights.values():
            for shared in (w, *self.optimizer.state[w].values()):
                shared.share_memory_()
        self.clock.share_memory_()
        self.lock = torch.multiprocessing.Lock()
        self.began = time.monotonic() - before

    def load(self) -> float:
        """Take over ``state.pt``; returns the seconds it was trained for."""
        import torch

        state = torch.load(self.out / "state.pt")
        for name, w in self.weights.items():
            w.data.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        *counts, seconds = state["clock"]
        self.clock.copy_(torch.tensor(counts))
        return seconds

    def save(self) -> None:
        """Replace ``state.pt``. The caller is the only one that saves."""
        import torch

        with self.lock:
            state = {
                "weights": {n: w.detach() for n, w in self.weights.items()},
                "optimizer": self.optimizer.state_dict(),
                "clock": (*self.clock.tolist(), self.elapsed),
            }
            torch.save(state, self.out / "state.tmp")
        os.replace(self.out / "state.tmp", self.out / "state.pt")

    @property
    def elapsed(self) -> float:
        """Seconds of training, with those before a resume."""
        return time.monotonic() - self.began

    @property
    def progress(self) -> float:
        """Fraction of the wall-clock budget that is used."""
        return self.elapsed / (60 * self.recipe.minutes)

    def learning_rate(self) -> float:
        """Linear warm-up by steps, then a cosine by wall-clock time."""
        r = self.recipe
        warmup = min(1.0, (int(self.clock[0]) + 1) / r.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, self.progress)))
        return r.peak_lr * warmup * (r.final_lr + (1 - r.final_lr) * cosine)

    def update(self, batch: torch.Tensor) -> tuple[float, float]:
        """One optimizer step on windows [B, T + 1]; returns the loss and the balance loss."""
        import torch

        r = self.recipe
        weights = rounded(self.weights) if self.progress >= r.quant_phase else self.weights
        h, balance = forward(weights, batch[:, :-1], self.shape, torch.bfloat16)
        head = weights["model.embed_tokens.weight"]
        loss = head_loss(h.flatten(0, 1).bfloat16(), head, batch[:, 1:].flatten())
        (loss + r.balance_weight * balance).backward()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        with self.lock:
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate()
            self.optimizer.step()
            self.clock += torch.tensor([1, batch[:, 1:].numel()])
        self.optimizer.zero_grad()
        return loss.item(), balance.item()

    def work(self, rank: int) -> None:
        """Update until the time is used; worker 0 also reports and saves."""
        import torch

        torch.set_num_threads(1)
        r, tokens = self.recipe, load_tokens(self.out / "train.bin")
        rng = random.Random(f"{r.seed} {rank} {int(self.clock[0])}")
        sizes = (r.short_window, r.long_window)
        streams = {size: windows(tokens, size, rng) for size in sizes}
        evaluated = saved = self.elapsed
        while self.progress < 1:
            size = sizes[self.progress >= r.long_phase]
            batch = torch.stack([next(streams[size]) for _ in range(r.batch_tokens // size)])
            losses = self.update(batch)
            if rank == 0 and self.elapsed - saved >= r.save_every_s:
                saved = self.elapsed
                self.report(losses)
                self.save()
            if rank == 0 and self.elapsed - evaluated >= r.eval_every_s:
                evaluated = self.elapsed
                value = perplexity(self.weights, load_tokens(self.out / "excerpt.bin"), self.shape)
                print(f"held-out perplexity {value:.2f}", flush=True)

    def report(self, losses: tuple[float, float]) -> None:
        """Print one line about the run."""
        (loss, balance), (steps, tokens) = losses, self.clock.tolist()
        print(
            f"{self.elapsed:.0f} s, step {steps}, {tokens / 1e6:.2f} M tokens, loss {loss:.3f}, "
            f"balance {balance:.3f}, rate {self.learning_rate():.1e}",
            flush=True,
        )

    def finish(self, workers: int) -> None:
        """Write what ``export`` reads: ``weights.safetensors`` and ``train.json``."""
        from safetensors.torch import save_file

        weights = {n: w.detach().clone() for n, w in self.weights.items()}
        save_file(weights, self.out / "weights.safetensors")
        (steps, tokens), seconds, scores = self.clock.tolist(), self.elapsed, {}
        quantized = rounded(weights)
        for name in ("excerpt", "heldout"):
            ids = load_tokens(self.out / f"{name}.bin")
            scores[f"{name}_4bit"] = round(perplexity(quantized, ids, self.shape), 4)
            if name == "excerpt":
                scores["excerpt_float"] = round(perplexity(weights, ids, self.shape), 4)
        facts = {
            "steps": steps,
            "tokens_seen": tokens,
            "seconds": round(seconds),
            "workers": workers,
            "tokens_per_second": round(tokens / seconds),
            "torch_perplexity": scores,
        }
        (self.out / "train.json").write_text(json.dumps(facts, indent=1) + "\n")
        print(json.dumps(facts))


def train(out: Path, shape: Shape, recipe: Recipe, resume: bool, workers: int) -> None:
    """Train for recipe.minutes of wall-clock time in single-threaded workers."""
    import torch

    torch.set_num_threads(1)  # a forked worker must not inherit a thread pool
    trainer = Trainer(out, shape, recipe, resume)
    context = torch.multiprocessing.get_context("fork")
    helpers = [context.Process(target=trainer.work, args=(i,)) for i in range(1, workers)]
    for helper in helpers:
        helper.start()
    trainer.work(0)
    for helper in helpers:
        helper.join()
    trainer.save()
    trainer.finish(workers)


# --- export: the MLX checkpoint ------------------------------------------------------------------


def mlx_config(shape: Shape) -> dict[str, Any]:
    """``config.json`` of the float model."""
    return asdict(shape) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "eos_token_id": 0,
        "hidden_act": "silu",
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


def mlx_perplexity(model: Any, ids: list[int]) -> float:
    """What ``perplexity`` computes, for an mlx-lm model."""
    import mlx.core as mx
    import mlx.nn as nn

    total, scored = 0.0, 0
    for start in range(0, len(ids), WINDOW):
        window = ids[start : start + WINDOW]
        logits = model(mx.array(window[:-1])[None])[0].astype(mx.float32)
        total += nn.losses.cross_entropy(logits, mx.array(window[1:]), reduction="sum").item()
        scored += len(window) - 1
    return math.exp(total / scored)


def score_record(value: float, ids: list[int], tokenizer: Any) -> dict[str, float]:
    """A perplexity over ids with its bits per byte."""
    scored = [i for start in range(0, len(ids), WINDOW) for i in ids[start : start + WINDOW][1:]]
    # In a byte-level alphabet a token has one character a byte.
    size = sum(len(tokenizer.id_to_token(i)) for i in scored)
    return {
        "scored_tokens": len(scored),
        "scored_bytes": size,
        "perplexity": round(value, 4),
        "bits_per_byte": round(len(scored) * math.log2(value) / size, 4),
    }


def sample(folder: Path, prompt: str = "In the beginning", tokens: int = 160) -> str:
    """Seeded text of the exported checkpoint, through stock mlx-lm."""
    import mlx.core as mx
    from mlx_lm import generate, load
    from mlx_lm.sample_utils import make_sampler

    model, tokenizer = load(str(folder))
    mx.random.seed(0)
    sampler = make_sampler(temp=0.7, top_p=0.9)
    return prompt + generate(model, tokenizer, prompt, max_tokens=tokens, sampler=sampler)


def export(work: Path, out: Path, shape: Shape) -> None:
    """Quantize, measure and write the checkpoint; files of OUT are replaced one by one."""
    import mlx.core as mx
    from mlx_lm.models import qwen3_moe
    from mlx_lm.utils import quantize_model, save_config, save_model
    from tokenizers import Tokenizer

    config = mlx_config(shape)
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(config))
    model.load_weights(list(mx.load(str(work / "weights.safetensors")).items()))
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    excerpt = tokenizer.encode((work / "heldout.txt").read_text("utf-8")).ids
    train = json.loads((work / "train.json").read_text())
    exact = train["torch_perplexity"]["excerpt_float"]
    model, config = quantize_model(model, config, group_size=GROUP, bits=4)
    staging = work / "export"
    save_model(staging, model)
    save_config(config, staging / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json", "heldout.txt"):
        (staging / name).write_bytes((work / name).read_bytes())
    metrics = {
        "window": WINDOW,
        "excerpt_tokens": len(excerpt),
        "excerpt_float": score_record(exact, excerpt, tokenizer),
        "excerpt_4bit": score_record(mlx_perplexity(model, excerpt), excerpt, tokenizer),
        "train": train,
        "corpus": json.loads((work / "corpus.json").read_text()),
        "checkpoint_bytes": (staging / "model.safetensors").stat().st_size,
    }
    (staging / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    card = model_card(shape, metrics, sample(staging))
    (staging / "README.md").write_text(card, encoding="utf-8")
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(staging.iterdir()):
        fresh = out / (path.name + ".new")  # OUT may be on another disk than the scratch folder
        shutil.copyfile(path, fresh)
        os.replace(fresh, out / path.name)
    print(json.dumps(metrics))


def export_float(work: Path, out: Path, shape: Shape) -> None:
    """Write the checkpoint before rounding, for what quantizes it in other ways."""
    import mlx.core as mx
    from mlx_lm.utils import save_config

    out.mkdir(parents=True, exist_ok=True)
    weights = mx.load(str(work / "weights.safetensors"))
    mx.save_safetensors(str(out / "model.safetensors"), weights, {"format": "mlx"})
    save_config(mlx_config(shape), out / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json", "heldout.txt"):
        shutil.copyfile(work / name, out / name)


def model_card(shape: Shape, metrics: dict[str, Any], text: str) -> str:
    """README.md of the checkpoint."""
    s, train, corpus = shape, metrics["train"], metrics["corpus"]
    layer = 3 * s.hidden_size * s.moe_intermediate_size
    experts = s.num_hidden_layers * s.num_experts * layer
    exact, rounded_4bit = metrics["excerpt_float"], metrics["excerpt_4bit"]
    return CARD.format(
        s=s,
        experts=experts / 1e6,
        active=s.num_hidden_layers * s.num_experts_per_tok * layer / 1e6,
        megabytes=metrics["checkpoint_bytes"] / 1e6,
        kjv=corpus["bytes"]["kjv"] / 1e6,
        austen=corpus["bytes"]["austen"] / 1e6,
        papers=corpus["bytes"]["state_papers"] / 1e3,
        held_tokens=corpus["tokens"]["heldout"],
        train_tokens=corpus["tokens"]["train"] / 1e6,
        minutes=train["seconds"] / 60,
        seen=train["tokens_seen"] / 1e6,
        t=train,
        window=WINDOW,
        exact=exact,
        q=rounded_4bit,
        p=train["torch_perplexity"],
        text=text.strip().replace("\n", "\n> "),
    )


CARD = """# Demo model

A small Mixture-of-Experts language model ({s.num_hidden_layers} layers, {s.num_experts} experts a
layer, top {s.num_experts_per_tok}) that writes English-looking prose. It is here so that the
runtime, its tests and its benchmarks have a real trained checkpoint to run without a download. It
knows no facts and follows no instructions: its chat template joins the messages, and it goes on
from there.

| | |
|---|---|
| Layout | mlx-lm `qwen3_moe`: hidden {s.hidden_size}, expert intermediate \
{s.moe_intermediate_size}, {s.num_attention_heads} query and {s.num_key_value_heads} key-value \
heads of {s.head_dim}, tied embeddings |
| Parameters | {experts:.1f} M in experts, {active:.2f} M of them active for a token |
| Weights | affine, group 64: 4 bits, routers 8 bits; scales, biases and norms float32 |
| File | {megabytes:.2f} MB |
| Tokenizer | byte-level BPE, {s.vocab_size} tokens, trained on the training text |

## Training text

All in the public domain, taken from Debian packages:

- the King James Bible, {kjv:.2f} MB, package `bible-kjv-text`;
- Jane Austen's six novels, {austen:.2f} MB, package `r-cran-janeaustenr`, which Julia Silge made
  from Project Gutenberg's texts;
- the United States Declaration of Independence and Constitution, {papers:.0f} kB, package
  `miscfiles`.

One passage in twenty (about 16 kB each, contiguous) is held out of {train_tokens:.2f} M training
tokens and of the tokenizer's training. `heldout.txt` is an excerpt: one passage of the Bible and
two of Austen. The gospels and the books of Kings and Chronicles tell some stories twice, so the
Bible passages are not wholly unseen.

## Recipe

`tools/train_demo_model.py`, PyTorch on the CPU in {t[workers]} single-threaded processes:
{minutes:.0f} minutes on a shared machine, {t[steps]} steps, {seen:.2f} M tokens
({t[tokens_per_second]} a second). AdamW with a cosine schedule, a load-balance loss, windows of
256 tokens and then 1024, and at the end 4-bit weights in the forward pass.

## Held-out perplexity

Procedure: encode the text, cut it in non-overlapping windows of {window} tokens, run each from an
empty context in float32, score every token but the first of each window. The last window is
shorter. Perplexity is the exponential of the mean negative log-likelihood of the scored tokens;
bits per byte divides their total, in bits, by their UTF-8 bytes. The checkpoint is measured with
stock mlx-lm.

| Text | Weights | Tokens scored | Perplexity | Bits per byte |
|---|---|---|---|---|
| `heldout.txt` | this checkpoint (4-bit) | {q[scored_tokens]} | {q[perplexity]} | \
{q[bits_per_byte]} |
| `heldout.txt` | before rounding, PyTorch | {exact[scored_tokens]} | {exact[perplexity]} | \
{exact[bits_per_byte]} |

The PyTorch twin with the rounded weights gives {p[excerpt_4bit]} on `heldout.txt`, and
{p[heldout_4bit]} on all of the held-out text ({held_tokens} tokens), by the same procedure. The
same numbers are in `metrics.json`.

## Sample

Prompt "In the beginning", temperature 0.7, top-p 0.9:

> {text}

## Licence

The weights and the tokenizer are released with this project under its MIT licence. The training
text and `heldout.txt` are in the public domain.
"""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "step",
        nargs="?",
        choices=("prepare", "train", "export", "export-float", "all"),
        default="all",
        help="export-float: the weights before rounding, after 'train'",
    )
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--work", type=Path, help="scratch folder (default: OUT with .work added)")
    parser.add_argument("--minutes", type=float, default=Recipe.minutes)
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="training processes")
    parser.add_argument("--resume", action="store_true", help="go on from the scratch folder")
    parser.add_argument("--austen", type=Path, default=AUSTEN, help="R lazy-load database")
    parser.add_argument("--state-papers", type=Path, nargs="*", default=STATE_PAPERS)
    args = parser.parse_args()
    shape, recipe = Shape(), Recipe(minutes=args.minutes)
    work = args.work or args.out.with_name(args.out.name + ".work")
    prepared = args.resume and (work / "corpus.json").exists()
    if args.step == "prepare" or (args.step == "all" and not prepared):
        prepare(work, args.austen, [Path(p) for p in args.state_papers], shape)
    if args.step in ("train", "all"):
        train(work, shape, recipe, args.resume, args.workers)
    if args.step in ("export", "all"):
        export(work, args.out, shape)
    if args.step == "export-float":
        export_float(work, args.out, shape)


if __name__ == "__main__":
    main()
