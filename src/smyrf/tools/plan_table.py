"""A plan as a table for the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table

from smyrf.models.plan import COLUMNS, Plan


def table(plan: Plan, title: str) -> Table:
    """One row per layer; what was replaced in bold."""
    found = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        text = name in ("method", "why")
        found.add_column(name, justify="left" if text else "right", no_wrap=not text)
    for layer in plan.layers:
        found.add_row(*layer.cells(), style="bold" if layer.key_visits < layer.n_keys else "")
    found.caption = f"{plan.summary}; error: ‖output − dense‖ / ‖dense‖, estimated; speed-up: over dense attention"
    found.caption_justify = "left"
    return found
