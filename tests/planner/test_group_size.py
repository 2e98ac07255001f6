"""The size of a read group: from measured rates, the reads of the layout, a budget, or a user."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import mlx_stream
from mlx_stream.cli import cli
from mlx_stream.config import ConfigError, StreamConfig
from mlx_stream.errors import BudgetError
from mlx_stream.planner.fit import Traits, plan_prefill
from mlx_stream.planner.group_size import (
    LEAST_EXPERTS,
    MOST_GROUP_NBYTES,
    GroupSize,
    ReadRates,
    group_size_for,
    read_share,
    sizes_to_try,
    wanted_group,
)
from mlx_stream.planner.machine_profile import ProfileError
from mlx_stream.planner.model_shape import model_shape
from mlx_stream.storage.expert_index import ExpertIndex
from mlx_stream.storage.read_plan import plan_group
from mlx_stream.storage.record_layout import RECORD_ALIGN
from tests.packed.building import index_of, pack_checkpoint
from tests.planner.profiles import KIB, MIB, machine, read_rate

ALIGN = 512
EXPERTS = 64
CHANGES = {"num_experts": EXPERTS, "num_experts_per_tok": 4}


@pytest.fixture(scope="module")
def plain(checkpoint) -> ExpertIndex:
    """64 experts a layer, nine tensors an expert."""
    return index_of(checkpoint("qwen3_moe", changes=CHANGES))


@pytest.fixture(scope="module")
def packed(checkpoint, tmp_path_factory) -> ExpertIndex:
    target = tmp_path_factory.mktemp("packed") / "model"
    pack_checkpoint(checkpoint("qwen3_moe", changes=CHANGES), target)
    return index_of(target)


def steps(full: int) -> ReadRates:
    """Half the best rate below `full` bytes a request, the best from there on."""
    return ReadRates(((512, 1e9), (full - 1, 1e9), (full, 2e9), (8 * MIB, 2e9)))


def sizes_of(index: ExpertIndex) -> tuple[int, ...]:
    return tuple(f.size for f in index.checkpoint.files)


def record(index: ExpertIndex) -> int:
    found = index.layers[0].record
    assert found is not None
    return found.nbytes


@pytest.mark.parametrize("group", [8, 16, 32, 64])
def test_a_packed_group_is_one_request(packed, group):
    """So the group is as many records as a fast request has."""
    full = group * record(packed) - RECORD_ALIGN  # the last record's padding is not read
    found = group_size_for(packed, steps(full), align=ALIGN)
    assert found == GroupSize(group, "probe")


def test_a_plain_group_is_a_request_for_each_tensor(plain, packed):
    """What one packed record gives in one request takes many plain experts."""
    rates = steps(LEAST_EXPERTS * record(packed) - RECORD_ALIGN)
    small = group_size_for(packed, rates, align=ALIGN)
    large = group_size_for(plain, rates, align=ALIGN)
    assert small.experts == LEAST_EXPERTS < large.experts


def test_the_size_is_the_smallest_that_is_read_at_full_speed(plain):
    """Against the ops of the reads themselves."""
    layer, sizes = plain.layers[0], sizes_of(plain)
    full = 16 * max(t.nbytes for t in layer.tensors)
    rates = steps(full)
    found = group_size_for(plain, rates, align=1).experts

    def rate(group: int) -> float:
        ops = plan_group(layer, range(group), align=1, file_sizes=sizes).ops
        seconds = sum(op.nbytes / (2e9 if op.nbytes >= full else 1e9) for op in ops)
        return sum(op.nbytes for op in ops) / seconds

    best = max(rate(2**n) for n in range(3, 7))
    assert rate(found) >= 0.95 * best > rate(found // 2)
    assert read_share(layer, found, rates, 1, sizes) == pytest.approx(rate(found) / 2e9)


def test_computing_bounds_it_from_below(packed):
    assert group_size_for(packed, steps(1024), align=ALIGN).experts == LEAST_EXPERTS


@pytest.mark.parametrize(("fit", "most"), [(3.5, 3), (1.5, 1), (0.5, 1)])
def test_memory_bounds_it_from_above(plain, fit, most):
    """Experts of which `fit` are as large as a group may be."""
    layer, file = plain.layers[0], replace(plain.checkpoint.files[0], size=2**40)
    factor = MOST_GROUP_NBYTES / fit / layer.expert_nbytes
    tensors = tuple(
        replace(t, nbytes=int(t.nbytes * factor), stride=int(t.nbytes * factor), offset=0)
        for t in layer.tensors
    )
    large = ExpertIndex(
        replace(plain.checkpoint, files=(file,)), (replace(layer, tensors=tensors),)
    )
    found = group_size_for(large, steps(1024), align=1)
    assert found.experts == most


def test_no_group_is_larger_than_a_layer(packed):
    found = group_size_for(packed, steps(10 * EXPERTS * record(packed)), align=ALIGN)
    assert found.experts <= EXPERTS


def test_rates_never_fall_with_the_size():
    """A slow measurement of a long request is noise: it could be read in short ones."""
    profile = machine()
    rates = {16 * KIB: 1e9, MIB: 2e9, 8 * MIB: 1.5e9}
    profile = replace(profile, reads=tuple(read_rate(n, r) for n, r in rates.items()))
    found = ReadRates.of(profile, 4)
    assert found.points == ((16 * KIB, 1e9), (MIB, 2e9), (8 * MIB, 2e9))
    assert found.best == 2e9
    assert found.seconds(4 * MIB) == pytest.approx(4 * MIB / 2e9)
    assert found.seconds(1) == pytest.approx(16 * KIB / 1e9), "no faster than the shortest known"


def test_the_readers_depth_is_what_counts(packed):
    one = record(packed) * LEAST_EXPERTS
    reads = [read_rate(n, r, depth=1) for n, r in ((512, 1e8), (4 * one, 1e9), (8 * MIB, 2e9))]
    reads += [read_rate(n, 2e9, depth=8) for n in (512, 4 * one, 8 * MIB)]
    profile = replace(machine(), reads=tuple(reads))
    deep = wanted_group(packed, profile, asked=None, align=ALIGN, depth=8)
    shallow = wanted_group(packed, profile, asked=None, align=ALIGN, depth=1)
    assert deep.experts == LEAST_EXPERTS < shallow.experts


def test_who_decides(packed):
    profile = machine()
    assert wanted_group(packed, profile, asked=3, align=ALIGN) == GroupSize(3, "asked")
    assert wanted_group(packed, profile, asked=None, align=ALIGN).source == "probe"
    assert wanted_group(packed, None, asked=None, align=ALIGN) is None
    with pytest.raises(ProfileError, match="no rates of reads"):
        wanted_group(packed, replace(profile, reads=()), asked=None, align=ALIGN)


def test_what_is_asked_for_is_not_made_smaller(packed):
    tried = [(g.experts, g.source) for g in sizes_to_try(packed, GroupSize(8, "probe"), 1)]
    assert tried == [(8, "probe"), (4, "memory"), (2, "memory"), (1, "memory")]
    one = packed.layers[0].expert_nbytes
    tried = [(g.experts, g.source) for g in sizes_to_try(packed, None, 3 * one)]
    assert tried == [(3, "default"), (1, "memory")]
    asked = list(sizes_to_try(packed, GroupSize(1000, "asked"), 1))
    assert asked == [GroupSize(EXPERTS, "asked")]


def plan_of(index: ExpertIndex, group: GroupSize | None, budget: int):
    traits = Traits(4, 700_000, 300_000, ALIGN, group=group)
    shape = model_shape(index.checkpoint.config, index)
    return plan_prefill(index, shape, traits, prompt_tokens=2000, budget=budget, chunk_tokens=256)


@pytest.mark.parametrize("group", [1, 2, 4, 8, 16])
def test_an_asked_size_is_planned(packed, group):
    plan = plan_of(packed, GroupSize(group, "asked"), 10**9)
    assert (plan.group_size, plan.group_source) == (group, "asked")
    assert {b - a for layer in plan.layers for a, b in layer.groups} == {group}
    assert f"groups of {group} experts (as asked)" in str(plan)


def test_an_asked_size_that_does_not_fit_is_refused(packed):
    least = plan_of(packed, GroupSize(16, "asked"), 10**9)
    budget = least.memory.total - least.memory.staging - least.memory.expert_cache
    budget += 2 * least.slot_nbytes // 2
    with pytest.raises(BudgetError, match="smaller group_size") as caught:
        plan_of(packed, GroupSize(EXPERTS, "asked"), 3 * least.slot_nbytes)
    assert "memory_budget to" in caught.value.remedy
    smaller = plan_of(packed, GroupSize(16, "probe"), budget)
    assert smaller.group_size < 16
    assert smaller.group_source == "memory"
    assert "to fit the budget" in str(smaller)


@pytest.fixture
def profile_file(tmp_path, monkeypatch):
    """Where `mlx_stream probe` would save."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mlx_stream" / "machine.json"


