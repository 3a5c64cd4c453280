"""`smyrf compare`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from smyrf.tools.cli.options import Audio, Images, Json, Length, MaxError, Memory, Model, Plot, Seed, Text, Threads
from smyrf.tools.cli.validation import (
    naming,
    need_at_least,
    need_max_error,
    need_model,
    need_outputs,
    need_seed,
    read_inputs,
    read_memory,
    read_threads,
    refuse,
)


def compare(
    model: Model,
    text: Text = None,
    images: Images = None,
    audio: Audio = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="tangent:0.25 (share of the keys), tangent:128 (key visits), smyrf:8x32 (rounds × cluster size), with "
            "further options as in tangent:0.25,levels=2; tuned, tuned:0.1 or tuned:0.1,fallback=false. May be given "
            "several times; by default Tangent and Smyrf at 1/8, 1/4 and 1/2 of the keys, and tuned."
        ),
    ] = None,
    max_error: MaxError = 0.05,
    length: Length = None,
    documents: Annotated[int, typer.Option(help="Texts, images or sounds; the first that are long enough.")] = 32,
    batch: Annotated[int, typer.Option(help="Documents in a forward pass.")] = 8,
    threads: Threads = None,
    memory: Memory = None,
    seed: Seed = 0,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Compare a model with itself under other attention: drift of its outputs, key visits, memory and time.

    Without --text, --images or --audio: Python's documentation, crops of a photograph, or synthesised sounds.
    """
    from smyrf.tools.compare import command
    from smyrf.tools.compare.contenders import parse_contender
    from smyrf.tools.compare.load_model import load_subject

    threads = read_threads(threads)
    need_at_least(1, length=length, documents=documents, batch=batch)
    need_seed(seed)
    need_max_error(max_error)
    contenders = []
    for one in method or []:
        try:
            contenders.append(parse_contender(one, max_error))
        except ValueError as error:
            refuse(f"--method: {error}")
    kind, path = read_inputs(length, text=text, images=images, audio=audio)
    memory = read_memory(memory)
    need_model(model)
    need_outputs(json, plot)
    console = Console()
    with naming(model, kind, path):
        subject = load_subject(
            model, kind=kind, path=path, length=length, documents=documents, batch=batch, seed=seed, console=console
        )
        prepared = command.prepare(subject, threads=threads, seed=seed, console=console)
        command.compare(
            prepared,
            contenders,
            max_error=max_error,
            threads=threads,
            memory=memory,
            json=json,
            plot=plot,
            console=console,
        )
