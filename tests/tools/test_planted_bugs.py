"""docs/planted_bugs.md says what the tests plant."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from tools import planted_bugs as tool


def test_the_page_is_up_to_date():
    result = CliRunner().invoke(tool.main, ["--check"])
    assert result.exit_code == 0, result.output


def test_a_stale_page_is_noticed(tmp_path, monkeypatch):
    stale = tmp_path / "planted_bugs.md"
    monkeypatch.setattr(tool, "PAGE", stale)
    assert CliRunner().invoke(tool.main, ["--check"]).exit_code == 1, "missing"
    stale.write_text(tool.page(tool.all_bugs()[1:]))
    assert CliRunner().invoke(tool.main, ["--check"]).exit_code == 1, "a bug short"
    assert CliRunner().invoke(tool.main, []).exit_code == 0
    assert CliRunner().invoke(tool.main, ["--check"]).exit_code == 0


def test_every_bug_has_one_row_and_its_text_is_in_the_kernels():
    bugs = tool.all_bugs()
    rows = [line for line in tool.page(bugs).splitlines() if line.startswith("| `")]
    assert len(rows) == len(bugs)
    root = Path(tool.ROOT)
    sources = {
        "Metal": "".join(p.read_text() for p in root.glob("metal/*")),
        "CUDA": "".join(p.read_text() for p in root.glob("cuda/*")),
    }
    assert all(bug.old in sources[bug.language] for bug in bugs)


def test_a_bug_without_a_kind_is_an_error():
    bug = tool.PlantedBug("CUDA", "moe_up", "something new", "a case", "race", "a", "b")
    with pytest.raises(tool.click.ClickException, match="something new"):
        tool.page([bug])
