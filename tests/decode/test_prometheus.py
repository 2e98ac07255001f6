"""The exposition text, read back by a parser written from the description of the format."""

from __future__ import annotations

import importlib.util
import math
import re

import pytest

from mlx_stream.decode.metrics import DecodeMetrics, StepMetrics
from mlx_stream.decode.prometheus import CONTENT_TYPE, prometheus_text
from mlx_stream.telemetry import Receipt

RECEIPT = Receipt(
    prompt_tokens=300,
    segments=1,
    chunk_tokens=64,
    mode="stream",
    bytes_read=2_730_000_000,
    distinct_expert_bytes=2_700_000_000,
    read_calls=40,
    read_seconds=1.5,
    compute_seconds=2.25,
    stall_seconds=0.125,
    wall_seconds=2.5,
    peak_bytes=800_000_000,
    budget_bytes=1_000_000_000,
    io_mode="O_DIRECT, throttled to 2.00 GB/s",
    backend="cpu",
)
SUFFIXES = {
    "counter": {""},
    "gauge": {""},
    "summary": {"", "_sum", "_count"},
}


@pytest.fixture
def metrics():
    m = DecodeMetrics()
    m.add(StepMetrics("exact", hits=6, misses=2, bytes_read=2000, wall_seconds=0.25))
    m.add(StepMetrics("hot", hits=8, wall_seconds=0.125, stall_seconds=1e-7, cache_bytes=77))
    return m


def unescape(text: str, quoted: bool) -> str:
    known = {"\\\\": "\\", "\\n": "\n"} | ({'\\"': '"'} if quoted else {})
    assert not re.sub(r"\\\\|\\n" + (r'|\\"' if quoted else ""), "", text).count("\\")
    return re.sub(r"\\.", lambda m: known[m.group()], text)


def parse(text: str) -> dict[str, dict]:
    """``{family: {type, help, samples: {(name, labels): value}}}``; asserts the format's rules."""
    assert text.endswith("\n")
    families: dict[str, dict] = {}
    name = None
    for line in text.split("\n")[:-1]:
        if match := re.fullmatch(r"# HELP ([a-zA-Z_:][a-zA-Z0-9_:]*) (.*)", line):
            name = match[1]
            assert name not in families, "one group of lines for each family"
            families[name] = {"help": unescape(match[2], False), "samples": {}}
        elif match := re.fullmatch(r"# TYPE (\S+) (counter|gauge|summary|histogram|untyped)", line):
            assert match[1] == name
            assert not families[name]["samples"], "TYPE comes before the samples"
            families[name]["type"] = match[2]
        else:
            read_sample(line, name, families[name])
    return families


def read_sample(line: str, family: str, into: dict) -> None:
    match = re.fullmatch(
        r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[^"]|"(?:[^"\\]|\\.)*")*)\})? (\S+)', line
    )
    assert match, line
    assert match[1].removeprefix(family) in SUFFIXES[into["type"]], line
    labels = {}
    if match[2] is not None:
        rest = match[2]
        while rest:
            pair = re.match(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\.)*)"(?:,|$)', rest)
            assert pair, rest
            assert pair[1] not in labels
            labels[pair[1]] = unescape(pair[2], True)
            rest = rest[pair.end() :]
    key = (match[1], frozenset(labels.items()))
    assert key not in into["samples"], "no sample twice"
    assert re.fullmatch(r"[+-]?(\d+(\.\d+)?([eE][+-]?\d+)?)|NaN|[+-]Inf", match[3]), line
    into["samples"][key] = float(match[3])


def value(families: dict, family: str, suffix: str = "", **labels: str) -> float:
    name = f"mlx_stream_{family}"
    return families[name]["samples"][name + suffix, frozenset(labels.items())]


