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
    free = psutil.virtual_memory().available
    room = cgroup_room()
    share = FREE_SHARE * (free if room is None else min(free, room))
    why = f"{FREE_SHARE:.0%} of {format_bytes(share / FREE_SHARE)} free"
    if device_limit is not None and DEVICE_SHARE * device_limit < share:
        share = DEVICE_SHARE * device_limit
        why = f"{DEVICE_SHARE:.0%} of the GPU's working set of {format_bytes(device_limit)}"
    return int(share), why


def cgroup_room() -> int | None:
    """Bytes left under this process's memory cgroup, or None where there is no limit."""
    if sys.platform != "linux":
        return None
    rooms = []
    for limit_file, used_file in _own_cgroup_files():
        limit, used = _number(limit_file), _number(used_file)
        if limit is not None and used is not None and limit < psutil.virtual_memory().total:
            rooms.append(max(0, limit - used))
    return min(rooms, default=None)


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
