"""Qualities as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.table import Table

from smyrf.tools.quality.measure import Quality


def table(qualities: Sequence[Quality], title: str) -> Table:
    """One row per contender, by budget, then by error; ours in bold."""
    # Narrow enough for 80 columns with everything in it.
    found = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0)
    gradients = any(one.map is not None for one in qualities)
    time = any(one.seconds is not None for one in qualities)
    names = ["budget", "attention", "visits", "error", "worst"]
    names += ["map", "dq", "dk"] if gradients else []
    names += ["time"] if time else []
    for name in names:
        if name == "attention":  # the only column that may be cut
            found.add_column(name, no_wrap=True)
        else:
            found.add_column(name, justify="right", no_wrap=True, min_width=max(5, len(name)))
    budget = None
    for one in sorted(qualities, key=lambda one: (one.contender.budget, one.error)):
        fresh = one.contender.budget != budget
        if fresh and budget is not None:
            found.add_section()
        budget = one.contender.budget
        cells = [
            str(budget) if fresh else "",
            one.contender.label,
            f"{one.contender.key_visits:.0f}",
            f"{one.error:.3f}",
            f"{max(one.out):.3f}",
        ]
        if gradients:
            cells += ["" if errors is None else f"{fmean(errors):.3f}" for errors in (one.map, one.dq, one.dk)]
        if time:
            cells.append("" if one.relative_time is None else f"{one.relative_time:.2f}")
        found.add_row(*cells, style="bold" if one.contender.ours else "")
    found.caption = "error: ‖output − dense‖ / ‖dense‖, mean over layers, and worst layer"
    if gradients:
        found.caption += "; map: of the attention map, Frobenius (= dv); dq, dk: of the gradients"
    if time:
        found.caption += "; time: forward, as a multiple of PyTorch's fused attention"
    found.caption_justify = "left"
    return found
