"""`smyrf compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from smyrf.tools.cli.validation import (
    naming,
    need_at_least,
    need_model,
    need_outputs,
    need_seed,
    read_inputs,
    read_memory,
    refuse,
)


def compare(
    model: Annotated[str, typer.Argument(help="minilm, or a path or hub name of a transformers model.")],
    text: Annotated[
        Path | None,
        typer.Option(
            help="File with documents: .jsonl, an object with a field text on each line; or .txt, .md, .rst, a "
            "document on each line or, if there are blank lines, in each paragraph. Each may end in .gz."
        ),
    ] = None,
    images: Annotated[Path | None, typer.Option(help="Folder with .jpg, .png or .webp images.")] = None,
    audio: Annotated[
        Path | None, typer.Option(help="Folder with .wav files, or others with soundfile; 30 seconds of each at most.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="tangent:0.25 (share of the keys), tangent:128 (key visits), smyrf:8x32 (rounds × cluster size), each "
            "perhaps with options as in tangent:0.25,levels=2; tuned, tuned:0.1 or tuned:0.1,fallback=false. May be "
            "given several times; by default Tangent and Smyrf at an eighth, a quarter and half of the keys, and tuned."
        ),
    ] = None,
    max_error: Annotated[float, typer.Option(help="Relative output error of each layer, for tuned.")] = 0.05,
    length: Annotated[
        int | None, typer.Option(help="Tokens per text; 512 by default, or as many as the model has positions.")
    ] = None,
    documents: Annotated[int, typer.Option(help="Texts, images or sounds; the first that are long enough.")] = 32,
    batch: Annotated[int, typer.Option(help="Documents in a forward pass.")] = 8,
    threads: Annotated[int | None, typer.Option(help="CPU threads; PyTorch's own number by default.")] = None,
    memory: Annotated[
        bool | None,
        typer.Option(help="Also measure peak memory, each in a fresh process; where it can be, by default."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of hashes, samples and crops.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the results here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write plots here, as .png and .svg.")] = None,
) -> None:
    """A model with other attention against itself: drift of its outputs, key visits, memory and time.

    Without --text, --images or --audio: Python's documentation, crops of a photograph, or synthesised sounds.
    """
    import torch

    from smyrf.tools.compare import command
    from smyrf.tools.compare.contenders import parse_contender

    threads = torch.get_num_threads() if threads is None else threads
    need_at_least(1, length=length, documents=documents, batch=batch, threads=threads)
    need_seed(seed)
    if not 0.0 < max_error < 1.0:
        refuse(f"--max-error {max_error} must be between 0 and 1")
    contenders = []
    for one in method or []:
        try:
            contenders.append(parse_contender(one, max_error))
        except ValueError as error:
            refuse(f"--method: {error}")
    kind, inputs = read_inputs(length, text=text, images=images, audio=audio)
    memory = read_memory(memory)
    need_model(model)
    need_outputs(json, plot)
    console = Console()
    with naming(model, kind, inputs):
        prepared = command.prepare(
            model,
            kind=kind,
            path=inputs,
            length=length,
            documents=documents,
            batch=batch,
            threads=threads,
            seed=seed,
            console=console,
        )
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
