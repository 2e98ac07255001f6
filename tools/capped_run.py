"""Time a prefill under a hard memory limit and a slow disk: the case that streaming is for.

A child process runs inside a control group that limits its memory (page cache included) and the
rate at which it may read. Without a command the child is our own runtime on --model; anything after
-- is run instead, so that another engine can be measured the same way. The last JSON line that the
child prints becomes part of the report, a JSON object on standard output.

Needs root on Linux, and control groups v1 (memory, blkio) or v2 (memory, io). The page cache is
dropped first. The groups are removed at the end, after Ctrl-C too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol

import click

from mlx_stream.config import parse_bytes

MOUNT = Path("/sys/fs/cgroup")
PREFIX = "mlx-stream-capped-"
EMPTY_SECONDS = 10.0  # killed processes leave their group within moments

EXAMPLES = """
\b
Examples:
  python tools/capped_run.py --model ./checkpoint --tokens 4096
  python tools/capped_run.py --model ./checkpoint --memory 0 --read-rate 0      (no caps)
  python tools/capped_run.py --memory 800MB --read-rate 200MB --model ./checkpoint \\
      -- python tools/peer_llama_cpp.py model.gguf --tokens 4096
"""


class CapError(click.ClickException):
    """The caps cannot be set up on this system."""


@dataclass(frozen=True)
class Limits:
    """What the child may use; None is no limit.

    Attributes:
        memory: bytes of memory and page cache.
        read_rate: bytes per second read from `device`.
        device: the disk, as "MAJOR:MINOR".
    """

    memory: int | None = None
    read_rate: int | None = None
    device: str | None = None


@dataclass(frozen=True)
class Usage:
    """What the kernel counted for the group; None where it does not count."""

    max_usage_bytes: int | None
    memory_failcnt: int | None
    oom_kills: int | None
    read_bytes: int | None


class CappedGroup(Protocol):
    """A control group with limits set. Use as a context manager: leaving it removes the group."""

    def join(self) -> None:
        """Move the calling process in; meant for the child between fork and exec."""

    def usage(self) -> Usage:
        """The kernel's counts so far."""

    def close(self) -> None:
        """Kill what is left inside, and remove the group."""


class _Group:
    """One directory per hierarchy; `folders` are all that were made."""

    def __init__(self) -> None:
        self.folders: list[Path] = []

    def __enter__(self) -> _Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def join(self) -> None:
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(os.getpid()))

    def close(self) -> None:
        deadline = time.monotonic() + EMPTY_SECONDS
        for folder in self.folders:
            while folder.is_dir():
                for pid in _members(folder):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                try:
                    folder.rmdir()
                except OSError as error:
                    if time.monotonic() > deadline:
                        raise CapError(f"cannot remove {folder}: {error}") from error
                    time.sleep(0.02)
        self.folders.clear()

    def _make(self, parent: Path) -> Path:
        _remove_stale(parent)
        folder = parent / f"{PREFIX}{os.getpid()}"
        folder.mkdir()
        self.folders.append(folder)
        return folder


class GroupV1(_Group):
    """Control groups v1: separate hierarchies for memory and block I/O."""

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self._limits = limits
        try:
            self._memory = self._make(MOUNT / "memory")
            self._blkio = self._make(MOUNT / "blkio")
            if limits.memory is not None:
                _write(self._memory / "memory.limit_in_bytes", limits.memory)
                with suppress(OSError):  # absent where swap is not accounted for
                    _write(self._memory / "memory.memsw.limit_in_bytes", limits.memory)
            if limits.read_rate is not None:
                throttle = self._blkio / "blkio.throttle.read_bps_device"
                _write(throttle, f"{limits.device} {limits.read_rate}")
        except BaseException:
            self.close()
            raise

    def usage(self) -> Usage:
        """See CappedGroup."""
        return Usage(
            _number(self._memory / "memory.max_usage_in_bytes"),
            _number(self._memory / "memory.failcnt"),
            _field(self._memory / "memory.oom_control", "oom_kill"),
            self._read_bytes(),
        )

    def _read_bytes(self) -> int | None:
        """Lines are "MAJOR:MINOR Read N"."""
        total = 0
        try:
            lines = (self._blkio / "blkio.throttle.io_service_bytes").read_text().splitlines()
        except OSError:
            return None
        for line in lines:
            parts = line.split()
            if len(parts) == 3 and parts[1] == "Read":
                total += int(parts[2])
        return total


