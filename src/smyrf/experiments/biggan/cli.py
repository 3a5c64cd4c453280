"""`smyrf biggan sample`, `smyrf biggan score` and `smyrf biggan train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape

from smyrf.experiments.biggan.image_limits import MAX_SCORED, need_images
from smyrf.tools.cli.validation import (
    need,
    need_at_least,
    need_figure,
    need_outputs,
    need_seed,
    need_weights,
    need_writable,
    read_classes,
    read_methods,
    refuse,
)

app = typer.Typer(help="BigGAN with any attention method: the paper's image experiments.", no_args_is_help=True)
Truncation: TypeAlias = Annotated[float | None, typer.Option(help="Bound of the latents; none by default.")]
Seed: TypeAlias = Annotated[int, typer.Option(help="Seed of latents, classes and hashes.")]
Batch: TypeAlias = Annotated[int, typer.Option(help="Batch size.")]
Threads: TypeAlias = Annotated[int | None, typer.Option(help="CPU threads; PyTorch's setting by default.")]


@app.callback()
def _root() -> None:
    """BigGAN with any attention method: the paper's image experiments."""


@app.command()
def sample(
    checkpoint: Annotated[
        Path,
        typer.Argument(help="Weights of a generator: G_ema.pth of the public checkpoints, or .safetensors of ours."),
    ],
    methods: Annotated[
        str,
        typer.Option(help="Methods, separated by commas: dense,smyrf:64x32,tangent:0.125 makes the paper's figure."),
    ] = "dense",
    number: Annotated[int, typer.Option(help="Number of images.")] = 8,
    classes: Annotated[
        str | None, typer.Option(help="Class indices, separated by commas, used in turn; random by default.")
    ] = None,
    truncation: Truncation = None,
    seed: Seed = 0,
    batch: Batch = 8,
    threads: Threads = None,
    output: Annotated[
        Path, typer.Option(help="Path of the image, without .png (and .svg for several methods).")
    ] = Path("samples"),
    json: Annotated[Path | None, typer.Option(help="Write the table to this file.")] = None,
) -> None:
    """Sample images of a pretrained BigGAN with one attention method, or with several from the same latents."""
    import torch
    from rich.progress import track

    from smyrf.atomic_write import write_json
    from smyrf.experiments.biggan.checkpoints import CheckpointError, load_generator
    from smyrf.experiments.biggan.sample import compare, write_images
    from smyrf.experiments.biggan.tables import image_table
    from smyrf.tools.results import command_line
    from smyrf.tuning.machine import machine

    need_images(number)
    need_at_least(1, batch=batch, threads=threads)
    need_seed(seed)
    chosen, wanted = read_methods(methods), read_classes(classes)
    need("PIL", "plots")
    need_outputs(json, None)
    if len(chosen) > 1:
        need("matplotlib", "plots")
    need_figure(output, *([".png", ".svg"] if len(chosen) > 1 else [".png"]))
    need_weights(checkpoint)
    if threads is not None:
        torch.set_num_threads(threads)
    console = Console()
    try:
        with console.status(f"loading {escape(checkpoint.name)}"):
            generator = load_generator(checkpoint)
        rows = compare(
            generator,
            chosen,
            number,
            classes=wanted,
            truncation=truncation,
            seed=seed,
            batch=batch,
            track=lambda some: track(some, "images", console=console, transient=True),
        )
    except CheckpointError as error:
        refuse(str(error))
    except ValueError as error:
        refuse(f"{checkpoint}: {error}")
    title = f"{checkpoint.name}, {number} images, seed {seed}" + (f", truncation {truncation:g}" if truncation else "")
    console.print(image_table(rows, title))
    if json is not None:
        found = [
            {"method": row.method.to_dict(), "memory": row.share, "distance_to_dense": row.distance} for row in rows
        ]
        about = {"command": command_line(), "machine": machine(), "config": generator.config.to_dict()}
        write_json(json, {**about, "rows": found})
    for path in write_images(rows, output, title):
        console.print(f"written: {escape(str(path))}", highlight=False, soft_wrap=True)


