"""Plots of inspected heads: singular values, heat maps of layers × heads, captured mass, correlates of errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

from smyrf.tools.analysis.hardness import MEASURES, Hardness
from smyrf.tools.analysis.inspection import HeadInspection
from smyrf.tools.inspect.layers import by_family
from smyrf.tools.plotting import dress, family_looks, new_figure, save_figure, share_axis

# Singular values below this share of the largest are rounding, in float32 weights.
_ROUNDING = 1e-7
# Most measures to show for each method.
_MOST_MEASURES = 3
# Measures that differ by factors between heads.
_LOGARITHMIC = ("effective rank", "query spread", "alike")


def plot_all(heads: Sequence[HeadInspection], found: Sequence[Hardness], folder: Path, title: str) -> list[Path]:
    """Write all plots that have data into a folder, and return their paths.

    Args:
        heads: at least one.
        found: for the method of each family that the heat maps show.
    """
    written = []
    if any(head.spectrum for head in heads):
        written += plot_singular_values(heads, folder / "singular-values", title)
    if len(heads) > 1:
        written += plot_heads(heads, found, folder / "heads", title)
    if by_family(heads):
        written += plot_mass(heads, folder / "mass", title)
    if any(one.correlations for one in found):
        written += plot_reasons(heads, found, folder / "reasons", title)
    return written


def plot_singular_values(heads: Sequence[HeadInspection], path: Path, title: str) -> list[Path]:
    """Singular values of all heads on a logarithmic scale, as in the paper's appendix, coloured by layer."""
    from matplotlib import colormaps

    long = any(head.spectrum and len(head.spectrum.values) < head.spectrum.size for head in heads)
    what = _count(heads) + " in the first input" + ", the largest values of each" * long
    figure, ((axis,),) = new_figure(size=(7.2, 4.4), title=f"{title}\n{what}")
    layers = sorted({head.layer for head in heads})
    colours = colormaps["viridis"]
    for head in heads:
        if head.spectrum is None:
            continue
        largest = head.spectrum.values[0]
        values = [value for value in head.spectrum.values if value > _ROUNDING * largest]
        place = layers.index(head.layer) / max(1, len(layers) - 1)
        name = f"layer {head.layer}" if head.head == 0 else None
        axis.plot(range(1, len(values) + 1), values, color=colours(0.95 * place), linewidth=0.9, alpha=0.75, label=name)
    axis.set_yscale("log")
    axis.set_xlabel("number of the singular value")
    axis.set_ylabel("singular value of the attention map")
    axis.set_xlim(left=0)
    dress(axis)
    n_columns = 1 if len(layers) <= 16 else 2
    legend = figure.legend(loc="outside right center", frameon=False, fontsize=8, ncols=n_columns)
    for line in legend.get_lines():
        line.set(linewidth=2.2, alpha=1.0)
    return save_figure(figure, path)


