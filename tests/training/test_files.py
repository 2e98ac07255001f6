"""What the phases hand on, without torch: spec, order, options, schedule, names of the files."""

import json

import mlx.core as mx
import numpy as np
import pytest

from mlx_stream.errors import MlxStreamError
from mlx_stream.prerouter.head_file import open_heads
from mlx_stream.prerouter.spec_file import SPEC_NAME, read_spec
from tools.prerouter_training.files import (
    HEADS_NAME,
    LORA_NAME,
    need_phase,
    prerouter_spec,
    with_lora,
    write_phase,
)
from tools.prerouter_training.options import layer_list
from tools.prerouter_training.schedule import Schedule


def ended(folder, phase, *names):
    """A folder that a phase left behind."""
    folder.mkdir()
    spec = prerouter_spec("test", [0, 1], [1, 2], 2, "executed")
    for name in names:
        (folder / name).write_bytes(b"x")
    write_phase(folder, spec if phase == 1 else with_lora(spec, 32.0, 16), {"phase": phase})
    return folder


def test_specs_are_read_back(tmp_path):
    folder = ended(tmp_path / "one", 1, HEADS_NAME)
    spec = read_spec(folder / SPEC_NAME)
    assert (spec.trained, spec.lora, spec.heads_file) == (False, None, HEADS_NAME)
    assert (spec.owners, spec.consumers, spec.top_k) == ((0, 1), (1, 2), 2)
    assert (spec.first_prediction, spec.first_previous) == ("second_step", "zeros")
    spec = read_spec(ended(tmp_path / "two", 2, HEADS_NAME, LORA_NAME) / SPEC_NAME)
    assert spec.trained  # only with its LoRA is a model fit to be used with the heads
    assert (spec.lora.file, spec.lora.scale) == (LORA_NAME, 2.0)


def test_the_order_of_the_phases_is_enforced(tmp_path):
    one = ended(tmp_path / "one", 1, HEADS_NAME)
    two = ended(tmp_path / "two", 2, HEADS_NAME, LORA_NAME)
    assert need_phase(one, 1, "the script").top_k == 2
    assert need_phase(two, 2, "the script").lora is not None
    empty = tmp_path / "empty"
    empty.mkdir()
    unfinished = ended(tmp_path / "unfinished", 2, HEADS_NAME)
    for folder, phase in ((empty, 1), (two, 1), (one, 2), (empty, 2), (unfinished, 2)):
        with pytest.raises(MlxStreamError, match=f"phase {phase + 1} needs") as caught:
            need_phase(folder, phase, "the script")
        assert "run the script first" in str(caught.value)
    (one / HEADS_NAME).unlink()
    with pytest.raises(MlxStreamError, match="phase 2 needs"):
        need_phase(one, 1, "the script")


def test_a_phase_has_ended_only_with_its_report(tmp_path):
    folder = ended(tmp_path / "one", 1, HEADS_NAME)
    (folder / "report.json").unlink()
    with pytest.raises(MlxStreamError, match="phase 2 needs"):
        need_phase(folder, 1, "the script")


def test_the_heads_form_is_the_one_that_the_runtime_reads(tmp_path):
    spec = prerouter_spec("test", [0, 1], [1, 2], 2, "executed")
    shapes = {"fc1": (8, 24), "fc2": (4, 8), "linear_init": (4, 24)}
    arrays = {
        f"layers.{owner}.{part}.weight": mx.array(np.zeros(shape, np.float16))
        for owner in spec.owners
        for part, shape in shapes.items()
    }
    mx.save_safetensors(str(tmp_path / HEADS_NAME), arrays)
    file = open_heads(tmp_path / HEADS_NAME, spec, hidden=16, experts=4)
    assert (file.inputs, file.width, file.experts) == (24, 8, 4)


@pytest.mark.parametrize(
    ("text", "layers"), [("1-3,5", (1, 2, 3, 5)), ("4", (4,)), ("2-2,1", (1, 2))]
)
def test_lists_of_layers(text, layers):
    assert layer_list(text, 1, 5) == layers


@pytest.mark.parametrize("text", ["", "0-2", "2-6", "a", "3-", "3-2", "-1"])
def test_bad_lists_of_layers(text):
    with pytest.raises(MlxStreamError, match="bad list"):
        layer_list(text, 1, 5)


def test_the_learning_rate_warms_up_and_ends_low():
    schedule = Schedule(100, 1e-2, warmup=10)
    rates = [schedule.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(1e-3, rel=0.01)
    assert max(rates) == pytest.approx(1e-2, rel=0.03)
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(5e-4, rel=0.01)


def test_reports_are_plain_json(tmp_path):
    folder = ended(tmp_path / "one", 1, HEADS_NAME)
    assert json.loads((folder / "report.json").read_text()) == {"phase": 1}
