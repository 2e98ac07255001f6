"""The roofline: tile arithmetic against the kernels' sources and by hand; the page up to date."""

import re

import pytest
from click.testing import CliRunner

from tools import roofline as tool
from tools import roofline_model as model

AFFINE, MXFP4, BF16 = model.FORMATS


def tile_of(kernel, rows):
    tiles = model.metal_tiles() + model.cuda_tiles()
    return next(t for t in tiles if t.kernel == kernel and t.rows == rows)


def test_the_page_is_up_to_date():
    result = CliRunner().invoke(tool.main, ["--check"])
    assert result.exit_code == 0, result.output


def test_a_stale_page_is_noticed_and_rewritten(tmp_path, monkeypatch):
    page = tmp_path / "roofline.md"
    page.write_text(tool.PAGE.read_text().replace("| `moe_up` | 16", "| `moe_up` | 17", 1))
    monkeypatch.setattr(tool, "PAGE", page)
    assert CliRunner().invoke(tool.main, ["--check"]).exit_code == 1
    assert CliRunner().invoke(tool.main, []).exit_code == 0
    assert CliRunner().invoke(tool.main, ["--check"]).exit_code == 0
    page.write_text("no tables\n")
    result = CliRunner().invoke(tool.main, ["--check"])
    assert result.exit_code == 1
    assert "expected the tables" in result.output


def test_weights_cost_their_bits_and_constants():
    assert AFFINE.nbytes(64) == 32 + 4  # scale and bias of two bytes
    assert MXFP4.nbytes(32) == 16 + 1
    assert BF16.nbytes(5) == 10


def test_a_metal_tile_by_hand():
    tile = tile_of("expert_gate_up", 32)
    assert tile.flops == 2 * 32 * (2 * 32) * 2048
    rows, weights, results = 32 * 2048 * 2, 64 * 2048 * 0.5625, 32 * 32 * 2
    assert tile.device_nbytes(AFFINE) == rows + weights + results
    # 2 x 2 simdgroups: everything is written once and read twice.
    assert tile.onchip_nbytes(AFFINE) == 3 * (32 + 64) * 2048 * 2
    small = tile_of("expert_down", 16)  # 1 x 4 simdgroups
    assert small.onchip_nbytes(BF16) == 2 * 768 * (16 * (1 + 4) + 64 * (1 + 1))


def test_metal_allocations_are_those_of_the_sources():
    source = (tool.ROOT / "metal" / "tile.h").read_text()
    step = int(re.search(r"BK = (\d+)", source)[1])
    assert "LD = BK + 16 / int(sizeof(T))" in source
    assert "ROW_GROUPS = BM == 16 ? 1 : 2" in source
    assert step == model.METAL_BK
    for tile in model.metal_tiles():
        expected = (tile.rows + tile.matrices * tile.columns) * (step + 8) * 2
        assert tile.allocation(AFFINE) == expected <= model.THREADGROUP_LIMIT


def test_shared_memory_is_what_nvcc_reported():
    page = tool.REGISTERS.read_text()
    for tile in model.cuda_tiles():
        gated = "gated, " if tile.kernel == "moe_up" else ""
        for fmt, label in ((AFFINE, "affine 4-bit g64"), (MXFP4, "mxfp4 4-bit g32")):
            row = f"| `{tile.kernel}` | {label}, {gated}{tile.rows} rows, bfloat16 | "
            cells = page.split(row)[1].split(" | ")
            assert cells[1].endswith(f" / {tile.allocation(fmt) / 1024:.1f} KiB")
            registers = tool.registers_of(tile.kernel, label, tile.rows)
            assert cells[1].startswith(f"{registers} / ")


@pytest.mark.parametrize(
    ("registers", "shared", "expected"),
    [
        (168, 43.5 * 1024, (3, "registers")),  # 65536 / (168 * 128) = 3.05
        (169, 43.5 * 1024, (2, "registers")),  # handed out in eights
        (64, 60 * 1024, (3, "shared memory")),  # 228 / 61
        (16, 1024, (16, "threads")),  # 64 warps of four
    ],
)
def test_blocks_of_a_multiprocessor(registers, shared, expected):
    assert model.blocks_per_sm(registers, shared) == expected


def test_rows_computed_are_the_mean_over_remainders():
    """Against counting: every alignment of a tile, every remainder of a count."""
    for rows in (16, 43, 128):
        visits = [(start + rows - 1) // 16 - start // 16 + 1 for start in range(16)]
        assert model.straddled_rows(rows, 16) == 16 * sum(visits) / 16
    counts = range(97, 113)
    padded = [-(-n // 16) * 16 for n in counts]
    assert model.executed_rows(1, 16) == 16
    mean = sum(model.executed_rows(n, 16) for n in counts) / 16
    assert mean == pytest.approx(sum(padded) / 16)


def test_stock_agrees_with_the_public_figure_it_was_taken_from():
    rate = 20.5 * max(model.STOCK_SHARES) * 43 / model.straddled_rows(43, 16)
    assert rate == pytest.approx(14.2, abs=0.05)


@pytest.mark.parametrize("chip", model.CHIPS, ids=lambda c: c.name)
@pytest.mark.parametrize("fmt", model.FORMATS, ids=lambda f: f.name)
def test_no_estimate_beats_the_roofline_and_more_rows_take_longer(chip, fmt):
    times = [model.ours(chip, rows, fmt).milliseconds for rows in tool.ROWS]
    assert times == sorted(times)
    for rows, time in zip(tool.ROWS, times, strict=True):
        assert time >= model.floor(chip, rows, fmt).milliseconds


def test_a_layer_by_hand():
    """256 rows an expert on an M4 Max: compute; one row: memory, each weight once."""
    flops = 128 * 256 * 6 * 2048 * 768
    best = model.floor(model.M4_MAX, 256, AFFINE)
    assert best == model.Estimate(pytest.approx(flops / 13.2e9), "compute")
    weights = 128 * 3 * 2048 * 768 * 0.5625
    one = model.floor(model.M4_MAX, 1, AFFINE)
    assert one.bound == "memory"
    assert one.milliseconds == pytest.approx(weights / (546e6 * 0.85), rel=0.01)
