"""One read per prompt: bytes are counted by the reader and compared with the files' headers."""

import json
import struct

import pytest

from tests.prefill.running import decode, relative, routed_experts, settled_prompt
from tests.support.checkpoints import random_tokens

MANY = {"num_experts": 64}


def expert_nbytes(path):
    """``{layer: bytes of one expert}``, straight from the headers."""
    sizes = {}
    for shard in path.glob("*.safetensors"):
        raw = shard.read_bytes()
        header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
        for name, entry in header.items():
            if ".switch_mlp." in name or ".experts." in name:
                layer = int(name.split("layers.")[1].split(".")[0])
                begin, end = entry["data_offsets"]
                sizes[layer] = sizes.get(layer, 0) + (end - begin) // entry["shape"][0]
    return [sizes[layer] for layer in sorted(sizes)]


@pytest.mark.parametrize("tokens", [20, 83])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_are_read_once_whatever_the_chunk(checkpoint, stock, open_engine, name, tokens):
    path = checkpoint(name)
    model = stock(path)
    prompt = random_tokens(model, tokens, seed=5)
    used = routed_experts(model, prompt)
    sizes = expert_nbytes(path)
    distinct = sum(len(experts) * size for experts, size in zip(used, sizes, strict=True))
    whole = sum(8 * size for size in sizes)

    receipts = []
    for chunk in (1, 7, 64, tokens):
        engine = open_engine(path, chunk_tokens=chunk, io="buffered")
        receipts.append(engine.prefill(prompt).receipt)
        engine.close()
    for receipt in receipts:
        assert receipt.mode == "stream"
        assert receipt.segments == 1
        assert receipt.bytes_read == whole
        assert receipt.distinct_expert_bytes == distinct
        assert receipt.read_amplification == pytest.approx(whole / distinct)


def test_direct_reads_add_alignment_only(checkpoint, open_engine):
    path = checkpoint("qwen3_moe")
    whole = sum(8 * size for size in expert_nbytes(path))
    engine = open_engine(path)
    plan, receipt = engine.plan(83), engine.prefill(random_tokens(160, 83)).receipt
    tensors = len(engine.index.layers) * 9  # weight, scales and biases of three projections
    groups = sum(len(layer.groups) for layer in plan.layers)
    slack = 2 * engine.reader.align * tensors * groups
    assert whole <= receipt.bytes_read <= whole + slack
    assert receipt.io_mode == engine.reader.io_mode


def test_nothing_is_read_twice_nor_before_it_is_asked_for(checkpoint, open_engine):
    engine = open_engine(checkpoint("qwen3_moe"), io="buffered")
    assert engine.reader.counters.bytes == 0, "loading reads no expert"
    first = engine.prefill(random_tokens(160, 40))
    second = engine.prefill(random_tokens(160, 41, seed=1), first.cache)
    assert first.receipt.bytes_read == second.receipt.bytes_read == engine.index.nbytes
    assert engine.reader.counters.bytes == 2 * engine.index.nbytes


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_short_prompts_read_only_what_they_route_to(checkpoint, stock, open_engine, tokens, io):
    path = checkpoint("qwen3_moe", changes=MANY)
    model = stock(path)
    prompt, rows = settled_prompt(model, tokens, 4)
    used = routed_experts(model, prompt)
    assert all(len(experts) <= 2 * tokens for experts in used)
    expected = sum(
        len(experts) * size for experts, size in zip(used, expert_nbytes(path), strict=True)
    )
    engine = open_engine(path, io=io)
    result = engine.prefill(prompt)
    receipt = result.receipt
    assert receipt.mode == "union"
    assert receipt.distinct_expert_bytes == expected
    if io == "buffered":
        assert receipt.bytes_read == expected
        assert receipt.read_amplification == 1.0
    assert receipt.bytes_read < engine.index.nbytes / 4
    assert relative(result.logits, rows[0]) < 1e-4
    assert decode(engine, result, prompt, 4) == [int(row.argmax()) for row in rows]


@pytest.mark.parametrize("group", [1, 3, 5])
def test_scattered_experts_fit_the_slots_of_small_groups(
    checkpoint, stock, open_engine, monkeypatch, group
):
    """Aligned reads pad every scattered expert: fewer fit into a slot than neighbours would."""
    path = checkpoint("qwen3_moe", changes=MANY)
    prompt, rows = settled_prompt(stock(path), 7, 1)
    one = max(expert_nbytes(path))
    monkeypatch.setattr("mlx_stream.planner.fit.TARGET_GROUP_NBYTES", group * one)
    engine = open_engine(path)
    plan, result = engine.plan(7), engine.prefill(prompt)
    assert (plan.mode, plan.group_size) == ("union", group)
    assert relative(result.logits, rows[0]) < 1e-4


def test_progress_counts_layers_and_bytes(checkpoint, open_engine):
    engine = open_engine(checkpoint("qwen3_moe"), io="buffered")
    seen = []
    engine.prefill(random_tokens(160, 30), progress=seen.append)
    layers = len(engine.index.layers)
    assert [(p.segment, p.layer) for p in seen] == [(0, n + 1) for n in range(layers)]
    assert {(p.segments, p.layers) for p in seen} == {(1, layers)}
    counted = [p.bytes_read for p in seen]
    assert counted == sorted(counted)
    assert counted[-1] == seen[-1].bytes_planned == engine.index.nbytes
