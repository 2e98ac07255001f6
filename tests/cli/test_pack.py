"""pack, verify and repair as a user runs them."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from mlx_stream.decode.routing_trace import RoutingTrace
from mlx_stream.packed.order import used_first
from tests.cli.runner import COMMAND, GENERATE, assert_failed, run


def command(*args):
    return run(*args, command=COMMAND)


@pytest.fixture(scope="module")
def model(checkpoint):
    return checkpoint("qwen3_moe")


def test_pack_verify_generate_damage_repair(model, tmp_path):
    folder = tmp_path / "packed"
    packed = command("pack", model, "-o", folder, "--verify")
    assert packed.returncode == 0, packed.stderr
    assert "verified" in packed.stdout
    assert "nothing to do" in command("pack", model, "-o", folder).stdout
    assert "sound" in command("verify", folder, "--against", model).stdout
    assert "structure" in command("verify", model).stdout
    info = command("info", folder).stdout.splitlines()[2:]
    assert info == command("info", model).stdout.splitlines()[2:] or len(info) > 3

    options = ("--prompt", "1 2 3 4 5", "--max-tokens", "4", "--verbose", "False")
    answers = [run("--model", m, *options, command=GENERATE).stdout for m in (model, folder)]
    assert answers[0] == answers[1]

    shard = folder / "experts-00001-of-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2 + 77] ^= 4
    shard.write_bytes(data)
    found = command("verify", folder)
    assert found.returncode == 1
    assert "expert" in found.stdout
    assert "mlx_stream repair" in found.stderr
    mended = command("repair", folder, "--source", model)
    assert mended.returncode == 0
    assert "written anew" in mended.stdout
    assert "nothing to repair" in command("repair", folder, "--source", model).stdout


def test_a_damaged_record_ends_generate_with_its_name(model, tmp_path):
    folder = tmp_path / "packed"
    assert command("pack", model, "-o", folder).returncode == 0
    shard = folder / "experts-00001-of-00001.safetensors"
    data = bytearray(shard.read_bytes())
    for at in range(16384 + 5, len(data), 16384):
        data[at] ^= 1
    shard.write_bytes(data)
    options = ("--model", folder, "--prompt", "1 2 3 4 5", "--max-tokens", "4")
    quiet = (*options, "--verbose", "False")
    assert_failed(run(*quiet), "expert", "experts-00001-of-00001.safetensors", "repair")
    assert run(*options, "--verify", "off").returncode == 0


def test_an_order_from_a_trace(model, tmp_path):
    from tests.packed.building import index_of

    index = index_of(model)
    rng = np.random.default_rng(0)
    layers = len(index.layers)
    ids = [np.stack([rng.permutation(8)[:2] for _ in range(50)]) for _ in range(layers)]
    for i in ids:
        i[:40] = [6, 1]
    sizes = tuple(x.expert_nbytes for x in index.layers)
    trace = RoutingTrace(
        "m",
        tuple(range(layers)),
        (8,) * layers,
        sizes,
        tuple(i.astype(np.int16) for i in ids),
        tuple(i[:5].astype(np.int16) for i in ids),
        np.arange(5, dtype=np.int32),
    )
    trace.save(tmp_path / "trace.npz")
    folder = tmp_path / "packed"
    done = command("pack", model, "-o", folder, "--order", tmp_path / "trace.npz")
    assert done.returncode == 0, done.stderr
    manifest = json.loads((folder / "packed.json").read_text())
    assert all(set(x["order"][:2]) == {1, 6} for x in manifest["layers"])
    assert command("verify", folder, "--against", model).returncode == 0


def test_used_first_is_an_order_whatever_was_routed():
    rng = np.random.default_rng(1)
    for experts in (1, 2, 7, 64):
        for rows in (0, 1, 30):
            ids = rng.integers(0, experts, (rows, 3)) if rows else np.zeros((0, 3), int)
            order = used_first([ids], experts)
            assert sorted(order) == list(range(experts))
    together = np.array([[0, 5], [0, 5], [0, 5], [3, 4], [3, 4], [2, 1]])
    assert used_first([together], 6)[:4] in ([0, 5, 3, 4], [0, 5, 4, 3])


def test_errors_are_one_message(model, checkpoint, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "x").write_text("")
    assert_failed(command("pack", model, "-o", other), "other files")
    assert_failed(command("pack", tmp_path / "nothing", "-o", tmp_path / "p"), "cannot find")
    folder = tmp_path / "packed"
    assert command("pack", model, "-o", folder).returncode == 0
    gpt = checkpoint("gpt_oss")
    assert_failed(command("pack", gpt, "-o", folder), "another packing", "--force")
    assert_failed(command("repair", folder, "--source", gpt), "not the checkpoint")
    assert_failed(command("repair", model, "--source", gpt), "manifest")
    shutil.copy(folder / "config.json", tmp_path / "trace.npz")
    done = command("pack", model, "-o", tmp_path / "p", "--order", tmp_path / "trace.npz")
    assert_failed(done, "trace")


def test_a_read_only_folder(model, tmp_path):
    import os

    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    assert_failed(command("pack", model, "-o", tmp_path / "p"), "cannot be made")
