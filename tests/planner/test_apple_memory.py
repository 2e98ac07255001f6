"""Apple's working set: figures from public logs, the wired limit, monotonicity."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_stream.config import ConfigError
from mlx_stream.planner.apple_memory import GIB, MIB, recommended_working_set, wired_limit


@pytest.mark.parametrize(
    ("gib", "mib"), [(16, 10_922.67), (32, 21_845.34), (36, 27_648), (64, 49_152), (96, 73_728)]
)
def test_the_rule_gives_what_logs_show(gib, mib):
    """recommendedMaxWorkingSetSize as logged by llama.cpp; sources in the module."""
    assert recommended_working_set(gib * GIB) / MIB == pytest.approx(mib, abs=0.01)


@pytest.mark.parametrize(("gib", "measured"), [(128, 107.52), (16, 11.84)])
def test_the_rule_is_below_what_later_systems_allow(gib, measured):
    assert recommended_working_set(gib * GIB) < measured * GIB


def test_a_set_limit_counts_instead():
    assert recommended_working_set(128 * GIB, 114_688) == 112 * GIB


def test_the_command_asks_for_what_is_needed_and_no_more():
    enough = wired_limit(64 * GIB, 40 * GIB)
    assert (enough.fits, enough.megabytes, enough.command) == (True, 0, None)
    tight = wired_limit(64 * GIB, 50 * GIB + 1)
    assert (tight.fits, tight.possible) == (False, True)
    assert tight.command == f"sudo sysctl iogpu.wired_limit_mb={50 * 1024 + 1}"
    too_much = wired_limit(64 * GIB, 60 * GIB)
    assert (too_much.fits, too_much.possible, too_much.command) == (False, False, None)


@settings(deadline=None)
@given(st.integers(1, 1024 * GIB), st.integers(0, 1024 * GIB), st.integers(0, 64 * GIB))
def test_limits_hold(memory, needed, reserve):
    limit = wired_limit(memory, needed, reserve=reserve)
    assert 0 <= limit.working_set < memory
    assert recommended_working_set(memory + GIB) >= limit.working_set
    assert limit.possible or not limit.fits
    if limit.command:
        raised = limit.megabytes * MIB
        assert needed <= raised <= memory - reserve
        assert wired_limit(memory, needed, wired_limit_mb=limit.megabytes).fits


def test_a_limit_above_the_memory_is_refused():
    with pytest.raises(ConfigError, match="wired_limit_mb"):
        recommended_working_set(16 * GIB, 16 * 1024 + 1)
    with pytest.raises(ConfigError, match="memory_nbytes"):
        recommended_working_set(0)
