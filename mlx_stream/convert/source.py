"""A source whose weights are converted while they are packed.

The packer asks for the bytes of its files, front to back or in parts. Expert files are made a few
experts at a time, resident files one module at a time; what is not asked for is never computed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_stream import interrupts
from mlx_stream.convert.expert_inputs import ExpertInputs, layer_number
from mlx_stream.convert.modules import ModuleMaker, Parts
from mlx_stream.convert.options import Conversion
from mlx_stream.convert.plan import ConversionPlan, load_source, plan_conversion
from mlx_stream.convert.sanitize import FewExperts, check_independence
from mlx_stream.packed.blocks import Blocks
from mlx_stream.packed.layout import FileLayout, Part
from mlx_stream.packed.pieces import PIECE_NBYTES, Piece, PieceSource
from mlx_stream.packed.source import SideFile, TensorError
from mlx_stream.storage.checkpoint import Checkpoint, open_checkpoint
from mlx_stream.storage.expert_index import ExpertIndex, ExpertLayer
from mlx_stream.storage.open_modes import IoChoice
from mlx_stream.storage.reader import Reader

CHUNK_NBYTES = 16 << 20  # of the floats of a few experts; quantizing takes a few times as much
INPUT_PIECE_NBYTES = 4 << 20  # of the source's bytes; a handful are held
OUTPUT_PIECE_NBYTES = 8 << 20
CACHE_NBYTES = 32 << 20  # of freed arrays that MLX keeps; its own limit grows with the machine
LEFT_OUT = ("hf_quant_config.json",)  # describes the source's packing of weights
CONFIG_NAME = "config.json"


@dataclass(frozen=True)
class ConvertedSource:
    """What `packed.pack` packs; see `packed.source.PackSource`."""

    checkpoint: Checkpoint
    made: ConversionPlan
    options: Conversion

    @property
    def index(self) -> ExpertIndex:
        """Of what is written."""
        return self.made.index

    @property
    def conversion(self) -> dict:
        """For the manifest."""
        return self.options.as_json()

    def side_files(self, found: Sequence[Path]) -> list[SideFile]:
        """The files beside the weights; config.json is the converted one."""
        text = json.dumps(dict(sorted(self.made.config.items())), indent=4).encode()
        kept = [SideFile(p.name, p) for p in found if self._keeps(p.name)]
        return [*kept, SideFile(CONFIG_NAME, None, text)]

    def _keeps(self, name: str) -> bool:
        """Heads and adapters were trained for the weights as they were."""
        trained = name.startswith(("prerouter", "lora")) and bool(self.options.specs)
        return name not in (*LEFT_OUT, CONFIG_NAME) and not trained

    @contextmanager
    def pieces(
        self, *, io: IoChoice, threads: int, piece_nbytes: int = PIECE_NBYTES
    ) -> Iterator[ConvertedPieces]:
        """What makes the files' bytes. The source is checked for changes at the end."""
        before = mx.set_cache_limit(CACHE_NBYTES)
        try:
            with Reader(self.checkpoint, io=io, threads=threads, verify="off") as reader:
                yield ConvertedPieces(self, reader, piece_nbytes)
                reader.check_unchanged()
        finally:
            mx.set_cache_limit(before)
            mx.clear_cache()


def open_converted(path: Path, options: Conversion) -> ConvertedSource:
    """Plan a conversion; no weight is read.

    Raises:
        CheckpointError, UnsupportedModelError, MissingTensorError, DenseModelError: see
            `open_checkpoint` and `plan_conversion`.
        PackError: nothing can be quantized as it is asked.
    """
    checkpoint = open_checkpoint(path)
    return ConvertedSource(checkpoint, plan_conversion(checkpoint, options), options)


