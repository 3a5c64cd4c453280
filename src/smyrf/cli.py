"""The command `smyrf`: bad input gives one sentence and exit code 2, never a traceback."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

app = typer.Typer(
    help="Attention in O(N log N) for models that already exist.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root() -> None:
    """Attention in O(N log N) for models that already exist."""


@app.command()
def bench(
    preset: Annotated[str | None, typer.Option(help="batch1, fixed-tokens (the paper's two experiments) or quick.")] = None,
    length: Annotated[list[int] | None, typer.Option(help="Sequence lengths; may be given several times.")] = None,
    batch: Annotated[int, typer.Option(help="Batch size, with --length.")] = 1,
    n_hashes: Annotated[list[int] | None, typer.Option(help="Rounds, with --cluster-size in pairs.")] = None,
    cluster_size: Annotated[list[int] | None, typer.Option(help="Queries per cluster.")] = None,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    width: Annotated[int, typer.Option(help="Width of a head.")] = 64,
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")] = "float32",
    threads: Annotated[int | None, typer.Option(help="CPU threads; PyTorch's own number by default.")] = None,
    backend: Annotated[str | None, typer.Option(help="Kernel: reference or torch; the best by default.")] = None,
    backward: Annotated[bool, typer.Option(help="Also measure forward + backward.")] = True,
    memory: Annotated[bool, typer.Option(help="Also measure peak memory, each in a fresh process.")] = True,
    json: Annotated[Path | None, typer.Option(help="Write the results here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write plots here, as .png and .svg.")] = None,
) -> None:
    """Time and peak memory of attention, against PyTorch's fused attention and eager baselines."""
    import torch

    from smyrf.bench import peak, plots, results, table
    from smyrf.bench.cases import DTYPES, PRESETS, Plan, Problem
    from smyrf.bench.run import run
    from smyrf.kernels import BACKENDS
    from smyrf.methods import Smyrf

    if preset is not None and preset not in PRESETS:
        _refuse(f"--preset {preset} must be one of {', '.join(PRESETS)}")
    if preset is not None and (length or n_hashes or cluster_size):
        _refuse(f"--preset {preset} already says lengths and methods: leave out --length, --n-hashes and --cluster-size")
    if dtype not in DTYPES:
        _refuse(f"--dtype {dtype} must be one of {', '.join(DTYPES)}")
    if backend is not None and backend not in BACKENDS:
        _refuse(f"--backend {backend} must be one of {', '.join(BACKENDS)}")
    threads = torch.get_num_threads() if threads is None else threads
    for name, values in (("length", length or []), ("batch", [batch]), ("heads", [heads]), ("width", [width]), ("threads", [threads])):
        for value in values:
            if value < 1:
                _refuse(f"--{name} {value} must be at least 1")
    if len(n_hashes or []) != len(cluster_size or []):
        _refuse(f"--n-hashes is given {len(n_hashes or [])} times, --cluster-size {len(cluster_size or [])} times: they go in pairs")
    reason = peak.can_measure()
    if memory and reason:
        _refuse(f"--memory: {reason}; use --no-memory")
    if plot is not None:
        _need("matplotlib", "plots")

    if preset is None and not length:
        preset = "quick"
    try:
        chosen = tuple(Smyrf(h, c) for h, c in zip(n_hashes or [], cluster_size or [], strict=True))
    except ValueError as error:
        _refuse(str(error))
    shapes = PRESETS[preset].shapes if preset else tuple((batch, n) for n in length or [])
    plan = Plan(
        problems=tuple(
            Problem(b, heads, n, width, dtype, direction)
            for direction in ((False, True) if backward else (False,))
            for b, n in shapes
        ),
        methods=PRESETS[preset].methods if preset else chosen or (Smyrf(4, 64),),
    )
    console = Console()
    title = f"smyrf bench{f' --preset {preset}' if preset else ''}"
    console.print(f"[bold]{title}[/]  {heads} heads of {width}, {dtype}, {threads} thread{'s' * (threads > 1)}, {results.machine()['cpu']}")
    if preset:
        console.print(PRESETS[preset].says)
    measurements = run(plan, threads, memory, backend, console)
    for direction in (False, True) if backward else (False,):
        console.print(table.table(measurements, title, direction))
    if json is not None:
        config = {"preset": preset, "backend": backend, "memory": memory}
        results.save(json, shlex.join(["smyrf", *sys.argv[1:]]), threads, config, measurements)
        console.print(f"results: {json}")
    if plot is not None:
        subtitle = f"Attention on {results.machine()['cpu']}, {threads} thread{'s' * (threads > 1)}, {heads} heads of {width}, {dtype}"
        for file in plots.plot(measurements, plot, subtitle):
            console.print(f"plot: {file}")


def main() -> None:
    """The entry point."""
    app()


def _refuse(sentence: str) -> NoReturn:
    Console(stderr=True).print(f"[bold red]error:[/] {sentence}", soft_wrap=True, highlight=False)
    raise typer.Exit(2)


def _need(module: str, extra: str) -> None:
    import importlib.util

    if importlib.util.find_spec(module) is None:
        _refuse(f"this needs {module}: pip install 'smyrf[{extra}]'")


if __name__ == "__main__":
    main()
