"""Figures: their common look, and writing them as PNG and SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

from smyrf.atomic_write import replacing

# One look for a family of methods in all figures: the paper's in grey, ours in warm colours.
LOOKS: dict[str, dict[str, Any]] = {
    "Smyrf": {"color": "#1f2937", "linestyle": "-"},
    "Smyrf, pairs once": {"color": "#6b7280", "linestyle": "--"},
    "Tangent": {"color": "#c2410c", "linestyle": "-"},
    "Tangent, one level": {"color": "#f59e0b", "linestyle": "-"},
    "Tangent, 2 levels": {"color": "#7c2d12", "linestyle": "-"},
}
# Colours of families without a look in `LOOKS`, in turn.
_OTHERS = ("#be123c", "#7c3aed", "#4d7c0f", "#1d4ed8", "#0891b2")


def family_looks(families: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour and line style of each family of methods."""
    others = cycle(_OTHERS)
    return {name: LOOKS.get(name) or {"color": next(others)} for name in families}


def new_figure(
    n_rows: int = 1, n_columns: int = 1, *, size: tuple[float, float], title: str = "", **options: Any
) -> tuple[Any, Any]:
    """A matplotlib figure with a title at the top left, and its axes as an ``(n_rows, n_columns)`` array.

    Args:
        size: width and height in inches.
        options: for ``Figure.subplots``.

    Raises:
        ModuleNotFoundError: names the extra that installs matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plots need matplotlib: pip install 'smyrf[plots]'") from error
    figure = Figure(figsize=size, layout="constrained")
    if title:
        figure.suptitle(title, fontsize=10, x=0.012, ha="left", parse_math=False)
    return figure, figure.subplots(n_rows, n_columns, squeeze=False, **options)


def dress(axis: Any) -> None:
    """A light grid, and no frame at the top and the right."""
    axis.grid(True, alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=9)


def share_axis(axis: Any, least: float) -> None:
    """A logarithmic x axis for the share of keys visited, from `least` to 1, with ticks at powers of two."""
    axis.set_xscale("log", base=2)
    ticks = [2.0**-i for i in range(math.ceil(-math.log2(least) - 0.02) + 1)]
    axis.set_xticks(ticks, [f"{100 * tick:.3g}%" for tick in ticks])
    axis.set_xlim(ticks[-1] / 1.25, 1.1)
    axis.minorticks_off()
    axis.set_xlabel("keys visited, as a share of dense")


def save_figure(figure: Any, path: Path) -> list[Path]:
    """Write a matplotlib figure as `path`.png and `path`.svg, close it, and return the paths."""
    import matplotlib.pyplot as plt

    written = [path.with_name(path.name + suffix) for suffix in (".png", ".svg")]
    for file in written:
        with replacing(file) as temporary:
            figure.savefig(temporary, dpi=160, format=file.suffix[1:])
    plt.close(figure)
    return written
