"""The file with the heads' weights: names and shapes checked before any byte is used.

Both published ways of naming are read: ``layers.<owner>.<part>.weight`` and
``layers.<owner>.mlp.prerouter.<part>.weight``, part being fc1, fc2 or linear_init. All are
``[out, in]`` without bias. Read as untrusted input.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from mlx_stream.errors import (
    CheckpointError,
    MissingTensorError,
    PrerouterError,
    TensorFormatError,
)
from mlx_stream.prerouter.spec import PrerouterSpec
from mlx_stream.storage.safetensors_header import (
    TensorInfo,
    parse_header,
    read_header,
)

PARTS = ("fc1", "fc2", "linear_init")
MAX_WIDTH = 1 << 16
_NAME = re.compile(r"layers\.(\d{1,5})\.(?:mlp\.prerouter\.)?(fc1|fc2|linear_init)\.weight")
_DTYPES = {"F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "BF16": np.dtype("<u2")}
_REMEDY = "take the heads that belong to this checkpoint, or run with --prerouter off"


@dataclass(frozen=True)
class HeadFile:
    """Where the heads' tensors lie.

    Attributes:
        inputs: F, width of a head's input: hidden + 2 E.
        width: R, rows of fc1.
        experts: E, rows of fc2 and linear_init.
    """

    path: Path
    tensors: Mapping[tuple[int, str], TensorInfo]
    inputs: int
    width: int
    experts: int

    def read(self, owners: Sequence[int]) -> Iterator[tuple[int, str, np.ndarray]]:
        """``(owner, part, float32 [out, in])`` one by one; a part that the file lacks is left out.

        Raises:
            CheckpointError: the file cannot be read, or holds values that are not finite.
        """
        with self.path.open("rb") as file:
            for owner in owners:
                for part in PARTS:
                    info = self.tensors.get((owner, part))
                    if info is not None:
                        file.seek(info.offset)
                        yield owner, part, _floats(file.read(info.nbytes), info, self.path)


def open_heads(path: Path, spec: PrerouterSpec, *, hidden: int, experts: int) -> HeadFile:
    """Check a heads file against its spec and its model.

    Args:
        hidden: width of the model's hidden state.
        experts: of a layer.

    Raises:
        PrerouterError: there is no such file, or it has tensors that are no head's.
        MissingTensorError: a head of the spec lacks a matrix.
        TensorFormatError: a dtype or shape is not the model's.
        CheckpointError: the file is no sound safetensors file.
    """
    tensors = _named(path, _header(path), spec)
    first = tensors[spec.owners[0], "fc1"]
    width = first.shape[0] if len(first.shape) == 2 else 0
    if not 0 < width <= MAX_WIDTH:
        _wrong_shape(path, first, f"[1..{MAX_WIDTH}, {hidden + 2 * experts}]")
    inputs = hidden + 2 * experts
    shapes = {"fc1": (width, inputs), "fc2": (experts, width), "linear_init": (experts, inputs)}
    for (_, part), info in tensors.items():
        if tuple(info.shape) != shapes[part]:
            _wrong_shape(path, info, list(shapes[part]))
        if info.dtype not in _DTYPES:
            raise TensorFormatError(
                "a Prerouter head has an unknown dtype",
                file=path,
                tensor=info.name,
                expected=", ".join(_DTYPES),
                actual=info.dtype,
                remedy=_REMEDY,
            )
    return HeadFile(path, tensors, inputs, width, experts)


def _header(path: Path) -> tuple[TensorInfo, ...]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            raw = read_header(file, size, path)
    except OSError as error:
        raise PrerouterError(
            "the Prerouter's heads cannot be read",
            file=path,
            expected="a safetensors file",
            actual=str(error),
            remedy="download the file, or run with --prerouter off",
        ) from error
    return parse_header(raw, size, path)


def _named(
    path: Path, header: Sequence[TensorInfo], spec: PrerouterSpec
) -> dict[tuple[int, str], TensorInfo]:
    found: dict[tuple[int, str], TensorInfo] = {}
    for info in header:
        match = _NAME.fullmatch(info.name)
        key = (int(match.group(1)), match.group(2)) if match else None
        if key is None or key[0] not in spec.owners or key in found:
            raise PrerouterError(
                "the heads file has a tensor that belongs to no head",
                file=path,
                tensor=info.name[:200],
                expected=f"layers.<{spec.owners[0]}..{spec.owners[-1]}>.<part>.weight, each once",
                actual="another name, another owner or the same head twice",
                remedy=_REMEDY,
            )
        found[key] = info
    needed = PARTS if spec.missing_linear_init == "error" else PARTS[:2]
    for owner in spec.owners:
        for part in needed:
            if (owner, part) not in found:
                raise MissingTensorError(
                    "a Prerouter head lacks a matrix",
                    file=path,
                    tensor=f"layers.{owner}.{part}.weight",
                    expected=f"{', '.join(needed)} of every owner {list(spec.owners)}",
                    actual="missing",
                    remedy=_REMEDY,
                )
    return found


def _wrong_shape(path: Path, info: TensorInfo, expected: object) -> NoReturn:
    raise TensorFormatError(
        "a Prerouter head has the wrong shape",
        file=path,
        tensor=info.name,
        expected=expected,
        actual=list(info.shape),
        remedy=_REMEDY,
    )


def _floats(raw: bytes, info: TensorInfo, path: Path) -> np.ndarray:
    if len(raw) != info.nbytes:
        raise CheckpointError(
            "the heads file ended early",
            file=path,
            tensor=info.name,
            expected=f"{info.nbytes} bytes",
            actual=f"{len(raw)} bytes",
            remedy="download it again",
        )
    values = np.frombuffer(raw, _DTYPES[info.dtype]).reshape(info.shape)
    if info.dtype == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    values = values.astype(np.float32)
    if not np.isfinite(values).all():
        raise TensorFormatError(
            "a Prerouter head has values that are not numbers",
            file=path,
            tensor=info.name,
            expected="finite values",
            actual="NaN or infinity",
            remedy=_REMEDY,
        )
    return values
