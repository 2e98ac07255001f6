"""What the grouped-expert kernels must do per tile and per layer, and how long chips need for it.

Pure arithmetic: bytes and FLOPs follow from the tile sizes the launches use; times follow from
those and from public figures of chips and kernels, which carry their source. Nothing is measured
here; docs/roofline.md says what each assumption is worth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlx_stream.backends.kernels import grouped, grouped_cuda
from mlx_stream.backends.kernels.tiles import TILE_COST, choose_tile_rows

EXPERTS, DIMS, HIDDEN = 128, 2048, 768  # a layer of Qwen3-30B-A3B
ACTIVATION_NBYTES = 2  # bfloat16 or float16
METAL_BK, METAL_SIMDGROUPS = 32, 4  # metal/tile.h
CUDA_BK, CUDA_WARPS = 64, 4  # cuda/grouped_gemm.h
THREADGROUP_LIMIT = 32 << 10
SM_REGISTERS, SM_SHARED_NBYTES, SM_WARPS, SM_BLOCKS = 65536, 228 << 10, 64, 32
BLOCK_RESERVED_NBYTES = 1 << 10  # shared memory the system takes for each block


@dataclass(frozen=True)
class Format:
    """How weights are stored."""

    name: str
    bits: int
    group: int = 0  # 0: no groups
    constants_nbytes: int = 0  # scale and bias of a group

    def nbytes(self, weights: int) -> float:
        """Bytes of so many weights with their share of the constants."""
        constants = self.constants_nbytes / self.group if self.group else 0.0
        return weights * (self.bits / 8 + constants)


FORMATS = (
    Format("affine 4-bit g64", 4, 64, 4),
    Format("mxfp4", 4, 32, 1),
    Format("bf16", 16),
)


@dataclass(frozen=True)
class Tile:
    """One threadgroup's or block's share of a launch: rows times columns of each matrix."""

    language: str  # 'metal' | 'cuda'
    kernel: str
    rows: int
    columns: int  # of each matrix
    matrices: int
    inner: int  # K

    @property
    def flops(self) -> int:
        """Of the whole tile, all rows in use."""
        return 2 * self.rows * self.columns * self.matrices * self.inner

    def device_nbytes(self, fmt: Format) -> float:
        """Read and written beyond the core: rows, packed weights, results. No reuse by others."""
        rows = self.rows * self.inner * ACTIVATION_NBYTES
        results = self.rows * self.columns * ACTIVATION_NBYTES
        return rows + results + fmt.nbytes(self.columns * self.matrices * self.inner)

    def onchip_nbytes(self, fmt: Format) -> float:
        """Written to and read from threadgroup (shared) memory."""
        weights = self.columns * self.matrices * self.inner
        if self.language == "metal":  # dequantized in there; read once a row or column group
            across = METAL_SIMDGROUPS // self.row_groups
            staged = self.rows * self.inner + weights
            read = self.rows * self.inner * across + weights * self.row_groups
            return ACTIVATION_NBYTES * (staged + read)
        # Every warp reads all rows and its own packed columns.
        constants = weights / max(fmt.group, 1) * 4
        packed = weights * fmt.bits / 8
        return self.rows * self.inner * ACTIVATION_NBYTES * (1 + CUDA_WARPS) + 2 * (
            packed + constants
        )

    @property
    def row_groups(self) -> int:
        """Simdgroups along the rows of a Metal tile."""
        return 1 if self.rows == 16 else 2

    def allocation(self, fmt: Format) -> int:
        """Bytes of threadgroup (shared) memory."""
        if self.language == "metal":
            row = METAL_BK * ACTIVATION_NBYTES + 16
            return (self.rows + self.columns * self.matrices) * row
        columns = self.columns * self.matrices
        groups = max(1, CUDA_BK // fmt.group)
        words = columns * (24 if fmt.bits == 8 else 12) + columns * groups
        stages = 2 if fmt.bits == 8 else 3
        return stages * (self.rows * CUDA_BK * ACTIVATION_NBYTES + 4 * words)


def metal_tiles() -> list[Tile]:
    """Of both GEMM kernels, by rows, as `backends.kernels.grouped` launches them."""
    return [
        tile
        for rows in TILE_COST
        for tile in (
            Tile("metal", "expert_gate_up", rows, grouped.GATED_COLUMNS[rows], 2, DIMS),
            Tile("metal", "expert_down", rows, grouped.SINGLE_COLUMNS[rows], 1, HIDDEN),
        )
    ]


def cuda_tiles() -> list[Tile]:
    """Of both GEMM kernels, by rows, as `backends.kernels.grouped_cuda` launches them."""
    strip = grouped_cuda.STRIP
    return [
        tile
        for rows in grouped_cuda.ROW_TILES
        for tile in (
            Tile("cuda", "moe_up", rows, strip, 2, DIMS),
            Tile("cuda", "moe_down", rows, 2 * strip, 1, HIDDEN),
        )
    ]


def blocks_per_sm(registers: int, shared_nbytes: float) -> tuple[int, str]:
    """Blocks of 128 threads that fit a multiprocessor of an H200, and what stops the next one."""
    warps = grouped_cuda.THREADS // 32
    per_warp = -(-registers * 32 // 256) * 256  # registers are handed out in units of 256
    limits = {
        "registers": SM_REGISTERS // (per_warp * warps),
        "shared memory": int(SM_SHARED_NBYTES // (shared_nbytes + BLOCK_RESERVED_NBYTES)),
        "threads": SM_WARPS // warps,
        "blocks": SM_BLOCKS,
    }
    limit = min(limits, key=limits.__getitem__)
    return limits[limit], limit


# Dense share of a 32 x 64 tile, and of stock's 16 x 32 tile by two public comparisons that differ.
WIDE_SHARE = 0.96
STOCK_SHARES = (0.80, 0.934)


@dataclass(frozen=True)
class Chip:
    """Public figures and estimates of a chip: TFLOPS and GB/s. Sources: docs/roofline.md."""

    name: str
    language: str  # of our kernels on it
    bandwidth: float
    dense: float  # what a good GEMM of the instructions our kernels use reaches
    stock_dense: float  # the same for the instructions stock's kernels use
    stock_shares: tuple[float, ...] = STOCK_SHARES  # of stock_dense that its full tiles reach
    matrix_units: bool = False  # stock runs on them, in wider tiles; our kernels cannot
    read_share: float = 0.85  # of the bandwidth that a kernel gets


M4_MAX = Chip("M4 Max", "metal", 546, 13.2, 13.2)
M5_MAX = Chip("M5 Max", "metal", 614, 12.5, 50.0, matrix_units=True)
H200 = Chip("H200", "cuda", 4800, 593.0, 593.0, stock_shares=(1.0,))
CHIPS = (M4_MAX, M5_MAX, H200)

# Instructions of a 32-k step of a public 4-bit GEMM on Hopper, and its rate with 64-row tiles.
STEP_MMA, STEP_OTHER, HOPPER_RATE = 64, 156, 254.0


def tile_share(rows: int) -> float:
    """Share of a dense GEMM's rate for a full Metal tile, from the costs that choose the tile."""
    wide = 32 / TILE_COST[32]
    return min(WIDE_SHARE, WIDE_SHARE * (rows / TILE_COST[rows]) / wide)


