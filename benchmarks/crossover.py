"""The native backend against the torch backend, over many shapes: ``python benchmarks/crossover.py --json …``.

A ratio is native time / torch time of the whole `smyrf.attention` call, clustering included, both in turns, best of
several; above 1 the native backend is slower. First come all lengths in each setting of `SERIES`, which
differs in one thing or two from the base, then shapes drawn from all combinations (with a seed) until the time is
over. A ratio close to 1 is measured again for longer before it counts. Results are kept after every case.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import smyrf
from smyrf.methods import is_one_block
from smyrf.tools.bench.problems import DTYPES, Problem
from smyrf.tools.bench.roofline import flops
from smyrf.tools.results import write_results
from smyrf.tools.tables import duration
from smyrf.tuning.timer import best_times

LENGTHS = tuple(2**i for i in range(4, 15))
WIDTHS = (8, 32, 64, 128, 256)
HEADS = (1, 4, 12)
BATCHES = (1, 8)
CLUSTER_SIZES = (8, 32, 64, 256)
KINDS = ("smyrf", "tangent", "smyrf causal", "tangent causal")
# A case beyond these takes too long or too much memory to be one of hundreds.
MOST_FLOPS = 2e10
MOST_NUMBERS = 2**24
# Seconds for both backends together, and for cases that are close.
SECONDS, LONGER = 0.15, 1.0
CLOSE = 0.9


@dataclass(frozen=True)
class Case:
    """One comparison. Tangent has as many key visits as Smyrf with four rounds of clusters of this size."""

    length: int
    width: int = 64
    heads: int = 4
    batch: int = 1
    cluster_size: int = 64
    kind: str = "smyrf"
    dtype: str = "float32"
    backward: bool = False
    threads: int = 1

    @property
    def method(self) -> smyrf.Smyrf | smyrf.Tangent:
        if self.kind.startswith("smyrf"):
            return smyrf.Smyrf(4, self.cluster_size)
        return smyrf.Tangent(4 * self.cluster_size)

    @property
    def is_causal(self) -> bool:
        return self.kind.endswith("causal")

    @property
    def is_exact(self) -> bool:
        """Whether it is dense attention, which runs on a backend only if one is named, or with mask or dropout."""
        short = self.is_causal and is_one_block(self.length, self.length)
        return short or self.method.is_exact(self.length, self.length)

    @property
    def problem(self) -> Problem:
        return Problem(self.batch, self.heads, self.length, self.width, self.dtype, self.backward)

    @property
    def fits(self) -> bool:
        numbers = self.batch * self.heads * self.length * self.width
        # Causal attention spends the budget at each halving of the sequence.
        halvings = max(1.0, math.log2(self.length / 256)) if self.is_causal else 1.0
        return numbers <= MOST_NUMBERS and halvings * flops(self.problem, self.method) <= MOST_FLOPS


# What differs from the base, a float32 forward pass of four heads of 64 with clusters of 64.
SERIES: tuple[dict[str, Any], ...] = (
    {},
    {"backward": True},
    {"kind": "tangent"},
    {"kind": "tangent", "backward": True},
    {"kind": "smyrf causal"},
    {"kind": "tangent causal"},
    *({"width": width} for width in WIDTHS if width != 64),
    *({"heads": heads} for heads in HEADS if heads != 4),
    {"batch": 8},
    *({"cluster_size": size} for size in CLUSTER_SIZES if size != 64),
    *({"dtype": dtype} for dtype in DTYPES if dtype != "float32"),
)


def cases(threads: Sequence[int], seed: int) -> Iterator[Case]:
    """Those of the series, then drawn ones without end; none twice, none that is too large."""
    seen: set[Case] = set()

    def fresh(case: Case) -> bool:
        new = case.fits and case not in seen
        seen.add(case)
        return new

    for setting in SERIES:
        for n in threads:
            yield from filter(fresh, (Case(length, threads=n, **setting) for length in LENGTHS))
    draw = random.Random(seed)
    while True:
        case = Case(
            length=draw.choice(LENGTHS),
            width=draw.choice(WIDTHS),
            heads=draw.choice(HEADS),
            batch=draw.choice(BATCHES),
            cluster_size=draw.choice(CLUSTER_SIZES),
            kind=draw.choice(KINDS),
            dtype=draw.choice(list(DTYPES)),
            backward=draw.choice((False, True)),
            threads=draw.choice(threads),
        )
        if draw.random() < 0.5:  # lengths between powers of two, where groups are uneven
            case = replace(
                case, length=draw.randrange(LENGTHS[0], LENGTHS[-1]) if case.length > 1024 else case.length + 3
            )
        if fresh(case):
            yield case


def call(case: Case, backend: str) -> Callable[[], None]:
    q, k, v = case.problem.inputs()

    def attend() -> torch.Tensor:
        return smyrf.attention(q, k, v, method=case.method, is_causal=case.is_causal, generator=0, backend=backend)

    def forward() -> None:
        with torch.no_grad():
            attend()

    def both() -> None:
        out = attend()
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    return both if case.backward else forward


def measure(case: Case) -> dict[str, Any]:
    torch.set_num_threads(case.threads)
    calls = {backend: call(case, backend) for backend in ("native", "torch")}
    for one in calls.values():
        one()
    best = dict(best_times(calls, SECONDS / len(calls)))
    if best["native"] > CLOSE * best["torch"]:
        again = dict(best_times(calls, LONGER / len(calls)))
        best = {name: min(best[name], again[name]) for name in best}
    return {
        **asdict(case),
        "exact": case.is_exact,
        "native_seconds": best["native"],
        "torch_seconds": best["torch"],
        "ratio": best["native"] / best["torch"],
    }


def by_length(rows: list[dict[str, Any]]) -> Table:
    found = Table(title="native time / torch time, by length", title_justify="left")
    for name in ("length", "cases", "best", "median", "worst", "slower"):
        found.add_column(name, justify="right")
    for low, high in zip(LENGTHS, [*LENGTHS[1:], math.inf], strict=True):
        here = [row["ratio"] for row in rows if low <= row["length"] < high]
        if here:
            slower = sum(ratio > 1.0 for ratio in here)
            shown = (f"{f(here):.2f}" for f in (min, median, max))
            found.add_row(
                f"{low:,}" if high == math.inf else f"{low:,} to {high - 1:,}", str(len(here)), *shown, str(slower)
            )
    return found


def worst(rows: list[dict[str, Any]], n: int = 15) -> Table:
    found = Table(title=f"the {min(n, len(rows))} worst", title_justify="left", pad_edge=False, collapse_padding=True)
    for name in ("ratio", "native", "torch", "attention", "shape", "dtype", "threads"):
        found.add_column(name, justify="left" if name in ("attention", "shape", "dtype") else "right", no_wrap=True)
    for row in sorted(rows, key=lambda row: -row["ratio"])[:n]:
        exact = ", exact" * row["exact"]
        found.add_row(
            f"{row['ratio']:.2f}",
            duration(row["native_seconds"]),
            duration(row["torch_seconds"]),
            f"{row['kind']} {row['cluster_size']}{exact}{', grad' * row['backward']}",
            f"{row['batch']}×{row['heads']}×{row['length']}×{row['width']}",
            row["dtype"],
            str(row["threads"]),
        )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=0, help="of the drawn shapes")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    if smyrf.backends()["native"].startswith("not available"):
        parser.error(f"the native backend is {smyrf.backends()['native']}")
    console = Console()
    config = {"minutes": given.minutes, "threads": given.threads, "seed": given.seed, "backends": smyrf.backends()}
    rows: list[dict[str, Any]] = []
    seconds = 60 * given.minutes
    start = time.monotonic()
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("measuring", total=seconds)
        for case in cases(given.threads, given.seed):
            if time.monotonic() - start > seconds:
                break
            rows.append(measure(case))
            if given.json is not None:
                write_results(given.json, rows, threads=max(given.threads), config=config)
            slower = sum(row["ratio"] > 1.0 for row in rows)
            progress.update(
                task, completed=time.monotonic() - start, description=f"{len(rows)} cases, native slower in {slower}"
            )
    console.print(by_length(rows))
    console.print(worst(rows))
    long = [row["ratio"] for row in rows if row["length"] >= 128]
    if long:
        console.print(f"worst from 128 tokens on: {max(long):.2f}, of {len(long)} cases")
    if given.json is not None:
        console.print(f"written: {given.json}")


if __name__ == "__main__":
    main()
