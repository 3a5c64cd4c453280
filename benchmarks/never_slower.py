"""A tuned model against the dense one, at lengths from 64 to 4,096: ``python benchmarks/never_slower.py --json …``.

Twice at each length: tuned there, and tuned at the greatest length and used at this one. The models are MiniLM on real
text (positions interpolated beyond 512), the same on a batch in which one text is half as long, and a decoder of
Llama's kind with random weights. Times are of whole forward passes, both models in turn, best of several.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import smyrf
from smyrf.tools.encoders import load_encoder, minilm_path
from smyrf.tools.results import write_results
from smyrf.tuning.timer import best_times

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)


def minilm(length: int) -> tuple[Any, dict[str, torch.Tensor]]:
    return load_encoder(minilm_path(), 1, length)


def padded(length: int) -> tuple[Any, dict[str, torch.Tensor]]:
    model, arguments = load_encoder(minilm_path(), 2, length)
    mask = torch.ones_like(arguments["input_ids"])
    mask[1, length // 2 :] = 0
    return model, {**arguments, "attention_mask": mask}


def decoder(length: int) -> tuple[Any, dict[str, torch.Tensor]]:
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=1376,
        initializer_range=0.05,
        max_position_embeddings=LENGTHS[-1],
        use_cache=False,
    )
    return LlamaModel(config).eval(), {"input_ids": torch.randint(1000, (1, length))}


MODELS = {"MiniLM": minilm, "MiniLM, padded": padded, "Llama's kind, random": decoder}


def measure(max_error: float, seconds: float, console: Console) -> Iterator[dict[str, Any]]:
    for name, build in MODELS.items():
        longest = smyrf.tune(*build(LENGTHS[-1]), max_error=max_error)
        for length in track(LENGTHS, name, console=console, transient=True):
            dense, arguments = build(length)
            plans = {"tuned here": smyrf.tune(dense, arguments, max_error=max_error), "tuned at 4096": longest}
            models = {"dense": dense} | {which: copy.deepcopy(dense) for which in plans}
            reports = {which: smyrf.replace_attention(models[which], plan) for which, plan in plans.items()}
            with torch.no_grad():
                times = dict(
                    best_times({which: partial(model, **arguments) for which, model in models.items()}, seconds / 2)
                )
            for which, report in reports.items():
                yield {
                    "model": name,
                    "length": length,
                    "plan": which,
                    "served": report.calls.served > 0,
                    "replaced": len(report.replaced),
                    "layers": len(report.layers),
                    "dense_seconds": times["dense"],
                    "seconds": times[which],
                    "ratio": times[which] / times["dense"],
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--max-error", type=float, default=0.2)
    parser.add_argument("--seconds", type=float, default=6.0, help="for the times of one length")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console()
    rows: list[dict[str, Any]] = []
    for row in measure(arguments.max_error, arguments.seconds, console):
        rows.append(row)
        if arguments.json is not None:
            config = {"max_error": arguments.max_error}
            write_results(arguments.json, rows, threads=arguments.threads, config=config)
    for which in ("tuned here", "tuned at 4096"):
        title = f"time of the model relative to dense, {which}, max_error={arguments.max_error} (layers replaced)"
        table = Table(title=title, title_justify="left")
        table.add_column("model")
        for length in LENGTHS:
            table.add_column(f"{length:,}", justify="right")
        for name in MODELS:
            found = [row for row in rows if row["model"] == name and row["plan"] == which]
            cells = [f"{row['ratio']:.2f}" + (f" ({row['replaced']})" if row["served"] else "") for row in found]
            table.add_row(name, *cells)
        console.print(table)
    console.print(f"worst: {max(row['ratio'] for row in rows):.3f}")


if __name__ == "__main__":
    main()
