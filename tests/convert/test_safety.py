"""Converted packings survive interruptions, are repaired from their source, and tell the truth."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from mlx_stream.cli import cli
from mlx_stream.convert.options import Conversion
from mlx_stream.convert.source import open_converted
from mlx_stream.errors import DamagedRecordError, PackError
from mlx_stream.packed.pack import PackOptions, pack
from mlx_stream.packed.repair import repair
from mlx_stream.packed.verify import verify
from mlx_stream.storage.quant_spec import QuantSpec
from tests.convert.building import convert, differing, tensors_of
from tests.support.hf_layout import STYLES, publish

ASKED = Conversion(QuantSpec("affine", 3, 64), QuantSpec("affine", 4, 64))
BIG = os.environ.get("MLX_STREAM_BIG") == "1"
ROUNDS = 60 if BIG else 1
COMMAND = [sys.executable, "-m", "mlx_stream", "pack", "--rest-bits", "4", "--expert-bits", "3"]


@pytest.fixture
def published(checkpoint, tmp_path):
    plain = checkpoint("qwen3_moe", mode="none", dtype="bfloat16")
    return publish(plain, tmp_path / "published", STYLES["each"])


@pytest.fixture
def packed(published, tmp_path):
    convert(published, tmp_path / "packed", ASKED)
    return tmp_path / "packed"


def run(*arguments):
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def test_the_command_says_what_it_did(published, tmp_path):
    result = run("pack", published, "-o", tmp_path / "p", "--bits", 4, "--expert-bits", 3)
    assert result.exit_code == 0, result.output
    assert "mlp.switch_mlp.up_proj" in result.output
    assert "relative error" in result.output
    assert run("verify", tmp_path / "p").exit_code == 0
    again = run("pack", published, "-o", tmp_path / "p", "--bits", 4, "--expert-bits", 3)
    assert "nothing to do" in again.output
    other = run("pack", published, "-o", tmp_path / "p", "--bits", 4)
    assert other.exit_code != 0
    assert "another packing" in str(other.exception)
    replaced = run("pack", published, "-o", tmp_path / "p", "--bits", 4, "--force")
    assert replaced.exit_code == 0, replaced.output


def test_without_bits_only_names_change(published, checkpoint, tmp_path):
    assert run("pack", published, "-o", tmp_path / "p").exit_code == 0
    plain = checkpoint("qwen3_moe", mode="none", dtype="bfloat16")
    result = run("verify", tmp_path / "p", "--against", plain)
    assert result.exit_code == 0, result.output


def test_quantized_weights_are_not_compared_with_their_source(packed, published, checkpoint):
    plain = checkpoint("qwen3_moe", mode="none", dtype="bfloat16")
    result = run("verify", packed, "--against", plain)
    assert result.exit_code != 0
    assert "quantized while they were packed" in str(result.exception)


def test_stopped_between_files_it_goes_on(published, tmp_path, packed):
    class Stop(Exception):
        pass

    def stop(done, total, what):
        if what.startswith("experts-00002"):
            raise Stop

    target = tmp_path / "again"
    options = PackOptions(open=lambda p: open_converted(p, ASKED), shard_nbytes=1)
    with pytest.raises(Stop):
        pack(published, target, options, stop)
    report = convert(published, target, ASKED, shard_nbytes=1)
    assert report.kept_nbytes > 0
    assert differing(tensors_of(target), tensors_of(packed)) == []
    fresh = convert(published, tmp_path / "fresh", ASKED, shard_nbytes=1)
    assert report.errors == fresh.errors  # those of the files from before are not lost


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_killed_at_any_moment_it_goes_on(published, tmp_path, packed, seed):
    """Moments are spread over the whole run; later rounds kill the continued run too."""
    target = tmp_path / f"killed-{seed}"
    command = [*COMMAND, str(published), "-o", str(target)]
    for number in range(2):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(0.6 + (seed * 0.37 + number * 0.21) % 1.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert differing(tensors_of(target), tensors_of(packed)) == []
    assert verify(target).sound


def test_damaged_records_are_made_again(published, packed):
    """An expert, a resident tensor and config.json: each from the source, by the manifest."""
    before = tensors_of(packed)
    manifest = json.loads((packed / "packed.json").read_text())
    layer = manifest["layers"][1]
    expert_file = packed / layer["file"]
    at = expert_file.stat().st_size - layer["record_nbytes"] // 2
    for path, place in ((expert_file, at), (packed / "model-00001-of-00001.safetensors", -40)):
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(bytes(data))
    (packed / "config.json").write_text("{}")
    assert len(verify(packed).damage) == 3
    result = run("repair", packed, "--source", published)
    assert result.exit_code == 0, result.output
    assert verify(packed).sound
    assert differing(tensors_of(packed), before) == []


def test_a_repair_in_another_width_is_refused(published, packed):
    """The manifest's word is not enough: what is made must have the checksum."""
    path = packed / "experts-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-20_000] ^= 1
    path.write_bytes(bytes(data))
    other = Conversion(QuantSpec("affine", 3, 64), QuantSpec("affine", 4, 64), refine=True)
    with pytest.raises((PackError, DamagedRecordError)):
        repair(packed, published, open_source=lambda p, _: open_converted(p, other))
    with pytest.raises(PackError, match="converted"):
        repair(packed, published)


@pytest.mark.parametrize("quantized", [False, True])
def test_heads_stay_with_the_weights_they_were_trained_for(published, tmp_path, quantized):
    names = {"prerouter.json", "prerouter_x.safetensors", "lora_x.safetensors"}
    for name in names:
        (published / name).write_bytes(b"{}")
    convert(published, tmp_path / "packed", ASKED if quantized else None)
    kept = names & {p.name for p in (tmp_path / "packed").iterdir()}
    assert kept == (set() if quantized else names)
