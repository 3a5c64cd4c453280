"""`smyrf inspect`, `smyrf inspect biggan`, `smyrf inspect tokens` and `smyrf inspect clusters`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape

from smyrf.tools.cli.default_command import RunByDefault
from smyrf.tools.cli.validation import (
    naming,
    need,
    need_at_least,
    need_figure,
    need_model,
    need_seed,
    need_weights,
    need_writable,
    read_classes,
    read_inputs,
    read_methods,
    refuse,
)

if TYPE_CHECKING:
    from torch import Tensor

    from smyrf.experiments.biggan.networks import Generator
    from smyrf.methods import Method

    # Images, for each method the clusters on them, the methods, and a title.
    Clustered: TypeAlias = tuple[Tensor, list[Tensor], tuple[Method, ...], str]

app = typer.Typer(cls=RunByDefault, help="Look inside: what a method does with real inputs.")
# Tokens of a text that fit a screen.
SCREEN = 128
# How the weights of a generator end; what does not, and is no file, is a model of transformers.
WEIGHTS = (".pth", ".pt", ".safetensors")

MODEL = typer.Argument(help="minilm, or a path or hub name of a transformers model.")
TEXT = typer.Option(help="File with documents, as for smyrf compare: .jsonl, .txt, .md or .rst, perhaps with .gz.")
METHODS = typer.Option(
    help="Methods behind commas, as in tangent:0.25,smyrf:8x32; by default Tangent and Smyrf at an eighth, a quarter "
    "and half of the keys."
)
THREADS = typer.Option(help="CPU threads; PyTorch's own number by default.")
JSON = typer.Option(help="Write everything here, head by head.")
PLOTS = typer.Option(help="Folder for plots, as .png and .svg.")
CLASSES = "Class numbers behind commas, used in turn; any by default."
TRUNCATION = "Bound of the latents; none by default."
# Options of one kind of source alone stand together.
OF_MODEL, OF_BIGGAN = "Of a transformers model", "Of a BigGAN"


@app.command(hidden=True)
def run(
    model: Annotated[str, MODEL] = "minilm",
    text: Annotated[Path | None, TEXT] = None,
    images: Annotated[Path | None, typer.Option(help="Folder with .jpg, .png or .webp images.")] = None,
    audio: Annotated[Path | None, typer.Option(help="Folder with .wav files, or others with soundfile.")] = None,
    methods: Annotated[str | None, METHODS] = None,
    length: Annotated[
        int | None,
        typer.Option(
            "--length", "--max-length", help="Tokens per text; 512 by default, or as many as the model has positions."
        ),
    ] = None,
    documents: Annotated[int, typer.Option(help="Texts, images or sounds; singular values are of the first.")] = 1,
    layer: Annotated[
        list[int] | None, typer.Option(help="Number of a layer, from 0; may be given several times; all by default.")
    ] = None,
    heads: Annotated[bool, typer.Option("--heads", help="A row for each head, not for each layer.")] = False,
    rows: Annotated[int, typer.Option(help="Queries of a document whose weights are looked at, a sample.")] = 1024,
    singular: Annotated[
        int, typer.Option(help="Singular values of maps beyond 1,024 tokens; shorter ones have all, 0 leaves all out.")
    ] = 64,
    threads: Annotated[int | None, THREADS] = None,
    seed: Annotated[int, typer.Option(help="Of hashes, rows and samples.")] = 0,
    json: Annotated[Path | None, JSON] = None,
    output: Annotated[Path | None, PLOTS] = None,
) -> None:
    """Every head of a model: sparsity, entropy, singular values, and how well methods approximate it and why not.

    `smyrf inspect biggan` does the same for a BigGAN, `smyrf inspect tokens` shows a text as a head sees it, and `smyrf
    inspect clusters` the clusters of an image's pixels or patches.
    Without --text, --images or --audio: Python's documentation, crops of a photograph, or synthesised sounds.
    """
    import torch

    threads = torch.get_num_threads() if threads is None else threads
    need_at_least(1, length=length, documents=documents, rows=rows, threads=threads)
    need_at_least(0, singular=singular)
    need_seed(seed)
    chosen = () if methods is None else read_methods(methods)
    kind, inputs = read_inputs(length, text=text, images=images, audio=audio)
    need_model(model)
    _need_places(json, output)

    from smyrf.tools.inspect import command

    torch.set_num_threads(threads)
    console = Console()
    with naming(model, kind, inputs):
        loaded = command.load(
            model, kind=kind, path=inputs, length=length, documents=documents, seed=seed, console=console
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
def biggan(
    checkpoint: Annotated[Path, typer.Argument(help="Weights of a BigGAN generator, as for smyrf biggan sample.")],
    methods: Annotated[str | None, METHODS] = None,
    number: Annotated[int, typer.Option(help="Images; singular values are of the first.")] = 4,
    classes: Annotated[str | None, typer.Option(help=CLASSES)] = None,
    truncation: Annotated[float | None, typer.Option(help=TRUNCATION)] = None,
    block: Annotated[
        list[int] | None,
        typer.Option(help="Number of an attention block, from 0; may be given several times; all by default."),
    ] = None,
    rows: Annotated[int, typer.Option(help="Pixels of an image whose weights are looked at, a sample.")] = 1024,
    singular: Annotated[
        int, typer.Option(help="Singular values of maps beyond 1,024 keys; smaller ones have all, 0 leaves all out.")
    ] = 64,
    threads: Annotated[int | None, THREADS] = None,
    seed: Annotated[int, typer.Option(help="Of latents, classes, hashes, rows and samples.")] = 0,
    json: Annotated[Path | None, JSON] = None,
    output: Annotated[Path | None, PLOTS] = None,
) -> None:
    """The attention of a BigGAN on drawn latents: the paper's sparsity and singular values, and errors of methods.

    Each attention block of the generator is a layer with one head, pixels ask and pooled pixels are looked at.
    """
    import torch

    threads = torch.get_num_threads() if threads is None else threads
    need_at_least(1, number=number, rows=rows, threads=threads)
    need_at_least(0, singular=singular)
    need_seed(seed)
    chosen, wanted = () if methods is None else read_methods(methods), read_classes(classes)
    need_weights(checkpoint)
    _need_places(json, output)

    from smyrf.experiments.biggan.calls import draw_calls
    from smyrf.experiments.biggan.checkpoints import load_generator
    from smyrf.tools.inspect import command

    torch.set_num_threads(threads)
    console = Console()
    with naming(str(checkpoint)):
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
def tokens(
    model: Annotated[str, MODEL] = "minilm",
    text: Annotated[Path | None, TEXT] = None,
    method: Annotated[str, typer.Option(help="As in smyrf:8x32 or tangent:0.25.")] = "smyrf:4x16",
    layer: Annotated[int, typer.Option(help="Number of the layer, from 0.")] = 0,
    head: Annotated[int, typer.Option(help="Number of the head, from 0.")] = 0,
    round: Annotated[int, typer.Option(help="Hashing round whose clusters are shown, from 0.")] = 0,
    token: Annotated[int | None, typer.Option(help="Also show the strongest keys of this token, from 0.")] = None,
    strongest: Annotated[int, typer.Option(help="How many keys of a token, dense against approximate.")] = 8,
    length: Annotated[
        int, typer.Option("--length", "--max-length", help="Tokens of the text, its first ones.")
    ] = SCREEN,
    seed: Annotated[int, typer.Option(help="Of hashes.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the view here: clusters, keys and weights.")] = None,
) -> None:
    """A text as a head sees it: tokens coloured by cluster, and the keys that they reach."""
    from smyrf.methods import parse_method

    need_at_least(0, layer=layer, head=head, round=round, token=token)
    need_at_least(1, length=length, strongest=strongest)
    need_seed(seed)
    try:
        chosen = parse_method(method)
    except ValueError as error:
        refuse(f"--method {error}")
    need_model(model)
    if json is not None:
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
            help="Methods behind commas; by default two clusters, and clusters of 32 queries, 128 at 64×64 pixels."
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
        int | None, typer.Option(help="Number of the layer, from 0; 0 by default.", rich_help_panel=OF_MODEL)
    ] = None,
    head: Annotated[
        int | None, typer.Option(help="Number of the head, from 0; 0 by default.", rich_help_panel=OF_MODEL)
    ] = None,
    classes: Annotated[str | None, typer.Option(help=CLASSES, rich_help_panel=OF_BIGGAN)] = None,
    truncation: Annotated[float | None, typer.Option(help=TRUNCATION, rich_help_panel=OF_BIGGAN)] = None,
    block: Annotated[
        int | None, typer.Option(help="Which attention block; the last by default.", rich_help_panel=OF_BIGGAN)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of latents, classes, crops and hashes.")] = 0,
    output: Annotated[Path, typer.Option(help="Figure to write, .png and .svg behind it.")] = Path("clusters"),
) -> None:
    """In which cluster each pixel or patch of images asks, beside the images: the paper's figure of memberships."""
    from smyrf.tools.analysis.cluster_grids import check_clustering
    from smyrf.tools.inspect.clusters import plot_clusters

    is_weights = Path(source).suffix in WEIGHTS or Path(source).is_file()
    if is_weights:
        _need_absent(f"a model, and {source} is the weights of a BigGAN", images=images, layer=layer, head=head)
    else:
        what = f"a BigGAN, whose weights end in {', '.join(WEIGHTS)}, and {source} is a model"
        _need_absent(what, classes=classes, truncation=truncation, block=block)
    need_at_least(1, number=number)
    need_at_least(0, layer=layer, head=head)
    need_seed(seed)
    need("matplotlib", "plots")
    need_figure(output, ".png", ".svg")
    chosen, wanted = () if methods is None else read_methods(methods), read_classes(classes)
    try:
        check_clustering(chosen)
    except ValueError as error:
        refuse(f"--methods: {error}")
    if is_weights:
        block = -1 if block is None else block
        pictures, maps, chosen, title = _of_biggan(Path(source), chosen, number, wanted, truncation, block, seed)
    else:
        pictures, maps, chosen, title = _of_model(source, chosen, number, images, layer or 0, head or 0, seed)
    for path in plot_clusters(pictures, maps, chosen, output, title):
        Console().print(f"written: {escape(str(path))}", highlight=False, soft_wrap=True)


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
    with naming(str(checkpoint)):
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


def _find_block(generator: Generator, block: int) -> int:
    """The number of an attention block from 0; from the last, a number is negative."""
    n_blocks = len(generator.config.attention)
    if not n_blocks:
        raise ValueError("the generator has no attention block")
    if not -n_blocks <= block < n_blocks:
        refuse(f"--block {block} must be from {-n_blocks} to {n_blocks - 1}")
    return block % n_blocks


def _need_absent(what: str, **options: object) -> None:
    """Refuses options that are for something else."""
    for name, value in options.items():
        if value is not None:
            refuse(f"--{name} {value} is for {what}")


def _need_places(json: Path | None, output: Path | None) -> None:
    """Refuses a file of results or a folder of plots that cannot be written."""
    if json is not None:
        need_writable("json", json)
    if output is not None:
        need("matplotlib", "plots")
        if output.exists() and not output.is_dir():
            refuse(f"--output {output} is a file, not a folder")
        need_writable("output", output / "heads.png")
