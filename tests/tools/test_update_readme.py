"""README's table against the CSV: round trip, what --check sees, and mistakes."""

from __future__ import annotations

import shlex

import pytest
from click.testing import CliRunner

from mlx_stream.bench import report
from mlx_stream.bench.arms import (
    CHUNK_MAJOR,
    COMPUTE_ONLY,
    DECODE,
    LAYER_MAJOR,
    STOCK,
    Arm,
    Setting,
)
from mlx_stream.bench.command import bench
from mlx_stream.bench.results import Run, collect
from tools import update_readme as tool

EXPERTS = 1_000_000
NAME = "benchmarks/machine.csv"


def run_of(order, tokens=1024, seconds=2.0, passes=1.0, setting=None, **more):
    setting = setting or Setting(4 * 10**9)
    direct = order not in (STOCK, COMPUTE_ONLY)
    return Run(
        arm=Arm(order, tokens, 512, setting, 32 if order == DECODE else 0),
        wall_seconds=seconds,
        bytes_read=int(passes * EXPERTS) if direct else 0,
        read_calls=3,
        expert_bytes=EXPERTS,
        peak_bytes=0 if order == STOCK else 7_000_000,
        io_mode="O_DIRECT" if direct else "-",
        backend="cpu",
        hit_rate=0.97 if order == DECODE else None,
        **more,
    )


RUNS = [
    run_of(LAYER_MAJOR, seconds=1.0),
    run_of(LAYER_MAJOR, seconds=1.5),
    run_of(LAYER_MAJOR, seconds=9.0),
    run_of(CHUNK_MAJOR, seconds=3.0, passes=2.0),
    run_of(STOCK, seconds=8.0),
    run_of(COMPUTE_ONLY),
    run_of(DECODE, tokens=256, seconds=16.0),
]


@pytest.fixture
def root(tmp_path):
    """A repository with a page, a picture and one CSV; the section is up to date."""
    (tmp_path / "README.md").write_text(f"# Title\n\n{tool.START}\nold\n{tool.END}\n\nRest.\n")
    (tmp_path / "benchmarks").mkdir()
    picture = tmp_path / tool.PICTURE
    picture.parent.mkdir(parents=True)
    picture.write_bytes(b"png")
    report.append_csv(tmp_path / NAME, collect(RUNS), "demo")
    assert update(tmp_path).exit_code == 0
    return tmp_path


def update(root, *flags):
    return CliRunner().invoke(tool.main, [*flags, "--root", str(root)])


def page(root):
    return (root / "README.md").read_text()


def test_the_repository_is_up_to_date():
    result = update(tool.ROOT, "--check")
    assert result.exit_code == 0, result.output


def test_round_trip(root):
    text = page(root)
    assert text.startswith("# Title\n\n")
    assert text.endswith("\n\nRest.\n")
    assert "old" not in text
    for line in (
        "| layer-major (mlx_stream) | 1,024 | 1.50 (1.00 to 9.00) | 683 | 1.00 MB | 1.00 |",
        "| chunk-major, chunks of 512 | 1,024 | 3.00 (3.00 to 3.00) | 341 | 2.00 MB | 2.00 |",
        "| stock mlx-lm, all in memory | 1,024 | 8.00 (8.00 to 8.00) | 128 | - | - | - |",
        "| the computing alone | 1,024 | 2.00 (2.00 to 2.00) |  | - | - | 7.00 MB |",
        "| decode, 97% cache hits | 256 + 32 | 16.00 (16.00 to 16.00) | 2.00 | 1.00 MB |",
        f"all experts once ([machine.csv]({NAME})):",
        f"({tool.PICTURE})",
    ):
        assert line in text
    assert f"**demo** on {report.machine()};" in text
    assert update(root, "--check").exit_code == 0
    assert update(root).exit_code == 0
    assert page(root) == text


def test_the_command_is_one_that_bench_takes(root):
    block = page(root).split("```bash\n")[1].split("\n```")[0]
    words = shlex.split(block.replace("\\\n", ""))
    start, stop = (n for n, word in enumerate(words) if word == "&&")
    assert words[:start] == ["rm", "-f", NAME]
    assert words[stop + 1 :] == ["python", "tools/update_readme.py"]
    program, command, *argv = words[start + 1 : stop]
    assert (program, command) == ("mlx_stream", "bench")
    context = bench.make_context("bench", argv)
    assert context.params["rounds"] == 3
    assert context.params["new_tokens"] == 32
    assert context.params["tokens"] == "256,1024"
    assert context.params["chunks"] == "512"
    assert context.params["budgets"] == "4GB"
    assert context.params["orders"].split(",") == [*dict.fromkeys(r.arm.order for r in RUNS)]
    assert str(context.params["csv"]) == NAME


