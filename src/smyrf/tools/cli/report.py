"""`smyrf report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from smyrf.tools.cli.validation import (
    naming,
    need,
    need_at_least,
    need_model,
    need_seed,
    need_writable,
    read_inputs,
    read_memory,
    read_methods,
    refuse,
)


def report(
    model: Annotated[str, typer.Argument(help="minilm, or a path or hub name of a transformers model.")] = "minilm",
    text: Annotated[Path | None, typer.Option(help="File with documents, as for smyrf compare.")] = None,
    images: Annotated[Path | None, typer.Option(help="Folder with .jpg, .png or .webp images.")] = None,
    audio: Annotated[Path | None, typer.Option(help="Folder with sounds.")] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Methods behind commas; Tangent and Smyrf at an eighth, a quarter and half by default."),
    ] = None,
    max_error: Annotated[float, typer.Option(help="Relative output error of each layer, for the tuned plan.")] = 0.1,
    length: Annotated[
        int | None, typer.Option(help="Tokens per text; 512 by default, or as many as the model has positions.")
    ] = None,
    documents: Annotated[int, typer.Option(help="Texts, images or sounds for the comparison of outputs.")] = 8,
    rows: Annotated[int, typer.Option(help="Queries of each document whose weights are looked at.")] = 512,
    singular: Annotated[
        int, typer.Option(help="Singular values of maps beyond 1,024 tokens; shorter ones have all, 0 leaves all out.")
    ] = 64,
    memory: Annotated[
        bool | None,
        typer.Option(help="Also measure peak memory, each in a fresh process; where it can be, by default."),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; PyTorch's own number by default.")] = None,
    seed: Annotated[int, typer.Option(help="Of hashes, samples and crops.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write everything that the page shows here, as data.")] = None,
    output: Annotated[Path, typer.Option(help="Page to write.")] = Path("report.html"),
) -> None:
    """One page about a model, without anything from elsewhere: its heads, each method on them, a text, a tuned plan."""
    import torch

    from smyrf.tools.compare import command

    threads = torch.get_num_threads() if threads is None else threads
    need_at_least(1, length=length, documents=documents, threads=threads, rows=rows)
    need_at_least(0, singular=singular)
    need_seed(seed)
    if not 0.0 < max_error < 1.0:
        refuse(f"--max-error {max_error} must be between 0 and 1")
    chosen = [] if methods is None else list(read_methods(methods))
    kind, inputs = read_inputs(length, text=text, images=images, audio=audio)
    memory = read_memory(memory)
    need_model(model)
    need("plotly", "report")
    need_writable("output", output)
    if json is not None:
        need_writable("json", json)
        if json.resolve() == output.resolve():
            refuse(f"--json {json} is the page itself: choose another file")

    from smyrf.tools.report.findings import gather, write_data, write_page

    console = Console()
    with naming(model, kind, inputs):
        prepared = command.prepare(
            model,
            kind=kind,
            path=inputs,
            length=length,
            documents=documents,
            batch=documents,
            threads=threads,
            seed=seed,
            console=console,
        )
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
    for file in (json, output):
        if file is not None:
            console.print(f"written: {escape(str(file))}", highlight=False, soft_wrap=True)
