"""Run a suite of `smyrf bench`, print its tables, and write its results."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from smyrf.tools.bench.measurement import Measurement, rows
from smyrf.tools.bench.plot import plot as write_plot
from smyrf.tools.bench.problems import Suite
from smyrf.tools.bench.run import run
from smyrf.tools.bench.table import table
from smyrf.tools.results import machine_line, write_results
from smyrf.tools.tables import print_written


def run_suite(
    suite: Suite,
    title: str,
    *,
    threads: int,
    memory: bool,
    json: Path | None,
    plot: Path | None,
    console: Console,
) -> None:
    """Measure everything, print the tables, and write what was asked for.

    Args:
        memory: measure peak memory too.
        json: file for the results.
        plot: path of the plots, without suffix.
    """
    first = suite.problems[0]
    setting = f"{machine_line(threads)}, {first.heads} heads of {first.width}, {first.dtype}"
    console.print(f"[bold]{title}[/]: {setting}", highlight=False)

    def keep(measurements: list[Measurement]) -> None:
        if json is not None:
            config = {"backends": suite.backends, "without": suite.without, "memory": memory}
            write_results(json, rows(measurements), threads=threads, config=config)

    measurements = run(suite, threads=threads, memory=memory, console=console, keep=keep)
    for backward in dict.fromkeys(problem.backward for problem in suite.problems):
        console.print(table(measurements, title, backward))
    print_written([json] if json is not None else [], console)
    if plot is not None:
        print_written(write_plot(measurements, plot, f"Attention on {setting}"), console)
