"""`smyrf inspect biggan` and `smyrf inspect clusters`, registered on the app of `smyrf inspect`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape

from smyrf.experiments.biggan.image_limits import need_images
from smyrf.tools.cli.inspect import app
from smyrf.tools.cli.options import Json, Methods, PlotFolder, Seed, Singular, Threads
from smyrf.tools.cli.validation import (
    naming,
    need,
    need_at_least,
    need_figure,
    need_folder,
    need_model,
    need_seed,
    need_weights,
    need_writable,
    read_classes,
    read_methods,
    read_threads,
    refuse,
)

if TYPE_CHECKING:
    from torch import Tensor

    from smyrf.experiments.biggan.networks import Generator
    from smyrf.methods import Method

    # Images, the cluster grids of each method, the methods, and a title.
    Clustered: TypeAlias = tuple[Tensor, list[Tensor], tuple[Method, ...], str]

# Suffixes of a generator's weights; anything else that is no file is a transformers model.
WEIGHTS = (".pth", ".pt", ".safetensors")

CLASSES = "Class numbers, separated by commas, used in turn; any by default."
TRUNCATION = "Bound of the latents; none by default."
# Options for only one kind of source are shown together.
OF_MODEL, OF_BIGGAN = "Of a transformers model", "Of a BigGAN"


@app.command()
def biggan(
    checkpoint: Annotated[Path, typer.Argument(help="Weights of a BigGAN generator, as for smyrf biggan sample.")],
    methods: Methods = None,
    number: Annotated[int, typer.Option(help="Images; singular values are those of the first.")] = 4,
    classes: Annotated[str | None, typer.Option(help=CLASSES)] = None,
    truncation: Annotated[float | None, typer.Option(help=TRUNCATION)] = None,
    block: Annotated[
        list[int] | None,
        typer.Option(help="Attention block, counted from 0; may be given several times; all by default."),
    ] = None,
    rows: Annotated[int, typer.Option(help="Size of the sample of pixels per image to inspect.")] = 1024,
    singular: Singular = 64,
    threads: Threads = None,
    seed: Seed = 0,
    json: Json = None,
    output: PlotFolder = None,
) -> None:
    """The attention of a BigGAN on drawn latents: the paper's sparsity and singular values, and errors of methods.

    Each attention block of the generator is a layer with one head; its queries are pixels, its keys pooled pixels.
    """
    import torch

    threads = read_threads(threads)
    need_images(number)
    need_at_least(1, rows=rows)
    need_at_least(0, singular=singular)
    need_seed(seed)
    chosen, wanted = read_methods(methods), read_classes(classes)
    need_weights(checkpoint)
    need_writable("json", json)
    need_folder(output)

    from smyrf.experiments.biggan.checkpoints import load_generator
    from smyrf.experiments.biggan.inspect_input import draw_calls
    from smyrf.tools.inspect import command

    torch.set_num_threads(threads)
    console = Console()
    with _naming_checkpoint(checkpoint):
        with console.status(f"loading {escape(checkpoint.name)}"):
            generator = load_generator(checkpoint)
        layers = None if block is None else sorted({_find_block(generator, one) for one in block})
        with console.status(f"running {escape(checkpoint.name)}"):
            loaded = draw_calls(generator, str(checkpoint), number, classes=wanted, truncation=truncation, seed=seed)
        command.inspect(
            loaded,
            chosen,
            layers=layers,
            rows=rows,
            n_values=singular,
            seed=seed,
            threads=threads,
            all_heads=False,
            json=json,
            output=output,
            console=console,
        )


@app.command()
def clusters(
    source: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT|MODEL",
            help="Weights of a BigGAN generator, a .pth, .pt or .safetensors file as for smyrf biggan sample; or a "
            "transformers model that reads images, a folder or a hub name.",
        ),
    ],
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods, separated by commas; by default two clusters, and clusters of 32 queries (128 of them at "
            "64×64 pixels)."
        ),
    ] = None,
    number: Annotated[int, typer.Option(help="Images.")] = 4,
    images: Annotated[
        Path | None,
        typer.Option(
            help="Folder with .jpg, .png or .webp images; crops of a photograph by default.", rich_help_panel=OF_MODEL
        ),
    ] = None,
    layer: Annotated[
        int | None, typer.Option(help="Layer, counted from 0; 0 by default.", rich_help_panel=OF_MODEL)
    ] = None,
    head: Annotated[
        int | None, typer.Option(help="Head, counted from 0; 0 by default.", rich_help_panel=OF_MODEL)
    ] = None,
    classes: Annotated[str | None, typer.Option(help=CLASSES, rich_help_panel=OF_BIGGAN)] = None,
    truncation: Annotated[float | None, typer.Option(help=TRUNCATION, rich_help_panel=OF_BIGGAN)] = None,
    block: Annotated[
        int | None, typer.Option(help="Attention block; the last by default.", rich_help_panel=OF_BIGGAN)
    ] = None,
    seed: Seed = 0,
    output: Annotated[Path, typer.Option(help="Figure to write, with .png and .svg appended.")] = Path("clusters"),
) -> None:
    """Images beside the clusters of their pixels or patches: the paper's figure of memberships."""
    from smyrf.tools.analysis.cluster_grids import check_clustering
    from smyrf.tools.inspect.clusters import plot_clusters
    from smyrf.tools.tables import print_written

    is_weights = Path(source).suffix in WEIGHTS or Path(source).is_file()
    if is_weights:
        _need_absent(f"a model, and {source} is the weights of a BigGAN", images=images, layer=layer, head=head)
    else:
        what = f"a BigGAN, whose weights end in {', '.join(WEIGHTS)}, and {source} is a model"
        _need_absent(what, classes=classes, truncation=truncation, block=block)
    need_images(number)
    need_at_least(0, layer=layer, head=head)
    need_seed(seed)
    need("matplotlib", "plots")
    need_figure(output, ".png", ".svg")
    chosen, wanted = read_methods(methods), read_classes(classes)
    try:
        check_clustering(chosen)
    except ValueError as error:
        refuse(f"--methods: {error}")
    if is_weights:
        block = -1 if block is None else block
        pictures, maps, chosen, title = _of_biggan(Path(source), chosen, number, wanted, truncation, block, seed)
    else:
        pictures, maps, chosen, title = _of_model(source, chosen, number, images, layer or 0, head or 0, seed)
    print_written(plot_clusters(pictures, maps, chosen, output, title), Console())


