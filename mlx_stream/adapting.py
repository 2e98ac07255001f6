"""Which adapter a request runs with: the Prerouter's own, one that was asked for, or none.

A prompt cache is of one adapter. It is marked when a prompt has run, decoding follows the mark, and
going on with another adapter is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from mlx_stream.adapters.adapter_set import AdapterSet
from mlx_stream.adapters.cache_marks import CacheMarks
from mlx_stream.adapters.lora_file import open_adapter
from mlx_stream.config import StreamConfig
from mlx_stream.errors import AdapterError, PrerouterError
from mlx_stream.prefill.cache_views import cache_offset
from mlx_stream.prerouter.opening import OpenPrerouter
from mlx_stream.prerouter.spec import PUBLISHED, LoraSpec
from mlx_stream.prerouter.spec_file import SPEC_NAME, read_spec

AUTO, OFF = "auto", "off"
Adapter = str | Path | None


class EngineAdapters:
    """The adapters of an engine, by path. Compute thread only.

    Args:
        make_room: called before an adapter is read: the expert cache gives way.

    Attributes:
        default: the adapter of requests that name none; None is the base.
    """

    def __init__(
        self,
        adapters: AdapterSet,
        make_room: Callable[[], None],
    ) -> None:
        self._set, self._marks = adapters, CacheMarks()
        self._make_room = make_room
        self.default: str | None = None
        self._closed = False

    def open_default(
        self, config: StreamConfig, checkpoint: Path, prerouter: OpenPrerouter | None
    ) -> None:
        """Load what requests run with that name no adapter.

        Raises:
            AdapterError, CheckpointError, BudgetError: see :meth:`load`.
        """
        if config.adapter != AUTO:
            self.default = self.choose(config.adapter, config.adapter_scale)
        elif prerouter is not None and prerouter.spec.lora is not None:
            lora, spec = prerouter.spec.lora, config.prerouter_spec
            folder = checkpoint if spec is None else Path(spec).absolute().parent
            self.default = self.load(folder / lora.file, lora.scale, lora.rank)

    def choose(self, adapter: Adapter, scale: float | None = None) -> str | None:
        """The name of an adapter that a request asked for, loaded if it is not yet.

        Args:
            adapter: a path; ``auto`` is :attr:`default`; ``off`` or None is the base.
        """
        if adapter == AUTO:
            return self.default
        return None if adapter in (None, OFF) else self.load(Path(adapter), scale)  # type: ignore[arg-type]

    def load(self, path: Path, scale: float | None = None, rank: int | None = None) -> str:
        """Hold an adapter, and say its name; nothing happens if it is held already.

        Args:
            scale: alpha / r of a published file; None asks the specs beside the file.
            rank: r that a file which is not held yet must have; None for any.

        Raises:
            AdapterError: missing, of another form, rank or model, for routed experts, or without
                a scale.
            CheckpointError: the file is damaged.
            BudgetError: no room for it.
        """
        name = str(path.absolute())
        if name not in self._set:
            file = open_adapter(path, _scale_beside(path) if scale is None else scale, rank)
            self._make_room()
            self._set.add(name, file)
        elif scale not in (None, self._set.scale(name)):
            raise AdapterError(
                "the adapter is held already, with another scale",
                file=path,
                expected=self._set.scale(name),
                actual=scale,
                remedy="use the same scale, or a copy of the file",
            )
        return name

    # --- a request

    def using(self, name: str | None) -> AbstractContextManager[None]:
        """While open, the model runs with this adapter."""
        return self._set.using(name)

    def check(self, cache: list[Any] | None, name: str | None) -> None:
        """Refuse a prompt cache of another adapter.

        Raises:
            KvCacheError: it was made with another one.
        """
        if cache is not None and cache_offset(cache):
            self._marks.check(cache, name)

    def mark(self, cache: list[Any], name: str | None) -> None:
        """The cache is of this adapter from now on."""
        self._marks.put(cache, name)

    def of(self, cache: list[Any]) -> str | None:
        """The adapter of a cache; the default for one that was made elsewhere."""
        return self._marks.of(cache, self.default)

    def fingerprint(self, name: str | None) -> str | None:
        """Of an adapter; None for the base."""
        return self._set.fingerprint(name)

    def following(
        self, cache: list[Any], tokens: Generator[Any, None, None]
    ) -> Generator[Any, None, None]:
        """The same tokens, each step with the cache's adapter, whatever runs in between."""
        name = self.of(cache)
        try:
            while True:
                with self._using_if_open(name):
                    item = next(tokens)
                yield item
        except StopIteration:
            return
        finally:
            with self._using_if_open(name):
                tokens.close()

    def _using_if_open(self, name: str | None) -> AbstractContextManager[None]:
        """As :meth:`using`; a closed engine says itself that it is closed."""
        return nullcontext() if self._closed else self.using(name)

    def close(self) -> None:
        """Put the model's own layers back."""
        self._closed = True
        self._set.close()


def _scale_beside(path: Path) -> float | None:
    """The scale that a spec in the file's folder says, or that of the published names.

    ``prerouter.json`` is asked first, and must be sound. Then ``prerouter_*.json``, by name: what
    is no sound spec there is passed over.
    """
    if path.is_dir():
        return None
    spec = path.parent / SPEC_NAME
    known: list[LoraSpec | None] = [read_spec(spec).lora] if spec.is_file() else []
    for other in sorted(path.parent.glob("prerouter_*.json")):
        with suppress(PrerouterError):  # prerouter_metrics.json, for one, is no spec
            known.append(read_spec(other).lora)
    known += [published.lora for published in PUBLISHED]
    return next((lora.scale for lora in known if lora and lora.file == path.name), None)
