"""Options that several commands share, as annotated types."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Model: TypeAlias = Annotated[str, typer.Argument(help="minilm, or a path or hub name of a transformers model.")]
Text: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="File with documents: .jsonl, an object with a field text on each line; or .txt, .md, .rst, a document on "
        "each line or, if there are blank lines, in each paragraph. Each may end in .gz."
    ),
]
Images: TypeAlias = Annotated[Path | None, typer.Option(help="Folder with .jpg, .png or .webp images.")]
Audio: TypeAlias = Annotated[
    Path | None, typer.Option(help="Folder with .wav files, or others with soundfile; at most 30 seconds of each.")
]
LENGTH = "Tokens per text; by default 512, or fewer if the model has fewer positions."
Length: TypeAlias = Annotated[int | None, typer.Option(help=LENGTH)]
Methods: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Methods, separated by commas, as in tangent:0.25,smyrf:8x32; by default Tangent and Smyrf at 1/8, 1/4 "
        "and 1/2 of the keys."
    ),
]
MaxError: TypeAlias = Annotated[float, typer.Option(help="Relative output error that tuning allows in each layer.")]
Singular: TypeAlias = Annotated[
    int,
    typer.Option(help="Singular values to compute of maps beyond 1,024 tokens; shorter maps get all; 0 for none."),
]
Memory: TypeAlias = Annotated[
    bool | None,
    typer.Option(help="Also measure peak memory, each in a fresh process; by default if the system allows it."),
]
Threads: TypeAlias = Annotated[int | None, typer.Option(help="CPU threads; PyTorch's setting by default.")]
Seed: TypeAlias = Annotated[int, typer.Option(help="Seed of everything random.")]
Json: TypeAlias = Annotated[Path | None, typer.Option(help="Write the results to this file.")]
Plot: TypeAlias = Annotated[Path | None, typer.Option(help="Write plots to this path, with .png and .svg appended.")]
PlotFolder: TypeAlias = Annotated[Path | None, typer.Option(help="Folder for plots, as .png and .svg.")]
