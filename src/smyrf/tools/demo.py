"""`smyrf demo`: a pretrained encoder with other attention against itself, as a whole and layer by layer.

The encoder is all-MiniLM-L6-v2 from a Python package, the text is Python's own documentation: nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from smyrf.atomic_write import write_json
from smyrf.call import Call
from smyrf.methods import Method, Smyrf, Tangent
from smyrf.tools.analysis.error import output_errors
from smyrf.tools.bench.command import run_suite
from smyrf.tools.bench.problems import make_suite
from smyrf.tools.compare import command
from smyrf.tools.compare.load_model import load_subject
from smyrf.tools.encoders import MINILM, minilm_attention
from smyrf.tools.plotting import LOOKS, dress, new_figure, save_figure, share_axis
from smyrf.tools.progress import track
from smyrf.tools.subprocess_memory import can_measure
from smyrf.tools.tables import new_table, print_written

LENGTH = 512
N_DOCUMENTS = 8
N_COMPARED = 32
BUDGETS = (64, 128, 256)  # an eighth, a quarter and half of the keys
METHODS: tuple[Method, ...] = (
    *(Smyrf(u // size, size, deduplicate=once) for once in (False, True) for u in BUDGETS for size in (16, 32, 64)),
    *(Tangent(u, levels=levels) for levels in (1, 2) for u in BUDGETS),
)


def error_rows(calls: list[Call], console: Console) -> list[dict[str, Any]]:
    """Error of each method of `METHODS`, by layer and averaged over layers."""
    rows = []
    for method in track(METHODS, "error against dense attention", total=len(METHODS), console=console):
        errors = output_errors(calls, method)
        n_keys = calls[0].k.shape[-2]
        rows.append(
            {
                "family": method.family,
                "label": method.label,
                "method": method.to_dict(),
                "key_visits": method.key_visits(n_keys),
                "memory_share": method.memory_share(n_keys),
                "error": fmean(errors),
                "error_by_layer": errors,
            }
        )
    return rows


def best_sizes(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """For each family of methods and each number of key visits, the sizes with the smallest error."""
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        here = best.setdefault((row["family"], row["key_visits"]), row)
        if row["error"] < here["error"]:
            best[row["family"], row["key_visits"]] = row
    families: dict[str, list[dict[str, Any]]] = {}
    for row in best.values():
        families.setdefault(row["family"], []).append(row)
    return families


def error_table(rows: list[dict[str, Any]]) -> Table:
    """Errors as a table, the best of each budget in bold."""
    names = ["method", "memory", "key visits", "error", "worst layer"]
    found = new_table("Error without retraining: MiniLM, all layers, 512 tokens of real text", names)
    chosen = [row for family in best_sizes(rows).values() for row in family]
    for visits in sorted({row["key_visits"] for row in chosen}):
        here = [row for row in chosen if row["key_visits"] == visits]
        best = min(row["error"] for row in here)
        for row in here:
            found.add_row(
                row["label"],
                f"{row['memory_share']:.1%}",
                str(visits),
                f"{row['error']:.3f}",
                f"{max(row['error_by_layer']):.3f}",
                style="bold" if row["error"] == best else "",
            )
        found.add_section()
    found.caption = (
        "error: ‖output − dense‖ / ‖dense‖; Smyrf rounds × cluster size, the best of several;\n"
        "pairs once: a pair that meets in several rounds counts once"
    )
    return found


def plot_errors(rows: list[dict[str, Any]], path: Path) -> list[Path]:
    """Plot error against the share of keys visited, as `path`.png and `path`.svg."""
    figure, ((axis,),) = new_figure(size=(6.4, 4.2), title="MiniLM, 512 tokens of real text, no retraining")
    for name, chosen in best_sizes(rows).items():
        shares, errors = [row["memory_share"] for row in chosen], [row["error"] for row in chosen]
        axis.plot(shares, errors, marker="o", markersize=4, label=name, **LOOKS[name])
        for share, error in zip(shares, errors, strict=True):
            if name in ("Smyrf", "Tangent, 2 levels"):  # the outer curves, which have room for numbers
                above = 6 if name == "Smyrf" else -13
                axis.annotate(
                    f"{error:.2g}", (share, error), (0, above), textcoords="offset points", fontsize=8, ha="center"
                )
    axis.set_yscale("log")
    ticks = [0.02, 0.05, 0.1, 0.2, 0.5, 1.0]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_ylim(0.018, 1.3)
    axis.set_ylabel("relative error of the output")
    dress(axis)
    share_axis(axis, min(row["memory_share"] for row in rows))
    axis.legend(frameon=False, fontsize=9, loc="lower left")
    return save_figure(figure, path)


def run_comparison(output: Path, console: Console) -> None:
    """Compare MiniLM as a whole: tables on the console, JSON and plots in `output`."""
    threads = torch.get_num_threads()
    subject = load_subject(MINILM, length=LENGTH, documents=N_COMPARED, batch=4, console=console)
    command.compare(
        command.prepare(subject, threads=threads, seed=0, console=console),
        (),
        max_error=0.05,
        threads=threads,
        memory=can_measure() is None,
        json=output / "compare.json",
        plot=output / "compare",
        console=console,
    )


def run_errors(output: Path, console: Console) -> None:
    """Measure errors in the layers of MiniLM: a table on the console, JSON and plots in `output`."""
    output.mkdir(parents=True, exist_ok=True)
    console.print(
        "MiniLM (6 layers, 12 heads of 32) reads Python's documentation; its attention is compared layer by layer."
    )
    with console.status("loading MiniLM"):
        calls = minilm_attention(N_DOCUMENTS, LENGTH)
    rows = error_rows(calls, console)
    console.print(error_table(rows))
    write_json(output / "error.json", rows)
    print_written([output / "error.json", *plot_errors(rows, output / "error")], console)


def run_benchmark(output: Path, console: Console) -> None:
    """Time attention at two lengths: a table on the console, JSON and plots in `output`."""
    methods = [Smyrf(4, 64), Tangent(256)]
    run_suite(
        make_suite([(1, 1024), (1, 16384)], methods, heads=4, width=64, dtype="float32", backward=False),
        "smyrf bench",
        threads=torch.get_num_threads(),
        memory=can_measure() is None,
        json=output / "bench.json",
        plot=output / "bench",
        console=console,
    )