def test_plans_and_engines_follow_the_saved_profile(checkpoint, open_engine, profile_file):
    path = checkpoint("qwen3_moe", changes=CHANGES)
    options = {"memory_budget": "1GB"}
    assert mlx_stream.plan(path, 1000, **options).group_source == "default"
    machine().save(profile_file)
    planned = mlx_stream.plan(path, 1000, **options)
    engine = open_engine(path)
    plan = engine.plan(1000)
    assert planned.group_source == plan.group_source == "probe"
    assert plan.group_size == planned.group_size >= LEAST_EXPERTS
    assert mlx_stream.plan(path, 1000, group_size=2, **options).group_size == 2


def test_a_damaged_profile_is_said_and_does_no_harm(checkpoint, open_engine, profile_file, caplog):
    profile_file.parent.mkdir(parents=True)
    profile_file.write_text("{")
    engine = open_engine(checkpoint("qwen3_moe"))
    assert engine.plan(1000).group_source == "default"
    assert "machine.json" in caplog.text


def test_a_throttled_disk_needs_no_long_requests(checkpoint, open_engine, profile_file):
    path = checkpoint("qwen3_moe", changes=CHANGES)
    one = max(t.nbytes for t in index_of(path).layers[0].tensors)
    rates = ((512, 1e8), (16 * one, 1e9), (8 * MIB, 2e9))
    replace(machine(), reads=tuple(read_rate(n, r) for n, r in rates)).save(profile_file)
    free = open_engine(path).plan(1000).group_size
    slow = open_engine(path, throttle="100MB/s").plan(1000).group_size
    assert slow == LEAST_EXPERTS < free


