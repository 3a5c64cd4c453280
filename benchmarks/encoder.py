"""One forward pass of an encoder of BERT-base's shape, by attention: ``python benchmarks/encoder.py --json …``.

Random weights, one sequence of random tokens, 12 heads of 64, as many positions as tokens. The same model runs on
PyTorch's fused attention (SDPA), on each method, and with attention that returns the values: what is left of its time
then is not attention, and bounds what any method can gain. All in turns, best of several. Results are kept after
every pass.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import AttentionInterface, BertConfig, BertModel

import smyrf
from smyrf.methods import Method
from smyrf.tools.results import write_results
from smyrf.tools.tables import duration

SDPA = "sdpa"
VALUES = "no attention"
METHODS: dict[str, Method] = {"Tangent(256)": smyrf.Tangent(256), "Smyrf(4, 64)": smyrf.Smyrf(4, 64)}


def values(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Attention that costs nothing, in the signature of transformers."""
    return value.transpose(1, 2), None  # (batch, N, heads, E)


AttentionInterface.register("values", values)


def encoder(n_layers: int, length: int) -> tuple[BertModel, torch.Tensor]:
    """The model and its tokens."""
    torch.manual_seed(0)
    config = BertConfig(num_hidden_layers=n_layers, max_position_embeddings=length)
    model = BertModel(config, add_pooling_layer=False).eval()
    return model, torch.randint(config.vocab_size, (1, length))


def forward_seconds(model: BertModel, tokens: torch.Tensor, name: str) -> float:
    """Seconds of a forward pass with one kind of attention; the model is as it was afterwards."""
    report = None
    if name == VALUES:
        model.set_attn_implementation("values")
    elif name != SDPA:
        report = smyrf.replace_attention(model, METHODS[name])
    try:
        with torch.no_grad():
            model(tokens[:, : tokens.shape[1] // 8])  # memory and caches as this one leaves them
            before = 0 if report is None else report.calls.served
            start = time.perf_counter()
            model(tokens)
            found = time.perf_counter() - start
        if report is not None and report.calls.served - before != len(report.layers):
            raise RuntimeError(f"{name} at {tokens.shape[1]} tokens did not serve every layer: {report.calls}")
    finally:
        if report is not None:
            smyrf.restore_attention(model)
        elif name == VALUES:
            model.set_attn_implementation("sdpa")
    return found


def rows(length: int, n_layers: int, best: dict[str, float]) -> list[dict[str, Any]]:
    """What there is so far about a length."""
    return [
        {
            "length": length,
            "layers": n_layers,
            "attention": name,
            "method": METHODS[name].to_dict() if name in METHODS else None,
            "seconds": found,
            "speedup_over_sdpa": best[SDPA] / found,
            "share_of_attention": 1.0 - best[VALUES] / found if VALUES in best else None,
        }
        for name, found in best.items()
    ]


def table(results: list[dict[str, Any]], n_layers: int) -> Table:
    title = f"one forward pass, {n_layers} layer{'s' * (n_layers > 1)} of BERT-base's shape, random weights"
    found = Table(title=title, title_justify="left")
    for name in ("length", "attention", "time", "over sdpa", "share of attention"):
        found.add_column(name, justify="left" if name == "attention" else "right", no_wrap=True)
    previous = None
    for row in results:
        if previous not in (None, row["length"]):
            found.add_section()
        previous = row["length"]
        share = row["share_of_attention"]
        found.add_row(
            f"{row['length']:,}" if row["attention"] == SDPA else "",
            row["attention"],
            duration(row["seconds"]),
            f"{row['speedup_over_sdpa']:.2f}",
            "" if share is None or row["attention"] == VALUES else f"{share:.0%}",
        )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--layers", type=int, default=12, help="2 for a quick look")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=2, help="of each kind of attention; the best counts")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    console = Console()
    config = {
        "layers": given.layers,
        "turns": given.turns,
        "dtype": "float32",
        "transformers": transformers.__version__,
        "backends": smyrf.backends(),
    }
    done: list[dict[str, Any]] = []
    names = [SDPA, *METHODS, VALUES]
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    with progress:
        task = progress.add_task("building the model", total=len(given.lengths) * given.turns * len(names))
        for length in given.lengths:
            model, tokens = encoder(given.layers, length)
            best: dict[str, float] = {}
            for _ in range(given.turns):
                for name in names:
                    progress.update(task, description=f"{name} at {length:,}")
                    found = forward_seconds(model, tokens, name)
                    best[name] = min(best.get(name, found), found)
                    progress.advance(task)
                    if given.json is not None:
                        write_results(
                            given.json, done + rows(length, given.layers, best), threads=given.threads, config=config
                        )
            done += rows(length, given.layers, best)
    console.print(table(done, given.layers))
    if given.json is not None:
        console.print(f"written: {given.json}")


if __name__ == "__main__":
    main()
