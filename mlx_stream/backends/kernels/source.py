"""Kernel sources: one text file a kernel, ``.metal`` or ``.cu``, parsed by one loader.

A file is read once, here, and never rewritten: production hands `KernelSource.header` and
`KernelSource.body` to ``mx.fast.metal_kernel`` or ``mx.fast.cuda_kernel``, and the tests hand the
same object to the CPU shim. Layout of a file::

    //! name: moe_gate_up                   equal to the file's stem
    //! inputs: x w scales                  repeated lines append
    //! outputs: y
    //! template: T=dtype BITS=int GATED=bool
    //! include: common.h                   replaced by that file's text; same folder only
    ... helpers, tables ...                 -> header
    //! body
    ... statements of the kernel ...        -> body

MLX searches the body, and only the body, for the names it provides (thread positions, ``x_shape``
and so on), so these names must not be used in the header.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal, NoReturn, get_args

from mlx_stream.errors import MlxStreamError

Language = Literal["metal", "cuda"]
TemplateKind = Literal["dtype", "int", "bool"]

SUFFIXES: dict[Language, str] = {"metal": ".metal", "cuda": ".cu"}
_MARK = "//!"
_BODY = "//! body"
_LIST_KEYS = ("inputs", "outputs", "template")
_TEXT_KEYS = ("name", "grid")  # grid is for the reader: what one thread of the launch stands for
_INCLUDE = "include"
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*\Z", re.ASCII)
_FILE_NAME = re.compile(r"[A-Za-z0-9_][\w.\-]*\Z", re.ASCII)  # no separators, no leading dot


class KernelSourceError(MlxStreamError):
    """A kernel's source file is missing or malformed."""


