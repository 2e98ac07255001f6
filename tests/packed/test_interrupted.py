"""Packing that is killed, interrupted, starved of space or raced: nothing lost, nothing wrong."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlx_stream.errors import CheckpointError, MlxStreamError, PackError
from mlx_stream.packed import manifest_json, output_file
from mlx_stream.packed import pack as pack_module
from mlx_stream.packed.folder_lock import LOCK_NAME, folder_lock
from mlx_stream.packed.pack import PackOptions, pack
from mlx_stream.packed.verify import verify
from mlx_stream.storage.checkpoint import open_checkpoint
from mlx_stream.storage.packed_manifest import JOURNAL_NAME, MANIFEST_NAME
from tests.packed.building import (
    SMALL,
    contents,
    final_names,
    index_of,
    pack_checkpoint,
    random_orders,
)
from tools.fault_parts_system import CHANGES, SystemFaults

ROUNDS = 200 if os.environ.get("MLX_STREAM_BIG") else 5
ROOT = Path(__file__).parents[2]


def start(source, target, *arguments):
    command = [sys.executable, "-m", "tests.packed.killing", str(source), str(target), *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture(scope="module")
def plain(checkpoint):
    return checkpoint("qwen3_moe", shard_bytes=200_000)


@pytest.fixture(scope="module")
def whole(plain, tmp_path_factory):
    """What an undisturbed run writes."""
    target = tmp_path_factory.mktemp("whole") / "packed"
    pack_checkpoint(plain, target, **SMALL)
    return contents(target)


@pytest.mark.slow
def test_killed_anywhere_and_run_again(plain, whole, tmp_path):
    """kill -9 at random moments, several times in a row; then to the end."""
    rng = random.Random(0)
    kills = kept = done = 0
    while kills < ROUNDS:
        target = tmp_path / f"target-{done}"
        for _ in range(rng.randint(1, 3)):
            process = start(plain, target)
            time.sleep(rng.random() * 0.25)
            process.kill()
            ended = process.wait() == 0
            process.communicate()
            kills += not ended
            for name in final_names(target):  # whatever has its name is whole
                if name != JOURNAL_NAME:
                    assert (target / name).read_bytes() == whole[name]
            if MANIFEST_NAME not in final_names(target):
                with pytest.raises(CheckpointError):
                    open_checkpoint(target)
        report = pack_checkpoint(plain, target, **SMALL)
        kept += report.kept_nbytes > 0
        assert contents(target) == whole
        done += 1
        shutil.rmtree(target)
    assert kept, "no run found anything to keep: the kills came too early"


def test_finished_files_are_kept_only_if_they_are_sound(plain, whole, tmp_path):
    target = tmp_path / "target"

    class Stop(Exception):
        pass

    def stop(done, total, what):
        if what.startswith("experts-00003"):
            raise Stop

    with pytest.raises(Stop):
        pack(plain, target, PackOptions(**SMALL), stop)
    first, second = (target / f"experts-0000{n}-of-00003.safetensors" for n in (1, 2))
    assert not (target / third_of(target)).exists()
    data = bytearray(second.read_bytes())
    data[-1] ^= 1  # padding, which no checksum covers but verify does
    second.write_bytes(data)
    inode = first.stat().st_ino
    report = pack_checkpoint(plain, target, **SMALL)
    assert report.kept_nbytes == first.stat().st_size
    assert first.stat().st_ino == inode
    assert contents(target) == whole


def third_of(target):
    return "experts-00003-of-00003.safetensors"


def test_ctrl_c_leaves_no_half_file(plain, whole, tmp_path):
    for delay in (0.0, 0.05, 0.15):
        target = tmp_path / f"target-{delay}"
        process = start(plain, target)
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
        assert process.returncode in (0, 130), errors
        assert "Traceback" not in errors
        if not target.exists():  # it came too early
            continue
        assert not [p for p in target.iterdir() if p.name.startswith(".")]
        for name in final_names(target) - {JOURNAL_NAME}:
            assert (target / name).read_bytes() == whole[name]
        pack_checkpoint(plain, target, **SMALL)
        assert contents(target) == whole


def test_of_two_packers_one_wins_and_the_other_says_why(plain, whole, tmp_path):
    target = tmp_path / "target"
    first = start(plain, target)
    while not (target / JOURNAL_NAME).exists():
        time.sleep(0.005)
    with pytest.raises(PackError, match="another process") as caught:
        pack_checkpoint(plain, target, **SMALL)
    assert str(first.pid) in caught.value.actual
    assert first.wait() == 0
    first.communicate()
    assert contents(target) == whole
    assert not (target / LOCK_NAME).exists()


def test_many_at_once(plain, whole, tmp_path):
    target = tmp_path / "target"
    processes = [start(plain, target) for _ in range(4)]
    ended = [(p.wait(), p.communicate()[1]) for p in processes]
    assert any(code == 0 for code, _ in ended)
    for code, errors in ended:
        assert code == 0 or ("another process" in errors and "Traceback" not in errors)
    assert contents(target) == whole


def test_the_lock_of_a_dead_process_is_taken_over(plain, tmp_path):
    target = tmp_path / "target"
    process = start(plain, target)
    while not (target / JOURNAL_NAME).exists():
        time.sleep(0.005)
    process.kill()
    process.wait()
    process.communicate()
    assert (target / LOCK_NAME).exists()
    with folder_lock(target):
        pass
    assert not (target / LOCK_NAME).exists()


# --- errors of the system -----------------------------------------------------------------------


def failing(monkeypatch, call, number, code):
    """The `number`-th use of a system call on the target fails; counts all uses."""
    original, count = getattr(os, call), [0]

    def fail(*args, **options):
        count[0] += 1
        if count[0] == number:
            raise OSError(code, os.strerror(code))
        return original(*args, **options)

    monkeypatch.setattr(output_file.os, call, fail)
    return count


def outcome(plain, target):
    """The PackError of a packing, or None."""
    try:
        pack_checkpoint(plain, target, **SMALL)
    except PackError as error:
        return error
    return None


@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace", "ftruncate"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failure_at_every_write_loses_nothing(plain, whole, tmp_path, monkeypatch, call, code):
    with monkeypatch.context() as patch:
        uses = failing(patch, call, -1, code)
        pack_checkpoint(plain, tmp_path / "count", **SMALL)
    numbers = range(1, uses[0] + 1)
    if not os.environ.get("MLX_STREAM_BIG"):
        numbers = sorted({numbers[0], numbers[-1], *random.Random(code).sample(numbers, 3)})
    for number in numbers:
        target = tmp_path / f"target-{number}"
        with monkeypatch.context() as patch:
            failing(patch, call, number, code)
            error = outcome(plain, target)
        if error is None:  # a pid in a lock file, or a folder that cannot be synced: no matter
            assert contents(target) == whole
        else:
            assert error.file is not None
            assert "full" in error.problem or code != errno.ENOSPC
        assert not [p for p in target.iterdir() if p.name.endswith(".partial")]
        for name in final_names(target) - {JOURNAL_NAME}:
            assert (target / name).read_bytes() == whole[name]
        pack_checkpoint(plain, target, **SMALL)
        assert contents(target) == whole
        shutil.rmtree(target)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.8, 1.0])
def test_a_disk_that_becomes_read_only_is_a_typed_error(plain, whole, tmp_path, share):
    """Not even what is being cleaned up may hide what happened."""
    with SystemFaults(CHANGES, tmp_path) as count:
        pack_checkpoint(plain, tmp_path / "count", **SMALL)
    target = tmp_path / "target"
    number = int(share * (count.uses - 2))  # the last two remove the journal and the lock
    with SystemFaults(CHANGES, target, number, errno.EROFS, lasting=True) as faults:
        error = outcome(plain, target)
    assert faults.injected
    assert error is None if share == 1.0 else "Read-only" in str(error)
    pack_checkpoint(plain, target, **SMALL)
    assert contents(target) == whole


def test_a_disk_without_locks_is_a_typed_error(plain, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("mlx_stream.packed.folder_lock.fcntl.flock", refuse)
    with pytest.raises(PackError, match="cannot be locked"):
        pack_checkpoint(plain, tmp_path / "target")


def test_what_cannot_be_removed_is_a_typed_error(plain, tmp_path):
    (tmp_path / "target" / ".packed.json.partial").mkdir(parents=True)
    with pytest.raises(PackError, match="cannot be prepared"):
        pack_checkpoint(plain, tmp_path / "target")


@pytest.mark.root
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_disk_that_is_really_full(plain, whole, tmp_path, monkeypatch, share):
    disk = tmp_path / "disk"
    disk.mkdir()
    size = int(sum(map(len, whole.values())) * share)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        with pytest.raises(PackError, match="not enough free space"):
            pack_checkpoint(plain, disk / "target", **SMALL)
        monkeypatch.setattr(
            pack_module.shutil,
            "disk_usage",
            lambda _: shutil._ntuple_diskusage(1 << 50, 0, 1 << 50),
        )
        with pytest.raises(PackError, match="disk is full"):
            pack_checkpoint(plain, disk / "target", **SMALL)
        for name in final_names(disk / "target") - {JOURNAL_NAME}:
            assert (disk / "target" / name).read_bytes() == whole[name]
        grown = f"remount,size={64 << 20}"
        subprocess.run(["mount", "-o", grown, str(disk)], check=True)
        pack_checkpoint(plain, disk / "target", **SMALL)
        assert contents(disk / "target") == whole
    finally:
        subprocess.run(["umount", str(disk)], check=False)


def test_space_is_asked_for_before_anything_is_written(plain, tmp_path, monkeypatch):
    target = tmp_path / "target"
    free = shutil._ntuple_diskusage(1 << 40, 0, 1 << 20)
    monkeypatch.setattr(pack_module.shutil, "disk_usage", lambda _: free)
    with pytest.raises(PackError, match="free space"):
        pack_checkpoint(plain, target)
    assert not list(target.iterdir())


def test_a_folder_that_cannot_be_made(plain, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PackError, match="cannot be made"):
        pack_checkpoint(plain, tmp_path / "file" / "target")


# --- folders that hold something ------------------------------------------------------------------


def test_never_among_foreign_files_and_never_over_the_source(plain, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "thesis.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(PackError, match="other files"):
            pack_checkpoint(plain, target, force=force)
    assert [p.name for p in target.iterdir()] == ["thesis.txt"]
    with pytest.raises(PackError, match="same folder"):
        pack_checkpoint(plain, plain)


def test_another_packing_is_replaced_only_with_force(plain, whole, checkpoint, tmp_path):
    target = tmp_path / "target"
    pack_checkpoint(plain, target, orders=random_orders(index_of(plain)))
    assert pack_checkpoint(plain, target, orders=random_orders(index_of(plain))).already
    before = contents(target)
    for source in (plain, checkpoint("gpt_oss")):
        with pytest.raises(PackError, match="another packing"):
            pack_checkpoint(source, target, **SMALL)
        assert contents(target) == before
    pack_checkpoint(plain, target, force=True, **SMALL)
    assert contents(target) == whole
    assert verify(target, against=plain).sound


def test_an_unfinished_folder_says_so(plain, tmp_path):
    target = tmp_path / "target"
    pack_checkpoint(plain, target)
    (target / MANIFEST_NAME).unlink()
    (target / JOURNAL_NAME).write_text("{}")
    with pytest.raises(CheckpointError, match="not packed to the end"):
        open_checkpoint(target)


def test_a_source_that_changes_meanwhile_is_not_packed(plain, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(plain, source)
    shard = min(source.glob("model*.safetensors"))

    def touch(done, total, what):
        os.utime(shard, ns=(1, 1))

    with pytest.raises(CheckpointError, match="changed"):
        pack(source, target, PackOptions(), touch)
    assert MANIFEST_NAME not in final_names(target)


@pytest.mark.parametrize("name", ["config.json", "model-00001"])
def test_half_a_file_is_not_taken_for_the_whole(plain, tmp_path, monkeypatch, name):
    """A read that ends early, of a file beside the weights or of a header, is no end of file."""
    read, opened = Path.read_bytes, builtins.open

    def half(path):
        data = read(path)
        return data[: len(data) // 2] if path.name.startswith(name) else data

    class Short(io.BufferedReader):
        def read(self, size=-1):
            return super().read(size if size < 16 else size // 2)

    def short(path, *rest, **options):
        file = opened(path, *rest, **options)
        return Short(file.detach()) if Path(path).name.startswith(name) else file

    if name == "config.json":
        monkeypatch.setattr(Path, "read_bytes", half)
    else:
        monkeypatch.setattr(manifest_json, "open", short, raising=False)
    with pytest.raises(MlxStreamError):
        pack_checkpoint(plain, tmp_path / "packed")
    assert not (tmp_path / "packed" / "packed.json").exists()


def test_a_link_to_nowhere_is_not_left_out(plain, tmp_path):
    """A download that was stopped leaves such links; without the tokenizer nothing runs."""
    source = tmp_path / "source"
    shutil.copytree(plain, source)
    (source / "tokenizer.json").symlink_to(tmp_path / "blobs" / "gone")
    with pytest.raises(PackError, match="leads nowhere"):
        pack_checkpoint(source, tmp_path / "packed")


def test_files_beside_the_weights_are_renewed(plain, tmp_path):
    """Weights that are there are not packed again; an old config or tokenizer is not left there."""
    source, target = tmp_path / "source", tmp_path / "packed"
    shutil.copytree(plain, source)
    (source / "notes.txt").write_text("old")
    pack_checkpoint(source, target)
    config = json.loads((source / "config.json").read_text()) | {"note": 1}
    (source / "config.json").write_text(json.dumps(config))
    (source / "added.jinja").write_text("new")
    (source / "notes.txt").unlink()
    report = pack_checkpoint(source, target)
    assert report.already
    assert report.renewed == ("added.jinja", "config.json", "notes.txt")
    assert json.loads((target / "config.json").read_text())["note"] == 1
    assert not (target / "notes.txt").exists()
    assert verify(target).sound
    assert pack_checkpoint(source, target).renewed == ()
