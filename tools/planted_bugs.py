"""Write docs/planted_bugs.md: the bugs planted in the kernels and the test that catches each.

The lists are those that the tests themselves run, so the page cannot name a bug that is not
planted; ``--check`` fails when the page is out of date::

    python tools/planted_bugs.py           writes docs/planted_bugs.md
    python tools/planted_bugs.py --check   exit status 1 if it would change
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

PAGE = ROOT / "docs" / "planted_bugs.md"
METAL_TEST = "tests/backends/kernels/test_planted_bugs.py::test_planted_bug_is_caught"
CUDA_TEST = "tests/backends/cuda/test_kernels.py::test_planted_bugs_are_caught"

# A kind and the words of a bug's description that put it there; the first match counts.
KINDS = (
    ("Barriers: dropped, or not for all threads", r"barrier(?! orders)(?! of)|not waited for"),
    ("Barriers: wrong memory flag or scope", r"the barrier orders|barrier of the simdgroup"),
    ("Row, column and length guards", r"guard|ragged row|tail of a row|read on|skipped$|absent ro"),
    (
        "Scale, bias and constant groups",
        r"(scale|bias) group|constants|affine bias|bias is added|off by two",
    ),
    ("Wrong expert, slot or bias offset", r"expert|slot|bias of|bias index"),
    (
        "Wrong row: gather, un-sort, router scores",
        r"gathered|un-sorted|places|wrong token|scores|counts as absent",
    ),
    ("Decoding of packed weights", r"nibbles|halves|second word|sign\b|exponent|powers of|bytes"),
    (
        "Tile geometry and fragments",
        r"off[ -]by[ -]one|too far left|share columns|half of its rows|padded|misplaced|not moved"
        r"|chosen too early|swizzle|paired|strips swapped",
    ),
    (
        "Steps, buffers and sums",
        r"accumulators|short|restart|second step|last buffer|staged over|previous sum|last choice"
        r"|lanes are not|one lane",
    ),
    ("Gate, up and the activation", r"gate|clamp|limit"),
)
NOTICED = {
    "values": "values differ from the twin",
    "uninit": "uninitialised read",
    "uninitialised": "uninitialised read",
    "race": "race",
    "divergence": "barrier in divergent code",
    "out-of-bounds": "access out of bounds",
    "double-write": "two writes to one place",
    "misaligned": "misaligned access",
    "unwritten": "output not written",
}


@dataclass(frozen=True)
class PlantedBug:
    """One edit of a kernel's text and what must notice it."""

    language: str
    kernel: str
    what: str
    case: str
    noticed: str  # key of NOTICED
    old: str
    new: str

    @property
    def kind(self) -> str:
        """The heading it belongs under."""
        for kind, words in KINDS:
            if re.search(words, self.what):
                return kind
        raise click.ClickException(f"no kind for {self.kernel}: {self.what}; add one to KINDS")


def all_bugs() -> list[PlantedBug]:
    """Those of the Metal kernels, then those of the CUDA kernels, as their tests list them."""
    from tests.backends.cuda.test_kernels import BUGS as CUDA
    from tests.backends.kernels.test_planted_bugs import BUGS as METAL

    bugs = [PlantedBug("Metal", b.kernel, b.what, b.case, b.caught_by, b.old, b.new) for b in METAL]
    for what, ((kernel, spec), old, new, caught) in CUDA.items():
        case = "combine" if spec is None else spec.name
        bugs.append(PlantedBug("CUDA", kernel, what, case, caught, old, new))
    return bugs


def code(text: str) -> str:
    """A piece of source in a table cell, on one line."""
    line = " ".join(text.split()).replace("|", "\\|")
    return f"`{line}`" if line else "(nothing)"


def table(bugs: Iterable[PlantedBug]) -> list[str]:
    """Markdown rows."""
    lines = ["| kernel | bug | text | becomes | case | noticed as |", "|---|---|---|---|---|---|"]
    for b in bugs:
        cells = (f"`{b.kernel}`", b.what, code(b.old), code(b.new), b.case, NOTICED[b.noticed])
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def page(bugs: Sequence[PlantedBug]) -> str:
    """The whole of docs/planted_bugs.md."""
    count = {language: sum(b.language == language for b in bugs) for language in ("Metal", "CUDA")}
    lines = [
        "# Planted bugs",
        "",
        "Written by `python tools/planted_bugs.py`; a test holds it to the sources.",
        "",
        f"{count['Metal']} bugs are planted in the Metal kernels and {count['CUDA']} in the CUDA",
        "kernels, one at a time, in the very text that ships. Each must be noticed: by the checker",
        "of the CPU shim (races, bounds, uninitialised reads, divergence, double and missing",
        "writes), or by a difference to the independent twin above the tolerance. The unedited",
        "kernels pass the same cases.",
        "",
        f"- Metal (`expert_*`): `{METAL_TEST}`,",
        "  with `[kernel: bug]` for one; the list is `tests/backends/kernels/planted_bugs.txt`.",
        f"- CUDA (`moe_*`): `{CUDA_TEST}`, with `[bug]`.",
        "",
        "A case is a weight format or a shape that reaches the line; see `CASES` and `bug_case`",
        "there. What no planted bug can show: the GPU's own compiler, its timing and its rounding.",
        "",
        "| kind | Metal | CUDA |",
        "|---|---|---|",
    ]
    kinds = [kind for kind, _ in KINDS]
    grouped = {kind: [b for b in bugs if b.kind == kind] for kind in kinds}
    for kind, members in grouped.items():
        metal = sum(b.language == "Metal" for b in members)
        lines.append(f"| {kind} | {metal} | {len(members) - metal} |")
    lines.append(f"| **all** | **{count['Metal']}** | **{count['CUDA']}** |")
    for kind, members in grouped.items():
        lines += ["", f"## {kind}", "", *table(members)]
    return "\n".join(lines) + "\n"


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Only say whether the page is up to date.")
def main(check: bool) -> None:
    """Write the page, or compare it."""
    text = page(all_bugs())
    if not check:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        raise click.ClickException("docs/planted_bugs.md is out of date: tools/planted_bugs.py")


if __name__ == "__main__":
    main()
