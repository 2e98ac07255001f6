"""The pictures of a benchmark: speed by prompt length, a timeline, bytes by order (matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_stream.bench.arms import CHUNK_MAJOR, LAYER_MAJOR, READ_ONLY, STOCK
from mlx_stream.bench.results import Result
from mlx_stream.errors import MlxStreamError
from mlx_stream.timeline import COMPUTE, Event, Timeline

COLORS = {LAYER_MAJOR: "#1f6feb", CHUNK_MAJOR: "#d1242f", STOCK: "#57606a"}
PHASES = {
    "read": "#1f6feb",
    "attention": "#8250df",
    "experts": "#2da44e",
    "stall": "#d1242f",
    "token": "#bf8700",
}
DPI = 120


def write_plots(
    folder: Path, results: Sequence[Result], timeline: Timeline | None, title: str
) -> list[Path]:
    """Write what the results allow; returns the files.

    Raises:
        MlxStreamError: matplotlib is not installed, or the folder cannot be written.
    """
    pyplot = _pyplot()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = [
            _speed(pyplot, folder / "speed.png", results, title),
            _bytes(pyplot, folder / "bytes.png", results, title),
        ]
        if timeline is not None and timeline.events:
            written.append(_gantt(pyplot, folder / "timeline.png", timeline, title))
    except OSError as error:
        raise MlxStreamError(
            "the plots cannot be written",
            file=folder,
            actual=str(error),
            remedy="choose a writable folder for --plots",
        ) from error
    return [path for path in written if path is not None]


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise MlxStreamError(
            "plots need matplotlib",
            expected="matplotlib",
            actual="not installed",
            remedy="pip install 'mlx-stream[bench]', or leave out --plots",
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _speed(pyplot: Any, path: Path, results: Sequence[Result], title: str) -> Path | None:
    """Tokens a second by prompt length, and the line that the disk alone would allow."""
    prompts = [r for r in results if r.arm.order in COLORS]
    if not prompts:
        return None
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    series: dict[tuple[str, str], list[Result]] = {}
    for r in prompts:
        chunk = f", chunks of {r.arm.chunk}" if r.arm.order == CHUNK_MAJOR else ""
        series.setdefault((r.arm.order, f"{r.arm.order}{chunk} ({r.arm.setting})"), []).append(r)
    for (order, label), found in series.items():
        found.sort(key=lambda r: r.arm.tokens)
        x, y = [r.arm.tokens for r in found], [r.tokens_per_second for r in found]
        low = [r.arm.tokens / r.spread[1] for r in found]
        high = [r.arm.tokens / max(r.spread[0], 1e-9) for r in found]
        axes.plot(x, y, marker="o", label=label, color=COLORS[order])
        axes.fill_between(x, low, high, alpha=0.15, color=COLORS[order])
    _read_bound(axes, results)
    axes.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="prompt tokens a second")
    axes.set_title(title, fontsize=10)
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize=7)
    return _save(pyplot, figure, path)


def _read_bound(axes: Any, results: Sequence[Result]) -> None:
    """N / T_read, and where the measured speed leaves it: the break-even length N*."""
    reads = [r for r in results if r.arm.order == READ_ONLY]
    ours = sorted((r for r in results if r.arm.order == LAYER_MAJOR), key=lambda r: r.arm.tokens)
    if not reads or not ours:
        return
    seconds = min(r.median for r in reads)
    tokens = [ours[0].arm.tokens, ours[-1].arm.tokens]
    axes.plot(
        tokens,
        [n / seconds for n in tokens],
        linestyle="--",
        color="#9a6700",
        label=f"read-bound: N / {seconds:.2f} s",
    )
    beyond = [r.arm.tokens for r in ours if r.median > 1.25 * seconds]
    if beyond and beyond[0] > tokens[0]:
        axes.axvline(beyond[0], color="#9a6700", alpha=0.4)
        axes.text(beyond[0], axes.get_ylim()[0], " compute-bound from here", fontsize=7)


def _bytes(pyplot: Any, path: Path, results: Sequence[Result], title: str) -> Path | None:
    """Expert bytes read, by prompt length and order."""
    prompts = [r for r in results if r.arm.order in (LAYER_MAJOR, CHUNK_MAJOR)]
    if not prompts:
        return None
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    labels, values, colors = [], [], []
    most = max(r.first.bytes_read for r in prompts)
    unit, scale = ("GB", 1e9) if most >= 1e9 else ("MB", 1e6)
    for r in sorted(prompts, key=lambda r: (r.arm.tokens, r.arm.order != LAYER_MAJOR, r.arm.chunk)):
        chunk = f"\nchunks of {r.arm.chunk}" if r.arm.order == CHUNK_MAJOR else ""
        labels.append(f"{r.arm.tokens}\n{r.arm.order}{chunk}")
        values.append(r.first.bytes_read / scale)
        colors.append(COLORS[r.arm.order])
    bars = axes.bar(range(len(values)), values, color=colors)
    axes.bar_label(bars, [f"{v:.3g}" for v in values], fontsize=7)
    axes.set_xticks(range(len(values)), labels, fontsize=6)
    axes.set(ylabel=f"expert bytes read, {unit}")
    axes.set_title(title, fontsize=10)
    return _save(pyplot, figure, path)


def _gantt(pyplot: Any, path: Path, timeline: Timeline, title: str) -> Path:
    """Reader threads and the compute thread over time."""
    events = [e for e in timeline.events if e.name in PHASES]
    origin = min(e.start for e in events)
    tracks = sorted({e.track for e in events}, key=lambda t: (t != COMPUTE, t))
    figure, axes = pyplot.subplots(figsize=(9, 0.9 + 0.45 * len(tracks)), layout="constrained")
    for name in PHASES:
        for row, track in enumerate(tracks):
            spans = [_span(e, origin) for e in events if e.name == name and e.track == track]
            if spans:
                height, base = (0.4, row - 0.2) if name == "stall" else (0.8, row - 0.4)
                axes.broken_barh(spans, (base, height), facecolors=PHASES[name], label=name)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(
        unique.values(), unique.keys(), fontsize=7, ncols=len(unique), loc="outside lower center"
    )
    axes.set_yticks(range(len(tracks)), [t.replace("mlx-stream-", "") for t in tracks], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="seconds")
    axes.set_title(title, fontsize=10)
    return _save(pyplot, figure, path)


def _span(event: Event, origin: float) -> tuple[float, float]:
    return event.start - origin, event.seconds


def _save(pyplot: Any, figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)
    return path
