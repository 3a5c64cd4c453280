"""Figures as files: PNG to look at, SVG to enlarge."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save_figure(figure: Any, path: Path) -> list[Path]:
    """Writes a matplotlib figure as `path`.png and `path`.svg, closes it, and says what it wrote."""
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    written = [path.with_name(path.name + suffix) for suffix in (".png", ".svg")]
    for file in written:
        figure.savefig(file, dpi=160)
    plt.close(figure)
    return written
