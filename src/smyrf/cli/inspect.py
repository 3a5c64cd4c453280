"""`smyrf inspect clusters`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from smyrf.cli.refusals import need, need_at_least, need_seed, need_writable, read_classes, read_methods, refuse

app = typer.Typer(help="Look inside: what a method does with real inputs.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Look inside: what a method does with real inputs."""


@app.command()
def clusters(
    checkpoint: Annotated[Path, typer.Argument(help="Weights of a BigGAN generator, as for smyrf biggan sample.")],
    methods: Annotated[
        str, typer.Option(help="Methods behind commas; at 64×64 pixels the default makes 2 and 128 clusters.")
    ] = "smyrf:1x2048,smyrf:1x32",
    number: Annotated[int, typer.Option(help="Images.")] = 4,
    classes: Annotated[
        str | None, typer.Option(help="Class numbers behind commas, used in turn; any by default.")
    ] = None,
    truncation: Annotated[float | None, typer.Option(help="Bound of the latents; none by default.")] = None,
    block: Annotated[int, typer.Option(help="Which attention block; the last by default.")] = -1,
    seed: Annotated[int, typer.Option(help="Of latents, classes and hashes.")] = 0,
    output: Annotated[Path, typer.Option(help="Figure to write, .png and .svg behind it.")] = Path("clusters"),
) -> None:
    """In which cluster each pixel of generated images asks, beside the images: the paper's figure of memberships."""
    from smyrf.biggan.checkpoints import load_generator
    from smyrf.biggan.clusters import cluster_maps, plot_clusters
    from smyrf.biggan.latents import draw_classes, draw_latents

    need_at_least(1, number=number)
    need_seed(seed)
    need("matplotlib", "plots")
    need_writable("output", output.with_name(output.name + ".png"))
    chosen, wanted = read_methods(methods), read_classes(classes)
    try:
        generator = load_generator(checkpoint)
        z = draw_latents(number, generator.config.n_latent, truncation=truncation, seed=seed)
        drawn = draw_classes(number, generator, wanted, seed)
        images, maps = cluster_maps(generator, z, drawn, chosen, block=block, seed=seed)
    except ValueError as error:
        refuse(str(error))
    for path in plot_clusters(images, maps, chosen, output):
        Console().print(f"written: {escape(str(path))}", highlight=False, soft_wrap=True)
