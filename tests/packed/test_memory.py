"""Packing in constant memory: experts larger than what packing may hold."""

from __future__ import annotations

import json
import struct
import subprocess
import sys

import pytest

from tests.packed.building import index_of

LIMIT = 300_000_000
DIMS, HIDDEN, EXPERTS = 4096, 8192, 2  # 403 MB an expert in float32
PACK = """
import resource, sys
from pathlib import Path
from mlx_stream.packed.pack import PackOptions, pack
pack(Path(sys.argv[1]), Path(sys.argv[2]), PackOptions(verify=True))
assert not {"mlx", "torch", "transformers"} & set(sys.modules)
if sys.platform == "linux":  # ru_maxrss also counts the process that started this one
    status = Path("/proc/self/status").read_text()
    print(int(status.split("VmHWM:")[1].split()[0]) * 1024)
else:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def sparse_checkpoint(folder):
    """Zeros that take no room, with a few bytes among them."""
    folder.mkdir()
    shapes = {
        f"model.layers.0.mlp.switch_mlp.{name}.weight": (EXPERTS, *shape)
        for name, shape in (
            ("gate_proj", (HIDDEN, DIMS)),
            ("up_proj", (HIDDEN, DIMS)),
            ("down_proj", (DIMS, HIDDEN)),
        )
    } | {"model.norm.weight": (DIMS,)}
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4
        for n in shape:
            size *= n
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (end, end + size)}
        end += size
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
        for at in range(0, end, 7_654_321):
            file.seek(8 + len(text) + at)
            file.write(bytes([1 + at % 250]))
    (folder / "config.json").write_text(json.dumps({"num_experts": EXPERTS}))


@pytest.mark.slow
def test_peak_memory_does_not_grow_with_the_expert(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    sparse_checkpoint(source)
    command = [sys.executable, "-c", PACK, str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < LIMIT
    index = index_of(target)
    assert index.layers[0].record.nbytes > LIMIT
    (target / "experts-00001-of-00001.safetensors").unlink()
