"""`smyrf tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from smyrf.tools.cli.validation import need_at_least, need_model, need_seed, need_writable, refuse


def tune(
    model: Annotated[str, typer.Argument(help="minilm, or a path or hub name of a transformers model.")],
    max_error: Annotated[float, typer.Option(help="Relative output error that each layer may have.")] = 0.05,
    length: Annotated[int, typer.Option(help="Tokens per document.")] = 512,
    documents: Annotated[int, typer.Option(help="Documents to estimate errors on.")] = 4,
    fallback: Annotated[bool, typer.Option(help="Stay dense where dense is as fast on this machine.")] = True,
    threads: Annotated[int | None, typer.Option(help="CPU threads; PyTorch's own number by default.")] = None,
    seed: Annotated[int, typer.Option(help="Of the sample of rows.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the plan here.")] = None,
) -> None:
    """The cheapest attention of each layer of a model that keeps its error below a target."""
    import torch
    from rich.progress import track

    from smyrf.models.calls import model_calls
    from smyrf.models.plan import Plan
    from smyrf.tools.encoders import load_encoder, minilm_path
    from smyrf.tools.plan_table import table
    from smyrf.tuning.machine import machine_summary
    from smyrf.tuning.search import plan_layers

    threads = torch.get_num_threads() if threads is None else threads
    need_at_least(1, length=length, documents=documents, threads=threads)
    need_seed(seed)
    if not 0.0 < max_error < 1.0:
        refuse(f"--max-error {max_error} must be between 0 and 1")
    if json is not None:
        need_writable("json", json)
    need_model(model)

    console = Console()
    torch.set_num_threads(threads)
    source = "MiniLM" if model == "minilm" else Path(model).name
    try:
        with console.status(f"loading {source}"):
            calls = model_calls(*load_encoder(minilm_path() if model == "minilm" else model, documents, length))
    except ValueError as error:
        refuse(f"{model}: {error}")
    layers = plan_layers(calls, max_error, fallback=fallback, documents=documents, seed=seed)
    bar = track(layers, "error and time", total=len(calls), console=console, transient=True)
    plan = Plan(tuple(bar), max_error, machine_summary() if fallback else "")
    console.print(table(plan, f"smyrf tune: {source}, {length:,} tokens"))
    if json is not None:
        plan.save(json)
        console.print(f"written: {json}")