@dataclass(frozen=True)
class KernelSource:
    """One kernel as written. Immutable and hashable; `dataclasses.replace` makes variants.

    Attributes:
        name: identifier of the kernel and stem of its file.
        inputs: names of the input arrays, in launch order.
        outputs: names of the output arrays, in launch order.
        template: (name, kind) of each template parameter.
        header: text before the kernel function, includes already replaced: self-contained.
        body: statements of the kernel function.
        path: where the text came from, for messages.
        language: ``"metal"`` or ``"cuda"``.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    template: tuple[tuple[str, TemplateKind], ...]
    header: str
    body: str
    path: str
    language: Language


def source_folder(language: Language) -> Traversable:
    """Folder of the ``.metal`` or ``.cu`` files: in the installed package, else the checkout.

    Raises:
        KernelSourceError: neither place has it.
    """
    packaged = resources.files("mlx_stream").joinpath(f"_{language}")
    if packaged.is_dir():
        return packaged
    checkout = Path(__file__).resolve().parents[3] / language  # editable install or source tree
    if checkout.is_dir():
        return checkout
    raise KernelSourceError(
        f"the {language} kernel sources are not installed",
        file=str(packaged),
        expected=f"package data in mlx_stream/_{language}",
        remedy="reinstall mlx-stream from a wheel, or run from a checkout",
    )


@cache
def load_kernel(name: str, language: Language) -> KernelSource:
    """Parse the kernel ``name`` that ships with mlx_stream; cached for the process.

    Raises:
        KernelSourceError: there is no such file, or it is malformed.
    """
    return _Parser(source_folder(language), name + SUFFIXES[language]).parse()


def read_kernel(path: Path) -> KernelSource:
    """Parse one ``.metal`` or ``.cu`` file; its includes are looked up beside it.

    Raises:
        KernelSourceError: the file cannot be read or is malformed.
    """
    return _Parser(path.parent, path.name).parse()


@dataclass
class _Parser:
    """State of parsing one file: metadata seen so far and which includes are already in."""

    folder: Traversable
    file_name: str
    values: dict[str, list[str]] = field(default_factory=dict)
    included: set[str] = field(default_factory=set)

    def parse(self) -> KernelSource:
        language = self._language()
        head, body = self._split(self._read(self.file_name))
        header = "".join(self._expand(head, self.file_name, metadata=True))
        if not body.strip():
            self._fail("the kernel body is empty", expected="statements after '//! body'")
        if f"\n{_MARK}" in "\n" + body.replace(" ", ""):
            self._fail("metadata after '//! body'", expected="all '//! key: value' lines above it")
        name = self._single("name")
        source = KernelSource(
            name=name,
            inputs=tuple(self.values.get("inputs", ())),
            outputs=tuple(self.values.get("outputs", ())),
            template=self._template(),
            header=header,
            body=body,
            path=self._path,
            language=language,
        )
        self._check_names(source)
        return source

    @property
    def _path(self) -> str:
        return str(self.folder.joinpath(self.file_name))

    def _read(self, name: str) -> str:
        """Text of a file of the kernel's folder."""
        if not _FILE_NAME.match(name):
            self._fail("a kernel and its includes are files of one folder", actual=name)
        try:
            return self.folder.joinpath(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise KernelSourceError(
                f"the kernel source {name} cannot be read", file=self._path, actual=error
            ) from error

    def _language(self) -> Language:
        for language, suffix in SUFFIXES.items():
            if self.file_name.endswith(suffix):
                return language
        self._fail("unknown kernel language", expected="a .metal or .cu file")

    def _split(self, text: str) -> tuple[str, str]:
        parts = re.split(rf"^{re.escape(_BODY)}[ \t]*\n", text, flags=re.M)
        if len(parts) != 2:
            self._fail(
                "header and body cannot be told apart",
                expected=f"one line '{_BODY}'",
                actual=f"{len(parts) - 1} of them",
            )
        return parts[0], parts[1]

    def _expand(self, text: str, where: str, *, metadata: bool) -> Iterator[str]:
        """The text without its metadata lines, each include replaced by the file's own text."""
        for number, line in enumerate(text.splitlines(), 1):
            if not line.lstrip().startswith(_MARK):
                yield line + "\n"
                continue
            match = re.fullmatch(r"//! (\w+): *(.*?)\s*", line)
            if match is None:
                self._fail(
                    f"{where}, line {number} is not metadata",
                    expected="//! key: value",
                    actual=line,
                )
            key, value = match.groups()
            if key == _INCLUDE:
                yield from self._include(value)
            elif metadata and key in (*_LIST_KEYS, *_TEXT_KEYS):
                self.values.setdefault(key, []).extend(
                    value.split() if key in _LIST_KEYS else [value]
                )
            else:
                known = (*_TEXT_KEYS, *_LIST_KEYS, _INCLUDE) if metadata else (_INCLUDE,)
                self._fail(
                    f"{where}, line {number}: unknown key {key!r}", expected=", ".join(known)
                )

    def _include(self, name: str) -> Iterator[str]:
        """Text of a file of the same folder, once: a second include of it adds nothing."""
        if name in self.included:
            return
        self.included.add(name)
        yield from self._expand(self._read(name), name, metadata=False)

    def _single(self, key: str) -> str:
        values = self.values.get(key, [])
        if len(values) != 1 or not values[0]:
            self._fail(f"'//! {key}:' must be given once", actual=len(values))
        return values[0]

    def _template(self) -> tuple[tuple[str, TemplateKind], ...]:
        pairs: list[tuple[str, TemplateKind]] = []
        for item in self.values.get("template", []):
            name, _, kind = item.partition("=")
            if kind not in get_args(TemplateKind):
                self._fail(
                    "a template parameter is NAME=kind",
                    expected="kind dtype, int or bool",
                    actual=item,
                )
            pairs.append((name, kind))
        return tuple(pairs)

    def _check_names(self, source: KernelSource) -> None:
        stem = self.file_name.removesuffix(SUFFIXES[source.language])
        if source.name != stem:
            self._fail(
                "the kernel's name is not its file's stem", expected=stem, actual=source.name
            )
        if not source.outputs:
            self._fail("the kernel has no outputs", expected="'//! outputs: name ...'")
        names = [source.name, *source.inputs, *source.outputs, *(n for n, _ in source.template)]
        for name in names:
            if not _IDENTIFIER.match(name):
                self._fail("a name is not an identifier", actual=name)
        if duplicates := {name for name in names[1:] if names[1:].count(name) > 1}:
            self._fail("a name is used twice", actual=", ".join(sorted(duplicates)))

    def _fail(self, problem: str, *, expected: object = None, actual: object = None) -> NoReturn:
        raise KernelSourceError(problem, file=self._path, expected=expected, actual=actual)
