"""Adapter files: both forms, the published layouts' true names, and everything that is refused."""

import json

import mlx.core as mx
import numpy as np
import pytest

from mlx_stream.adapters.adapter_set import OWNER
from mlx_stream.adapters.lora_file import open_adapter
from mlx_stream.errors import AdapterError, BudgetError, CheckpointError
from tests.adapters.making import ATTENTION, RANK, SCALE, publish, random_pairs, save_mlx, shapes

GDN = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
SHARED = ("gate_proj", "up_proj", "down_proj")
Q = {"model.layers.0.self_attn.q_proj": (8, 16)}


def layout_35b():
    """40 layers, every fourth with full attention; a shared expert in each."""
    for n in range(40):
        layer = f"language_model.model.layers.{n}"
        full = n % 4 == 3
        kind, names = ("self_attn", ATTENTION) if full else ("linear_attn", GDN)
        yield from (f"{layer}.{kind}.{name}" for name in names)
        yield from (f"{layer}.mlp.shared_expert.{name}" for name in SHARED)


def layout_8b():
    """24 layers, layer 0 dense; 84 attention targets and 69 of shared experts make 153."""
    for n in range(24):
        layer = f"model.layers.{n}"
        full = n % 4 == 3
        names = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "g_proj", "dense")
        linear = ("query_key_value", "g_proj", "dense")
        yield from (f"{layer}.attention.{name}" for name in (names if full else linear))
        if n:
            yield from (f"{layer}.mlp.shared_experts.{name}" for name in SHARED)


@pytest.mark.parametrize(("layout", "count"), [(layout_35b, 310), (layout_8b, 153)])
def test_the_published_layouts_are_read_whole(tmp_path, layout, count):
    names = list(layout())
    pairs = random_pairs(dict.fromkeys(names, (6, 10)), 0)
    file = open_adapter(publish(tmp_path / "lora.safetensors", pairs), 2.0)
    assert len(file.pairs) == count
    assert set(file.pairs) == set(names)
    assert {(p.outputs, p.inputs, p.rank) for p in file.pairs.values()} == {(6, 10, RANK)}
    assert (file.scale, file.transposed) == (2.0, False)


def test_both_forms_say_the_same(tmp_path):
    pairs = random_pairs(Q, 0)
    ours = open_adapter(publish(tmp_path / "a.safetensors", pairs), SCALE)
    theirs = open_adapter(save_mlx(tmp_path / "b", pairs, 1))
    shapes = [
        {m: (p.outputs, p.inputs, p.rank) for m, p in f.pairs.items()} for f in (ours, theirs)
    ]
    assert shapes[0] == shapes[1]
    assert theirs.scale == ours.scale == SCALE


def test_the_fingerprint_follows_bytes_and_scale(tmp_path):
    one = publish(tmp_path / "a.safetensors", random_pairs(Q, 0))
    same = publish(tmp_path / "b.safetensors", random_pairs(Q, 0))
    other = publish(tmp_path / "c.safetensors", random_pairs(Q, 1))
    prints = [
        open_adapter(p, s).fingerprint for p, s in ((one, 2), (same, 2), (other, 2), (one, 1))
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


A, B = np.zeros((4, 16), np.float16), np.zeros((8, 4), np.float16)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"layers.0.q.lora_A": A, "layers.0.q.lora_B": B, "layers.0.q.alpha": A}, "another key"),
        ({"layers.0.q.lora_A.weight": A, "layers.0.q.lora_B.weight": B}, "another key"),
        ({"layers.0.q.lora_a": A, "layers.0.q.lora_b": B}, "another key"),
        ({"layers.0.q.lora_A": A}, "half of a pair"),
        ({"layers.0.q.lora_A": A, "layers.0.q.lora_B": B.T}, "does not fit"),
        ({"layers.0.q.lora_A": A[0], "layers.0.q.lora_B": B}, "does not fit"),
        ({"layers.0.q.lora_A": A.astype(np.int32), "layers.0.q.lora_B": B}, "dtype"),
        (
            {f"l.0.mlp.switch_mlp.up_proj.lora_{s}": v for s, v in (("A", A), ("B", B))},
            "routed experts",
        ),
        ({f"l.0.mlp.experts.7.up_proj.lora_{s}": v for s, v in (("A", A), ("B", B))}, "routed"),
    ],
)
def test_bad_files_are_refused(tmp_path, arrays, said):
    path = tmp_path / "lora.safetensors"
    mx.save_safetensors(str(path), {name: mx.array(value) for name, value in arrays.items()})
    with pytest.raises(AdapterError, match=said):
        open_adapter(path, 2.0)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "no adapter's config"),
        (json.dumps({"fine_tune_type": "dora", "lora_parameters": {"scale": 1.0}}), "another kind"),
        (json.dumps({"fine_tune_type": "full"}), "another kind"),
        (json.dumps({"lora_parameters": {"alpha": 1.0}}), "no scale"),
        (json.dumps({"lora_parameters": {"scale": True}}), "no scale"),
        (json.dumps({"lora_parameters": {"scale": float("nan")}}), "bad scale"),
    ],
)
def test_bad_configs_are_refused(tmp_path, config, said):
    folder = save_mlx(tmp_path / "adapter", random_pairs(Q, 0), 1)
    (folder / "adapter_config.json").write_text(config)
    with pytest.raises(AdapterError, match=said):
        open_adapter(folder)


