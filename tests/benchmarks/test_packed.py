"""The benchmark of read groups: every arm reads everything, and the plans it makes are runnable."""

import json

import pytest
from click.testing import CliRunner

from benchmarks import packed
from mlx_stream.hub import demo_path
from tests.packed.building import index_of, pack_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = tmp_path_factory.mktemp("packed") / "demo"
    pack_checkpoint(demo_path(), target)
    return target


def test_every_arm_reads_every_expert_once(folder):
    index = index_of(folder)
    options = {"io": "buffered", "verify": "off"}
    for group in packed.GROUPS:
        arm = packed.GroupArm(index, group, 64 << 20, options)
        experts = [(p.layer, e) for p in arm.plans for e in p.experts]
        assert experts == [(x.index, e) for x in index.layers for e in range(x.num_experts)]
        assert arm.count == 2 or group != packed.WHOLE
        arm.seconds(packed.allocate_slot(arm.count * arm.slot_nbytes))
        assert arm.reader.counters.bytes == sum(p.read_nbytes for p in arm.plans)
        arm.reader.close()


def test_the_tables_and_the_ratio(folder, tmp_path):
    arguments = [str(demo_path()), "--packed", str(folder), "--dir", str(tmp_path)]
    arguments += ["--groups", "8,whole", "--rounds", "1", "--tokens", "20", "--io", "buffered"]
    result = CliRunner().invoke(packed.main, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.output.splitlines()[-1])
    arms = {(r["layout"], r["group"]) for r in found["prefill"]}
    assert arms == {(n, g) for n in ("plain", "packed") for g in (8, "whole", "plan")}
    for table in ("reader", "prefill"):
        assert found[f"{table}_packed_whole_over_8"]["median"] > 0
    assert "| whole |" in result.output
    assert not list(tmp_path.iterdir())
