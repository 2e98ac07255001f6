"""Write README's table of measurements from what `mlx_stream bench --csv` left in benchmarks/.

The text between ``<!-- bench:start -->`` and ``<!-- bench:end -->`` is replaced; the rest of the
page is written by hand. One table for each machine (a CSV) and model. Of a model the newest date
counts, and of an arm its last row, so a run may be repeated onto the same file::

    python tools/update_readme.py           rewrites the section
    python tools/update_readme.py --check   exit status 1 and a diff if README and CSV differ

To measure anew: the command under each table.
"""

from __future__ import annotations

import csv
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

from mlx_stream.bench.arms import (  # noqa: E402
    CHUNK_MAJOR,
    COMPUTE_ONLY,
    LAYER_MAJOR,
    ORDERS,
    READ_ONLY,
    STOCK,
)
from mlx_stream.config import format_bytes  # noqa: E402

README = "README.md"
CSVS = "benchmarks/*.csv"
PICTURE = "docs/images/timeline.png"
START, END = "<!-- bench:start -->", "<!-- bench:end -->"
HEADER = ("order", "tokens", "seconds (spread)", "tok/s", "read", "passes", "peak memory")
DEFAULT_STOCK_TOKENS = 1024  # of `mlx_stream bench`
WHAT = {
    LAYER_MAJOR: "layer-major (mlx_stream)",
    CHUNK_MAJOR: "chunk-major",
    STOCK: "stock mlx-lm, all in memory",
    READ_ONLY: "the reads alone",
    COMPUTE_ONLY: "the computing alone",
}


@dataclass(frozen=True)
class Row:
    """One arm, as bench wrote it; names are the CSV's columns."""

    date: str
    version: str
    machine: str
    model: str
    order: str
    tokens: int
    chunk: int
    new_tokens: int
    budget_bytes: int
    io_mode: str
    throttle: str
    rounds: int
    seconds_median: float
    seconds_min: float
    seconds_max: float
    tokens_per_second: float
    bytes_read: int
    passes: float
    peak_bytes: int
    hit_rate: float | None

    @property
    def granted(self) -> str:
        """How the system let it read, without the limit; empty for an arm that reads nothing."""
        return self.io_mode.partition(",")[0].removesuffix("-")

    @property
    def arm(self) -> tuple[object, ...]:
        """What a later row of the same arm has in common."""
        return (
            self.order,
            self.tokens,
            self.chunk,
            self.new_tokens,
            self.budget_bytes,
            self.io_mode,
            self.throttle,
        )

    def cells(self) -> tuple[str, ...]:
        """Its line of the table."""
        order = WHAT.get(self.order, self.order)
        if self.order == CHUNK_MAJOR:
            order = f"{order}, chunks of {self.chunk}"
        if self.hit_rate is not None:
            order = f"{order}, {self.hit_rate:.0%} cache hits"
        speed = self.tokens_per_second
        shown = f"{speed:,.0f}" if speed >= 10 else f"{speed:.2f}"
        return (
            order,
            f"{self.tokens:,} + {self.new_tokens}" if self.new_tokens else f"{self.tokens:,}",
            f"{self.seconds_median:.2f} ({self.seconds_min:.2f} to {self.seconds_max:.2f})",
            # The halves of a prompt have no speed of their own.
            "" if self.order in (READ_ONLY, COMPUTE_ONLY) else shown,
            format_bytes(self.bytes_read) if self.bytes_read else "-",
            f"{self.passes:.2f}" if self.bytes_read else "-",
            format_bytes(self.peak_bytes) if self.peak_bytes else "-",
        )


TEXTS = ("date", "version", "machine", "model", "order", "io_mode", "throttle")
FLOATS = ("seconds_median", "seconds_min", "seconds_max", "tokens_per_second", "passes", "hit_rate")


