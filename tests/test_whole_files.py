"""Files are written whole; links are followed and devices are left in place."""

import os
import stat

import pytest

from mlx_stream.whole_files import write_whole


def test_it_replaces_a_file_and_leaves_nothing_else(tmp_path):
    target = tmp_path / "a.json"
    target.write_text("old and longer")
    write_whole(target, "new")
    assert target.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_link_stays_a_link(tmp_path):
    target, link = tmp_path / "a.json", tmp_path / "b.json"
    target.write_text("old")
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_pipe_is_written_into(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "new")
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_folder_that_is_missing(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        write_whole(tmp_path / "no" / "a.json", "new")


def test_the_old_file_survives_a_failed_write(tmp_path, monkeypatch):
    target = tmp_path / "a.json"
    target.write_text("old")

    def fail(*args):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_whole(target, "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]
