"""Qualities as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.table import Table

from smyrf.tools.quality.measure import Quality
from smyrf.tools.tables import new_table


def table(qualities: Sequence[Quality], title: str) -> Table:
    """One row per entrant, by budget, then by error; ours in bold."""
    gradients = any(one.map is not None for one in qualities)
    time = any(one.seconds is not None for one in qualities)
    names = ["attention", "budget", "visits", "error", "worst"]
    names += ["map", "dq", "dk"] if gradients else []
    names += ["time"] if time else []
    found = new_table(title, names, padding=0)
    budget = None
    for one in sorted(qualities, key=lambda one: (one.entrant.budget, one.error)):
        fresh = one.entrant.budget != budget
        if fresh and budget is not None:
            found.add_section()
        budget = one.entrant.budget
        cells = [
            one.entrant.label,
            str(budget) if fresh else "",
            f"{one.entrant.key_visits:.0f}",
            f"{one.error:.3f}",
            f"{max(one.out):.3f}",
        ]
        if gradients:
            cells += ["" if errors is None else f"{fmean(errors):.3f}" for errors in (one.map, one.dq, one.dk)]
        if time:
            cells.append("" if one.relative_time is None else f"{one.relative_time:.2f}")
        found.add_row(*cells, style="bold" if one.entrant.ours else "")
    found.caption = "error: ‖output − dense‖ / ‖dense‖, averaged over layers, and of the worst layer"
    if gradients:
        found.caption += "; map: of the attention map, Frobenius (= dv); dq, dk: of the gradients"
    if time:
        found.caption += "; time: forward, as a multiple of PyTorch's fused attention"
    return found
