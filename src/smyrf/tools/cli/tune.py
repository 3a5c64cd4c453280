"""`smyrf tune`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from smyrf.tools.cli.options import Json, MaxError, Model, Seed, Threads
from smyrf.tools.cli.validation import (
    naming,
    need_at_least,
    need_max_error,
    need_model,
    need_seed,
    need_writable,
    read_threads,
)


def tune(
    model: Model,
    max_error: MaxError = 0.05,
    length: Annotated[int, typer.Option(help="Tokens per document.")] = 512,
    documents: Annotated[int, typer.Option(help="Documents to estimate errors on.")] = 4,
    fallback: Annotated[bool, typer.Option(help="Stay dense where dense is as fast on this machine.")] = True,
    threads: Threads = None,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Find the cheapest attention of each layer that keeps its error below a target."""
    import torch

    from smyrf.models.calls import model_calls
    from smyrf.models.plan import Plan
    from smyrf.tools.encoders import load_encoder, model_title
    from smyrf.tools.progress import track
    from smyrf.tools.tables import plan_table, print_written
    from smyrf.tuning.machine import machine_summary
    from smyrf.tuning.search import plan_layers

    threads = read_threads(threads)
    need_at_least(1, length=length, documents=documents)
    need_seed(seed)
    need_max_error(max_error)
    need_writable("json", json)
    need_model(model)

    console = Console()
    torch.set_num_threads(threads)
    title = model_title(model)
    with naming(model), console.status(f"loading {title}"):
        calls = model_calls(*load_encoder(model, documents, length))
    layers = plan_layers(calls, max_error, fallback=fallback, documents=documents, seed=seed)
    bar = track(layers, "error and time", total=len(calls), console=console)
    plan = Plan(tuple(bar), max_error, machine_summary() if fallback else "")
    console.print(plan_table(plan, f"smyrf tune: {title}, {length:,} tokens"))
    if json is not None:
        plan.save(json)
        print_written([json], console)
