"""The loader: what a kernel file may contain, and what each malformed file is told."""

from dataclasses import FrozenInstanceError, replace

import pytest

from mlx_stream.backends.kernels import source as module
from mlx_stream.backends.kernels.source import KernelSourceError, load_kernel, read_kernel

GOOD = """//! name: scale
//! inputs: x w
//! inputs: factor
//! outputs: y
//! template: T=dtype N=int FLAG=bool
//! grid: one thread an element
#include <metal_stdlib>
// ---- helpers
//! include: common.h
//! body
  y[0] = T(x[0]);
"""


@pytest.fixture
def write(tmp_path):
    """``write(text, name="scale.metal") -> path``; common.h and loop.h lie beside it."""
    (tmp_path / "common.h").write_text("constant int COMMON = 1;\n//! include: deeper.h\n")
    (tmp_path / "deeper.h").write_text("constant int DEEPER = 2;\n//! include: common.h\n")

    def write(text, name="scale.metal"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_a_file_is_parsed_into_its_parts(write):
    path = write(GOOD)
    kernel = read_kernel(path)
    assert kernel.name == "scale"
    assert kernel.inputs == ("x", "w", "factor")
    assert kernel.outputs == ("y",)
    assert kernel.template == (("T", "dtype"), ("N", "int"), ("FLAG", "bool"))
    assert kernel.body == "  y[0] = T(x[0]);\n"
    assert kernel.path == str(path)
    assert kernel.language == "metal"
    assert read_kernel(write(GOOD, "scale.cu")).language == "cuda"


def test_includes_are_replaced_by_their_text_once(write):
    kernel = read_kernel(write(GOOD.replace("//! body", "//! include: deeper.h\n//! body")))
    assert kernel.header == (
        "#include <metal_stdlib>\n// ---- helpers\n"
        "constant int COMMON = 1;\nconstant int DEEPER = 2;\n"
    )


def test_a_source_is_frozen_and_hashable(write):
    kernel = read_kernel(write(GOOD))
    assert hash(kernel) == hash(replace(kernel))
    with pytest.raises(FrozenInstanceError):
        kernel.body = ""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("//! body", "// body", "header and body"),
        ("//! body\n", "//! body\n//! body\n", "header and body"),
        ("  y[0] = T(x[0]);\n", " \n", "body is empty"),
        ("  y[0]", "  //! grid: late\n  y[0]", "metadata after"),
        ("//! name: scale\n", "", "must be given once"),
        ("//! name: scale\n", "//! name: scale\n//! name: scale\n", "must be given once"),
        ("//! name: scale", "//! name:", "must be given once"),
        ("name: scale", "name: other", "file's stem"),
        ("//! outputs: y\n", "", "no outputs"),
        ("outputs: y", "outputs: y-z", "not an identifier"),
        ("outputs: y", "outputs: x", "used twice"),
        ("T=dtype", "x=dtype", "used twice"),
        ("T=dtype", "T=float", "NAME=kind"),
        ("T=dtype", "T", "NAME=kind"),
        ("//! grid", "//! girdle", "unknown key 'girdle'"),
        ("//! grid: one thread an element", "//! grid", "is not metadata"),
        ("//! grid", " //! grid", "is not metadata"),
        ("include: common.h", "include: ../common.h", "one folder"),
        ("include: common.h", "include: /etc/passwd", "one folder"),
        ("include: common.h", "include: ..", "one folder"),
        ("include: common.h", "include:", "one folder"),
        ("include: common.h", "include: absent.h", "cannot be read"),
    ],
)
def test_malformed_files_are_refused(write, old, new, message):
    assert old in GOOD
    path = write(GOOD.replace(old, new))
    with pytest.raises(KernelSourceError, match=message) as caught:
        read_kernel(path)
    assert str(path) in str(caught.value)


def test_an_include_has_no_metadata_of_its_own(write, tmp_path):
    (tmp_path / "common.h").write_text("//! inputs: z\n")
    with pytest.raises(KernelSourceError, match=r"common\.h, line 1: unknown key 'inputs'"):
        read_kernel(write(GOOD))


def test_text_must_be_utf8_and_the_suffix_known(write):
    with pytest.raises(KernelSourceError, match="cannot be read"):
        read_kernel(write(b"\xff\xfe"))
    with pytest.raises(KernelSourceError, match="unknown kernel language"):
        read_kernel(write(GOOD, "scale.wgsl"))


def test_shipped_kernels_are_found_by_name(write, tmp_path, monkeypatch):
    write(GOOD)
    monkeypatch.setattr(module, "source_folder", lambda language: tmp_path)
    load_kernel.cache_clear()
    try:
        assert load_kernel("scale", "metal").name == "scale"
        assert load_kernel("scale", "metal") is load_kernel("scale", "metal")
        with pytest.raises(KernelSourceError, match="cannot be read"):
            load_kernel("absent", "metal")
        with pytest.raises(KernelSourceError, match="one folder"):
            load_kernel("../scale", "metal")
    finally:
        load_kernel.cache_clear()
