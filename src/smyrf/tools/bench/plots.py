"""Measurements as plots, PNG and SVG: time and memory against length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smyrf.tools.bench.results import Measurement
from smyrf.tools.plotting import save_figure

# Ours in warm colours, the others in grey: the eye should find the difference first.
_OURS = ("#c2410c", "#f59e0b", "#7c2d12", "#fb923c")
_OTHERS = {"sdpa": "#1f2937", "eager dense": "#9ca3af", "eager smyrf": "#60a5fa"}


def plot(measurements: list[Measurement], path: Path, title: str) -> list[Path]:
    """Writes `path`.png and `path`.svg, and says what it wrote."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plots need matplotlib: pip install 'smyrf[plots]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    passes = sorted({one.problem.backward for one in measurements})
    with_memory = any(one.extra_bytes is not None for one in measurements)
    n_rows = 2 if with_memory else 1
    figure, axes = plt.subplots(
        n_rows,
        len(passes),
        figsize=(5.2 * len(passes) + 1.6, 3.6 * n_rows),
        squeeze=False,
        sharex=True,
        layout="constrained",
    )
    handles: dict[str, Any] = {}
    for column, backward in enumerate(passes):
        here = [one for one in measurements if one.problem.backward == backward]
        handles |= _draw(axes[0][column], here, lambda one: one.seconds, "seconds per call")
        axes[0][column].set_title("forward + backward" if backward else "forward", fontsize=10)
        if with_memory:
            _draw(axes[1][column], here, lambda one: one.extra_bytes and one.extra_bytes / 1e6, "extra memory, MB")
        axes[-1][column].set_xlabel("sequence length")
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    figure.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False, fontsize=9)
    return save_figure(figure, path)


def _draw(axis: Any, measurements: list[Measurement], value: Any, label: str) -> dict[str, Any]:
    handles: dict[str, Any] = {}
    ours = [name for name in dict.fromkeys(one.label for one in measurements) if name.startswith(("smyrf", "tangent"))]
    for name in dict.fromkeys(one.label for one in measurements):
        points = [(one.problem.length, value(one)) for one in measurements if one.label == name]
        points = [(x, y) for x, y in points if y is not None]
        if not points:
            continue
        kind = next(one.name for one in measurements if one.label == name)
        colour = _OURS[ours.index(name) % len(_OURS)] if name in ours else _OTHERS[kind]
        style = "--" if kind.startswith("eager") else "-"
        (handles[name],) = axis.plot(
            *zip(*points, strict=True),
            style,
            color=colour,
            marker="o",
            markersize=3.5,
            linewidth=2.2 if name in ours else 1.5,
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    lengths = sorted({one.problem.length for one in measurements})
    axis.set_xticks(lengths, [f"{n // 1024}K" if n >= 1024 else str(n) for n in lengths])
    axis.minorticks_off()
    axis.set_ylabel(label)
    axis.grid(True, alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    return handles
