"""What `smyrf bench quality` does once its arguments are known to be good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from smyrf.call import Call
from smyrf.tools.bench import results
from smyrf.tools.quality.cases import Contender
from smyrf.tools.quality.measure import Exact, Quality, exact, measure
from smyrf.tools.quality.peers import PeerError
from smyrf.tools.quality.plot import plot as write_plot
from smyrf.tools.quality.table import table


def bench_quality(
    calls: Sequence[Call],
    entrants: Sequence[Contender],
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
    """Measures everything, prints the table, and writes what was asked for.

    Args:
        source: where q, k and v are from, for titles.
        config: for the result file.
    """
    torch.set_num_threads(threads)
    batch, heads, n_queries, width = calls[0].q.shape
    setting = (
        f"{source}: {len(calls)} layer{'s' * (len(calls) > 1)}, {batch} × {heads} heads of {width}, "
        f"{n_queries:,} queries, {calls[0].k.shape[2]:,} keys"
    )
    machine = f"{results.machine()['cpu']}, {threads} thread{'s' * (threads > 1)}"
    console.print(f"[bold]smyrf bench quality[/]: {setting}; {machine}", highlight=False)
    with console.status("dense attention"):
        layers = [exact(call, gradients, seed + i) for i, call in enumerate(calls)]

    def keep(qualities: list[Quality]) -> None:
        if json is not None:
            rows = [one.row() for one in qualities]
            results.write(json, results.command_line(), threads, config | {"gradients": gradients, "seed": seed}, rows)

    qualities = measure_all(entrants, layers, time=time, seed=seed, console=console, keep=keep)
    console.print(table(qualities, f"Error without retraining, {source}"))
    if json is not None:
        console.print(f"written: {json}")
    if plot is not None:
        for file in write_plot(qualities, plot, f"{setting}\n{machine}"):
            console.print(f"written: {file}")
    return qualities


def measure_all(
    entrants: Sequence[Contender],
    layers: Sequence[Exact],
    *,
    time: bool,
    seed: int,
    console: Console,
    keep: Callable[[list[Quality]], None],
) -> list[Quality]:
    """Measures one contender after the other.

    Args:
        keep: called with what there is after every contender, so that a kill loses nothing.

    Raises:
        PeerError: names the peer that failed.
    """
    qualities: list[Quality] = []
    for entrant in track(entrants, "error and time", console=console, transient=True):
        try:
            qualities.append(measure(entrant, layers, time=time, seed=seed))
        except Exception as error:
            if entrant.ours:
                raise
            raise PeerError(f"{entrant.label} failed at budget {entrant.budget}: {error}") from error
        keep(qualities)
    return qualities
