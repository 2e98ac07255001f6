"""The spec: the published forms, the file, and what `--prerouter` makes of a folder."""

import json
import os
from dataclasses import asdict, replace

import pytest

from mlx_stream.errors import PrerouterError
from mlx_stream.prerouter.opening import choose_prerouter
from mlx_stream.prerouter.spec import EDGE0_8B, EDGE0_35B, PUBLISHED, LoraSpec
from mlx_stream.prerouter.spec_file import MAX_NBYTES, SPEC_NAME, read_spec, write_spec
from tests.prerouter.making import HEADS, form


def test_the_published_forms_say_what_is_known_of_them():
    assert (len(EDGE0_35B.owners), EDGE0_35B.owners[0], EDGE0_35B.owners[-1]) == (33, 6, 38)
    assert (EDGE0_35B.consumers[0], EDGE0_35B.consumers[-1], EDGE0_35B.top_k) == (7, 38, 4)
    assert (len(EDGE0_8B.owners), EDGE0_8B.owners[0], EDGE0_8B.owners[-1]) == (16, 7, 22)
    assert (EDGE0_8B.consumers[0], EDGE0_8B.consumers[-1], EDGE0_8B.top_k) == (8, 23, None)
    assert EDGE0_35B.feature == "executed"
    assert EDGE0_8B.feature == "teacher"
    assert EDGE0_8B.lora is not None
    assert EDGE0_8B.lora.scale == 2.0
    assert EDGE0_35B.active_owners == EDGE0_35B.owners[:-1]  # head 38 routes nothing


@pytest.mark.parametrize("spec", [*PUBLISHED, form("8b", [2, 4], [3, 5], lora=None)])
def test_a_written_spec_is_read_back(tmp_path, spec):
    write_spec(tmp_path / SPEC_NAME, spec)
    assert read_spec(tmp_path / SPEC_NAME) == spec


def with_field(name, value):
    return lambda data: data.update({name: value})


def without(name):
    return lambda data: data.pop(name)


def inside(part, name, value):
    return lambda data: data[part].update({name: value})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (without("owners"), "missing"),
        (without("feature"), "missing"),
        (with_field("feature", "both"), "executed, teacher"),
        (with_field("first_prediction", None), "first_step"),
        (with_field("format_version", 2), "format_version"),
        (with_field("format_version", True), "format_version"),
        (with_field("owners", [7, 6]), "ascending"),
        (with_field("owners", [7, 7]), "ascending"),
        (with_field("owners", []), "ascending"),
        (with_field("owners", [True, 7]), "ascending"),
        (with_field("owners", [-1, 7]), "ascending"),
        (with_field("owners", list(range(5000))), "ascending"),
        (with_field("consumers", [2]), "follow an owner"),
        (with_field("top_k", 0), "top_k"),
        (with_field("top_k", 4.0), "top_k"),
        (with_field("trained", "yes"), "trained"),
        (with_field("heads_file", "../heads.safetensors"), "plain file name"),
        (with_field("heads_file", ""), "heads_file"),
        (with_field("surprise", 1), "unknown fields"),
        (with_field("router", []), "router"),
        (inside("router", "kind", "other"), "softmax_topk"),
        (inside("router", "scaling", float("nan")), "scaling"),
        (inside("router", "topk_group", 9), "at most 8"),
        (inside("router", "extra", 1), "unknown fields"),
        (inside("router", "scaling", 10**400), "scaling"),
        (inside("router", "scaling", -(10**400)), "scaling"),
        (inside("lora", "alpha", 10**400), "alpha"),
        (inside("lora", "alpha", float("inf")), "alpha"),
        (inside("lora", "rank", 0), "rank"),
        (inside("lora", "rank", 10**400), "rank"),
        (inside("lora", "file", "a/b"), "plain file name"),
    ],
)
def test_a_bad_spec_is_refused_and_says_why(tmp_path, change, word):
    data = {"format_version": 1} | json.loads(json.dumps(asdict(EDGE0_8B)))
    change(data)
    path = tmp_path / SPEC_NAME
    path.write_text(json.dumps(data))
    with pytest.raises(PrerouterError, match=word) as caught:
        read_spec(path)
    assert caught.value.file == str(path)
    assert "--prerouter off" in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 40_000])
