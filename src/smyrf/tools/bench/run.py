"""One run of the benchmark: every contender on every problem, with a progress bar."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from smyrf.methods import Smyrf, Tangent
from smyrf.tools.bench import peak_memory as peak
from smyrf.tools.bench import roofline as gemm
from smyrf.tools.bench.cases import Plan, Problem
from smyrf.tools.bench.contenders import DENSE, EAGER, SDPA, contender, needed_bytes
from smyrf.tools.bench.results import Measurement
from smyrf.tools.bench.table import duration
from smyrf.tools.bench.timing import once, seconds

# For each contender on each problem.
TIMING_SECONDS = 1.5


def run(
    plan: Plan,
    *,
    threads: int,
    memory: bool,
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
            measurements += _time_all(plan, problem, progress, task)
            keep(measurements)
        if memory:
            for i, one in enumerate(measurements):
                progress.update(task, description=f"memory of {one.label} at {one.problem.length:,}")
                if one.seconds is not None:
                    try:
                        found = peak.extra_bytes(one.name, one.problem, one.method, threads, one.backend)
                        measurements[i] = replace(one, extra_bytes=found)
                    except RuntimeError as error:
                        measurements[i] = replace(one, skipped=str(error))
                    keep(measurements)
                progress.advance(task)
    return measurements


def _contenders(plan: Plan) -> list[tuple[str, Smyrf | Tangent | None, str | None]]:
    """Name, method and backend of each."""
    ours: list[tuple[str, Smyrf | Tangent | None, str | None]] = [
        ("smyrf" if isinstance(method, Smyrf) else "tangent", method, backend)
        for method in plan.methods
        for backend in plan.backends
    ]
    first = next((method for method in plan.methods if isinstance(method, Smyrf)), None)
    eager: list[tuple[str, Smyrf | Tangent | None, str | None]] = [] if first is None else [(EAGER, first, None)]
    return ours + [one for one in (*eager, (SDPA, None, None), (DENSE, None, None)) if one[0] not in plan.without]


def _time_all(plan: Plan, problem: Problem, progress: Progress, task: TaskID) -> list[Measurement]:
    """Best times of all contenders on a problem, in turn with large matrix products."""
    found: dict[str, Measurement] = {}
    calls = gemm.products(problem.dtype)
    for name, method, backend in _contenders(plan):
        one = Measurement(problem, name, method, backend=backend)
        reason = _why_not(one)
        found[one.label] = replace(one, skipped=reason)
        if reason is None:
            calls[one.label] = once(contender(name, method, backend), problem)
    direction = "forward + backward" if problem.backward else "forward"
    times: dict[str, float] = {}
    for label, best in seconds(calls, TIMING_SECONDS):
        times[label] = best
        progress.update(task, description=f"{label} at {problem.length:,}, {direction}: {duration(best)}")
    progress.advance(task, len(found))
    rate = gemm.gflops(times)
    return [replace(one, seconds=times.get(label), gemm_gflops=rate) for label, one in found.items()]


def _why_not(one: Measurement) -> str | None:
    p = one.problem
    if one.name == EAGER and isinstance(one.method, Smyrf) and p.length % one.method.cluster_size:
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