class GroupV2(_Group):
    """Control groups v2: one hierarchy."""

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        try:
            _write(MOUNT / "cgroup.subtree_control", "+memory +io")
            self._folder = self._make(MOUNT)
            if limits.memory is not None:
                _write(self._folder / "memory.max", limits.memory)
                with suppress(OSError):
                    _write(self._folder / "memory.swap.max", 0)
            if limits.read_rate is not None:
                _write(self._folder / "io.max", f"{limits.device} rbps={limits.read_rate}")
        except BaseException:
            self.close()
            raise

    def usage(self) -> Usage:
        """See CappedGroup."""
        events = self._folder / "memory.events"
        return Usage(
            _number(self._folder / "memory.peak"),
            _field(events, "max"),
            _field(events, "oom_kill"),
            self._read_bytes(),
        )

    def _read_bytes(self) -> int | None:
        """Lines are "MAJOR:MINOR rbytes=N wbytes=N ..."."""
        try:
            words = (self._folder / "io.stat").read_text().split()
        except OSError:
            return None
        return sum(int(w.partition("=")[2]) for w in words if w.startswith("rbytes="))


def capped_group(limits: Limits) -> GroupV1 | GroupV2:
    """A new group with these limits.

    Raises:
        CapError: not root, or no usable control groups.
    """
    reason = why_not()
    if reason:
        raise CapError(reason)
    if limits.read_rate is not None and limits.device is None:
        raise CapError("a read rate needs a disk to apply it to: pass --model")
    try:
        return GroupV2(limits) if _is_v2() else GroupV1(limits)
    except OSError as error:
        raise CapError(f"the control group cannot be set up: {error}") from error


def why_not() -> str | None:
    """Why no capped group can be made here; None when one can."""
    if sys.platform != "linux":
        return "control groups exist on Linux only"
    if os.geteuid() != 0:
        return "control groups need root"
    if _is_v2():
        needed, there = {"memory", "io"}, set((MOUNT / "cgroup.controllers").read_text().split())
        return None if needed <= there else f"control groups v2 lack {sorted(needed - there)}"
    for name in ("memory", "blkio"):
        if not os.access(MOUNT / name / "cgroup.procs", os.W_OK):
            return f"the control group hierarchy {MOUNT / name} is not mounted or not writable"
    return None


def _is_v2() -> bool:
    return (MOUNT / "cgroup.controllers").exists()


def _members(folder: Path) -> list[int]:
    try:
        return [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def _remove_stale(parent: Path) -> None:
    """Groups of runs that were killed, if nothing lives in them."""
    for folder in parent.glob(f"{PREFIX}*"):
        if not Path("/proc", folder.name.removeprefix(PREFIX)).exists():
            with suppress(OSError):
                folder.rmdir()


def _write(path: Path, value: object) -> None:
    path.write_text(f"{value}\n")


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _field(path: Path, name: str) -> int | None:
    """A value from lines of "name value"."""
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
    except (OSError, ValueError):
        return None
    return int(fields[name]) if name in fields else None


def disk_of(path: Path) -> str:
    """ "MAJOR:MINOR" of the whole disk that holds `path`.

    Raises:
        CapError: it is on no single disk (a network or overlay file system).
    """
    device = os.stat(path).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    block = Path("/sys/dev/block", name)
    if not block.exists():
        raise CapError(f"{path} is on no single disk, so its reads cannot be throttled")
    if (block / "partition").exists():
        return (block.resolve().parent / "dev").read_text().strip()
    return name


def drop_caches() -> None:
    """Write back and forget the page cache of the whole system."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


def run_capped(command: Sequence[str], limits: Limits, *, drop: bool = True) -> dict[str, Any]:
    """Run a command under limits and report; the child's standard error passes through."""
    with capped_group(limits) as group:
        if drop:
            drop_caches()
        started = time.perf_counter()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, errors="replace", preexec_fn=group.join
        ) as child:
            try:
                assert child.stdout is not None
                out = child.stdout.read()
                # wait4 and not child.wait: it also tells the peak.
                _, status, resources = os.wait4(child.pid, 0)
                child.returncode = os.waitstatus_to_exitcode(status)
            except BaseException:
                child.kill()
                raise
        seconds = time.perf_counter() - started
        usage = group.usage()
    return {
        "command": list(command),
        "limits": asdict(limits),
        "exit_code": child.returncode,
        "wall_seconds": round(seconds, 3),
        "peak_rss_bytes": resources.ru_maxrss * 1024,
        "group": asdict(usage),
        "child": _last_json(out),
    }


