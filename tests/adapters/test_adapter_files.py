"""Adapter files: both forms, the published layouts' true names, and everything that is refused."""

import json
import os
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_stream.adapters.adapter_set import OWNER
from mlx_stream.adapters.lora_file import open_adapter
from mlx_stream.adapting import _scale_beside
from mlx_stream.errors import AdapterError, BudgetError, CheckpointError, PrerouterError
from mlx_stream.hub import demo_path
from mlx_stream.prerouter.spec import EDGE0_8B, LoraSpec
from mlx_stream.prerouter.spec_file import read_spec, write_spec
from mlx_stream.runtime import load
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
        (json.dumps({"lora_parameters": {"scale": float("-inf")}}), "bad scale"),
        (json.dumps({"lora_parameters": {"scale": 10**400}}), "bad scale"),
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


def test_a_fifo_is_refused_at_once(tmp_path):
    fifo = tmp_path / "lora.safetensors"
    os.mkfifo(fifo)
    folder = save_mlx(tmp_path / "adapter", random_pairs(Q, 0), 1)
    for path, scale in ((fifo, 2.0), (folder / "adapters.safetensors", None)):
        if path != fifo:
            path.unlink()
            path.symlink_to(fifo)
        with pytest.raises(AdapterError, match="not a regular file") as caught:
            open_adapter(path if scale else folder, scale)
        assert caught.value.file == str(path)
    config = folder / "adapter_config.json"
    config.unlink()
    config.symlink_to("/dev/zero")
    with pytest.raises(AdapterError, match="not a regular file") as caught:
        open_adapter(folder)
    assert caught.value.file == str(config)


def test_every_pair_must_be_of_the_rank_that_is_known(tmp_path):
    odd = "model.layers.1.self_attn.q_proj"
    pairs = random_pairs({**Q, odd: (8, 16)}, 0)
    pairs[odd] = (pairs[odd][0][:3], pairs[odd][1][:, :3])
    path = publish(tmp_path / "lora.safetensors", pairs)
    assert {p.rank for p in open_adapter(path, 2.0).pairs.values()} == {RANK, 3}
    with pytest.raises(AdapterError, match=r"lora\.rank") as caught:
        open_adapter(path, 2.0, RANK)
    assert (caught.value.file, caught.value.tensor) == (str(path), odd)
    assert (caught.value.expected[:6], caught.value.actual) == (f"rank {RANK}", "rank 3")
    even = publish(tmp_path / "even.safetensors", random_pairs(Q, 0))
    assert open_adapter(even, 2.0, RANK).scale == 2.0


# --- the specs beside a file


def test_any_spec_of_the_folder_says_the_scale(tmp_path):
    for name, alpha in (("prerouter.json", 8.0), ("prerouter_k2.json", 12.0)):
        lora = LoraSpec(f"{alpha}.safetensors", alpha, RANK)
        write_spec(tmp_path / name, replace(EDGE0_8B, lora=lora))
    (tmp_path / "prerouter_metrics.json").write_text('{"own": {}}')
    (tmp_path / "prerouter_bad.json").write_text("{")
    (tmp_path / "prerouter_folder.json").mkdir()
    os.mkfifo(tmp_path / "prerouter_fifo.json")
    assert _scale_beside(tmp_path / "8.0.safetensors") == 2.0
    assert _scale_beside(tmp_path / "12.0.safetensors") == 3.0
    assert _scale_beside(tmp_path / "other.safetensors") is None
    assert _scale_beside(tmp_path / "lora_edge0_8b.safetensors") == 2.0
    write_spec(
        tmp_path / "prerouter_a.json", replace(EDGE0_8B, lora=LoraSpec("8.0.safetensors", 1.0, 1))
    )
    assert _scale_beside(tmp_path / "8.0.safetensors") == 2.0  # the folder's own spec goes first
    (tmp_path / "prerouter.json").write_text("{")
    with pytest.raises(PrerouterError, match="not JSON"):
        _scale_beside(tmp_path / "12.0.safetensors")


def test_the_demo_models_second_lora_finds_its_scale():
    assert _scale_beside(demo_path() / "lora_k2.safetensors") == 2.0


# --- in an engine


def test_a_spec_of_another_rank_than_its_file_is_refused(tmp_path):
    for file in demo_path().iterdir():
        (tmp_path / file.name).symlink_to(file)
    spec = read_spec(demo_path() / "prerouter.json")
    mine = tmp_path / "prerouter_mine.json"
    write_spec(mine, replace(spec, lora=replace(spec.lora, rank=7)))
    with pytest.raises(AdapterError, match="rank 7") as caught:
        load(tmp_path, memory_budget="90MB", backend="cpu", prerouter="on", prerouter_spec=mine)
    assert caught.value.file == str(tmp_path / "lora.safetensors")
    assert caught.value.actual == f"rank {spec.lora.rank}"


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