def hopper_rate(tile_rows: int) -> float:
    """TFLOPS of a CUDA tile: unpacking costs the same whatever the rows, mma in proportion."""
    mma = STEP_MMA * tile_rows / 64
    full = STEP_MMA / (STEP_MMA + STEP_OTHER)
    return HOPPER_RATE * mma / (mma + STEP_OTHER) / full


def executed_rows(rows: int, unit: int) -> float:
    """Rows computed for an expert with about `rows`, in whole units, any remainder alike."""
    return max(unit, rows + (unit - 1) / 2)


def straddled_rows(rows: int, tile_rows: int) -> float:
    """Rows computed for an expert when tiles ignore experts and each visit takes the whole tile."""
    return rows + tile_rows - 1


@dataclass(frozen=True)
class Estimate:
    """Milliseconds of one layer's experts, and what they are bound by."""

    milliseconds: float
    bound: str

    def __str__(self) -> str:
        return f"{self.milliseconds:.2f} ({self.bound})"


def row_flops() -> int:
    """Of one row through one expert."""
    return 2 * 3 * DIMS * HIDDEN


def layer_nbytes(rows: int, fmt: Format, per_row: int) -> float:
    """All experts' weights once, and `per_row` bytes of activations a row."""
    return EXPERTS * (fmt.nbytes(3 * DIMS * HIDDEN) + rows * per_row)