@pytest.mark.parametrize("value", [0, -1])
def test_a_size_that_is_none(value):
    with pytest.raises(ConfigError, match="group_size"):
        StreamConfig(group_size=value)


def test_the_command_line(checkpoint, profile_file, tmp_path):
    from click.testing import CliRunner

    path, profile = str(checkpoint("qwen3_moe", changes=CHANGES)), tmp_path / "profile.json"
    machine().save(profile)
    options = ["plan", path, "--memory-budget", "1GB", "--json"]

    def found(*more: str) -> tuple[int, str]:
        result = CliRunner().invoke(cli, [*options, *more])
        assert result.exit_code == 0, result.output
        plan = json.loads(result.output)
        return plan["group_size"], plan["group_source"]

    assert found()[1] == "default"
    assert found("--profile", str(profile))[1] == "probe"
    assert found("--profile", str(profile), "--group-size", "4") == (4, "asked")
    assert CliRunner().invoke(cli, [*options, "--group-size", "0"]).exit_code == 2


def test_the_flag_reaches_the_plan(checkpoint):
    from mlx_stream.kv_flags import LoadFlags, load_of

    flags = LoadFlags(
        model=str(checkpoint("qwen3_moe")),
        trust_remote_code=False,
        memory_budget="1GB",
        chunk_tokens=64,
        group_size=3,
        backend="cpu",
        io="buffered",
        verify="first",
        throttle_reads=None,
    )
    with load_of(flags) as runtime:
        plan = runtime.engine.plan(1000)
    assert (plan.group_size, plan.group_source) == (3, "asked")
