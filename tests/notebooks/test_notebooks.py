"""Every notebook runs from top to bottom, and what it stores is light and of no machine."""

from __future__ import annotations

import re

import pytest

from tests.notebooks.execute import (
    MACHINE_PATH,
    MAX_NBYTES,
    execute,
    notebooks,
    output_texts,
    texts,
)

EACH = pytest.mark.parametrize("path", notebooks(), ids=lambda p: p.stem)

# What a run must say, as regular expressions over all text outputs.
FACTS = {
    "01_quick_start": [
        r"read amplification +1\.0\dx",
        r"4,?096 tokens in \d",
        *[rf"(?m)^ +{n} +[\d,]+ +1\.0\dx" for n in (1024, 2048, 4096)],
        r"decode \d+ tokens in",
        r"prefilled in turn 1: \d+ tokens, in turn 2: \d+",
    ],
    "02_why_layer_major": [
        r"W, all experts +16\.3 GB",
        r"512 tokens use 100\.0% of the experts",
        r"32768 tokens: chunk-major +1,044 GB, layer-major 16 GB, 64x",
        r"layer-major +[\d,]+ bytes, 1\.0x the experts",
        r"the formula says 4\.0x",
    ],
    "03_routing_and_the_seed_cache": [
        r"layers with experts +6\b",
        r"experts a token uses +4 in each layer",
        r"first 64 tokens: \d+% hits when seeded",
    ],
    "04_will_it_fit_my_mac": [
        r"30B-A3B +17\.\d GB",
        r"235B-A22B +132\.\d GB",
        r"16 GB +1 read",
        r"needs \d",
        r"sudo sysctl iogpu\.wired_limit_mb=\d+",
        r"5 tok/s need a hit rate of \d+%",
    ],
}


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """``executed(path) -> notebook``, run once."""
    for name in ("nbclient", "ipykernel", "ipywidgets", "matplotlib"):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install -e '.[notebooks]'")
    done = {}

    def run(path):
        if path not in done:
            done[path] = execute(path, tmp_path_factory.mktemp(path.stem))
        return done[path]

    return run


def test_there_are_facts_for_every_notebook():
    assert [p.stem for p in notebooks()] == list(FACTS)


@pytest.mark.slow
@EACH
def test_it_runs_and_says_what_it_should(path, executed):
    notebook = executed(path)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            assert output.output_type != "error", output
            # A warning in front of a newcomer is a mistake, too.
            assert output.get("name") != "stderr", output.text
    said = "\n".join(output_texts(notebook))
    for fact in FACTS[path.stem]:
        assert re.search(fact, said), f"{fact!r} is not in:\n{said}"
    assert not MACHINE_PATH.search(said)


@pytest.mark.slow
def test_the_seeded_cache_starts_better_and_belady_is_the_bound(executed):
    path = next(p for p in notebooks() if p.stem.startswith("03"))
    said = "\n".join(output_texts(executed(path)))
    starts = re.findall(r"first +\d+ tokens: (\d+)% hits when seeded, (\d+)% from an empty", said)
    assert len(starts) == 3
    for seeded, empty in starts:
        assert int(seeded) >= int(empty)
    lines = re.findall(r"(?m)^ +(?:10|25|50|75)%((?: +[\d.]+%){5})$", said)
    assert len(lines) == 4
    for line in lines:
        best, *others = (float(rate.rstrip("%")) for rate in line.split())
        assert all(best >= other for other in others), line


@EACH
def test_stored_outputs_are_complete_light_and_of_no_machine(path):
    nbformat = pytest.importorskip("nbformat", reason="pip install -e '.[notebooks]'")
    assert path.stat().st_size < MAX_NBYTES
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    assert counts == list(range(1, len(code) + 1)), "run python -m tests.notebooks.execute"
    assert not any(o.output_type == "error" for cell in code for o in cell.outputs)
    for text in texts(notebook):
        assert not MACHINE_PATH.search(text), MACHINE_PATH.search(text)
    said = "\n".join(output_texts(notebook))
    for fact in FACTS[path.stem]:
        assert re.search(fact, said), f"no {fact!r}: run python -m tests.notebooks.execute"


def test_machine_paths_are_told_from_urls_and_rates():
    for text in ("/home/me/x", "at /tmp/a b", "'/Users/me/x.npz'", "C:\\Users"):
        assert MACHINE_PATH.search(text), text
    for text in ("https://x.org/home/me", "bytes/tmp/s", "tok/s", "./a/b/c", "owner/name/x"):
        assert not MACHINE_PATH.search(text), text
