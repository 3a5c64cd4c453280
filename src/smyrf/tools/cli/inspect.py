"""`smyrf inspect` and `smyrf inspect tokens`; experiments register further commands on `app`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from smyrf.tools.cli.default_command import RunByDefault
from smyrf.tools.cli.options import (
    LENGTH,
    Audio,
    Images,
    Json,
    Methods,
    Model,
    PlotFolder,
    Seed,
    Singular,
    Text,
    Threads,
)
from smyrf.tools.cli.validation import (
    naming,
    need_at_least,
    need_folder,
    need_model,
    need_seed,
    need_writable,
    read_inputs,
    read_methods,
    read_threads,
    refuse,
)

app = typer.Typer(cls=RunByDefault, help="Look inside: what a method does with real inputs.")
# Tokens of a text that fit a screen.
SCREEN = 128


@app.command(hidden=True)
def run(
    model: Model = "minilm",
    text: Text = None,
    images: Images = None,
    audio: Audio = None,
    methods: Methods = None,
    length: Annotated[int | None, typer.Option("--length", "--max-length", help=LENGTH)] = None,
    documents: Annotated[
        int, typer.Option(help="Texts, images or sounds; singular values are those of the first.")
    ] = 1,
    layer: Annotated[
        list[int] | None, typer.Option(help="Layer, counted from 0; may be given several times; all by default.")
    ] = None,
    heads: Annotated[bool, typer.Option("--heads", help="One row per head instead of one per layer.")] = False,
    rows: Annotated[int, typer.Option(help="Size of the sample of queries per document to inspect.")] = 1024,
    singular: Singular = 64,
    threads: Threads = None,
    seed: Seed = 0,
    json: Json = None,
    output: PlotFolder = None,
) -> None:
    """Every head of a model: sparsity, entropy, singular values, and how well methods approximate it and why not.

    `smyrf inspect biggan` does the same for a BigGAN, `smyrf inspect tokens` shows a text as a head sees it, and `smyrf
    inspect clusters` the clusters of an image's pixels or patches.
    Without --text, --images or --audio: Python's documentation, crops of a photograph, or synthesised sounds.
    """
    import torch

    threads = read_threads(threads)
    need_at_least(1, length=length, documents=documents, rows=rows)
    need_at_least(0, singular=singular)
    need_seed(seed)
    chosen = read_methods(methods)
    kind, path = read_inputs(length, text=text, images=images, audio=audio)
    need_model(model)
    need_writable("json", json)
    need_folder(output)

    from smyrf.tools.inspect import command

    torch.set_num_threads(threads)
    console = Console()
    with naming(model, kind, path):
        loaded = command.load(
            model, kind=kind, path=path, length=length, documents=documents, seed=seed, console=console
        )
        layers = None if layer is None else sorted(set(layer))
        for one in layers or []:
            if not 0 <= one < len(loaded.calls):
                refuse(f"--layer {one} must be from 0 to {len(loaded.calls) - 1}")
        command.inspect(
            loaded,
            chosen,
            layers=layers,
            rows=rows,
            n_values=singular,
            seed=seed,
            threads=threads,
            all_heads=heads,
            json=json,
            output=output,
            console=console,
        )


@app.command()
def tokens(
    model: Model = "minilm",
    text: Text = None,
    method: Annotated[str, typer.Option(help="As in smyrf:8x32 or tangent:0.25.")] = "smyrf:4x16",
    layer: Annotated[int, typer.Option(help="Layer, counted from 0.")] = 0,
    head: Annotated[int, typer.Option(help="Head, counted from 0.")] = 0,
    round: Annotated[int, typer.Option(help="Round whose clusters are shown, counted from 0.")] = 0,
    token: Annotated[
        int | None, typer.Option(help="Also show the strongest keys of this token, counted from 0.")
    ] = None,
    strongest: Annotated[int, typer.Option(help="Number of strongest keys to show, dense against approximate.")] = 8,
    length: Annotated[
        int, typer.Option("--length", "--max-length", help="Read this many tokens from the start of the text.")
    ] = SCREEN,
    seed: Seed = 0,
    json: Annotated[Path | None, typer.Option(help="Write clusters, keys and weights to this file.")] = None,
) -> None:
    """A text as a head sees it: tokens coloured by cluster, and the keys that they visit."""
    from smyrf.methods import parse_method

    need_at_least(0, layer=layer, head=head, round=round, token=token)
    need_at_least(1, length=length, strongest=strongest)
    need_seed(seed)
    try:
        chosen = parse_method(method)
    except ValueError as error:
        refuse(f"--method {error}")
    need_model(model)
    need_writable("json", json)

    from smyrf.tools.inspect import command

    console = Console()
    with naming(model, "text", text):
        loaded = command.load(model, kind="text", path=text, length=length, documents=1, seed=seed, console=console)
        command.tokens(
            loaded,
            chosen,
            layer=layer,
            head=head,
            round=round,
            token=token,
            n_strongest=strongest,
            seed=seed,
            json=json,
            console=console,
        )
