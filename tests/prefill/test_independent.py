"""References that share no code with mlx-lm: numpy, and transformers where torch is installed.

One tiny Qwen3-MoE, unquantized, is written once; numpy reads the same file that is streamed, and
transformers gets the weights in Hugging Face's layout.
"""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.prefill.running import decode, relative

CHANGES = {"mlp_only_layers": [1], "attention_bias": False}
N, STEPS = 40, 5


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint("qwen3_moe", mode="none", changes=CHANGES)


@pytest.fixture(scope="module")
def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def config(folder):
    return json.loads((folder / "config.json").read_text())


# --- numpy: x [T, D], H heads of width d, in float64


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def silu(x):
    return x / (1 + np.exp(-x))


def rope(x, theta):
    """Rotate pairs (i, i + d/2) of ``[T, H, d]``, position = row."""
    tokens, _, dims = x.shape
    half = dims // 2
    angles = np.arange(tokens)[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def attention(x, w, cfg):
    tokens, dims, eps = len(x), cfg["head_dim"], cfg["rms_norm_eps"]
    heads, kv_heads = cfg["num_attention_heads"], cfg["num_key_value_heads"]
    q = (x @ w("self_attn.q_proj.weight").T).reshape(tokens, heads, dims)
    k = (x @ w("self_attn.k_proj.weight").T).reshape(tokens, kv_heads, dims)
    v = (x @ w("self_attn.v_proj.weight").T).reshape(tokens, kv_heads, dims)
    q = rope(rms_norm(q, w("self_attn.q_norm.weight"), eps), cfg["rope_theta"])
    k = rope(rms_norm(k, w("self_attn.k_norm.weight"), eps), cfg["rope_theta"])
    mask = np.triu(np.full((tokens, tokens), -np.inf), 1)
    out = []
    for h in range(heads):
        shared = h // (heads // kv_heads)
        scores = q[:, h] @ k[:, shared].T / np.sqrt(dims) + mask
        out.append(softmax(scores) @ v[:, shared])
    return np.stack(out, axis=1).reshape(tokens, heads * dims) @ w("self_attn.o_proj.weight").T


def dense_mlp(x, w):
    hidden = silu(x @ w("mlp.gate_proj.weight").T) * (x @ w("mlp.up_proj.weight").T)
    return hidden @ w("mlp.down_proj.weight").T


def routed_mlp(x, w, cfg):
    probabilities = softmax(x @ w("mlp.gate.weight").T)
    y = np.zeros_like(x)
    for t, row in enumerate(probabilities):
        chosen = np.argsort(-row)[: cfg["num_experts_per_tok"]]
        share = row[chosen] / row[chosen].sum()
        for expert, weight in zip(chosen, share, strict=True):
            gate = w("mlp.switch_mlp.gate_proj.weight")[expert] @ x[t]
            up = w("mlp.switch_mlp.up_proj.weight")[expert] @ x[t]
            y[t] += weight * (w("mlp.switch_mlp.down_proj.weight")[expert] @ (silu(gate) * up))
    return y


def numpy_logits(weights, cfg, tokens):
    """``[T, V]`` of a Qwen3-MoE, written from the paper's equations."""
    doubles = {name: value.astype(np.float64) for name, value in weights.items()}
    x = doubles["model.embed_tokens.weight"][tokens]
    for layer in range(cfg["num_hidden_layers"]):

        def w(name, layer=layer):
            return doubles[f"model.layers.{layer}.{name}"]

        eps = cfg["rms_norm_eps"]
        x = x + attention(rms_norm(x, w("input_layernorm.weight"), eps), w, cfg)
        h = rms_norm(x, w("post_attention_layernorm.weight"), eps)
        dense = layer in cfg["mlp_only_layers"]
        x = x + (dense_mlp(h, w) if dense else routed_mlp(h, w, cfg))
    x = rms_norm(x, doubles["model.norm.weight"], cfg["rms_norm_eps"])
    return x @ doubles["lm_head.weight"].T


def clear_prompt(logits_of, vocab):
    """A prompt whose greedy answer has no near ties, with the answer's tokens and first logits."""
    for seed in range(20):
        prompt = np.random.default_rng(seed).integers(0, vocab, N).tolist()
        tokens, first, gaps = list(prompt), None, []
        for _ in range(STEPS):
            row = logits_of(tokens)[-1]
            first = row if first is None else first
            ordered = np.sort(row)
            gaps.append((ordered[-1] - ordered[-2]) / np.abs(row).max())
            tokens.append(int(row.argmax()))
        if min(gaps) > 1e-3:
            return prompt, first, tokens[N:]
    raise AssertionError("no clear prompt")


@pytest.mark.parametrize("chunk", [7, N])
def test_numpy_agrees(folder, weights, config, open_engine, chunk):
    prompt, first, answer = clear_prompt(
        lambda tokens: numpy_logits(weights, config, tokens), config["vocab_size"]
    )
    engine = open_engine(folder, chunk_tokens=chunk)
    result = engine.prefill(prompt)
    assert relative(result.logits, first) < 1e-4
    assert decode(engine, result, prompt, STEPS) == answer


def test_numpy_agrees_through_the_metal_path(folder, weights, config, open_metal):
    tokens = list(range(30))
    result = open_metal(folder).prefill(tokens)
    assert relative(result.logits, numpy_logits(weights, config, tokens)[-1]) < 1e-4


def write_hugging_face(out, weights, config):
    """One tensor per expert, as Qwen publishes them."""
    tensors = {}
    for name, value in weights.items():
        if ".switch_mlp." not in name:
            tensors[name] = value
            continue
        prefix, _, rest = name.partition(".switch_mlp.")
        for expert, part in enumerate(value):
            tensors[f"{prefix}.experts.{expert}.{rest}"] = np.ascontiguousarray(part)
    out.mkdir()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    extra = {"architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu", "dtype": "float32"}
    (out / "config.json").write_text(json.dumps(config | extra))


@pytest.mark.parametrize("chunk", [7, N])
def test_transformers_agrees(folder, weights, config, open_engine, tmp_path, chunk):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    write_hugging_face(tmp_path / "hf", weights, config)
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager"
    ).eval()

    def logits_of(tokens):
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].numpy()

    prompt, first, answer = clear_prompt(logits_of, config["vocab_size"])
    assert relative(first, numpy_logits(weights, config, prompt)[-1]) < 1e-4
    engine = open_engine(folder, chunk_tokens=chunk)
    result = engine.prefill(prompt)
    assert relative(result.logits, first) < 1e-4
    assert decode(engine, result, prompt, STEPS) == answer
