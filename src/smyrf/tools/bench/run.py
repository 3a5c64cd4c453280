"""Measure a suite: every attention on every problem, with a progress bar."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from smyrf.methods import Method, Smyrf
from smyrf.tools.bench import peak_memory, roofline
from smyrf.tools.bench.baselines import DENSE, EAGER, SDPA, attention_function, needed_bytes
from smyrf.tools.bench.measurement import Measurement
from smyrf.tools.bench.problems import Problem, Suite
from smyrf.tools.tables import duration
from smyrf.tuning.timer import best_times

# For each attention on each problem.
TIMING_SECONDS = 1.5


def run(
    suite: Suite,
    *,
    threads: int,
    memory: bool,
    console: Console,
    keep: Callable[[list[Measurement]], None],
) -> list[Measurement]:
    """Measure a whole suite; what does not fit into memory is skipped and says so.

    Args:
        keep: called with all measurements so far after every problem, so that a kill loses little.
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
        n_steps = len(suite.problems) * len(_compared(suite)) * (2 if memory else 1)
        task = progress.add_task("measuring", total=n_steps)
        for problem in suite.problems:
            measurements += _time_all(suite, problem, progress, task)
            keep(measurements)
        for i, one in enumerate(measurements if memory else []):
            progress.update(task, description=f"memory of {one.label} at {one.problem.length:,}")
            if one.seconds is not None:
                try:
                    found = peak_memory.extra_bytes(one.name, one.problem, one.method, threads, one.backend)
                    measurements[i] = replace(one, extra_bytes=found)
                except RuntimeError as error:
                    measurements[i] = replace(one, skipped=str(error))
                keep(measurements)
            progress.advance(task)
    return measurements


def _compared(suite: Suite) -> list[tuple[str, Method | None, str | None]]:
    """Name, method and backend of everything that is compared."""
    found: list[tuple[str, Method | None, str | None]] = [
        (method.kind, method, backend) for method in suite.methods for backend in suite.backends
    ]
    eager = next((method for method in suite.methods if method.kind == Smyrf.kind), None)
    found += [] if eager is None else [(EAGER, eager, None)]
    found += [(SDPA, None, None), (DENSE, None, None)]
    return [one for one in found if one[0] not in suite.without]


def _time_all(suite: Suite, problem: Problem, progress: Progress, task: TaskID) -> list[Measurement]:
    """Best times of everything that is compared on a problem, in turn with large matrix products."""
    found: dict[str, Measurement] = {}
    calls = roofline.products(problem.dtype)
    for name, method, backend in _compared(suite):
        one = Measurement(problem, name, method, backend=backend)
        reason = _why_not(one)
        found[one.label] = replace(one, skipped=reason)
        if reason is None:
            calls[one.label] = problem.bind(attention_function(name, method, backend))
    times: dict[str, float] = {}
    for label, best in best_times(calls, TIMING_SECONDS):
        times[label] = best
        progress.update(task, description=f"{label} at {problem.length:,}, {problem.direction}: {duration(best)}")
    progress.advance(task, len(found))
    rate = roofline.gflops(times)
    return [replace(one, seconds=times.get(label), gemm_gflops=rate) for label, one in found.items()]


def _why_not(one: Measurement) -> str | None:
    """Why a measurement is skipped, or None."""
    if one.name == EAGER and isinstance(one.method, Smyrf) and one.problem.length % one.method.cluster_size:
        return "length is not a multiple of the cluster size"
    needed = needed_bytes(one.name, one.problem, one.method)
    available = _available_bytes()
    return f"needs {needed / 1e9:.0f} GB" if available is not None and needed > 0.8 * available else None


def _available_bytes() -> int | None:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