def test_check_fails_on_a_changed_number(root):
    csv = root / NAME
    csv.write_text(csv.read_text().replace("1.5,1.0,9.0", "1.25,1.0,9.0", 1))
    before = page(root)
    result = update(root, "--check")
    assert result.exit_code == 1
    assert "-| layer-major (mlx_stream) | 1,024 | 1.50" in result.output
    assert "+| layer-major (mlx_stream) | 1,024 | 1.25" in result.output
    assert "run python tools/update_readme.py" in result.output
    assert page(root) == before


def test_check_fails_on_an_edited_page(root):
    (root / "README.md").write_text(page(root).replace("| 1.50 (", "| 0.50 ("))
    assert update(root, "--check").exit_code == 1
    assert update(root).exit_code == 0
    assert update(root, "--check").exit_code == 0


def test_the_last_row_of_an_arm_and_the_newest_date_count(root):
    report.append_csv(root / NAME, collect([run_of(STOCK, seconds=4.0)]), "demo")
    update(root)
    assert "| stock mlx-lm, all in memory | 1,024 | 4.00 (" in page(root)
    assert "8.00" not in page(root)
    csv = root / NAME
    header, *rows = csv.read_text().splitlines()
    rows[-1] = "2199-01-01," + rows[-1].split(",", 1)[1]
    csv.write_text("\n".join([header, *rows]) + "\n")
    update(root)
    assert "2199-01-01" in page(root)
    assert "layer-major (mlx_stream)" not in page(root)


def test_machines_models_and_settings_are_named(root):
    other = root / "benchmarks" / "other.csv"
    slow = Setting(123_456_789, "buffered", "1GB/s")
    run = run_of(LAYER_MAJOR, setting=slow)
    run = Run(**{**vars(run), "io_mode": "buffered, 1GB/s"})
    report.append_csv(other, collect([run]), "/home/me/checkpoints/my-model")
    report.append_csv(other, collect([run]), "owner/name")
    update(root)
    text = page(root)
    assert text.count("Measure it again:") == 3
    assert "/home/me" not in text
    assert "**my-model** on" in text
    assert "--model ./my-model" in text
    assert "--model owner/name" in text
    assert "buffered reads limited to 1GB/s" in text
    assert "--budgets 123456789" in text
    assert "--io buffered" in text
    assert "--throttle-reads 1GB/s" in text
    assert max(map(len, text.splitlines())) < 125


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("nothing", "found neither"),
        (f"{tool.START}\n", f"found {tool.START}"),
        (f"{tool.END}\n{tool.START}\n", "once each and in this order"),
        (f"{tool.START}\n{tool.END}\n{tool.START}\n{tool.END}\n", "once each"),
    ],
)
@pytest.mark.parametrize("flags", [(), ("--check",)])
def test_missing_markers(root, text, found, flags):
    (root / "README.md").write_text(text)
    result = update(root, *flags)
    assert result.exit_code == 1
    assert found in result.output
    assert page(root) == text


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda text: "", "line 1: expected the columns"),
        (lambda text: text.splitlines()[0] + "\n", "at least one row"),
        (lambda text: text.replace("seconds_median", "median"), "missing: seconds_median"),
        (lambda text: text.replace("1.5,1.0,9.0", "fast,1.0,9.0"), "line 2: expected a number"),
        (lambda text: text.replace("1.5,1.0,9.0", "nan,1.0,9.0"), "as seconds_median, not 'nan'"),
        (lambda text: text.replace("1.5,1.0,9.0", "-1,1.0,9.0"), "at least 0"),
        (lambda text: text.replace(",1024,512,", ",1024.5,512,"), "as tokens, not '1024.5'"),
        (lambda text: text.replace("stock mlx-lm", "mlx-lm"), "line 4: expected one of"),
        (lambda text: text + "2026-11-30,0.1.0\n", "line 7: expected a value for machine"),
    ],
)
def test_a_malformed_csv(root, spoil, said):
    csv, before = root / NAME, page(root)
    csv.write_text(spoil(csv.read_text()))
    result = update(root)
    assert result.exit_code == 1
    assert "machine.csv, line" in result.output
    assert said in result.output
    assert page(root) == before


def test_no_csv_and_no_picture(root):
    (root / tool.PICTURE).unlink()
    result = update(root, "--check")
    assert result.exit_code == 1
    assert "--plots docs/images" in result.output
    (root / NAME).unlink()
    result = update(root, "--check")
    assert result.exit_code == 1
    assert "--csv benchmarks/NAME.csv" in result.output