def test_decode_metrics(metrics):
    families = parse(prometheus_text(metrics))
    assert value(families, "decode_tokens_total") == 2
    assert value(families, "decode_cache_hits_total") == 14
    assert value(families, "decode_cache_misses_total") == 2
    assert value(families, "decode_read_bytes_total") == 2000
    assert value(families, "decode_stall_seconds_total") == 1e-7
    assert value(families, "decode_path_steps_total", path="exact") == 1
    assert value(families, "decode_path_steps_total", path="hot") == 1
    assert value(families, "decode_step_seconds", quantile="0.5") == 0.125
    assert value(families, "decode_step_seconds", quantile="0.99") == 0.25
    assert value(families, "decode_step_seconds", "_sum") == 0.375
    assert value(families, "decode_step_seconds", "_count") == 2
    assert value(families, "decode_cache_bytes") == 77
    assert not any("prefill" in name for name in families)


def test_names_and_types(metrics):
    for name, family in parse(prometheus_text(metrics, RECEIPT)).items():
        assert name.startswith("mlx_stream_")
        assert family["help"]
        assert name.endswith("_total") == (family["type"] == "counter"), name
        assert not re.search(r"_(ms|us|kb|mb|gb|milli\w*|percent)(_|$)", name)
        for _, labels in family["samples"]:
            assert "model" not in dict(labels)


def test_a_dict_gives_the_same_text(metrics):
    assert prometheus_text(metrics.as_dict()) == prometheus_text(metrics)


def test_receipt(metrics):
    families = parse(prometheus_text(metrics, RECEIPT))
    assert value(families, "prefill_tokens") == 300
    assert value(families, "prefill_read_bytes") == 2_730_000_000
    assert value(families, "prefill_wall_seconds") == 2.5
    assert value(families, "memory_budget_bytes") == 1e9
    info = {k: getattr(RECEIPT, k) for k in ("mode", "bound", "io_mode", "backend")}
    assert value(families, "prefill_info", **info) == 1


def test_labels_are_on_every_sample_and_escaped(metrics):
    nasty = 'a "quoted" \\ path\nC:\\new, {b="c"} é'
    families = parse(prometheus_text(metrics, RECEIPT, {"model": nasty, "host": ""}))
    samples = [dict(labels) for f in families.values() for _, labels in f["samples"]]
    assert len(samples) > 20
    assert all(s["model"] == nasty and s["host"] == "" for s in samples)


@pytest.mark.parametrize("name", ["", "1st", "a-b", "a b", "__own", "path", "quantile", "é"])
def test_label_names_that_cannot_be(metrics, name):
    with pytest.raises(ValueError, match="cannot be a label"):
        prometheus_text(metrics, labels={name: "x"})


def test_before_the_first_token():
    families = parse(prometheus_text(DecodeMetrics()))
    assert value(families, "decode_tokens_total") == 0
    assert families["mlx_stream_decode_path_steps_total"]["samples"] == {}
    assert math.isnan(value(families, "decode_step_seconds", quantile="0.99"))


def test_odd_numbers_are_written_as_the_format_wants():
    import numpy as np

    m = DecodeMetrics()
    m.add(StepMetrics("exact", hits=np.int64(3), stall_seconds=math.inf, wall_seconds=1e-9))
    m.add(StepMetrics("exact", bytes_read=10**18, wall_seconds=float("nan")))
    text = prometheus_text(m)
    families = parse(text)
    assert value(families, "decode_cache_hits_total") == 3
    assert value(families, "decode_stall_seconds_total") == math.inf
    assert math.isnan(value(families, "decode_step_seconds", "_sum"))
    assert "decode_read_bytes_total 1000000000000000000\n" in text


@pytest.mark.skipif(
    importlib.util.find_spec("prometheus_client") is None, reason="no prometheus_client here"
)
def test_the_official_parser_agrees(metrics):
    from prometheus_client.parser import text_string_to_metric_families

    text = prometheus_text(metrics, RECEIPT, {"model": 'x"\\\n'})
    theirs = {
        (s.name, frozenset(s.labels.items())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    assert theirs == {k: v for f in parse(text).values() for k, v in f["samples"].items()}


def test_content_type():
    assert "version=0.0.4" in CONTENT_TYPE