def _estimate(chip: Chip, executed: float, tflops: float, nbytes: float) -> Estimate:
    compute = EXPERTS * executed * row_flops() / (tflops * 1e9)
    memory = nbytes / (chip.bandwidth * chip.read_share * 1e6)
    return Estimate(max(compute, memory), "compute" if compute >= memory else "memory")


def floor(chip: Chip, rows: int, fmt: Format) -> Estimate:
    """The roofline itself: rows in use at the dense rate, or every byte once."""
    nbytes = layer_nbytes(rows, fmt, _OUR_ROW)
    return _estimate(chip, rows, chip.dense, nbytes)


def ours(chip: Chip, rows: int, fmt: Format) -> Estimate:
    """Our kernels: x and h in, h and y out; tiles aligned to experts."""
    nbytes, tile = layer_nbytes(rows, fmt, _OUR_ROW), our_tile(chip, rows)
    if chip.language == "cuda":  # empty rows of a tile are computed
        return _estimate(chip, executed_rows(rows, tile), hopper_rate(tile), nbytes)
    unit = tile if tile == 16 else tile // 2  # a simdgroup without rows skips the products
    return _estimate(chip, executed_rows(rows, unit), chip.dense * tile_share(tile), nbytes)


def our_tile(chip: Chip, rows: int) -> int:
    """Rows of the tile that the launches choose when every expert has `rows`."""
    if chip.language == "cuda":
        return grouped_cuda.row_tile(rows, 1)
    return choose_tile_rows(np.full(EXPERTS, rows))


def stock(chip: Chip, rows: int, fmt: Format, share: float) -> Estimate:
    """Three gather_qmm, with sort, activation and un-sort as passes of their own."""
    gemm = layer_nbytes(rows, fmt, _STOCK_ROW)
    if chip.language == "cuda":
        tile = our_tile(chip, rows)
        main = _estimate(chip, executed_rows(rows, tile), share * hopper_rate(tile), gemm)
    elif rows < 4:  # gather_qmv: each row reads its expert
        main = _estimate(chip, 0, 1, rows * layer_nbytes(1, fmt, _STOCK_ROW))
    else:
        tile = 16 if not chip.matrix_units else 32 if rows < 64 else 64
        main = _estimate(chip, straddled_rows(rows, tile), share * chip.stock_dense, gemm)
    extra = EXPERTS * rows * _STOCK_PASSES / (chip.bandwidth * chip.read_share * 1e6)
    return Estimate(main.milliseconds + extra, main.bound)


# Bytes of activations a row: ours x, h, h, y; stock x, x, h, h, h, y, then sort, activation and
# un-sort, each of which reads and writes.
_OUR_ROW = ACTIVATION_NBYTES * (2 * DIMS + 2 * HIDDEN)
_STOCK_ROW = ACTIVATION_NBYTES * (3 * DIMS + 3 * HIDDEN)
_STOCK_PASSES = ACTIVATION_NBYTES * (4 * DIMS + 3 * HIDDEN)
