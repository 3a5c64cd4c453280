"""What `smyrf bench` does once its arguments are known to be good."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from smyrf.methods import Smyrf, Tangent
from smyrf.tools.bench import plots, results, table
from smyrf.tools.bench.cases import PRESETS, Plan, Problem
from smyrf.tools.bench.run import run


def plan(
    preset: str | None,
    shapes: list[tuple[int, int]],
    methods: list[Smyrf | Tangent],
    *,
    heads: int,
    width: int,
    dtype: str,
    backward: bool,
    backends: tuple[str | None, ...] = (None,),
    without: tuple[str, ...] = (),
) -> Plan:
    """Problems and methods: those of a preset, or the given ones.

    Example:
        >>> len(plan("batch1", [], [], heads=4, width=64, dtype="float32", backward=True).problems)
        14
    """
    return Plan(
        problems=tuple(
            Problem(batch, heads, length, width, dtype, direction)
            for direction in ((False, True) if backward else (False,))
            for batch, length in (PRESETS[preset].shapes if preset else shapes)
        ),
        methods=PRESETS[preset].methods if preset else tuple(methods),
        backends=backends,
        without=without,
    )


def bench(
    what: Plan,
    title: str,
    *,
    threads: int,
    memory: bool,
    json: Path | None,
    plot: Path | None,
    console: Console,
) -> None:
    """Runs a plan, prints its tables, and writes what was asked for."""
    first = what.problems[0]
    setting = (
        f"{results.machine()['cpu']}, {threads} thread{'s' * (threads > 1)}, "
        f"{first.heads} heads of {first.width}, {first.dtype}"
    )
    console.print(f"[bold]{title}[/]: {setting}", highlight=False)

    def keep(measurements: list[results.Measurement]) -> None:
        if json is not None:
            config = {"backends": what.backends, "without": what.without, "memory": memory}
            results.save(json, results.command_line(), threads, config, measurements)

    measurements = run(what, threads=threads, memory=memory, console=console, keep=keep)
    for direction in dict.fromkeys(problem.backward for problem in what.problems):
        console.print(table.table(measurements, title, direction))
    if json is not None:
        console.print(f"written: {json}")
    if plot is not None:
        for file in plots.plot(measurements, plot, f"Attention on {setting}"):
            console.print(f"written: {file}")
