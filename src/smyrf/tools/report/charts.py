"""Plotly charts of a report; the page sets their colours.

A chart is a dictionary: ``id``, ``title``, ``layout``, and ``data`` or several labelled ``choices`` of data. The
``meta`` of a trace names the family of methods whose colour it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from smyrf.tools.analysis.inspection import HeadInspection
from smyrf.tools.compare.run import ModelRow, relative_time
from smyrf.tools.inspect.layers import HeadSet, by_family
from smyrf.tools.report.findings import Findings

Chart = dict[str, Any]
DENSE = "Dense"
# Smaller errors are rounding; a logarithmic axis cannot show zero.
LEAST = 1e-6


def trade_off(findings: Findings) -> list[Chart]:
    """Error of the model's outputs against key visits, time and memory."""
    rows, dense = findings.rows[1:], findings.rows[0]
    found = [_against(rows, "visits", "error against key visits", "key visits, % of dense", _share)]
    if any(relative_time(row, dense) for row in rows):
        found.append(_against(rows, "time", "error against time", "time, % of dense", lambda row: _percent(row, dense)))
    if dense.extra_bytes and any(row.extra_bytes for row in rows):
        found.append(
            _against(
                rows,
                "memory",
                "error against memory",
                "peak memory, % of dense",
                lambda row: None if row.extra_bytes is None else 100 * row.extra_bytes / (dense.extra_bytes or 1),
            )
        )
    return found


def _share(row: ModelRow) -> float | None:
    return 100 * row.cost.share


def _percent(row: ModelRow, dense: ModelRow) -> float | None:
    time = relative_time(row, dense)
    return None if time is None else 100 * time


def _against(
    rows: Sequence[ModelRow], name: str, title: str, axis: str, of: Callable[[ModelRow], float | None]
) -> Chart:
    families: dict[str, list[ModelRow]] = {}
    for row in rows:
        families.setdefault(row.family, []).append(row)
    data = []
    for family, its in families.items():
        its.sort(key=lambda row: row.cost.share)  # lines run from small to large budgets
        its = [row for row in its if math.isfinite(row.drift.error)]
        points = [(x, max(row.drift.error, LEAST), row.label) for row in its if (x := of(row)) is not None]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(points) > 1 else "markers",
                "name": family,
                "meta": family,
                "x": [point[0] for point in points],
                "y": [point[1] for point in points],
                "text": [point[2] for point in points],
                "hovertemplate": "%{text}<br>%{x:.3g}%<br>error %{y:.3g}<extra></extra>",
            }
        )
    layout = {"xaxis": {"title": {"text": axis}, "rangemode": "tozero"}, "yaxis": _error_axis("error of the outputs")}
    return {"id": f"chart-{name}", "title": title, "data": data, "layout": layout}


def _error_axis(title: str) -> dict[str, Any]:
    # Errors often span less than a power of ten; few ticks then fall on 1, 2 and 5.
    return {"type": "log", "title": {"text": title}, "nticks": 4, "tickformat": "~g"}


def heat_maps(findings: Findings) -> list[Chart]:
    """Layers × heads: measures of the maps, and the error of each method."""
    heads = findings.heads
    maps: list[tuple[str, Callable[[HeadInspection], float]]] = [
        ("entropy, relative to its maximum", lambda head: head.entropy_share),
        ("keys below a weight of 0.01, share", lambda head: head.below_small),
        ("keys below a weight of 1/M, share", lambda head: head.below_uniform),
    ]
    if heads[0].spectrum is not None:
        maps.append(("effective rank", lambda head: head.effective_rank))
    errors = [
        (f"error of {one.method.label}", lambda head, i=i: head.outcomes[i].error)
        for i, one in enumerate(heads[0].outcomes)
    ]
    return [
        _heat("chart-maps", "measures of the maps", heads, maps),
        _heat("chart-errors", "errors of methods", heads, errors),
    ]


