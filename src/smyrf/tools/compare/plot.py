"""Plot of a comparison: cosines of the embeddings, and nearest neighbours or time, against keys visited."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smyrf.tools.compare.run import ModelRow, relative_time
from smyrf.tools.plotting import dress, family_looks, new_figure, save_figure, share_axis

_LINE = {"marker": "o", "markersize": 5, "linewidth": 2.2}
_TUNED = {"color": "#0e7490", "linestyle": "none", "marker": "*", "markersize": 13, "zorder": 5}
# A cosine closer to 1 than this differs from it only by rounding.
_EXACT = 1e-6


def plot(rows: Sequence[ModelRow], path: Path, title: str) -> list[Path]:
    """Write `path`.png and `path`.svg, and return the paths; the first row is dense attention."""
    figure, ((left, right),) = new_figure(1, 2, size=(9.6, 4.3), title=title)
    families: dict[str, list[ModelRow]] = {}
    for row in sorted(rows[1:], key=lambda row: row.cost.share):
        families.setdefault(row.family, []).append(row)
    looks = {name: _LINE | look for name, look in family_looks(families).items()}
    if "tuned" in looks:
        looks["tuned"] = _TUNED
    _cosines(left, families, looks)
    if rows[0].drift.agreement is not None:
        _neighbours(right, families, looks)
    else:
        _times(right, families, looks, rows[0])
    for axis in (left, right):
        dress(axis)
        share_axis(axis, min(row.cost.share for row in rows))
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.06)
    return save_figure(figure, path)


def _cosines(axis: Any, families: dict[str, list[ModelRow]], looks: dict[str, dict[str, Any]]) -> None:
    """1 − cosine on an inverted logarithmic scale, labelled by the cosine; exact results are at the top."""
    gaps = [1 - row.drift.pooled_cosine for members in families.values() for row in members]
    inexact = [gap for gap in gaps if gap > _EXACT] or [0.1]
    top = 10.0 ** math.floor(math.log10(min(inexact) / 3))
    bottom = max(inexact) * 2.2
    for name, members in families.items():
        points = [(row.cost.share, max(1 - row.drift.pooled_cosine, top)) for row in members]
        all_dense = not any(row.methods for row in members)
        axis.plot(*zip(*points, strict=True), label=name + " (all dense)" * all_dense, clip_on=False, **looks[name])
        for (x, y), row in zip(points, members, strict=True):
            if y > top and _has_room(families):
                _annotate(axis, x, y, f"{row.drift.pooled_cosine:.4f}", looks[name]["color"])
    axis.set_yscale("log")
    axis.set_ylim(bottom, top)
    ticks = [10.0**i for i in range(round(math.log10(top)), math.floor(math.log10(bottom)) + 1)]
    axis.set_yticks(ticks, ["1" if tick == ticks[0] else f"{1 - tick:.6g}" for tick in ticks])
    axis.set_ylabel("cosine with dense")
    axis.set_title("Mean-pooled embeddings", fontsize=10, loc="left", pad=11)


def _neighbours(axis: Any, families: dict[str, list[ModelRow]], looks: dict[str, dict[str, Any]]) -> None:
    for name, members in families.items():
        points = [(row.cost.share, 100 * (row.drift.agreement or 0.0)) for row in members]
        axis.plot(*zip(*points, strict=True), clip_on=False, **looks[name])
        for x, y in points:
            if name != "tuned" and _has_room(families):
                _annotate(axis, x, y, f"{y:.0f}%", looks[name]["color"])
    axis.set_ylim(0, 100)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    axis.set_ylabel("share of the documents")
    axis.set_title("Nearest other document is the same as with dense", fontsize=10, loc="left", pad=11)


def _times(axis: Any, families: dict[str, list[ModelRow]], looks: dict[str, dict[str, Any]], dense: ModelRow) -> None:
    for name, members in families.items():
        points = [(row.cost.share, time) for row in members if (time := relative_time(row, dense)) is not None]
        if points:
            axis.plot(*zip(*points, strict=True), **looks[name])
    axis.axhline(1, color="#9ca3af", linewidth=1, linestyle=":", zorder=0)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("multiple of dense")
    axis.set_title("Time of a forward pass", fontsize=10, loc="left", pad=11)


def _has_room(families: dict[str, list[ModelRow]]) -> bool:
    """Whether numbers fit beside the points without covering others."""
    return len(families.keys() - {"tuned"}) <= 2 and len(families.get("tuned", [])) <= 1


def _annotate(axis: Any, x: float, y: float, text: str, colour: str) -> None:
    """Write a number below and to the right of a point, where a rising curve leaves room."""
    axis.annotate(text, (x, y), (4, -11), textcoords="offset points", fontsize=8, color=colour)
