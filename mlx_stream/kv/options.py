"""What the user may ask of the KV cache, as mlx_lm.generate has it. Pure: no mlx here.

The options belong to a call, not to a loaded model: the same runtime serves a long prompt with a
quantized cache and a short one without.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mlx_stream.config import ConfigError

KV_BITS = (2, 3, 4, 5, 6, 8)
KV_GROUP_SIZES = (32, 64, 128)
KV_EVICT = ("keep", "quantize", "disk")
EVICT_BITS = 8  # of kv_evict="quantize" where kv_bits does not say
KEPT_TOKENS = 4  # a rotating cache never drops the first ones, as in mlx-lm


@dataclass(frozen=True)
class KvOptions:
    """How the keys and values of a prompt are kept; the defaults are mlx-lm's.

    Attributes:
        max_kv_size: most tokens a layer keeps; older ones, but the first 4, are overwritten.
        kv_bits: bits of a quantized value; None keeps keys and values as they are.
        kv_group_size: values that share a scale.
        quantized_kv_start: a layer's cache is quantized from this many tokens on.
        kv_evict: what becomes of a layer's keys and values once the prompt has passed the layer:
            ``"keep"``, ``"quantize"`` (so prefill itself runs with unquantized ones; kv_bits is 8
            unless given) or ``"disk"`` (only one layer's are in memory; decode loads them back).
        kv_dir: folder for ``kv_evict="disk"``: the file in it is an mlx-lm prompt cache.
    """

    max_kv_size: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 5000
    kv_evict: str = "keep"
    kv_dir: Path | str | None = None

    def __post_init__(self) -> None:
        size, bits = self.max_kv_size, self.kv_bits
        if size is not None and not (_whole(size) and size > KEPT_TOKENS):
            raise _bad("max_kv_size", f"more than {KEPT_TOKENS} tokens, or None", size)
        if bits is not None and not (_whole(bits) and bits in KV_BITS):
            raise _bad("kv_bits", f"one of {KV_BITS}, or None", bits)
        if not (_whole(self.kv_group_size) and self.kv_group_size in KV_GROUP_SIZES):
            raise _bad("kv_group_size", f"one of {KV_GROUP_SIZES}", self.kv_group_size)
        if not (_whole(self.quantized_kv_start) and self.quantized_kv_start >= 0):
            raise _bad("quantized_kv_start", "0 or more tokens", self.quantized_kv_start)
        if size is not None and bits is not None:
            raise ConfigError(
                "a cache that drops old tokens cannot be quantized",
                expected="max_kv_size or kv_bits, as mlx-lm can do one of them",
                actual=f"max_kv_size {size} and kv_bits {bits}",
                remedy="leave one of them out",
            )
        self._check_eviction()
        if self.kv_evict == "quantize" and bits is None:
            object.__setattr__(self, "kv_bits", EVICT_BITS)

    def _check_eviction(self) -> None:
        if self.kv_evict not in KV_EVICT:
            raise _bad("kv_evict", f"one of {KV_EVICT}", self.kv_evict)
        if (self.kv_evict == "disk") != (self.kv_dir is not None):
            raise ConfigError(
                "kv_evict='disk' and kv_dir belong together",
                expected="both, or neither",
                actual=f"kv_evict {self.kv_evict!r}, kv_dir {self.kv_dir}",
                remedy="name a folder with room for all keys and values",
            )
        if self.kv_evict != "keep" and self.max_kv_size is not None:
            raise ConfigError(
                "a cache of limited size is not evicted",
                expected="max_kv_size or kv_evict",
                actual=f"max_kv_size {self.max_kv_size} and kv_evict {self.kv_evict!r}",
                remedy="leave one of them out",
            )
        if self.kv_evict == "disk" and self.kv_bits is not None:
            raise ConfigError(
                "keys and values are quantized or moved to disk",
                expected="kv_evict='quantize', or 'disk' without kv_bits",
                actual=f"kv_bits {self.kv_bits} and kv_evict 'disk'",
                remedy="leave one of them out",
            )

    @classmethod
    def of(cls, kv: KvOptions, named: dict[str, Any]) -> KvOptions:
        """The options given as one object, or by mlx-lm's names.

        Raises:
            ConfigError: both ways at once, an unknown name, or a bad value.
        """
        if not named:
            return kv
        known = [field.name for field in fields(cls)]
        if not kv.plain or not named.keys() <= set(known):
            raise ConfigError(
                "these options are not known",
                expected=f"kv=KvOptions(...), or some of {', '.join(known)}",
                actual=", ".join(sorted(named)) + ("" if kv.plain else " besides kv"),
                remedy="check the names",
            )
        return cls(**named)

    @property
    def plain(self) -> bool:
        """Whether nothing is asked for."""
        return self.max_kv_size is None and self.kv_bits is None and self.kv_evict == "keep"

    def quantized_nbytes(self, itemsize: int) -> float:
        """Bytes of one quantized value with its share of scale and bias (`itemsize` each)."""
        assert self.kv_bits is not None
        return self.kv_bits / 8 + 2 * itemsize / self.kv_group_size


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bad(option: str, expected: str, actual: object) -> ConfigError:
    return ConfigError(
        f"bad value for {option}",
        expected=expected,
        actual=repr(actual),
        remedy=f"set {option} to a value in the expected range",
    )


PLAIN = KvOptions()