@app.command()
def score(
    checkpoint: Annotated[Path, typer.Argument(help="Weights of a generator, as for sample.")],
    features: Annotated[
        Path,
        typer.Option(
            help="Weights of the Inception network of published scores, pt_inception-2015-12-05-6726825d.pth; with "
            "--allow-torchscript a TorchScript network that returns features (images, width), optionally with logits."
        ),
    ],
    allow_torchscript: Annotated[
        bool,
        typer.Option("--allow-torchscript", help="Allow TorchScript as --features: this runs code from the file."),
    ] = False,
    real: Annotated[
        Path | None,
        typer.Option(help="Real images for the Fréchet distance: a folder, an .npz file or a saved dataset."),
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="Methods, separated by commas: dense,smyrf:64x32,tangent:0.125.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="table1: the ten rows of the paper's table.")] = None,
    number: Annotated[int, typer.Option(help="Number of images.")] = 5000,
    truncation: Truncation = None,
    seed: Seed = 0,
    batch: Batch = 8,
    threads: Threads = None,
    json: Annotated[Path | None, typer.Option(help="Write the scores to this file, after each method.")] = None,
) -> None:
    """Fréchet distance and inception score of a generator with different attention methods, beside the paper's."""
    import torch
    from rich.progress import track

    from smyrf.atomic_write import write_json
    from smyrf.experiments.biggan.checkpoints import CheckpointError, load_generator
    from smyrf.experiments.biggan.features import FeatureError, FeatureNetwork
    from smyrf.experiments.biggan.pictures import PictureError, load_pictures
    from smyrf.experiments.biggan.score import PAPER, real_moments
    from smyrf.experiments.biggan.score import score as score_methods
    from smyrf.experiments.biggan.tables import score_table
    from smyrf.tools.results import command_line
    from smyrf.tuning.machine import machine

    need_images(number, least=2, most=MAX_SCORED)
    need_at_least(1, batch=batch, threads=threads)
    need_seed(seed)
    if preset not in (None, "table1"):
        refuse(f"--preset {preset} must be table1")
    if preset is not None and methods is not None:
        refuse(f"--preset {preset} and --methods {methods} must not be given together")
    chosen = tuple(PAPER) if preset else read_methods(methods or "dense")
    need_outputs(json, None)
    need_weights(checkpoint)
    if real is not None:
        need("PIL", "plots")
    if threads is not None:
        torch.set_num_threads(threads)
    console = Console()

    def bar(some: Any, title: str) -> Any:
        return track(some, title, console=console, transient=True)

    scores = []
    try:
        network = FeatureNetwork(features, allow_torchscript=allow_torchscript)
        generator = load_generator(checkpoint)
        moments = None
        network.check(generator.config.n_colours, generator.config.resolution)
        if real is not None:
            pictures = load_pictures(real, generator.config.resolution, generator.config.n_colours)
            if len(pictures) < 2:
                refuse(f"--real {real} has only one image, at least two are needed")
            moments = real_moments(network, pictures, batch, lambda some: bar(some, "real images"))
        found = score_methods(
            generator, chosen, network, number, real=moments, truncation=truncation, seed=seed, batch=batch, track=bar
        )
        for one in found:
            scores.append(one)
            if json is not None:
                about = {"command": command_line(), "machine": machine(), "config": generator.config.to_dict()}
                write_json(json, {**about, "scores": [each.to_dict() for each in scores]})
    except (CheckpointError, FeatureError, PictureError) as error:  # their messages name a file
        refuse(str(error))
    except ValueError as error:
        refuse(f"{checkpoint}: {error}")
    console.print(score_table(scores, f"{checkpoint.name}, seed {seed}"))


@app.command()
def train(
    context: typer.Context,
    data: Annotated[
        Path,
        typer.Argument(help="Images: a folder (subfolders are classes), an .npz file or a dataset saved by datasets."),
    ],
    preset: Annotated[
        str | None,
        typer.Option(help="A run of the paper, such as celeba-128/smyrf-4x2048; other options override its settings."),
    ] = None,
    resolution: Annotated[int | None, typer.Option(help="Resolution in pixels: 32, 64, 128 or 256.")] = None,
    channels: Annotated[int | None, typer.Option(help="Width of the narrowest blocks; 96 in BigGAN.")] = None,
    colours: Annotated[int | None, typer.Option(help="3, or 1 for greyscale images.")] = None,
    latent: Annotated[int | None, typer.Option(help="Width of a latent vector.")] = None,
    hierarchical: Annotated[bool | None, typer.Option(help="Give each block a chunk of the latent vector.")] = None,
    shared: Annotated[int | None, typer.Option(help="Width of the shared class embedding; 0 for none.")] = None,
    attention: Annotated[
        list[int] | None, typer.Option(help="Resolution of an attention block; may be given several times.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="Attention method: dense, smyrf:4x2048, tangent:0.125.")] = None,
    batch: Annotated[int | None, typer.Option(help="Batch size, over all processes.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Parts of a batch whose gradients are accumulated.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the generator.")] = None,
    critic: Annotated[int | None, typer.Option(help="Discriminator steps per generator step.")] = None,
    generator_rate: Annotated[float | None, typer.Option(help="Learning rate of the generator.")] = None,
    discriminator_rate: Annotated[float | None, typer.Option(help="Learning rate of the discriminator.")] = None,
    ema: Annotated[float | None, typer.Option(help="Decay of the moving average of weights.")] = None,
    ema_start: Annotated[int | None, typer.Option(help="First step of the moving average.")] = None,
    flip: Annotated[bool | None, typer.Option(help="Mirror images at random.")] = None,
    max_error: Annotated[
        float | None, typer.Option(help="Target error of attention, to which the budget adapts.")
    ] = None,
    adapt_every: Annotated[int | None, typer.Option(help="Steps between changes of the budget.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, latents, the order of images and hashes.")] = 0,
    log_every: Annotated[int, typer.Option(help="Steps between losses.")] = 100,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 1000,
    grid_every: Annotated[int, typer.Option(help="Steps between image grids.")] = 1000,
    tensorboard: Annotated[bool, typer.Option(help="Also write losses and grids for TensorBoard.")] = False,
    threads: Threads = None,
    output: Annotated[Path, typer.Option(help="Folder for runs.")] = Path("runs"),
) -> None:
    """Train BigGAN with any attention method; the same command again resumes an interrupted run."""
    import torch
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from smyrf.experiments.biggan.config import BOTTOM
    from smyrf.experiments.biggan.pictures import load_pictures
    from smyrf.experiments.biggan.recipe import PRESETS, change
    from smyrf.experiments.biggan.tensorboard import Board
    from smyrf.experiments.biggan.train import Losses, Run
    from smyrf.experiments.launch_env import is_first_process
    from smyrf.experiments.run_lock import LockedError, run_lock
    from smyrf.experiments.save_errors import SaveError
    from smyrf.methods import parse_method

    need_at_least(1, threads=threads, log_every=log_every, save_every=save_every, grid_every=grid_every)
    need("accelerate", "biggan")
    need("safetensors", "biggan")
    need("PIL", "plots")
    if tensorboard:
        need("tensorboard", "tensorboard")
    if adapt_every is not None and max_error is None:
        refuse(f"--adapt-every {adapt_every} needs --max-error")
    if preset is not None and preset not in PRESETS:
        refuse(f"--preset {preset} must be one of {', '.join(PRESETS)}")
    try:
        chosen = None if method is None else parse_method(method)
    except ValueError as error:
        refuse(f"--method: {error}")
    of_config: dict[str, Any] = {
        "resolution": resolution,
        "channels": channels,
        "n_colours": colours,
        "n_latent": latent,
    }
    of_config |= {"attention": tuple(attention) if attention else None, "method": chosen}
    of_config |= {"hierarchical": hierarchical, "n_shared": shared}
    of_run: dict[str, Any] = {
        "batch_size": batch,
        "accumulate": accumulate,
        "n_steps": steps,
        "n_critic": critic,
        "ema": ema,
    }
    of_run |= {"generator_rate": generator_rate, "discriminator_rate": discriminator_rate, "ema_start": ema_start}
    of_run |= {"max_error": max_error, "adapt_every": adapt_every}
    try:
        found = load_pictures(data, BOTTOM)  # for its classes; the recipe sets the resolution
        n_classes = len(found.class_names)
        recipe = change(PRESETS.get(preset or ""), n_classes, of_config, {**of_run, "flip": flip, "seed": seed})
        pictures = found.fitted(recipe.config.resolution, recipe.config.n_colours, flip=recipe.flip)
        if threads is not None:
            torch.set_num_threads(threads)
        folder = output / recipe.name
        need_writable("output", folder / "state.json")
        if is_first_process():
            context.with_resource(run_lock(folder))
        run = Run(recipe, pictures, folder)
    except LockedError as error:
        refuse(f"--output {output}: {error}")
    except (TypeError, ValueError) as error:
        refuse(str(error))
    console = Console(quiet=not is_first_process())
    if recipe.config.n_classes == 1 < n_classes:
        console.print(f"{preset} trains without classes: the {n_classes} of {escape(str(data))} are not used")
    console.print(f"{escape(recipe.name)}: step {run.step:,} of {recipe.n_steps:,}", highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("train", total=recipe.n_steps, completed=run.step)

        def done(losses: Losses | None) -> None:
            bar.update(task, completed=run.step)
            if losses is not None:
                said = f"step {losses.step:,}: losses {losses.generator:.3f} and {losses.discriminator:.3f}"
                console.print(f"{said}, scores real {losses.real:.2f} fake {losses.fake:.2f}", highlight=False)

        board = Board(folder / "tensorboard", run.step) if tensorboard and is_first_process() else None
        try:
            run.train(log_every=log_every, save_every=save_every, grid_every=grid_every, board=board, done=done)
        except (SaveError, ValueError) as error:
            bar.stop()
            refuse(str(error))
        except OSError as error:
            bar.stop()
            refuse(f"{error.filename or folder} cannot be written: {error.strerror or error}")
    console.print(f"written: {escape(str(folder))}", highlight=False, soft_wrap=True)
