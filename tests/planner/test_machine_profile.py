"""The machine profile: what is written is read, the impossible is refused, rates interpolate."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_stream.planner.machine_profile import (
    ComputeRate,
    MachineProfile,
    ProfileError,
    attention_format,
    default_profile_path,
    load_default,
    nearest_format,
)

from .profiles import KIB, MIB, machine, read_rate

PACKED = "affine 4-bit g64"


def with_computes(*rates: ComputeRate) -> MachineProfile:
    return replace(machine(), computes=rates)


# --- files


def test_what_is_saved_is_loaded(tmp_path):
    profile = replace(machine(), notes=("noisy",))
    profile.save(tmp_path / "deep" / "machine.json")
    assert MachineProfile.load(tmp_path / "deep" / "machine.json") == profile
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["machine.json"]


def test_the_default_place_follows_the_cache_folder(tmp_path, monkeypatch):
    from mlx_stream.backends.kernels.selection import profile_path

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_profile_path().parent == profile_path().parent
    assert load_default() is None
    machine().save(default_profile_path())
    assert load_default() == machine()
    default_profile_path().write_text("{")
    with pytest.raises(ProfileError, match="probe again"):
        load_default()


def damaged(data, path, value):
    for key in path[:-1]:
        data = data[key]
    if value is KeyError:
        del data[path[-1]]
    else:
        data[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), 99),
        (("version",), KeyError),
        (("machine",), 3),
        (("notes",), [1]),
        (("overlap_cost",), -0.1),
        (("overlap_cost",), 1.5),
        (("overlap_cost",), True),
        (("reads",), KeyError),
        (("reads", 0, "order"), "backwards"),
        (("reads", 0, "nbytes"), 0),
        (("reads", 0, "bytes_per_second"), -1.0),
        (("reads", 0, "p50_seconds"), "fast"),
        (("reads", 0, "iops"), float("nan")),
        (("reads", 0, "extra"), 1),
        (("computes", 0, "kind"), "magic"),
        (("computes", 0, "dims"), [0, 4]),
        (("computes", 0, "dims"), 4),
        (("computes", 0, "flops_per_second"), float("inf")),
        (("computes", 0, "spread"), -0.1),
        (("computes", 0, "rows"), KeyError),
    ],
)
def test_damaged_profiles_are_refused(tmp_path, path, value):
    file = tmp_path / "machine.json"
    machine().save(file)
    data = json.loads(file.read_text())
    damaged(data, path, value)
    file.write_text(json.dumps(data))
    with pytest.raises(ProfileError, match="probe again") as caught:
        MachineProfile.load(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "null", "\ufeff{}", '{"version": 1}'])
def test_what_is_no_profile(tmp_path, text):
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(ProfileError):
        MachineProfile.load(tmp_path / "m.json")
    with pytest.raises(ProfileError):
        MachineProfile.load(tmp_path / "absent.json")


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="no-save"):
        machine().save(tmp_path / "file" / "machine.json")


# --- rates


def test_measured_points_come_back_and_ends_are_held():
    reads = (read_rate(16 * KIB, 1e8), read_rate(MIB, 1.6e9), read_rate(MIB, 9e8, depth=1))
    profile = replace(machine(), reads=reads)
    assert profile.read_bandwidth(16 * KIB) == 1e8
    assert profile.read_bandwidth(MIB) == 1.6e9
    assert profile.read_bandwidth(MIB, depth=1) == 9e8
    assert profile.read_bandwidth(1) == 1e8
    assert profile.read_bandwidth(64 * MIB, depth=64) == 1.6e9
    # half way in the logarithm of the size
    assert profile.read_bandwidth(128 * KIB) == pytest.approx((1e8 * 1.6e9) ** 0.5)


def test_random_reads_have_rates_of_their_own():
    reads = (read_rate(MIB, 2e9), read_rate(MIB, 1e9, order="random"))
    profile = replace(machine(), reads=reads)
    assert profile.read_bandwidth(MIB, order="random") == 1e9
    assert replace(profile, reads=reads[:1]).read_bandwidth(MIB, order="random") == 2e9


@given(
    points=st.dictionaries(st.integers(1, 1 << 30), st.floats(1.0, 1e12), min_size=1, max_size=6),
    at=st.floats(1, 1 << 31),
)
def test_interpolation_stays_between_its_neighbours(points, at):
    rates = [ComputeRate("experts", PACKED, rows, (8, 8), v) for rows, v in points.items()]
    value = with_computes(*rates).flops("experts", at, PACKED)
    below = [v for rows, v in points.items() if rows <= at]
    assert min(points.values()) * 0.999 <= value <= max(points.values()) * 1.001
    if len(below) == len(points):
        assert value == points[max(points)]


def test_sizes_are_interpolated_too():
    profile = with_computes(
        ComputeRate("linear", PACKED, 8, (10, 10), 1e9),
        ComputeRate("linear", PACKED, 8, (100, 100), 4e9),
    )
    assert profile.flops("linear", 8, PACKED, (10, 10)) == 1e9
    assert profile.flops("linear", 8, PACKED, (5, 2)) == 1e9
    assert profile.flops("linear", 8, PACKED, (10, 100)) == pytest.approx(2e9)
    assert profile.flops("linear", 8, PACKED) == 4e9


def test_what_was_not_measured_takes_its_nearest_relative():
    known = [PACKED, "affine 8-bit g64", "mxfp4 4-bit g32", "32-bit floats"]
    assert nearest_format(PACKED, known) == PACKED
    assert nearest_format("affine 5-bit g32", known) == PACKED
    assert nearest_format("affine 6-bit g64", known) == "affine 8-bit g64"
    assert nearest_format("nvfp4 4-bit g16", known) in (PACKED, "mxfp4 4-bit g32")
    assert nearest_format("16-bit floats", known) == "32-bit floats"
    assert nearest_format("16-bit floats", [PACKED]) == PACKED
    heads = ["head 64", "head 128", "token 64"]
    assert nearest_format("head 192", heads) == "head 128"
    assert nearest_format("token 128", heads) == "token 64"
    assert attention_format(1, 64) == "token 64"
    assert attention_format(2, 64) == "head 64"


def test_a_kind_that_is_missing_is_named():
    with pytest.raises(ProfileError, match="experts"):
        with_computes().flops("experts", 1, PACKED)
    with pytest.raises(ProfileError, match="reads"):
        replace(machine(), reads=()).read_bandwidth(1)


def test_a_slower_disk_is_never_faster():
    profile = machine(read=2e9)
    slow = profile.with_reads_at_most(5e8)
    assert slow.read_bandwidth(MIB) == 5e8
    assert profile.with_reads_at_most(9e9).read_bandwidth(MIB) == 2e9
    assert slow.computes == profile.computes