class ConvertedPieces:
    """Bytes of packed files, computed. Not for two files at once."""

    def __init__(self, source: ConvertedSource, reader: Reader, piece_nbytes: int) -> None:
        self._source = source
        self._plan = source.made
        self._reader = PieceSource(reader, piece_nbytes=INPUT_PIECE_NBYTES)
        self._piece = min(piece_nbytes, OUTPUT_PIECE_NBYTES)
        self._maker = ModuleMaker(source.made, refine=source.options.refine)
        self._inputs = ExpertInputs(source.checkpoint, source.made.counts)
        self._few = FewExperts(
            source.checkpoint, source.made.model_config, source.made.counts, self._inputs
        )
        self._checked = False

    def take_errors(self) -> dict[str, TensorError]:
        """Quantization errors of the tensors made since the last call."""
        return self._maker.take_errors()

    def assemble(
        self, layout: FileLayout, ranges: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[Piece]:
        """The file, or some ranges of it, in pieces of bounded size."""
        for begin, end in ranges or [(0, layout.nbytes)]:
            yield from Blocks(begin, end, self._piece).cut(self._blocks(layout, begin, end))

    def _blocks(self, layout: FileLayout, begin: int, end: int) -> Iterator[tuple[int, np.ndarray]]:
        """``(offset in the file, bytes)`` in order; what lies between them is zeros."""
        if begin < len(layout.header):
            yield 0, np.frombuffer(layout.header, np.uint8)
        wanted = [p for p in layout.parts[1:] if p.begin < end and p.end > begin]
        records = {layer.name: layer for layer in self._source.index.layers}
        resident = []
        for layer_name, parts in _by_layer(wanted, records):
            if layer_name is None:
                resident += parts
            else:
                yield from self._experts(records[layer_name], parts)
        if resident:
            yield from self._resident(resident)

    # --- experts --------------------------------------------------------------------------------

    def _experts(
        self, layer: ExpertLayer, parts: Sequence[Part]
    ) -> Iterator[tuple[int, np.ndarray]]:
        number = layer_number(f"{layer.name}.")
        self._check_once(number, layer.name)
        experts = [int(p.label.rpartition(" ")[2]) for p in parts]
        size = max(1, CHUNK_NBYTES // self._maker.float_nbytes(layer))
        choices = [experts[n : n + size] for n in range(0, len(experts), size)]
        arrays = self._inputs.read(number, choices, self._reader)
        offsets = self._maker.record_offsets(layer)
        place = 0
        for choice, found in zip(choices, arrays, strict=True):
            interrupts.check()
            outputs = self._few.sanitize(found, len(choice), layer.name)
            tensors = self._maker.expert_tensors(layer, outputs)
            for row in range(len(choice)):
                for name, offset in offsets:
                    yield parts[place].begin + offset, tensors[name][row]
                place += 1

    def _check_once(self, number: int, prefix: str) -> None:
        """Once, on real weights: two experts come out the same together and one by one."""
        if self._checked or self._plan.counts[number] < 2:
            return
        choices: list[tuple[int, ...]] = [(0, 1), (0,), (1,)]
        found = self._inputs.read(number, choices, self._reader)
        check_independence(self._few, number, prefix, dict(zip(choices, found, strict=True)))
        self._checked = True

    # --- everything else ------------------------------------------------------------------------

    def _resident(self, parts: Sequence[Part]) -> Iterator[tuple[int, np.ndarray]]:
        model, _ = load_source(self._source.checkpoint)
        lazy = dict(tree_flatten(model.parameters()))
        del model
        made: Parts = {}
        for part in parts:
            interrupts.check()
            if part.label not in made:
                made = self._maker.module_tensors(part.label, lazy)
            yield part.begin, made.pop(part.label)


def _by_layer(
    parts: Sequence[Part], layers: Mapping[str, ExpertLayer]
) -> Iterator[tuple[str | None, list[Part]]]:
    """Consecutive parts of one expert layer each; None for tensors that are no experts'."""
    group: list[Part] = []
    current: str | None = None
    for part in parts:
        prefix, _, expert = part.label.rpartition(" expert ")
        name = prefix if expert and prefix in layers else None
        if group and name != current:
            yield current, group
            group = []
        current = name
        group.append(part)
    if group:
        yield current, group
