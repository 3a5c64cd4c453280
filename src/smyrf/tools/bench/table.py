"""Measurements as a table for the terminal."""

from __future__ import annotations

from rich.table import Table

from smyrf.tools.bench.baselines import EAGER
from smyrf.tools.bench.measurement import Measurement, memory_ratio, speedup, speedup_over_backend
from smyrf.tools.tables import duration, megabytes


def table(measurements: list[Measurement], title: str, backward: bool) -> Table:
    """One row per measurement, a rule between problems, and only columns that are not empty."""
    here = [one for one in measurements if one.problem.backward == backward]
    found = Table(
        title=f"{title}: {here[0].problem.direction}",
        title_justify="left",
        caption_justify="left",
        # narrow, so that all columns fit into 80 characters
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    columns = {
        "over\nsdpa": [_digits(speedup(here, one)) for one in here],
        "over\neager": [_digits(speedup(here, one, EAGER)) if not one.is_baseline else "" for one in here],
        "over\ntorch": [_digits(speedup_over_backend(here, one)) for one in here],
        "×\nGEMM\nbound": [_digits(one.times_gemm_bound) for one in here],
        "memory": ["" if one.extra_bytes is None else megabytes(one.extra_bytes) for one in here],
        "ratio": [_digits(memory_ratio(here, one)) for one in here],
    }
    says = {
        "over\nsdpa": "times faster than sdpa, PyTorch's fused attention",
        "over\neager": "than eager smyrf",
        "over\ntorch": "than the same on the torch backend",
        "×\nGEMM\nbound": f"time relative to that of its matrix products only, at {_rates(here)} GFLOP/s",
        "memory": "peak beyond the inputs",
        "ratio": "of memory to sdpa's",
    }
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    found.caption = "; ".join(f"{name.replace(chr(10), ' ')}: {says[name]}" for name in columns)
    reasons = [f"{one.label} at {one.problem.length:,} {one.skipped}" for one in here if one.skipped]
    if reasons:
        found.caption += f"\nnot run: {'; '.join(reasons)}"
    batches = any(one.problem.batch > 1 for one in here)
    if batches:
        found.add_column("batch", justify="right", no_wrap=True)
    found.add_column("length", justify="right", no_wrap=True)
    found.add_column("attention", no_wrap=True)
    for name in ("time", *columns):
        found.add_column(name, justify="right", no_wrap=True)
    previous = None
    for i, one in enumerate(here):
        fresh = one.problem != previous
        if previous is not None and fresh:
            found.add_section()
        previous = one.problem
        found.add_row(
            *([str(one.problem.batch) if fresh else ""] if batches else []),
            f"{one.problem.length:,}" if fresh else "",
            one.label,
            "–" if one.seconds is None else duration(one.seconds),
            *(cells[i] for cells in columns.values()),
            style="bold" if not one.is_baseline else "dim" if one.seconds is None else "",
        )
    return found


def _digits(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}"


def _rates(measurements: list[Measurement]) -> str:
    rates = [one.gemm_gflops for one in measurements if one.gemm_gflops is not None]
    return " to ".join(dict.fromkeys(f"{f(rates):.0f}" for f in (min, max))) if rates else ""
