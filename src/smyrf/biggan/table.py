"""Tables of images for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from smyrf.biggan.sample import Row
from smyrf.methods import method_label


def image_table(rows: Sequence[Row], title: str) -> Table:
    """Memory and distance to the images with dense attention."""
    found = Table(
        title=escape(title), title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    found.add_column("attention", no_wrap=True)
    for name in ("memory", "distance to dense"):
        found.add_column(name, justify="right")
    for row in rows:
        label = method_label(row.method)
        style = "bold" if label.startswith("Tangent") else ""
        found.add_row(label, f"{100 * row.share:.4g}%", f"{row.distance:.4f}", style=style)
    found.caption = "memory: key visits of a query, relative to dense; distance: ‖image − dense‖ / ‖dense‖"
    return found
