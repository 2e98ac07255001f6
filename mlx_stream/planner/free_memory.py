"""How much memory a process may safely take when the user did not say."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from mlx_stream.config import format_bytes

FREE_SHARE = 0.6
DEVICE_SHARE = 0.8
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def default_budget(device_limit: int | None) -> tuple[int, str]:
    """``(bytes, why)``: a share of what is free, of the cgroup's room and of the GPU's limit."""
    share = FREE_SHARE * available_bytes()
    why = f"{FREE_SHARE:.0%} of {format_bytes(share / FREE_SHARE)} free"
    if device_limit is not None and DEVICE_SHARE * device_limit < share:
        share = DEVICE_SHARE * device_limit
        why = f"{DEVICE_SHARE:.0%} of the GPU's working set of {format_bytes(device_limit)}"
    return int(share), why


def available_bytes() -> int:
    """Bytes that new allocations may take now: of the machine, and of this process's cgroup.

    Cheap enough to be asked for every decoded token (a fifth of a millisecond on Linux).
    """
    free, room = psutil.virtual_memory().available, cgroup_room()
    return free if room is None else min(free, room)


def cgroup_room() -> int | None:
    """Bytes left under this process's memory cgroup, or None where there is no limit.

    Page cache that the system would drop first counts as left, as it does for the machine.
    """
    if sys.platform != "linux":
        return None
    rooms, total = [], psutil.virtual_memory().total
    for limit_file, used_file in _own_cgroup_files():
        limit, used = _number(limit_file), _number(used_file)
        if limit is not None and used is not None and limit < total:
            held = max(0, used - _droppable(used_file.with_name("memory.stat")))
            rooms.append(max(0, limit - held))
    return min(rooms, default=None)


def _droppable(stat: Path) -> int:
    """Bytes of page cache not used lately, descendants' included."""
    try:
        fields = dict(line.split(maxsplit=1) for line in stat.read_text().splitlines())
        return int(fields.get("total_inactive_file") or fields.get("inactive_file") or 0)
    except (OSError, ValueError):
        return 0


def _own_cgroup_files() -> list[tuple[Path, Path]]:
    files = [(Path(a), Path(b)) for a, b in _CGROUP_FILES]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return files
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "memory":
            base = Path("/sys/fs/cgroup/memory" + group)
            files.append((base / "memory.limit_in_bytes", base / "memory.usage_in_bytes"))
        elif controllers == "":
            base = Path("/sys/fs/cgroup" + group)
            files.append((base / "memory.max", base / "memory.current"))
    return files


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