def _last_json(text: str) -> Any:
    for line in reversed(text.splitlines()):
        with suppress(ValueError):
            return json.loads(line)
    return None


# --- the child: our runtime


def run_prompts(
    model: Path, tokens: int, decode: int, budget: int | None, prompts: int = 1
) -> dict[str, Any]:
    """Load, then prefill random tokens and decode greedily; figures are of the last prompt."""
    import numpy as np

    from mlx_stream import load

    started = time.perf_counter()
    with load(model, memory_budget=budget) as runtime:
        loaded = time.perf_counter()
        config = json.loads((model / "config.json").read_text())
        vocab = config.get("vocab_size") or config["text_config"]["vocab_size"]
        for seed in range(1, prompts + 1):
            ids = np.random.default_rng(seed).integers(2, vocab, tokens).tolist()
            read_before, begun = _process_read_bytes(), time.perf_counter()
            out, ttft, read = [], 0.0, 0
            for response in runtime.stream_generate(ids, max(1, decode)):
                if not out:
                    ttft, read = time.perf_counter() - begun, _process_read_bytes() - read_before
                out.append(response.token)
        receipt = runtime.last_receipt
        assert receipt is not None
        return {
            "engine": "mlx_stream",
            "tokens": tokens,
            "load_seconds": round(loaded - started, 3),
            "prefill_seconds": round(receipt.wall_seconds, 3),
            "ttft_seconds": round(ttft, 3),
            "prefill_read_bytes": read,
            "bound": receipt.bound,
            "decode_tokens_per_second": round(response.generation_tps, 2),
            "answer": out,
            "receipt": receipt.as_dict(),
        }


def _process_read_bytes() -> int:
    """Bytes that this process caused to be fetched from storage."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes: "):
            return int(line.split()[1])
    return 0


# --- command line


def _size(text: str) -> int | None:
    return None if text.strip() == "0" else parse_bytes(text)


def _terminated(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


@click.command(
    help=__doc__, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option("--model", type=click.Path(path_type=Path, exists=True), help="Checkpoint folder.")
@click.option("--tokens", default=4096, show_default=True, help="Prompt length.")
@click.option("--decode", default=1, show_default=True, help="Tokens to generate, at least 1.")
@click.option("--prompts", default=1, show_default=True, help="One after another; figures: last.")
@click.option("--memory", default="800MB", show_default=True, help="Memory limit; 0: none.")
@click.option("--read-rate", default="200MB", show_default=True, help="Per second; 0: no throttle.")
@click.option(
    "--allowance",
    default="170MB",
    show_default=True,
    help="Left of the limit for the interpreter and its libraries; the rest is our budget.",
)
@click.option("--budget", help="Memory budget of our runtime, instead of limit less allowance.")
@click.option("--keep-cache", is_flag=True, help="Do not drop the page cache first.")
@click.option("--worker", is_flag=True, hidden=True)
@click.argument("command", nargs=-1)
def main(
    model: Path | None,
    tokens: int,
    decode: int,
    prompts: int,
    memory: str,
    read_rate: str,
    allowance: str,
    budget: str | None,
    keep_cache: bool,
    worker: bool,
    command: tuple[str, ...],
) -> None:
    """Parse, run, report."""
    if model is None and not command:
        raise click.UsageError("give --model, or a command after --")
    limit = _size(memory)
    own = parse_bytes(budget) if budget else limit and limit - parse_bytes(allowance)
    if worker:
        assert model is not None
        click.echo(json.dumps(run_prompts(model, tokens, decode, own, prompts)))
        return
    if not command:
        command = (sys.executable, str(Path(__file__).resolve()), "--worker", "--model", str(model))
        command += ("--tokens", str(tokens), "--decode", str(decode), "--memory", memory)
        command += ("--prompts", str(prompts))
        command += ("--allowance", allowance, *(("--budget", budget) if budget else ()))
    rate = _size(read_rate)
    limits = Limits(limit, rate, disk_of(model) if rate and model else None)
    signal.signal(signal.SIGTERM, _terminated)
    report = run_capped(command, limits, drop=not keep_cache)
    click.echo(json.dumps(report, indent=2))
    sys.exit(0 if report["exit_code"] == 0 else 1)


if __name__ == "__main__":
    main()
