"""The timeline: what readers and the compute thread did, as Chrome trace events."""

import json
import threading

import pytest

from mlx_stream.timeline import COMPUTE, Timeline, span
from tests.prefill.running import generate


@pytest.fixture
def recorded(checkpoint, open_engine):
    """``(engine, timeline)`` after a prompt and four tokens with a cache of one record."""
    engine, timeline = open_engine(checkpoint("qwen3_moe")), Timeline()
    engine.record(timeline)
    before = engine.reader.counters
    engine.decoder.capacity_for = lambda nbytes: 1
    generate(engine, list(range(3, 33)), 5)
    return engine, timeline, before


def test_every_byte_read_is_on_a_reader_track(recorded):
    engine, timeline, before = recorded
    reads = [e for e in timeline.events if e.name == "read"]
    planned = sum(e.args["bytes"] for e in reads)
    counted = engine.reader.counters.bytes - before.bytes
    # The last read of a file may reach past its end.
    assert counted <= planned <= counted + len(reads) * engine.reader.align
    assert {e.track for e in reads} <= {f"mlx-stream-reader-{n}" for n in range(4)}
    assert {e.args["file"] for e in reads} == {"model.safetensors"}


def test_phases_of_the_compute_thread(recorded):
    engine, timeline, _ = recorded
    layers = len(engine.index.layers)
    by_name = {}
    for event in timeline.events:
        if event.track == COMPUTE:
            by_name.setdefault(event.name, []).append(event)
    assert [e.args["layer"] for e in by_name["experts"]] == list(range(layers))
    assert [e.args["layer"] for e in by_name["attention"]] == list(range(layers + 1))
    assert [e.args["path"] for e in by_name["token"]] == ["exact"] * 4
    assert len(by_name["stall"]) > layers, "prefill and decode both wait"
    for inner in by_name["stall"]:
        outer = [*by_name["experts"], *by_name["token"]]
        assert any(
            o.start <= inner.start and inner.start + inner.seconds <= o.start + o.seconds + 1e-6
            for o in outer
        )


def test_nothing_is_noted_after_it_is_taken_away(recorded):
    engine, timeline, _ = recorded
    count = len(timeline.events)
    engine.record(None)
    generate(engine, list(range(40, 60)), 2)
    assert len(timeline.events) == count


def test_the_file_is_a_chrome_trace(recorded, tmp_path):
    _, timeline, _ = recorded
    timeline.write(tmp_path / "trace.json")
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert names[min(names)] == COMPUTE
    assert len(spans) == len(timeline.events)
    assert min(e["ts"] for e in spans) == 0
    for event, span_ in zip(timeline.events, spans, strict=True):
        assert names[span_["tid"]] == event.track
        assert span_["dur"] == pytest.approx(event.seconds * 1e6, abs=1e-3)


def test_it_is_bounded_and_thread_safe(monkeypatch):
    monkeypatch.setattr("mlx_stream.timeline.MAX_EVENTS", 100)
    timeline = Timeline()

    def work(n):
        for i in range(50):
            timeline.add(f"t{n}", "x", i, i + 1)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(timeline.events), timeline.dropped) == (100, 100)
    assert timeline.as_dict()["otherData"] == {"dropped_events": 100}


def test_an_empty_timeline_is_a_trace_too():
    assert Timeline().as_dict()["traceEvents"] == []


def test_a_span_is_noted_when_its_block_fails():
    timeline = Timeline()
    with pytest.raises(ZeroDivisionError), span(timeline, "x", layer=3):
        1 / 0  # noqa: B018
    assert [(e.track, e.name, e.args) for e in timeline.events] == [(COMPUTE, "x", {"layer": 3})]
    with span(None, "x"):
        pass