def _heat(name: str, title: str, heads: Sequence[HeadInspection], measures: Sequence[Any]) -> Chart:
    layers = sorted({head.layer for head in heads})
    numbers = sorted({head.head for head in heads})
    places = {(head.layer, head.head): head for head in heads}
    choices = []
    for label, of in measures:
        z = [[of(places[layer, n]) if (layer, n) in places else None for n in numbers] for layer in layers]
        trace = {
            "type": "heatmap",
            "x": numbers,
            "y": layers,
            "z": z,
            "colorscale": "YlOrRd",
            "reversescale": True,
            "hovertemplate": "layer %{y}, head %{x}<br>%{z:.3g}<extra></extra>",
            "colorbar": {"thickness": 10},
        }
        choices.append({"label": label, "data": [trace]})
    layout = {
        "xaxis": {"title": {"text": "head"}, "dtick": max(1, len(numbers) // 12)},
        "yaxis": {"title": {"text": "layer"}, "autorange": "reversed", "dtick": max(1, len(layers) // 12)},
    }
    return {"id": name, "title": title, "choices": choices, "layout": layout}


def singular_values(findings: Findings) -> Chart | None:
    """Singular values of every head's map, relative to the largest; one line per head, coloured by layer."""
    heads = [head for head in findings.heads if head.spectrum is not None and head.spectrum.values[0] > 0.0]
    if not heads:
        return None
    n_layers = max(head.layer for head in heads) + 1
    data = []
    for head in heads:
        assert head.spectrum is not None
        values = [value / head.spectrum.values[0] for value in head.spectrum.values]
        y = [value if value > LEAST else None for value in values]
        hue = 15 + 210 * head.layer / max(1, n_layers - 1)
        data.append(
            {
                "type": "scattergl" if len(heads) > 400 else "scatter",
                "mode": "lines",
                "x": list(range(1, len(y) + 1)),
                "y": [None if value is None else round(value, 7) for value in y],
                "line": {"width": 1, "color": f"hsl({hue:.0f}, 65%, 52%)"},
                "opacity": 0.55,
                "showlegend": False,
                "hovertemplate": f"layer {head.layer}, head {head.head}<br>%{{x}}: %{{y:.2g}}<extra></extra>",
            }
        )
    powers = {"type": "log", "title": {"text": "relative to the largest"}, "exponentformat": "power", "dtick": 1}
    layout = {"xaxis": {"title": {"text": "singular value"}}, "yaxis": powers}
    return {"id": "chart-singular", "title": "singular values of all heads", "data": data, "layout": layout}


def captured_mass(findings: Findings) -> Chart | None:
    """Softmax mass of the visited keys against key visits, and the most that this number of keys can hold."""
    everything = HeadSet("all", findings.heads)
    data: list[dict[str, Any]] = []
    best: dict[float, float] = {}
    for family, numbers in by_family(findings.heads).items():
        shares = [100 * everything.outcome(i, lambda one: one.share) for i in numbers]
        masses = [100 * everything.outcome(i, lambda one: one.captured) for i in numbers]
        best |= dict(zip(shares, (100 * everything.outcome(i, lambda one: one.best) for i in numbers), strict=True))
        label = "%{x:.3g}% of the key visits<br>%{y:.3g}% of the mass"
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": family,
                "meta": family,
                "x": shares,
                "y": masses,
                "hovertemplate": f"{family}<br>{label}<extra></extra>",
            }
        )
    if not data:
        return None
    line = {"dash": "dot", "width": 1.5}
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "heaviest keys",
            "meta": DENSE,
            "x": sorted(best),
            "y": [best[share] for share in sorted(best)],
            "line": line,
            "hovertemplate": "the heaviest %{x:.3g}% hold %{y:.3g}%<extra></extra>",
        }
    )
    layout = {
        "xaxis": {"title": {"text": "key visits, % of dense"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "captured softmax mass, %"}, "range": [0, 102]},
    }
    return {"id": "chart-mass", "title": "captured softmax mass", "data": data, "layout": layout}


def by_layer(findings: Findings) -> Chart | None:
    """Error of each method by layer."""
    layers = sorted({head.layer for head in findings.heads})
    if len(layers) < 2:
        return None
    data = []
    for family, numbers in by_family(findings.heads).items():
        number = numbers[len(numbers) // 2]
        errors = [
            max(fmean(head.outcomes[number].error for head in findings.heads if head.layer == layer), LEAST)
            for layer in layers
        ]
        name = findings.heads[0].outcomes[number].method.label
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "meta": family,
                "x": layers,
                "y": errors,
                "hovertemplate": f"{name}<br>layer %{{x}}: %{{y:.3g}}<extra></extra>",
            }
        )
    if not data:
        return None
    layout = {"xaxis": {"title": {"text": "layer"}, "dtick": 1}, "yaxis": _error_axis("error of a head, mean")}
    return {"id": "chart-layers", "title": "error by layer", "data": data, "layout": layout}
