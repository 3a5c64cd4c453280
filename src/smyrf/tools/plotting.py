"""Figures as files: PNG to look at, SVG to enlarge."""

from __future__ import annotations

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


def save_figure(figure: Any, path: Path) -> list[Path]:
    """Writes a matplotlib figure as `path`.png and `path`.svg, closes it, and says what it wrote."""
    import matplotlib.pyplot as plt

    written = [path.with_name(path.name + suffix) for suffix in (".png", ".svg")]
    for file in written:
        with replacing(file) as temporary:
            figure.savefig(temporary, dpi=160, format=file.suffix[1:])
    plt.close(figure)
    return written
