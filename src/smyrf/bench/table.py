"""Measurements as a table for the terminal."""

from __future__ import annotations

from rich.table import Table

from smyrf.bench.results import Measurement, memory_ratio, speedup


def table(measurements: list[Measurement], title: str, backward: bool) -> Table:
    """One row per problem and contender; a rule between problems."""
    found = Table(title=f"{title}: {'forward + backward' if backward else 'forward'}", title_justify="left")
    reasons = [
        f"{one.label} at {one.problem.length:,} {one.skipped}"
        for one in measurements
        if one.skipped and one.problem.backward == backward
    ]
    found.caption = "speed-up and memory ratio: against sdpa, PyTorch's fused attention; memory: beyond the inputs"
    if reasons:
        found.caption += f"\nnot run: {'; '.join(reasons)}"
    found.caption_justify = "left"
    for name in ("batch", "length", "attention"):
        found.add_column(name, justify="left" if name == "attention" else "right", no_wrap=True)
    for name in ("time", "speed-up", "memory", "ratio"):
        found.add_column(name, justify="right", no_wrap=True)
    previous = None
    for one in measurements:
        if one.problem.backward != backward:
            continue
        if previous is not None and one.problem != previous:
            found.add_section()
        fresh = one.problem != previous
        previous = one.problem
        speed, memory = speedup(measurements, one), memory_ratio(measurements, one)
        ours = one.name in ("smyrf", "tangent")
        found.add_row(
            str(one.problem.batch) if fresh else "",
            f"{one.problem.length:,}" if fresh else "",
            one.label,
            "–" if one.seconds is None else duration(one.seconds),
            "" if speed is None else f"{speed:.1f}",
            "" if one.extra_bytes is None else size(one.extra_bytes),
            "" if memory is None else f"{memory:.3g}",
            style="bold" if ours else "dim" if one.seconds is None else "",
        )
    return found


def duration(seconds: float) -> str:
    """Three digits and a unit.

    Example:
        >>> duration(0.01234), duration(2.5)
        ('12.3 ms', '2.50 s')
    """
    return f"{seconds:.3g} s" if seconds >= 100 else f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def size(n_bytes: int) -> str:
    """Megabytes, of a million bytes.

    Example:
        >>> size(16_800_000)
        '17 MB'
    """
    return f"{n_bytes / 1e6:,.0f} MB"
