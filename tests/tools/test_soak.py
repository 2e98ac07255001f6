"""The soak finds what it is for: wrong tokens, growth; and it is quiet where nothing is wrong."""

import json
import signal
import threading
import time

import numpy as np
import pytest
from click.testing import CliRunner

from mlx_stream.hub import demo_path
from tools import soak, soak_parts


@pytest.fixture(scope="module")
def stock():
    return soak_parts.stock_model(demo_path())


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(soak, "SHORT_CASES", 3)
    monkeypatch.setattr(soak, "LONG_CASES", 1)
    monkeypatch.setattr(soak, "LONGEST", 450)
    monkeypatch.setattr(soak, "ANSWER_TOKENS", 4)


def run_soak():
    result = CliRunner().invoke(soak.main, ["--minutes", "0.05", "--seed", "3"])
    return result, json.loads(result.stdout.splitlines()[-1])


def test_a_short_run(small):
    result, found = run_soak()
    assert result.exit_code == 0, result.output
    assert found["answers"] >= 1
    assert found["wrong_tokens"] == 0
    assert found["errors"] == found["grew"] == []
    assert {"rss", "fds", "threads", "peak_rss_mb"} <= set(found["drift"])


def test_one_wrong_token_fails_the_run(small, monkeypatch):
    real = soak.Soak.check

    def one_wrong(self, runtime, talk, case, answer):
        real(self, runtime, None, soak.Case((1,), (answer[0] + 1, *answer[1:]), True), answer)

    monkeypatch.setattr(soak.Soak, "check", one_wrong)
    monkeypatch.setattr(soak, "TALK_SHARE", 0.0)
    result, found = run_soak()
    assert result.exit_code == 1
    assert found["wrong_tokens"] >= 1
    assert "wrong tokens" in found["errors"][0]


def test_a_wrong_token_is_counted(stock):
    prompt = list(range(40, 60))
    answer = soak_parts.stock_answer(stock, prompt, 5)
    assert len(answer) == 5, "choose another prompt: a near tie ends this answer"
    assert soak_parts.wrong_tokens(stock, prompt, answer) == 0
    assert soak_parts.wrong_tokens(stock, prompt, []) == 0
    last_wrong = [*answer[:-1], answer[-1] + 1]
    assert soak_parts.wrong_tokens(stock, prompt, last_wrong) == 1


def test_near_ties():
    logits = np.array([[0.0, 10.0, 9.0], [0.0, 10.0, 9.995], [0.0, 1e-4, -5.0]])
    assert soak_parts.nearly_tied(logits).tolist() == [False, True, True]


def test_faults_come_when_armed():
    faults = soak_parts.RandomFaults()
    faults(0, 0, 1)
    faults.arm(skip=1, times=2)
    faults(0, 0, 1)
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            faults(0, 0, 1)
    faults(0, 0, 1)
    assert faults.injected == 2


def test_ctrl_c_raises_inside_only():
    ctrl_c = soak_parts.CtrlC()
    with ctrl_c.installed():
        with pytest.raises(KeyboardInterrupt), ctrl_c.after(0.01):
            time.sleep(30)
        with ctrl_c.after(30):
            pass
        signal.raise_signal(signal.SIGINT)  # late: nothing happens
    assert (ctrl_c.sent, ctrl_c.raised) == (1, 1)
    assert not [t for t in threading.enumerate() if isinstance(t, threading.Timer)]


def test_drift_is_the_slope_after_warm_up():
    watch = soak_parts.Watch()
    for n in range(10):
        rss = 50_000_000 if n < 4 else 100_000_000 + n * 1_000_000
        watch.samples.append(soak_parts.Sample(60.0 * n, rss, 6, 9))
    drift = watch.drift(warm_seconds=240)
    assert drift["rss"]["start"] == 50
    assert drift["rss"]["warm"] == 104
    assert drift["rss"]["end"] == 109
    assert drift["rss"]["per_hour"] == pytest.approx(60)
    assert drift["threads"]["per_hour"] == pytest.approx(0, abs=1e-9)


def test_growth_fails_the_report(stock, capsys):
    run = soak.Soak(demo_path(), seed=0)
    mb = 1_000_000
    run.watch.samples = [
        soak_parts.Sample(600.0 * n, 100 * mb + 20 * mb * n, 6, 9) for n in range(6)
    ]
    assert not soak.report(run, minutes=40, seed=0)
    assert json.loads(capsys.readouterr().out)["grew"] == ["rss"]
    run.watch.samples = [soak_parts.Sample(600.0 * n, 100 * mb, 6 + n, 9) for n in range(6)]
    assert not soak.report(run, minutes=40, seed=0)
    assert json.loads(capsys.readouterr().out)["grew"] == ["fds"]
