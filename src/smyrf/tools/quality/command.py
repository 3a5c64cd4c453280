"""Run `smyrf bench quality` on validated arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from smyrf.call import Call
from smyrf.tools.progress import track
from smyrf.tools.quality.entrants import Entrant
from smyrf.tools.quality.measure import Exact, Quality, exact, measure
from smyrf.tools.quality.peers import PeerError
from smyrf.tools.quality.plot import plot as write_plot
from smyrf.tools.quality.table import table
from smyrf.tools.results import machine_line, write_results
from smyrf.tools.tables import print_written


def bench_quality(
    calls: Sequence[Call],
    entrants: Sequence[Entrant],
    source: str,
    *,
    gradients: bool,
    time: bool,
    threads: int,
    seed: int,
    json: Path | None,
    plot: Path | None,
    config: dict[str, Any],
    console: Console,
) -> list[Quality]:
    """Measure everything, print the table, and write what was asked for.

    Args:
        source: origin of q, k and v, for titles.
        config: for the result file.
    """
    torch.set_num_threads(threads)
    batch, heads, n_queries, width = calls[0].q.shape
    setting = (
        f"{source}: {len(calls)} layer{'s' * (len(calls) > 1)}, {batch} × {heads} heads of {width}, "
        f"{n_queries:,} queries, {calls[0].k.shape[2]:,} keys"
    )
    machine = machine_line(threads)
    console.print(f"[bold]smyrf bench quality[/]: {setting}; {machine}", highlight=False)
    with console.status("dense attention"):
        layers = [exact(call, gradients, seed + i) for i, call in enumerate(calls)]

    def keep(qualities: list[Quality]) -> None:
        if json is not None:
            about = config | {"gradients": gradients, "seed": seed}
            write_results(json, [one.row() for one in qualities], threads=threads, config=about)

    qualities = measure_all(entrants, layers, time=time, seed=seed, console=console, keep=keep)
    console.print(table(qualities, f"Error without retraining, {source}"))
    print_written([json] if json is not None else [], console)
    if plot is not None:
        print_written(write_plot(qualities, plot, f"{setting}\n{machine}"), console)
    return qualities


def measure_all(
    entrants: Sequence[Entrant],
    layers: Sequence[Exact],
    *,
    time: bool,
    seed: int,
    console: Console,
    keep: Callable[[list[Quality]], None],
) -> list[Quality]:
    """Measure one entrant after the other.

    Args:
        keep: called with all results so far after every entrant, so that a kill loses nothing.

    Raises:
        PeerError: names the peer that failed.
    """
    qualities: list[Quality] = []
    for entrant in track(entrants, "error and time", total=len(entrants), console=console):
        try:
            qualities.append(measure(entrant, layers, time=time, seed=seed))
        except Exception as error:
            if entrant.ours:
                raise
            raise PeerError(f"{entrant.label} failed at budget {entrant.budget}: {error}") from error
        keep(qualities)
    return qualities
