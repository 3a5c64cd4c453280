"""`smyrf demo`: the method on a real pretrained encoder, and a short benchmark.

The encoder is all-MiniLM-L6-v2 as a Python package carries it, the text is Python's own documentation:
both are there without a download from a hub.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from smyrf.analysis.capture import Captured
from smyrf.analysis.encoders import minilm_attention
from smyrf.analysis.error import output_errors
from smyrf.methods import Smyrf

LENGTH = 512
N_DOCUMENTS = 8
# Rounds × cluster sizes for an eighth, a quarter and half of the keys.
METHODS = tuple(
    Smyrf(visits // size, size, deduplicate=once)
    for once in (False, True)
    for visits in (64, 128, 256)
    for size in (16, 32, 64)
)


def error_rows(calls: list[Captured], console: Console) -> list[dict[str, Any]]:
    """Error of each method of `METHODS`: the mean over layers, and the worst layer."""
    rows = []
    for method in track(METHODS, "error against dense attention", console=console, transient=True):
        errors = output_errors(calls, method)
        n_keys = calls[0].k.shape[-2]
        rows.append(
            {
                "method": asdict(method),
                "key_visits": method.key_visits(n_keys),
                "memory_share": method.memory_share(n_keys),
                "error": fmean(errors),
                "error_by_layer": errors,
            }
        )
    return rows


def error_table(rows: list[dict[str, Any]]) -> Table:
    """The errors as a table, the best of each budget in bold."""
    found = Table(title="Error without retraining: MiniLM, all layers, 512 tokens of real text", title_justify="left")
    for name in ("memory", "key visits", "rounds × cluster", "pairs", "error", "worst layer"):
        found.add_column(name, justify="left" if name == "pairs" else "right", no_wrap=True)
    for once in (False, True):
        of_kind = [row for row in rows if row["method"]["deduplicate"] == once]
        for visits in dict.fromkeys(row["key_visits"] for row in of_kind):
            here = [row for row in of_kind if row["key_visits"] == visits]
            best = min(row["error"] for row in here)
            for row in here:
                found.add_row(
                    f"{row['memory_share']:.1%}",
                    str(visits),
                    f"{row['method']['n_hashes']} × {row['method']['cluster_size']}",
                    "once" if once else "as the paper",
                    f"{row['error']:.3f}",
                    f"{max(row['error_by_layer']):.3f}",
                    style="bold" if row["error"] == best else "",
                )
            found.add_section()
    found.caption = "error: ‖output − dense‖ / ‖dense‖; pairs: counted once, or as often as they meet"
    found.caption_justify = "left"
    return found


def plot_errors(rows: list[dict[str, Any]], path: Path) -> list[Path]:
    """Error against the share of keys visited, as `path`.png and `path`.svg."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    colours = {16: "#fb923c", 32: "#c2410c", 64: "#7c2d12"}
    for once, style in ((False, "-"), (True, "--")):
        for size, colour in colours.items():
            here = [
                row for row in rows if row["method"]["deduplicate"] == once and row["method"]["cluster_size"] == size
            ]
            label = f"clusters of {size}{', pairs once' if once else ''}"
            axis.plot(
                [row["memory_share"] for row in here],
                [row["error"] for row in here],
                style,
                color=colour,
                marker="o",
                markersize=4,
                label=label,
            )
    axis.set_xscale("log", base=2)
    shares = sorted({row["memory_share"] for row in rows})
    axis.set_xticks(shares, [f"{share:.1%}" for share in shares])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_xlabel("keys visited, as a share of all (the paper's memory)")
    axis.set_ylabel("relative error of the output")
    axis.set_title("SMYRF on MiniLM, 512 tokens of real text, no retraining", fontsize=11)
    axis.grid(True, alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)
    written = [path.with_name(path.name + suffix) for suffix in (".png", ".svg")]
    for file in written:
        figure.savefig(file, dpi=160)
    plt.close(figure)
    return written


def run_demo(output: Path, console: Console) -> None:
    """Errors on MiniLM: a table on the console, JSON and plots in `output`."""
    output.mkdir(parents=True, exist_ok=True)
    console.print(
        "MiniLM (6 layers, 12 heads of 32) reads Python's documentation; its attention is compared layer by layer."
    )
    with console.status("loading MiniLM"):
        calls = minilm_attention(N_DOCUMENTS, LENGTH)
    rows = error_rows(calls, console)
    console.print(error_table(rows))
    temporary = output / "error.json.tmp"
    temporary.write_text(json.dumps(rows, indent=1) + "\n")
    temporary.replace(output / "error.json")
    for file in (output / "error.json", *plot_errors(rows, output / "error")):
        console.print(f"written: {file}")
