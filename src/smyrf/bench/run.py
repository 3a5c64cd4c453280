"""One run of the benchmark: every contender on every problem, with a progress bar."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from smyrf.bench import peak
from smyrf.bench.cases import Plan, Problem
from smyrf.bench.contenders import DENSE, SDPA, contender, needed_bytes
from smyrf.bench.results import Measurement
from smyrf.bench.table import duration
from smyrf.bench.timing import once, seconds
from smyrf.methods import Smyrf, Tangent


def run(
    plan: Plan,
    *,
    threads: int,
    memory: bool,
    backend: str | None,
    console: Console,
    keep: Callable[[list[Measurement]], None],
) -> list[Measurement]:
    """Measures the whole plan; what does not fit into memory is skipped and says so.

    Args:
        keep: called with what there is after every problem, so that a kill loses little.
    """
    torch.set_num_threads(threads)
    measurements: list[Measurement] = []
    progress = Progress(
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with progress:
        n_steps = len(plan.problems) * len(_contenders(plan)) * (2 if memory else 1)
        task = progress.add_task("measuring", total=n_steps)
        for problem in plan.problems:
            measurements += _time_all(plan, problem, backend, progress, task)
            keep(measurements)
        if memory:
            for i, one in enumerate(measurements):
                progress.update(task, description=f"memory of {one.label} at {one.problem.length:,}")
                if one.seconds is not None:
                    try:
                        found = peak.extra_bytes(one.name, one.problem, one.method, threads, backend)
                        measurements[i] = replace(one, extra_bytes=found)
                    except RuntimeError as error:
                        measurements[i] = replace(one, skipped=str(error))
                    keep(measurements)
                progress.advance(task)
    return measurements


def _contenders(plan: Plan) -> list[tuple[str, Smyrf | Tangent | None]]:
    found: list[tuple[str, Smyrf | Tangent | None]] = [
        ("smyrf" if isinstance(method, Smyrf) else "tangent", method) for method in plan.methods
    ]
    first = next((method for method in plan.methods if isinstance(method, Smyrf)), None)
    if first is not None:
        found.append(("eager smyrf", first))
    return [*found, (SDPA, None), (DENSE, None)]


def _time_all(plan: Plan, problem: Problem, backend: str | None, progress: Progress, task: TaskID) -> list[Measurement]:
    found: dict[str, Measurement] = {}
    calls = {}
    for name, method in _contenders(plan):
        one = Measurement(problem, name, method)
        reason = _why_not(one)
        found[one.label] = replace(one, skipped=reason)
        if reason is None:
            calls[one.label] = once(contender(name, method, backend), problem)
    for label, best in seconds(calls):
        found[label] = replace(found[label], seconds=best)
        direction = "forward + backward" if problem.backward else "forward"
        progress.update(task, description=f"{label} at {problem.length:,}, {direction}: {duration(best)}")
    progress.advance(task, len(found))
    return list(found.values())


def _why_not(one: Measurement) -> str | None:
    p = one.problem
    if one.name == "eager smyrf" and isinstance(one.method, Smyrf) and p.length % one.method.cluster_size:
        return "length is not a multiple of the cluster size"
    needed = needed_bytes(one.name, p, one.method)
    available = _available_bytes()
    if available is not None and needed > 0.8 * available:
        return f"needs {needed / 1e9:.0f} GB"
    return None


def _available_bytes() -> int | None:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
