"""Plots of measurements: time and memory against length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smyrf.tools.bench.measurement import Measurement
from smyrf.tools.plotting import dress, new_figure, save_figure

# Methods in warm colours, baselines in grey: the eye should find the difference first.
_METHODS = ("#c2410c", "#f59e0b", "#7c2d12", "#fb923c")
_BASELINES = {"sdpa": "#1f2937", "eager dense": "#9ca3af", "eager smyrf": "#60a5fa"}


def plot(measurements: list[Measurement], path: Path, title: str) -> list[Path]:
    """Write `path`.png and `path`.svg, and return the paths."""
    directions = sorted({one.problem.backward for one in measurements})
    with_memory = any(one.extra_bytes is not None for one in measurements)
    n_rows = 2 if with_memory else 1
    size = (5.2 * len(directions) + 1.6, 3.6 * n_rows)
    figure, axes = new_figure(n_rows, len(directions), size=size, title=title, sharex=True)
    handles: dict[str, Any] = {}
    for column, backward in enumerate(directions):
        here = [one for one in measurements if one.problem.backward == backward]
        handles |= _draw(axes[0][column], here, lambda one: one.seconds, "seconds per call")
        axes[0][column].set_title(here[0].problem.direction, fontsize=10)
        if with_memory:
            _draw(axes[1][column], here, lambda one: one.extra_bytes and one.extra_bytes / 1e6, "extra memory, MB")
        axes[-1][column].set_xlabel("sequence length")
    figure.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False, fontsize=9)
    return save_figure(figure, path)


def _draw(axis: Any, measurements: list[Measurement], value: Any, label: str) -> dict[str, Any]:
    handles: dict[str, Any] = {}
    curves: dict[str, list[Measurement]] = {}
    for one in measurements:
        curves.setdefault(one.label, []).append(one)
    methods = [name for name, curve in curves.items() if not curve[0].is_baseline]
    for name, curve in curves.items():
        points = [(one.problem.length, y) for one in curve if (y := value(one)) is not None]
        if not points:
            continue
        ours, kind = name in methods, curve[0].name
        (handles[name],) = axis.plot(
            *zip(*points, strict=True),
            "--" if kind.startswith("eager") else "-",
            color=_METHODS[methods.index(name) % len(_METHODS)] if ours else _BASELINES[kind],
            marker="o",
            markersize=3.5,
            linewidth=2.2 if ours else 1.5,
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    lengths = sorted({one.problem.length for one in measurements})
    axis.set_xticks(lengths, [f"{n // 1024}K" if n >= 1024 else str(n) for n in lengths])
    axis.minorticks_off()
    axis.set_ylabel(label)
    dress(axis)
    return handles
