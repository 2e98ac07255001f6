"""The default budget: a share of what is free here, in this cgroup, and on the device."""

from types import SimpleNamespace

import pytest

from mlx_stream.planner import free_memory
from mlx_stream.planner.free_memory import available_bytes, default_budget


@pytest.fixture
def machine(monkeypatch):
    """``machine(free, room)``: bytes available, and under the cgroup's limit."""

    def set_up(free, room):
        memory = SimpleNamespace(available=free, total=10**12)
        monkeypatch.setattr(free_memory.psutil, "virtual_memory", lambda: memory)
        monkeypatch.setattr(free_memory, "cgroup_room", lambda: room)

    return set_up


def test_the_tightest_limit_counts(machine):
    machine(100 * 10**9, None)
    assert default_budget(None)[0] == 60 * 10**9
    machine(100 * 10**9, 10 * 10**9)
    assert default_budget(None)[0] == 6 * 10**9
    machine(5 * 10**9, 10 * 10**9)
    assert default_budget(None)[0] == 3 * 10**9


def test_a_device_limits_what_free_memory_would_allow(machine):
    machine(100 * 10**9, None)
    budget, why = default_budget(20 * 10**9)
    assert budget == 16 * 10**9
    assert "20.00 GB" in why
    budget, why = default_budget(10**12)
    assert budget == 60 * 10**9
    assert "free" in why


def test_the_limit_of_this_process_cgroup_is_found(tmp_path, monkeypatch):
    for name, limit, used in (("a", "1000", "400"), ("b", "5000", "100"), ("c", "max", "100")):
        (tmp_path / f"{name}.max").write_text(limit)
        (tmp_path / f"{name}.current").write_text(used)
    files = [(tmp_path / f"{n}.max", tmp_path / f"{n}.current") for n in ("a", "b", "c", "gone")]
    monkeypatch.setattr(free_memory, "_own_cgroup_files", lambda: files)
    monkeypatch.setattr(free_memory.sys, "platform", "linux")
    assert free_memory.cgroup_room() == 600
    monkeypatch.setattr(free_memory, "_own_cgroup_files", lambda: files[2:])
    assert free_memory.cgroup_room() is None
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 300\nactive_file 90\n")
    monkeypatch.setattr(free_memory, "_own_cgroup_files", lambda: files)
    assert free_memory.cgroup_room() == 900  # page cache that would go first is room
    (tmp_path / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 100\n")
    assert free_memory.cgroup_room() == 700  # v1 counts descendants apart
    (tmp_path / "memory.stat").write_text("inactive_file 10000\n")
    assert free_memory.cgroup_room() == 1000  # never more than the limit
    (tmp_path / "memory.stat").write_text("nonsense\n")
    assert free_memory.cgroup_room() == 600
    monkeypatch.setattr(free_memory.sys, "platform", "darwin")
    assert free_memory.cgroup_room() is None


def test_available_bytes_is_the_tighter_of_machine_and_cgroup(machine):
    machine(100, None)
    assert available_bytes() == 100
    machine(100, 60)
    assert available_bytes() == 60
    machine(50, 60)
    assert available_bytes() == 50


def test_available_bytes_here():
    assert 0 < available_bytes() <= free_memory.psutil.virtual_memory().total
