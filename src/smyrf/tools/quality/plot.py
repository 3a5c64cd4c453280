"""Plots of error against key visits and against time, and of the map's error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from smyrf.tools.plotting import dress, new_figure, save_figure
from smyrf.tools.quality.measure import Quality

# Ours in warm colours, peers in blue and grey; the methods before their ablations.
_OURS = ("#7c2d12", "#f59e0b", "#c2410c", "#be123c")
_ABLATIONS = ("#fdba74", "#fca5a5", "#fcd34d", "#d6b48a", "#f0abfc")
_PEERS = ("#111827", "#1d4ed8", "#60a5fa", "#0e7490", "#6b7280", "#9ca3af", "#a5b4fc", "#cbd5e1")
_MARKERS = "osD^vP*X"


def plot(qualities: Sequence[Quality], path: Path, title: str) -> list[Path]:
    """Write `path`.png and `path`.svg, and return the paths.

    A curve is a family: at each budget its sizes with the smallest error; against time, its Pareto front.
    """
    panels = [_Panel("key visits per query", "error of the output", _visits, _error, _best_of_budgets)]
    if any(one.map is not None for one in qualities):
        panels.append(
            _Panel("key visits per query", "error of the attention map", _visits, _map_error, _best_of_budgets)
        )
    if any(one.seconds is not None for one in qualities):
        panels.append(
            _Panel("time, relative to PyTorch's fused attention", "error of the output", _time, _error, _front)
        )
    figure, axes = new_figure(1, len(panels), size=(4.4 * len(panels) + 2.2, 4.6), title=title)
    families: dict[str, list[Quality]] = {}
    for one in qualities:
        families.setdefault(one.entrant.family, []).append(one)
    looks = _looks(families)
    handles: dict[str, Any] = {}
    for axis, panel in zip(axes[0], panels, strict=True):
        for name in looks:
            points = [(panel.x(one), panel.y(one)) for one in panel.choose(families[name])]
            (handles[name],) = axis.plot(*zip(*points, strict=True), **looks[name])
        _dress(axis, panel)
        if panel.x is _visits:
            budgets = sorted({one.entrant.budget for one in qualities})
            axis.set_xticks(budgets, [str(budget) for budget in budgets])
            axis.xaxis.minorticks_off()
        else:
            axis.axvline(1.0, color="#9ca3af", linewidth=1, linestyle=":", zorder=0)
    figure.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False, fontsize=9)
    return save_figure(figure, path)


class _Panel(NamedTuple):
    x_name: str
    y_name: str
    x: Callable[[Quality], float]
    y: Callable[[Quality], float]
    choose: Callable[[list[Quality]], list[Quality]]


def _dress(axis: Any, panel: _Panel) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel(panel.x_name)
    axis.set_ylabel(panel.y_name)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    # Between powers of ten, 2 and 5 are enough.
    axis.yaxis.set_minor_formatter(lambda value, _: f"{value:.1g}" if f"{value:e}"[0] in "25" else "")
    dress(axis)
    axis.tick_params(which="both", labelsize=8)


def _looks(families: dict[str, list[Quality]]) -> dict[str, dict[str, Any]]:
    """How each curve is drawn: our methods, then their ablations, then peers."""
    ours = [name for name, members in families.items() if members[0].entrant.ours]
    ablations = [name for name in ours if name.startswith("Smyrf, ") and not name.endswith("pairs once")]
    looks: dict[str, dict[str, Any]] = {}
    for names, colours, style, width, order in (
        ([name for name in ours if name not in ablations], _OURS, "-", 2.4, 4),
        (ablations, _ABLATIONS, "--", 1.3, 3),
        ([name for name in families if name not in ours], _PEERS, "-", 1.6, 2),
    ):
        for i, name in enumerate(names):
            looks[name] = {
                "color": colours[i % len(colours)],
                "marker": _MARKERS[i % len(_MARKERS)],
                "markersize": 5 if width > 2 else 4,
                "linestyle": style,
                "linewidth": width,
                "zorder": order,
            }
    return looks


def _best_of_budgets(family: list[Quality]) -> list[Quality]:
    budgets = sorted({one.entrant.budget for one in family})
    return [min((one for one in family if one.entrant.budget == budget), key=_error) for budget in budgets]


def _front(family: list[Quality]) -> list[Quality]:
    """Those with a smaller error than all faster ones, from fast to slow."""
    front: list[Quality] = []
    for one in sorted(family, key=_time):
        if not front or one.error < front[-1].error:
            front.append(one)
    return front


def _visits(one: Quality) -> float:
    return one.entrant.key_visits


def _time(one: Quality) -> float:
    return math.nan if one.relative_time is None else one.relative_time


def _error(one: Quality) -> float:
    return one.error


def _map_error(one: Quality) -> float:
    return math.nan if one.map is None else fmean(one.map)
