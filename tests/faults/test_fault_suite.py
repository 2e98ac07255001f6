"""tools/fault_suite.py with a round or two of each kind: nothing lost, nothing wrong."""

import os

import pytest

from tools.fault_parts import LostError, Tally, WrongError, caught
from tools.fault_parts_models import Workplace
from tools.fault_parts_system import WRITES, SystemFaults
from tools.fault_suite import KINDS, run_kinds, table

PLACES, FUZZ = 1, 12  # of each kind here
BIG = os.environ.get("MLX_STREAM_BIG") == "1"
# Each of these has a cheaper sister that takes the same way through the code.
LONG = {
    *("kill-prefill", "write-checkpoints", "write-prefill", "full-prefill", "full-eviction"),
    *("read-resume", "read-decode", "read-evicted", "read-only-from-checkpoints"),
    *("flip-kept-manifest", "flip-padding", "full-checkpoints"),
    *("read-only-from-prefill", "full-pack", "flip-record"),  # have tests of their own
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    made = Workplace(tmp_path_factory.mktemp("suite"), 1, 3, None, True)
    made.places, made.cases = PLACES, FUZZ
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if BIG or kind not in LONG])
def test_every_kind_of_fault_is_survived_or_refused(place, kind):
    (tally,) = run_kinds(place, [kind])
    if tally.skipped:
        pytest.skip(tally.skipped)
    assert tally.notes == []
    assert (tally.lost, tally.wrong, tally.tracebacks) == (0, 0, 0)
    assert tally.injected > 0
    assert tally.rounds == tally.survived + tally.refused > 0


def test_what_goes_wrong_is_counted():
    tally = Tally("x")
    for error in (LostError("a"), WrongError("b"), KeyError("c"), None):
        with tally.round() as current:
            current.inject()
            if error is not None:
                raise error
    assert (tally.lost, tally.wrong, tally.tracebacks, tally.survived) == (1, 1, 1, 1)
    assert tally.injected == tally.rounds == 4
    assert [note.split()[0] for note in tally.notes] == ["LOST", "WRONG", "TRACEBACK"]
    assert not tally.sound
    assert "| x | 4 | 4 | 1 | 0 | 0 | 1 | 1 | 1 |" in table([tally])


def test_an_error_without_advice_is_wrong():
    from mlx_stream.errors import PackError

    def fail():
        raise PackError("it does not work")

    tally = Tally("x")
    with tally.round() as current:
        current.error(caught(fail))
    assert tally.wrong == 1


def test_a_kind_that_breaks_down_is_no_success(place, monkeypatch):
    monkeypatch.setitem(KINDS, "broken", lambda place, tally: 1 / 0)
    (tally,) = run_kinds(place, ["broken"])
    assert tally.tracebacks == 1


def test_faults_hit_the_use_that_was_asked_for(tmp_path):
    for at in range(3):
        with SystemFaults(WRITES, tmp_path, at) as faults:
            for n in range(3):
                try:
                    (tmp_path / f"{at}-{n}").write_bytes(b"x")
                except OSError:
                    assert n == at
        assert (faults.uses, faults.injected) == (3, 1)
    outside = SystemFaults(WRITES, tmp_path / "elsewhere", 0)
    with outside:
        (tmp_path / "y").write_bytes(b"x")
    assert outside.uses == 0