def plot_heads(heads: Sequence[HeadInspection], found: Sequence[Hardness], path: Path, title: str) -> list[Path]:
    """Layers × heads: sparsity, entropy, effective rank, and the error of a method of each family."""
    panels: list[tuple[str, Callable[[HeadInspection], float], str, str]] = [
        ("keys with a weight below 0.01", lambda head: 100 * head.below_small, "{:.0f}%", "YlGnBu"),
        ("keys with a weight below 1/M", lambda head: 100 * head.below_uniform, "{:.0f}%", "YlGnBu"),
        ("entropy, relative to its maximum", lambda head: 100 * head.entropy_share, "{:.0f}%", "YlGnBu"),
    ]
    if all(head.spectrum for head in heads):
        panels.append(("effective rank", lambda head: head.effective_rank, "{:.3g}", "YlGnBu"))
    for one in found:
        panels.append((f"error of {one.method.label}", _error_of(_number(heads[0], one)), "{:.2f}", "YlOrRd"))
    layers = sorted({head.layer for head in heads})
    n_heads = 1 + max(head.head for head in heads)
    n_columns = min(3, len(panels))
    n_rows = -(-len(panels) // n_columns)
    width, height = max(2.6, 0.42 * n_heads), max(0.7, 0.34 * len(layers))
    size = (0.6 + n_columns * (width + 0.5), 0.6 + n_rows * (height + 0.7))
    figure, axes = new_figure(n_rows, n_columns, size=size, title=title)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (name, of, form, colours) in zip(axes.flat, panels, strict=False):
        values = [[math.nan] * n_heads for _ in layers]
        for head in heads:
            values[layers.index(head.layer)][head.head] = of(head)
        _heat(axis, values, colours, form, logarithmic=name == "effective rank")
        axis.set_title(name, fontsize=9, loc="left")
        axis.set_yticks(range(len(layers)), [str(layer) for layer in layers])
        axis.set_xticks(range(n_heads), [str(head) for head in range(n_heads)])
    for row in axes:
        row[0].set_ylabel("layer", fontsize=8)
    for axis in axes.flat[max(0, len(panels) - n_columns) : len(panels)]:  # the lowest one of each column
        axis.set_xlabel("head", fontsize=8)
    return save_figure(figure, path)


def plot_mass(heads: Sequence[HeadInspection], path: Path, title: str) -> list[Path]:
    """Captured softmax mass against key visits: mean and middle 80% of the heads."""
    what = "mean of " * (len(heads) > 1) + _count(heads) + "; band: the middle 80% of them" * (len(heads) > 1)
    figure, ((axis,),) = new_figure(size=(6.4, 4.4), title=f"{title}\n{what}")
    best: dict[float, float] = {}
    families = by_family(heads)
    looks = family_looks(families)
    for name, numbers in families.items():
        look = looks[name]
        shares = [fmean(head.outcomes[i].share for head in heads) for i in numbers]
        masses = [[100 * head.outcomes[i].captured for head in heads] for i in numbers]
        best |= {s: fmean(100 * head.outcomes[i].best for head in heads) for s, i in zip(shares, numbers, strict=True)}
        axis.plot(shares, [fmean(mass) for mass in masses], marker="o", markersize=5, linewidth=2.2, label=name, **look)
        if len(heads) > 1:
            tenths = [quantiles(mass, n=10, method="inclusive") for mass in masses]
            low, high = [tenth[0] for tenth in tenths], [tenth[-1] for tenth in tenths]
            axis.fill_between(shares, low, high, color=look["color"], alpha=0.13, linewidth=0)
    axis.plot(
        sorted(best),
        [best[share] for share in sorted(best)],
        color="#0e7490",
        linestyle=":",
        marker="x",
        linewidth=1.8,
        label="heaviest keys of each query",
    )
    axis.set_ylim(0, 102)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    axis.set_ylabel("softmax mass of the visited keys")
    dress(axis)
    share_axis(axis, min(best))
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return save_figure(figure, path)


def plot_reasons(heads: Sequence[HeadInspection], found: Sequence[Hardness], path: Path, title: str) -> list[Path]:
    """Error of each head against the measures that correlate with it most, one row per method."""
    found = [one for one in found if one.correlations]
    n_columns = min(_MOST_MEASURES, max(len(one.correlations) for one in found))
    size = (3.1 * n_columns + 0.4, 2.7 * len(found) + 0.5)
    heading = f"{title}\na point is a head, darker in earlier layers"
    figure, axes = new_figure(len(found), n_columns, size=size, title=heading)
    measures = {measure.name: measure for measure in MEASURES}
    layers = sorted({head.layer for head in heads})
    for row, one in zip(axes, found, strict=True):
        i = _number(heads[0], one)
        errors = [head.outcomes[i].error for head in heads]
        for axis in row[len(one.correlations) :]:
            axis.set_visible(False)
        for axis, its in zip(row, one.correlations, strict=False):
            values = [measures[its.measure].of(head, i) or 0.0 for head in heads]
            colours = [layers.index(head.layer) for head in heads]
            axis.scatter(
                values, errors, c=colours, cmap="viridis", vmax=1.05 * max(1, len(layers) - 1), s=16, alpha=0.85
            )
            if its.measure in _LOGARITHMIC and min(values) > 0:
                axis.set_xscale("log")
            sign = "" if its.holds else ", may be chance"
            axis.set_title(f"{its.measure}: ρ = {its.rho:+.2f}{sign}", fontsize=9, loc="left")
            axis.set_ylim(bottom=0)
            dress(axis)
        row[0].set_ylabel(f"error of {one.method.label}", fontsize=9)
    return save_figure(figure, path)


def _heat(axis: Any, values: list[list[float]], colours: str, form: str, logarithmic: bool) -> None:
    """A heat map with its numbers in the cells."""
    from matplotlib.colors import LogNorm

    finite = [value for row in values for value in row if not math.isnan(value)]
    low, high = min(finite), max(finite)
    if form.endswith("%") and high - low < 10:  # whole per cents would hide the differences
        form = "{:.1f}%"
    norm = LogNorm(low, max(high, low * 1.001)) if logarithmic else None
    image = axis.imshow(values, cmap=colours, aspect="auto", norm=norm)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if not math.isnan(value):
                dark = image.norm(value) > 0.6
                axis.text(
                    x, y, form.format(value), ha="center", va="center", fontsize=6, color="white" if dark else "#1f2937"
                )
    axis.tick_params(labelsize=7, length=0)
    axis.spines[:].set_visible(False)


def _count(heads: Sequence[HeadInspection]) -> str:
    return f"{len(heads)} head{'s' * (len(heads) > 1)}"


def _number(head: HeadInspection, found: Hardness) -> int:
    return [one.method for one in head.outcomes].index(found.method)


def _error_of(method: int) -> Callable[[HeadInspection], float]:
    return lambda head: head.outcomes[method].error