def test_what_is_no_object_is_refused(tmp_path, text):
    (tmp_path / SPEC_NAME).write_bytes(text)
    with pytest.raises(PrerouterError):
        read_spec(tmp_path / SPEC_NAME)


def test_a_huge_file_is_not_read_whole(tmp_path):
    (tmp_path / SPEC_NAME).write_bytes(b" " * (MAX_NBYTES + 1))
    with pytest.raises(PrerouterError, match="too large"):
        read_spec(tmp_path / SPEC_NAME)


@pytest.mark.parametrize("link", [False, True])
def test_a_fifo_or_a_device_is_refused_at_once(tmp_path, link):
    path, fifo = tmp_path / SPEC_NAME, tmp_path / "fifo"
    os.mkfifo(fifo)
    path.symlink_to(fifo if link else "/dev/zero")
    with pytest.raises(PrerouterError, match="not a regular file") as caught:
        choose_prerouter(tmp_path, "auto", None)
    assert caught.value.file == str(path)


def test_a_link_to_a_spec_is_followed(tmp_path):
    write_spec(tmp_path / "stored", EDGE0_8B)
    (tmp_path / SPEC_NAME).symlink_to("stored")
    assert read_spec(tmp_path / SPEC_NAME) == EDGE0_8B


def test_softmax_has_no_groups(tmp_path):
    spec = form("35b", [1], [2], router=replace(EDGE0_8B.router, kind="softmax_topk"))
    write_spec(tmp_path / SPEC_NAME, spec)
    with pytest.raises(PrerouterError, match="no groups"):
        read_spec(tmp_path / SPEC_NAME)


# --- auto, on, off -----------------------------------------------------------------------------


def folder_with(tmp_path, *, spec=None, heads=()):
    if spec is not None:
        write_spec(tmp_path / SPEC_NAME, spec)
    for name in heads:
        (tmp_path / name).write_bytes(b"")
    return tmp_path


def test_auto_needs_a_trained_spec_and_its_heads(tmp_path):
    trained, untrained = form("35b", [1], [2]), form("35b", [1], [2], trained=False)
    assert "no prerouter.json" in choose_prerouter(tmp_path, "auto", None).reason
    folder_with(tmp_path, spec=trained)
    assert choose_prerouter(tmp_path, "auto", None).reason == f"off: {HEADS} is missing"
    folder_with(tmp_path, heads=[HEADS])
    assert choose_prerouter(tmp_path, "auto", None).spec == trained
    assert choose_prerouter(tmp_path, "off", None).spec is None
    folder_with(tmp_path, spec=untrained)
    assert "not trained" in choose_prerouter(tmp_path, "auto", None).reason
    assert choose_prerouter(tmp_path, "on", None).spec == untrained


def test_on_without_heads_is_an_error(tmp_path):
    with pytest.raises(PrerouterError, match="has no Prerouter"):
        choose_prerouter(tmp_path, "on", None)
    folder_with(tmp_path, spec=form("35b", [1], [2]))
    with pytest.raises(PrerouterError, match="heads are missing"):
        choose_prerouter(tmp_path, "on", None)


@pytest.mark.parametrize("spec", PUBLISHED)
def test_published_folders_have_no_spec(tmp_path, spec):
    folder_with(tmp_path, heads=[spec.heads_file])
    assert choose_prerouter(tmp_path, "auto", None).spec == spec


def test_a_spec_given_by_hand_stands_for_the_folders_own(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "mine").mkdir()
    folder_with(tmp_path / "model", spec=form("35b", [1], [2]), heads=[HEADS])
    mine = form("8b", [3], [4], lora=LoraSpec("a.safetensors", 8.0, 4))
    folder_with(tmp_path / "mine", spec=mine, heads=[HEADS])
    choice = choose_prerouter(tmp_path / "model", "auto", tmp_path / "mine" / SPEC_NAME)
    assert (choice.spec, choice.folder) == (mine, tmp_path / "mine")
