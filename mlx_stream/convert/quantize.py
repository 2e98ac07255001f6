"""Float weights to quantized ones: MLX's own rounding, or a refined scale and bias for each group.

Owns the numbers and the bit layout; knows no file and no model. ``refine`` keeps the format: what
comes out is an ordinary affine tensor that ``mx.dequantize`` reads. Docs: docs/mixed_widths.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_stream.backends.cpu.pool import default_threads
from mlx_stream.errors import PackError
from mlx_stream.storage.quant_spec import QuantSpec

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]

BLOCK = 1 << 16  # weights refined at once: temporaries stay in the processor's cache
ERROR_BLOCK = 1 << 20  # weights whose error is summed at once
PACKED = 8  # codes that fill `bits` whole bytes
RANGES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)  # starts: parts of a group's range
ROUNDS = 8  # of encoding and fitting, from each start
KEEP = np.float32(2)  # weight of what is lost of a group, beside its squared error


@dataclass(frozen=True)
class Quantized:
    """One tensor in MLX's layout, with what the rounding cost.

    weight: uint32 [..., out, in * bits / 32].
    scales: [..., out, in / group_size], of w's dtype if affine, else uint8.
    biases: like scales; None unless affine.
    squared_error, squared_norm: sums of (w - ŵ)² and w², ŵ of the stored scales and biases.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    squared_error: float
    squared_norm: float


@dataclass(frozen=True)
class _Fit:
    """Scale and bias of N groups, their codes and their squared errors; G weights in a group."""

    scale: Floats  # [N]
    bias: Floats  # [N]
    codes: Codes  # [N, G]
    error: NDArray[np.float64]  # [N]

    def better_of(self, other: _Fit) -> _Fit:
        """For each group the fit with the smaller error, self on a tie."""
        take = other.error < self.error
        return _Fit(
            np.where(take, other.scale, self.scale),
            np.where(take, other.bias, self.bias),
            np.where(take[:, None], other.codes, self.codes),
            np.where(take, other.error, self.error),
        )


def quantize(w: mx.array, spec: QuantSpec, *, refine: bool = False) -> Quantized:
    """Quantize w [..., out, in]; without `refine` bit for bit ``mx.quantize``.

    With `refine` (affine only) no group's squared error is larger than with ``mx.quantize``.
    Deterministic. Temporaries: about the size of w and 50 MB.

    Raises:
        PackError: w has NaN or infinite values, or its scales would not be finite. It names no
            tensor: the caller knows which.
    """
    assert spec.mode != "none", "nothing to quantize to"
    assert not refine or spec.mode == "affine", f"no refinement for {spec.mode}"
    assert w.ndim >= 2, w.shape
    assert w.shape[-1] % spec.group_size == 0, (w.shape, spec)
    _check_finite(w)
    weight, scales, *rest = mx.quantize(
        w, group_size=spec.group_size, bits=spec.bits, mode=spec.mode
    )
    biases = rest[0] if rest else None
    mx.eval(weight, scales, *rest)
    if biases is not None:
        _check_scales(scales, biases)
    if refine:
        return _refined(w, Quantized(weight, scales, biases, 0.0, 0.0), spec)
    error, norm = _cost(w, weight, scales, biases, spec)
    return Quantized(weight, scales, biases, error, norm)


def pack_codes(codes: Codes, bits: int) -> NDArray[np.uint32]:
    """Codes [..., n] to MLX's words [..., n * bits / 32]: one stream of bits, the lowest first."""
    eights = codes.reshape(*codes.shape[:-1], -1, PACKED).astype(np.uint64)
    shifts = np.arange(PACKED, dtype=np.uint64) * np.uint64(bits)
    streams = np.bitwise_or.reduce(eights << shifts, axis=-1).astype("<u8")
    octets = streams[..., None].view(np.uint8)[..., :bits]
    return np.ascontiguousarray(octets).reshape(*codes.shape[:-1], -1).view("<u4")