def _of_biggan(
    checkpoint: Path,
    methods: tuple[Method, ...],
    number: int,
    classes: list[int] | None,
    truncation: float | None,
    block: int,
    seed: int,
) -> Clustered:
    from smyrf.experiments.biggan.checkpoints import load_generator
    from smyrf.experiments.biggan.clusters import cluster_maps
    from smyrf.experiments.biggan.latents import draw_classes, draw_latents
    from smyrf.tools.analysis.cluster_grids import default_clusterings

    need_weights(checkpoint)
    with _naming_checkpoint(checkpoint):
        generator = load_generator(checkpoint)
        block = _find_block(generator, block)
        size = sorted(generator.config.attention)[block]
        chosen = methods or default_clusterings(size * size)
        z = draw_latents(number, generator.config.n_latent, truncation=truncation, seed=seed)
        drawn = draw_classes(number, generator, classes, seed)
        pictures, maps = cluster_maps(generator, z, drawn, chosen, block=block, seed=seed)
    return pictures, maps, chosen, f"{checkpoint.name}, attention at {size}×{size} pixels"


def _of_model(
    model: str, methods: tuple[Method, ...], number: int, images: Path | None, layer: int, head: int, seed: int
) -> Clustered:
    from smyrf.models.calls import find_call
    from smyrf.tools.analysis.cluster_grids import default_clusterings
    from smyrf.tools.inspect import command
    from smyrf.tools.inspect.clusters import image_clusters

    need_model(model)
    with naming(model, "images", images):
        loaded = command.load(model, kind="images", path=images, documents=number, seed=seed, console=Console())
        chosen = methods or default_clusterings(find_call(loaded.calls, layer, head).n_queries)
        pictures, maps = image_clusters(loaded, chosen, layer=layer, head=head, seed=seed)
    return pictures, maps, chosen, f"{loaded.title}\nlayer {layer} head {head}"


@contextmanager
def _naming_checkpoint(checkpoint: Path) -> Iterator[None]:
    """Refuse a checkpoint that turns out to be bad inside the block, and name its file."""
    from smyrf.experiments.biggan.checkpoints import CheckpointError

    with naming(str(checkpoint)):
        try:
            yield
        except CheckpointError as error:  # its message names the file
            refuse(str(error))


def _find_block(generator: Generator, block: int) -> int:
    """The number of an attention block, counted from 0; negative numbers count from the last."""
    n_blocks = len(generator.config.attention)
    if not n_blocks:
        raise ValueError("the generator has no attention block")
    if not -n_blocks <= block < n_blocks:
        refuse(f"--block {block} must be from {-n_blocks} to {n_blocks - 1}")
    return block % n_blocks


def _need_absent(what: str, **options: object) -> None:
    """Refuse options that belong to another kind of source."""
    for name, value in options.items():
        if value is not None:
            refuse(f"--{name} {value} is for {what}")
