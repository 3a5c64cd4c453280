"""Tables for the terminal, and the formats of the numbers in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from smyrf.models.plan import COLUMNS, Plan


def new_table(title: str, names: Sequence[str], *, padding: int = 1) -> Table:
    """An empty table: the first column holds labels, which may be cut; the others hold numbers.

    Args:
        padding: blanks after each column; 0 for a table that would not fit 80 characters.
    """
    found = Table(
        title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, padding=(0, padding, 0, 0)
    )
    found.add_column(names[0], no_wrap=True)
    for name in names[1:]:
        found.add_column(name, justify="right", min_width=max(map(len, name.split())))
    return found


def with_note(found: Table, note: str) -> Group:
    """A table and a note below it; a caption would lose words at the edge of a narrow terminal."""
    return Group(found, Text(note, style="table.caption"))


def print_written(paths: Sequence[Path], console: Console) -> None:
    """Name the files that were written, one per line."""
    for path in paths:
        console.print(f"written: {escape(str(path))}", highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Three digits and a unit.

    Example:
        >>> duration(0.000123), duration(0.01234), duration(2.5)
        ('123 µs', '12.3 ms', '2.50 s')
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    return f"{seconds:.3g} s" if seconds >= 100 else f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def megabytes(n_bytes: float) -> str:
    """Megabytes (10⁶ bytes).

    Example:
        >>> megabytes(3_145_728), megabytes(123_456_789)
        ('3.1 MB', '123 MB')
    """
    return f"{n_bytes / 1e6:,.0f} MB" if n_bytes >= 1e7 else f"{n_bytes / 1e6:.1f} MB"


def plan_table(plan: Plan, title: str) -> Table:
    """A tuned plan, one row per layer, with replaced layers in bold."""
    found = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        text = name in ("method", "why")
        found.add_column(name, justify="left" if text else "right", no_wrap=not text)
    for layer in plan.layers:
        found.add_row(*layer.cells(), style="bold" if layer.key_visits < layer.n_keys else "")
    found.caption = f"{plan.summary}; error: ‖output − dense‖ / ‖dense‖, estimated; speed-up: over dense attention"
    return found