def read_csv(path: Path) -> list[Row]:
    """The rows of one CSV.

    Raises:
        ClickException: no rows, a column is missing, or a value is not what its column holds.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        names = list(Row.__dataclass_fields__)
        if missing := [n for n in names if n not in (reader.fieldnames or ())]:
            raise _bad(path, 1, f"the columns of mlx_stream bench, missing: {', '.join(missing)}")
        rows = []
        for raw in reader:
            values = {n: _value(path, reader.line_num, n, raw[n]) for n in names}
            rows.append(Row(**values))  # type: ignore[arg-type]
    if not rows:
        raise _bad(path, 1, "at least one row under the header")
    return rows


def _value(path: Path, line: int, name: str, text: str | None) -> str | int | float | None:
    if text is None:
        raise _bad(path, line, f"a value for {name}, the line is short")
    if name in TEXTS:
        if name == "order" and text not in ORDERS:
            raise _bad(path, line, f"one of {', '.join(ORDERS)} as order, not {text!r}")
        return text
    if name == "hit_rate" and not text:
        return None
    convert: Callable[[str], float] = float if name in FLOATS else int
    try:
        number = convert(text)
    except ValueError:
        number = -1
    if not 0 <= number < float("inf"):
        raise _bad(path, line, f"a number of at least 0 as {name}, not {text!r}")
    return number


def _bad(path: Path, line: int, expected: str) -> click.ClickException:
    return click.ClickException(f"{path.name}, line {line}: expected {expected}")


def newest(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by machine and model: of the newest date, the last one of each arm."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.machine, row.model), []).append(row)
    for key, group in found.items():
        last = max(row.date for row in group)
        found[key] = list({r.arm: r for r in group if r.date == last}.values())
    return found


def section(root: Path) -> str:
    """The text between the markers.

    Raises:
        ClickException: there is no CSV, one is malformed, or the picture is missing.
    """
    paths = sorted(root.glob(CSVS))
    if not paths:
        raise click.ClickException(f"no {CSVS}: run mlx_stream bench --csv benchmarks/NAME.csv")
    if not (root / PICTURE).is_file():
        raise click.ClickException(f"no {PICTURE}: run mlx_stream bench --plots docs/images")
    parts = []
    for path in paths:
        name = path.relative_to(root).as_posix()
        for (machine, model), rows in newest(read_csv(path)).items():
            parts.append(_one(name, machine, model, rows))
    picture = (
        f"![Reader threads and compute over time]({PICTURE})\n"
        "\n"
        "One layer-major prompt: reader threads fetch the next experts while the compute thread\n"
        "works on those before them. Red is waiting.\n"
    )
    return "\n" + "\n".join([*parts, picture]) + "\n"


def _one(csv_name: str, machine: str, model: str, rows: Sequence[Row]) -> str:
    first = rows[0]
    budgets = " and ".join(dict.fromkeys(format_bytes(r.budget_bytes) for r in rows))
    modes = " and ".join(dict.fromkeys(r.granted for r in rows if r.granted)) or "no"
    throttles = " and ".join(dict.fromkeys(r.throttle for r in rows if r.throttle))
    limited = f" limited to {throttles}" if throttles else ""
    rounds = max(r.rounds for r in rows)
    ruler = ["---", *["---:"] * (len(HEADER) - 1)]
    lines = [HEADER, ruler, *(row.cells() for row in rows)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return (
        f"**{_shown(model)}** on {machine}; {first.date}, mlx_stream {first.version}.\n"
        f"Memory budget {budgets}, {modes} reads{limited}, median of {rounds} rounds, one pass is\n"
        f"all experts once ([{Path(csv_name).name}]({csv_name})):\n"
        f"\n{table}\n\n"
        f"Measure it again:\n```bash\n{_command(csv_name, model, rows)}\n```\n"
    )


def _shown(model: str) -> str:
    """A name for people: a hub id as it is, of a path its last part."""
    return Path(model).name if _is_path(model) else model


def _is_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.count("/") > 1


def _command(csv_name: str, model: str, rows: Sequence[Row]) -> str:
    """What makes these rows; a model's folder is written relative."""
    flags = []
    if model != "demo":
        flags.append(f"--model {'./' + _shown(model) if _is_path(model) else model}")
    flags.append(f"--tokens {_list(r.tokens for r in rows)}")
    by_chunk = [r for r in rows if r.order in (CHUNK_MAJOR, LAYER_MAJOR)]
    flags.append(f"--chunks {_list(r.chunk for r in by_chunk or rows)}")
    flags.append(f"--budgets {','.join(dict.fromkeys(_size(r.budget_bytes) for r in rows))}")
    orders = [o for o in ORDERS if any(r.order == o for r in rows)]
    if orders != list(ORDERS):
        flags.append(f'--orders "{",".join(orders)}"')
    stock = max((r.tokens for r in rows if r.order == STOCK), default=0)
    if stock and (stock > DEFAULT_STOCK_TOKENS or any(stock < r.tokens for r in rows)):
        flags.append(f"--stock-tokens {stock}")
    decoded = max(r.new_tokens for r in rows)
    flags += [f"--new-tokens {decoded}"] if decoded else []
    # "buffered (refused ...)" is what a file system made of direct reads.
    asked = {"buffered" if r.granted == "buffered" else "direct" for r in rows if r.granted}
    if "buffered" in asked:
        flags.append("--io both" if len(asked) > 1 else "--io buffered")
    throttles = {r.throttle for r in rows if r.throttle}
    flags += [f"--throttle-reads {t}" for t in sorted(throttles)]
    flags.append(f"--rounds {max(r.rounds for r in rows)}")
    return _wrap(
        f"rm -f {csv_name} &&",
        ["mlx_stream bench", *flags, f"--csv {csv_name}", "--plots docs/images"],
        "&& python tools/update_readme.py",
    )


def _wrap(first: str, words: Sequence[str], last: str) -> str:
    lines, width = [first], 96
    for word in [*words, last]:
        if len(lines[-1]) + len(word) + 1 > width:
            lines.append(f"   {word}")
        else:
            lines[-1] += f" {word}"
    return " \\\n".join(lines)


def _list(numbers: object) -> str:
    return ",".join(str(n) for n in sorted(set(numbers)))  # type: ignore[call-overload]


def _size(nbytes: int) -> str:
    """As a flag takes it, exact."""
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if nbytes % size == 0:
            return f"{nbytes // size}{unit}"
    return str(nbytes)


def updated(text: str, content: str) -> str:
    """The page with `content` between its markers.

    Raises:
        ClickException: the markers are missing, repeated, or in the wrong order.
    """
    found = re.findall(f"{re.escape(START)}|{re.escape(END)}", text)
    if found != [START, END]:
        raise click.ClickException(
            f"{README}: expected {START} and {END}, once each and in this order; "
            f"found {', '.join(found) or 'neither'}"
        )
    before, rest = text.split(START)
    _, after = rest.split(END)
    return f"{before}{START}{content}{END}{after}"


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Only say whether README and CSV agree.")
@click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=ROOT,
    help="Of the repository.",
)
def main(check: bool, root: Path) -> None:
    """Rewrite the section, or compare it."""
    page = root / README
    old = page.read_text(encoding="utf-8")
    new = updated(old, section(root))
    if not check:
        page.write_text(new, encoding="utf-8")
    elif new != old:
        lines = old.splitlines(keepends=True), new.splitlines(keepends=True)
        click.echo("".join(difflib.unified_diff(*lines, README, "from the CSV")), nl=False)
        raise click.ClickException(f"{README} is out of date: run python tools/update_readme.py")


if __name__ == "__main__":
    main()
