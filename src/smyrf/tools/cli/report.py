"""`smyrf report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from smyrf.tools.cli.options import (
    Audio,
    Images,
    Length,
    MaxError,
    Memory,
    Methods,
    Model,
    Seed,
    Singular,
    Text,
    Threads,
)
from smyrf.tools.cli.validation import (
    naming,
    need,
    need_at_least,
    need_max_error,
    need_model,
    need_seed,
    need_writable,
    read_inputs,
    read_memory,
    read_methods,
    read_threads,
    refuse,
)


def report(
    model: Model = "minilm",
    text: Text = None,
    images: Images = None,
    audio: Audio = None,
    methods: Methods = None,
    max_error: MaxError = 0.1,
    length: Length = None,
    documents: Annotated[int, typer.Option(help="Texts, images or sounds to compare outputs on.")] = 8,
    rows: Annotated[int, typer.Option(help="Queries of each document whose weights are inspected.")] = 512,
    singular: Singular = 64,
    memory: Memory = None,
    threads: Threads = None,
    seed: Seed = 0,
    json: Annotated[Path | None, typer.Option(help="Write everything that the page shows to this file.")] = None,
    output: Annotated[Path, typer.Option(help="Page to write.")] = Path("report.html"),
) -> None:
    """Write one self-contained page about a model: its heads, each method on them, a text, a tuned plan."""
    from smyrf.tools.compare import command
    from smyrf.tools.compare.load_model import load_subject

    threads = read_threads(threads)
    need_at_least(1, length=length, documents=documents, rows=rows)
    need_at_least(0, singular=singular)
    need_seed(seed)
    need_max_error(max_error)
    chosen = read_methods(methods)
    kind, path = read_inputs(length, text=text, images=images, audio=audio)
    memory = read_memory(memory)
    need_model(model)
    need("plotly", "report")
    need_writable("output", output)
    need_writable("json", json)
    if json is not None and json.resolve() == output.resolve():
        refuse(f"--json {json} is the page itself: choose another file")

    from smyrf.tools.report.findings import gather, write_data, write_page
    from smyrf.tools.tables import print_written

    console = Console()
    with naming(model, kind, path):
        subject = load_subject(
            model, kind=kind, path=path, length=length, documents=documents, seed=seed, console=console
        )
        prepared = command.prepare(subject, threads=threads, seed=seed, console=console)
        found = gather(
            prepared,
            chosen,
            max_error=max_error,
            memory=memory,
            threads=threads,
            rows=rows,
            n_values=singular,
            console=console,
        )
        if json is not None:
            write_data(found, json)
        write_page(found, output)
    print_written([output] if json is None else [json, output], console)