def unpack_codes(words: NDArray[np.uint32], bits: int) -> Codes:
    """What ``pack_codes`` packed."""
    octets = np.ascontiguousarray(words).astype("<u4").view(np.uint8)
    octets = octets.reshape(*words.shape[:-1], -1, bits)
    streams = np.zeros((*octets.shape[:-1], PACKED), np.uint8)
    streams[..., :bits] = octets
    shifts = np.arange(PACKED, dtype=np.uint64) * np.uint64(bits)
    codes = (streams.view("<u8") >> shifts) & np.uint64((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(*words.shape[:-1], -1)


def _refined(w: mx.array, plain: Quantized, spec: QuantSpec) -> Quantized:
    bits, size = spec.bits, spec.group_size
    assert plain.biases is not None
    words = np.array(plain.weight).reshape(-1, size * bits // 32)  # [N, words of a group]
    groups = w.reshape(-1, size)
    scales, biases = plain.scales.reshape(-1), plain.biases.reshape(-1)
    fits = {"scale": _floats(scales), "bias": _floats(biases)}
    error = norm = 0.0
    for part, x, found in _searched(groups, bits, max(1, BLOCK // size)):
        scale, bias = fits["scale"][part], fits["bias"][part]
        codes = unpack_codes(words[part], bits)
        fit = _Fit(scale, bias, codes, _errors(x, scale, bias, codes))
        fit = fit.better_of(_stored_fit(x, scale, bias, bits, w.dtype))
        fit = fit.better_of(_stored_fit(x, *found, bits, w.dtype))
        scale[:], bias[:] = fit.scale, fit.bias
        words[part] = pack_codes(fit.codes, bits)
        error += float(fit.error.sum())
        norm += float(np.square(x, dtype=np.float64).sum())
    return Quantized(
        mx.array(words).reshape(plain.weight.shape),
        mx.array(fits["scale"]).astype(w.dtype).reshape(plain.scales.shape),
        mx.array(fits["bias"]).astype(w.dtype).reshape(plain.biases.shape),
        error,
        norm,
    )


def _searched(
    groups: mx.array, bits: int, step: int
) -> Iterator[tuple[slice, Floats, tuple[Floats, Floats]]]:
    """Blocks of groups in order, their values, and what `_search` finds, on all cores.

    The threads see numpy arrays only.
    """
    threads = default_threads()
    with ThreadPoolExecutor(threads, "mlx_stream-refine") as pool:
        ahead: deque[tuple[slice, Floats, Future[tuple[Floats, Floats]]]] = deque()
        for at in range(0, groups.shape[0], step):
            part = slice(at, at + step)
            x = _floats(groups[part])
            ahead.append((part, x, pool.submit(_search, x, bits)))
            if len(ahead) > 2 * threads:
                first, values, future = ahead.popleft()
                yield first, values, future.result()
        for first, values, future in ahead:
            yield first, values, future.result()


def _stored_fit(x: Floats, scale: Floats, bias: Floats, bits: int, dtype: mx.Dtype) -> _Fit:
    """The fit of x [N, G] with scale and bias as they will be stored; error inf where unusable."""
    scale, bias = _stored(scale, dtype), _stored(bias, dtype)
    usable = np.isfinite(scale) & np.isfinite(bias) & (scale != 0)
    scale, bias = np.where(usable, scale, 1), np.where(usable, bias, 0)
    # f32 quotients may overflow to infinity, which the clip brings back.
    with np.errstate(over="ignore"):
        codes = (x - bias[:, None]) / scale[:, None]
    codes = np.clip(np.rint(codes), 0, (1 << bits) - 1).astype(np.uint8)
    return _Fit(scale, bias, codes, np.where(usable, _errors(x, scale, bias, codes), np.inf))


def _search(x: Floats, bits: int) -> tuple[Floats, Floats]:
    """Scale and bias [N] of small cost for x [N, G], not yet rounded to what is stored.

    From each start, in turn: the codes that are nearest under scale and bias, and the scale and
    bias that are best for the codes.
    """
    low, high = x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)
    span = np.where(high > low, high - low, np.float32(1))
    middle = low + (high - low) / 2
    y = (x - middle) / span  # in [-1/2, 1/2], whatever the group's scale
    mean = y.mean(axis=1, keepdims=True)
    y -= mean
    energy = np.maximum(_dot(y, y), np.float32(1e-12))
    top = np.float32((1 << bits) - 1)
    best = np.full_like(mean, np.inf), np.full_like(mean, 1 / top), np.zeros_like(mean)
    for part in RANGES:
        scale, bias = np.full_like(mean, part / top), -np.float32(part) / 2 - mean
        for _ in range(ROUNDS):
            codes = _encode(y, scale, bias, top)
            fit = _Moments.of(y, energy, codes)
            found = fit.cost(scale, bias), scale, bias
            lower = found[0] < best[0]
            best = tuple(np.where(lower, a, b) for a, b in zip(found, best, strict=True))
            scale, bias = fit.solve(scale)
    _, scale, bias = best
    return (scale * span)[:, 0], ((bias + mean) * span + middle)[:, 0]


@dataclass(frozen=True)
class _Moments:
    """What the cost needs of groups y [N, G] with mean 0 and of their codes; all [N, 1]."""

    size: int  # G
    energy: Floats  # sum y²
    mean: Floats  # of the codes
    square: Floats  # sum (c - mean)²
    product: Floats  # sum c y

    @classmethod
    def of(cls, y: Floats, energy: Floats, codes: Floats) -> _Moments:
        size = y.shape[1]
        mean = codes.mean(axis=1, keepdims=True)
        square = _dot(codes, codes) - size * mean * mean
        return cls(size, energy, mean, square, _dot(codes, y))

    def cost(self, scale: Floats, bias: Floats) -> Floats:
        """Squared error over energy, and KEEP times the square of the part of y that is lost."""
        fit = scale * self.product
        error = self.energy - 2 * fit + scale * scale * self.square
        error = error + self.size * np.square(bias + scale * self.mean)
        return error / self.energy + KEEP * np.square(1 - fit / self.energy)

    def solve(self, scale: Floats) -> tuple[Floats, Floats]:
        """Scale and bias of least cost; the scale as it was where all codes are the same."""
        usable = (self.square > 0.5) & (self.product > 0)
        below = self.square + KEEP * self.product * (self.product / self.energy)
        scale = np.where(usable, (1 + KEEP) * self.product / np.where(usable, below, 1), scale)
        return scale, -scale * self.mean


def _encode(y: Floats, scale: Floats, bias: Floats, top: np.float32) -> Floats:
    """Codes, as floats, nearest to y [N, G]."""
    codes = y - bias
    np.divide(codes, scale, out=codes)
    np.rint(codes, out=codes)
    np.maximum(codes, 0, out=codes)
    return np.minimum(codes, top, out=codes)


def _dot(a: Floats, b: Floats) -> Floats:
    return np.einsum("ng,ng->n", a, b)[:, None]


def _floats(w: mx.array) -> Floats:
    return np.array(w.astype(mx.float32))  # numpy has no bfloat16


def _stored(values: Floats, dtype: mx.Dtype) -> Floats:
    """Values as an array of dtype would hold them."""
    return _floats(mx.array(values).astype(dtype))


def _errors(x: Floats, scale: Floats, bias: Floats, codes: Codes) -> NDArray[np.float64]:
    """Squared errors [N] of x [N, G], in float64 so that a comparison of two is exact."""
    rounded = codes * scale[:, None].astype(np.float64) + bias[:, None]
    return np.square(x - rounded).sum(axis=1)


def _cost(
    w: mx.array, weight: mx.array, scales: mx.array, biases: mx.array | None, spec: QuantSpec
) -> tuple[float, float]:
    """Sums of the squared error and of w², in blocks of rows."""
    rows = w.reshape(-1, w.shape[-1])
    parts = [p.reshape(-1, p.shape[-1]) for p in (weight, scales, biases) if p is not None]
    step = max(1, ERROR_BLOCK // w.shape[-1])
    error = norm = 0.0
    for at in range(0, rows.shape[0], step):
        x = _floats(rows[at : at + step])
        block = [p[at : at + step] for p in parts]
        if biases is not None:
            block[1:] = [p.astype(mx.float32) for p in block[1:]]
        rounded = mx.dequantize(
            *block, group_size=spec.group_size, bits=spec.bits, mode=spec.mode, dtype=mx.float32
        )
        error += float(np.square(x - np.array(rounded), dtype=np.float64).sum())
        norm += float(np.square(x, dtype=np.float64).sum())
    return error, norm


def _check_finite(w: mx.array) -> None:
    bad = int((~mx.isfinite(w)).sum().item())
    if bad:
        raise PackError(
            "A weight to be quantized has values that are no finite numbers.",
            expected="finite values",
            actual=f"{bad} of {w.size} values are NaN or infinite",
            remedy="check the checkpoint the weights come from: download or convert it again",
        )


def _check_scales(scales: mx.array, biases: mx.array) -> None:
    bad = int((~(mx.isfinite(scales) & mx.isfinite(biases))).sum().item())
    if bad:
        raise PackError(
            f"The range of a weight's values is too large for {scales.dtype} scales.",
            expected="finite scales and biases",
            actual=f"{bad} of {scales.size} groups have none",
            remedy="check the checkpoint the weights come from: download or convert it again",
        )
