"""Write the tables of docs/roofline.md from the kernels' tile sizes and public figures of chips.

Text between the markers ``<!-- roofline: NAME -->`` and ``<!-- end -->`` is replaced; the rest of
the page is written by hand. Arithmetic only, see `roofline_model`: nothing is measured::

    python tools/roofline.py           rewrites the tables of docs/roofline.md
    python tools/roofline.py --check   exit status 1 if a table is out of date
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

from tools.roofline_model import (  # noqa: E402
    CHIPS,
    FORMATS,
    H200,
    M4_MAX,
    M5_MAX,
    STOCK_SHARES,
    THREADGROUP_LIMIT,
    Chip,
    Tile,
    blocks_per_sm,
    cuda_tiles,
    floor,
    hopper_rate,
    layer_nbytes,
    metal_tiles,
    our_tile,
    ours,
    row_flops,
    stock,
    straddled_rows,
    tile_share,
)

PAGE = ROOT / "docs" / "roofline.md"
REGISTERS = ROOT / "docs" / "cuda_kernels.md"
ROWS = (1, 8, 16, 32, 64, 128, 256)
CUDA_FORMATS = FORMATS[:2]  # unquantized experts take stock operations there
MARKED = re.compile(r"(<!-- roofline: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def tile_table(tiles: Sequence[Tile], language: str) -> str:
    """Bytes, FLOPs and intensities of each tile."""
    memory = "threadgroup" if language == "metal" else "shared"
    header = (
        "kernel",
        "tile, rows x columns",
        "weights",
        "MFLOP",
        "KiB, device",
        "FLOP/B, device",
        f"KiB, {memory}",
        f"FLOP/B, {memory}",
    )
    rows = []
    for tile in tiles:
        times = f"{tile.matrices} x " if tile.matrices > 1 else ""
        for fmt in FORMATS if language == "metal" else CUDA_FORMATS:
            device, onchip = tile.device_nbytes(fmt), tile.onchip_nbytes(fmt)
            rows.append(
                (
                    f"`{tile.kernel}`",
                    f"{tile.rows} x {times}{tile.columns}",
                    fmt.name,
                    f"{tile.flops / 1e6:.1f}",
                    f"{device / 1024:.0f}",
                    f"{tile.flops / device:.1f}",
                    f"{onchip / 1024:.0f}",
                    f"{tile.flops / onchip:.1f}",
                )
            )
    return markdown(header, rows)


def metal_occupancy() -> str:
    """Threadgroup memory against 32 KiB, threads, accumulators."""
    header = (
        "kernel",
        "rows",
        "threads",
        "threadgroup memory",
        "of 32 KiB",
        "float32 accumulators a thread",
    )
    rows = []
    for tile in metal_tiles():
        allocation = tile.allocation(FORMATS[0])
        values = tile.rows * tile.columns * tile.matrices // 128
        share = f"{allocation / THREADGROUP_LIMIT:.0%}"
        rows.append((f"`{tile.kernel}`", tile.rows, 128, f"{allocation} B", share, values))
    return markdown(header, rows)


def registers_of(kernel: str, label: str, rows: int) -> int:
    """Registers a thread on sm_90a, from the table that tools/build_cuda.py wrote."""
    gated = "gated, " if kernel == "moe_up" else ""
    line = f"| `{kernel}` | {label}, {gated}{rows} rows, bfloat16 |"
    found = [text for text in REGISTERS.read_text().splitlines() if text.startswith(line)]
    if len(found) != 1:
        raise click.ClickException(f"docs/cuda_kernels.md: one row {line!r}, found {len(found)}")
    return int(found[0].split("|")[4].split("/")[0])


def cuda_occupancy() -> str:
    """Blocks that fit a multiprocessor, and why not more."""
    header = ("kernel", "rows", "weights", "registers", "shared memory", "blocks", "limit", "warps")
    rows = []
    for tile in cuda_tiles():
        for fmt, label in zip(CUDA_FORMATS, ("affine 4-bit g64", "mxfp4 4-bit g32"), strict=True):
            registers, shared = registers_of(tile.kernel, label, tile.rows), tile.allocation(fmt)
            blocks, limit = blocks_per_sm(registers, shared)
            size = f"{shared / 1024:.1f} KiB"
            warps = f"{4 * blocks} of 64"
            cells = (f"`{tile.kernel}`", tile.rows, fmt.name, registers, size, blocks, limit, warps)
            rows.append(cells)
    return markdown(header, rows)


def span(values: Sequence[float]) -> str:
    """One number, or the range of several."""
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def layer_times(chip: Chip) -> str:
    """Milliseconds of a layer by rows per expert and format: estimates."""
    header = (
        "rows an expert",
        "weights",
        "FLOP/B, memory",
        "our tile",
        "roofline, ms",
        "ours, ms",
        "stock, ms",
        "stock / ours",
    )
    rows = []
    for count in ROWS:
        for fmt in CUDA_FORMATS if chip.language == "cuda" else FORMATS:
            mine, best = ours(chip, count, fmt), floor(chip, count, fmt)
            theirs = [stock(chip, count, fmt, s).milliseconds for s in chip.stock_shares]
            intensity = 128 * count * row_flops() / layer_nbytes(count, fmt, 0)
            rows.append(
                (
                    count,
                    fmt.name,
                    f"{intensity:.0f}",
                    our_tile(chip, count),
                    best,
                    mine,
                    span(theirs),
                    span([t / mine.milliseconds for t in theirs]),
                )
            )
    return markdown(header, rows)


def rates() -> str:
    """The tile efficiencies that the estimates use."""
    header = ("rows of a tile", "Metal: share of dense", "CUDA on H200: TFLOPS")
    return markdown(
        header, [(r, f"{tile_share(r):.2f}", f"{hopper_rate(r):.0f}") for r in (16, 32, 64)]
    )


def model_check() -> str:
    """The model of stock gather_qmm next to the public comparisons. Dense 1: shares of dense."""
    rows = []
    for label, dense, count, measured in (
        ("mlx#4246, M3 Ultra, 43 rows: TFLOPS", 20.5, 43, "14.2"),
        ("mlx PR 3918, M3 Max, 64 to 128 rows: of dense", 1.0, 96, "0.79 to 0.81"),
    ):
        reached = count / straddled_rows(count, 16)
        predicted = [dense * share * reached for share in STOCK_SHARES]
        rows.append((label, measured, span(predicted)))
    return markdown(("public comparison", "measured there", "this model"), rows)


def crossover() -> str:
    """Rows an expert from which a layer is bound by compute, at the roofline."""
    header = ("chip", *(fmt.name for fmt in FORMATS))
    rows = []
    for chip in CHIPS:
        cells = []
        for fmt in FORMATS:
            found = (n for n in range(1, 4096) if floor(chip, n, fmt).bound == "compute")
            cells.append(next(found, "never"))
        rows.append((chip.name, *cells))
    return markdown(header, rows)


TABLES = {
    "metal-tiles": lambda: tile_table(metal_tiles(), "metal"),
    "cuda-tiles": lambda: tile_table(cuda_tiles(), "cuda"),
    "metal-occupancy": metal_occupancy,
    "cuda-occupancy": cuda_occupancy,
    "rates": rates,
    "model-check": model_check,
    "crossover": crossover,
    "m4-max": lambda: layer_times(M4_MAX),
    "m5-max": lambda: layer_times(M5_MAX),
    "h200": lambda: layer_times(H200),
}


def updated(text: str) -> str:
    """The page with every table filled in."""
    names = [match[2] for match in MARKED.finditer(text)]
    if sorted(names) != sorted(TABLES):
        raise click.ClickException(f"expected the tables {sorted(TABLES)}, found {sorted(names)}")
    return MARKED.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[3]}", text)


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Only say whether the tables are up to date.")
def main(check: bool) -> None:
    """Rewrite the tables, or compare them."""
    text = PAGE.read_text()
    if not check:
        PAGE.write_text(updated(text))
    elif updated(text) != text:
        raise click.ClickException("docs/roofline.md is out of date: run tools/roofline.py")


if __name__ == "__main__":
    main()
