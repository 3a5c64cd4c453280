"""How time grows with length: fitted exponents of Smyrf, Tangent and dense attention, 4k to 64k tokens.

    python benchmarks/complexity.py --json … --plot …

One attention call on random vectors, heads of 64, clustering included. Sizes are fixed: 4 rounds of clusters of 64, or
256 key visits. The paper's count is then N log N for Smyrf, where dense attention has N². All contenders of a length
run in turns, and the best time counts. Times are fitted by a power, seconds = c · N^e: least squares on the logarithms,
with the 95% interval of e by Student's t. The interval holds noise and curvature alike (a log factor, a cache that
becomes too small), so exponents from each length to the next stand beside the times. Results are kept after every
length.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from scipy import stats

import smyrf
from smyrf.methods import Smyrf, Tangent
from smyrf.tools.bench.baselines import SDPA, attention_function
from smyrf.tools.bench.problems import Problem
from smyrf.tools.plotting import LOOKS, save_figure
from smyrf.tools.results import write_results
from smyrf.tools.tables import duration
from smyrf.tuning.timer import best_times

METHODS: dict[str, Smyrf | Tangent | None] = {"Smyrf(4, 64)": Smyrf(4, 64), "Tangent(256)": Tangent(256), SDPA: None}
LENGTHS = [4096, 8192, 16384, 32768, 65536]


class Fit(NamedTuple):
    """seconds = c · N^exponent.

    Args:
        margin: half of the exponent's 95% interval; None where two lengths leave nothing to judge by.
        local: the exponent from each length to the next.
    """

    exponent: float
    margin: float | None
    local: tuple[float, ...]


def fit(lengths: Sequence[int], times: Sequence[float]) -> Fit | None:
    """The power that fits times best; None for a single length."""
    if len(lengths) < 2:
        return None
    x, y = [math.log(n) for n in lengths], [math.log(t) for t in times]
    line = stats.linregress(x, y)
    freedom = len(x) - 2
    margin = float(stats.t.ppf(0.975, freedom) * line.stderr) if freedom > 0 else None
    local = tuple((y[i + 1] - y[i]) / (x[i + 1] - x[i]) for i in range(len(x) - 1))
    return Fit(float(line.slope), margin, local)


def fits(found: dict[str, dict[int, float]]) -> dict[str, Fit | None]:
    """The fit of each contender, by what was measured of it."""
    return {name: fit(list(by_length), list(by_length.values())) for name, by_length in found.items()}


def rows(found: dict[str, dict[int, float]]) -> list[dict[str, Any]]:
    """One for each contender: its times and their fit."""
    return [
        {
            "attention": name,
            "method": None if METHODS[name] is None else METHODS[name].to_dict(),
            "lengths": list(found[name]),
            "seconds": list(found[name].values()),
            "fit": None if one is None else one._asdict(),
        }
        for name, one in fits(found).items()
    ]


def table(found: dict[str, dict[int, float]]) -> Table:
    result = Table(
        title="time of one attention call; in brackets its exponent from the length before",
        title_justify="left",
    )
    result.add_column("length", justify="right", no_wrap=True)
    for name in found:
        result.add_column(name, justify="right", no_wrap=True)
    by_name = fits(found)
    for i, length in enumerate(next(iter(found.values()))):
        local = {name: f" ({one.local[i - 1]:.2f})" if i and one else "" for name, one in by_name.items()}
        result.add_row(f"{length:,}", *(duration(found[name][length]) + local[name] for name in found))
    result.add_section()
    result.add_row(
        "exponent", *("" if one is None else f"{one.exponent:.2f}" for one in by_name.values()), style="bold"
    )
    result.add_row("95%", *(_interval(one) for one in by_name.values()))
    return result


def _interval(one: Fit | None) -> str:
    if one is None or one.margin is None:
        return ""
    return f"{one.exponent - one.margin:.2f} to {one.exponent + one.margin:.2f}"


def plot(found: dict[str, dict[int, float]], path: Path) -> list[Path]:
    """Times against length, and the fitted powers as thin lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for name, one in fits(found).items():
        lengths, times = list(found[name]), list(found[name].values())
        look = LOOKS.get(name.partition("(")[0], {"color": "#60a5fa"})
        label = name if one is None else f"{name}: N^{one.exponent:.2f}"
        axis.plot(lengths, times, "o", color=look["color"], markersize=4, label=label)
        if one is not None:
            middle = [
                math.exp(sum(map(math.log, some)) / len(some)) for some in (lengths, times)
            ]  # a fit goes through it
            fitted = [middle[1] * (length / middle[0]) ** one.exponent for length in lengths]
            axis.plot(lengths, fitted, "-", color=look["color"], linewidth=1.0)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    lengths = list(next(iter(found.values())))
    axis.set_xticks(lengths, [f"{n // 1024}K" if n >= 1024 else str(n) for n in lengths])
    axis.minorticks_off()
    axis.set_xlabel("sequence length")
    axis.set_ylabel("seconds per call")
    axis.grid(True, alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)
    return save_figure(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="two or more, for an exponent")
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--backward", action="store_true", help="forward and backward instead of forward only")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=2.0, help="to spend on each contender at each length")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="writes this name with .png and .svg")
    given = parser.parse_args(arguments)
    lengths = sorted(set(given.lengths))
    torch.set_num_threads(given.threads)
    console = Console()
    config = {
        "heads": given.heads,
        "width": 64,
        "dtype": "float32",
        "backward": given.backward,
        "seconds": given.seconds,
        "backends": smyrf.backends(),
    }
    found: dict[str, dict[int, float]] = {name: {} for name in METHODS}
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    with progress:
        task = progress.add_task("", total=len(lengths))
        for length in lengths:
            problem = Problem(1, given.heads, length, config["width"], config["dtype"], given.backward)
            calls = {name: problem.bind(attention_function(name, method)) for name, method in METHODS.items()}
            for name, best in best_times(calls, given.seconds):
                progress.update(task, description=f"{name} at {length:,}")
                found[name][length] = best
            progress.advance(task)
            if given.json is not None:
                write_results(given.json, rows(found), threads=given.threads, config=config)
    console.print(table(found))
    written = [] if given.json is None else [given.json]
    if given.plot is not None:
        written += plot(found, given.plot)
    for path in written:
        console.print(f"written: {path}")


if __name__ == "__main__":
    main()