def test_a_published_file_needs_a_scale(tmp_path):
    path = publish(tmp_path / "lora.safetensors", random_pairs(Q, 0))
    with pytest.raises(AdapterError, match="does not say its scale"):
        open_adapter(path)
    folder = save_mlx(tmp_path / "adapter", random_pairs(Q, 0), 1)
    with pytest.raises(AdapterError, match="says its scale itself"):
        open_adapter(folder, 2.0)
    with pytest.raises(AdapterError, match="cannot be read"):
        open_adapter(tmp_path / "missing.safetensors", 2.0)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError):
        open_adapter(path, 2.0)


# --- in an engine


def test_what_does_not_fit_the_model_changes_nothing(checkpoint, open_engine, stock, tmp_path):
    path = checkpoint("qwen3_moe")
    engine = open_engine(path)
    true = shapes(stock(path), lambda p: p.endswith("layers.1.self_attn.q_proj"))
    (name, (out, inputs)), before = next(iter(true.items())), engine.budget.used
    cases = {
        "no such module": {name.replace("q_proj", "x_proj"): (out, inputs)},
        "of rank": {name: (out, inputs + 64)},
        "a linear layer\n": {"model.layers.1.input_layernorm": (out, inputs)},
    }
    for number, (said, wrong) in enumerate(cases.items()):
        file = publish(tmp_path / f"{number}.safetensors", random_pairs(wrong, 0))
        with pytest.raises(AdapterError, match=said):
            engine.adapters.load(file, 2.0)
    pairs = random_pairs(true, 0)
    pairs[name][1][0, 0] = np.inf
    with pytest.raises(AdapterError, match="NaN or infinity"):
        engine.adapters.load(publish(tmp_path / "inf.safetensors", pairs), 2.0)
    assert engine.budget.owner(OWNER) == 0
    assert engine.budget.used <= before
    assert not engine.adapters._set._swapped


def test_bytes_are_asked_of_the_budget(checkpoint, open_engine, stock, tmp_path):
    path = checkpoint("qwen3_moe")
    engine = open_engine(path, memory_budget=100 << 20)
    wide = shapes(stock(path), lambda p: "self_attn" in p)
    files = [publish(tmp_path / f"{n}.safetensors", random_pairs(wide, n)) for n in range(2)]
    resident = engine.plan(64).memory.resident
    engine.adapters.load(files[0], 2.0)
    engine.adapters.load(files[0], 2.0)  # held already
    with pytest.raises(AdapterError, match="another scale"):
        engine.adapters.load(files[0], 1.0)
    held = sum(RANK * (o + i) * 4 for o, i in wide.values())  # float32 on this backend
    assert engine.budget.owner(OWNER) == held
    assert engine.plan(64).memory.resident == resident + held
    engine.adapters._make_room()
    total, engine.budget.total = engine.budget.total, engine.budget.used + held - 1
    with pytest.raises(BudgetError, match=OWNER):
        engine.adapters.load(files[1], 2.0)
    assert engine.budget.owner(OWNER) == held
    engine.budget.total = total
    assert engine.prefill([1, 2, 3], adapter=files[0]).logits.size
