"""What `smyrf compare` does once its arguments are known to be good."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from smyrf.tools.bench import results
from smyrf.tools.bench.table import duration
from smyrf.tools.compare.contenders import Contender, default_contenders, without_dense
from smyrf.tools.compare.inputs import Inputs, load_inputs
from smyrf.tools.compare.load_model import load_subject
from smyrf.tools.compare.memory import extra_bytes
from smyrf.tools.compare.plot import plot as write_plot
from smyrf.tools.compare.run import Comparison, Row, T, Track
from smyrf.tools.compare.table import cost_table, drift_table, remarks
from smyrf.tools.encoders import minilm_path


@dataclass(frozen=True)
class Prepared:
    """A model and its inputs, both known to be good.

    Args:
        name: minilm, or a path or a hub name.
        kind: what it reads: text, images or audio.
        path: of the inputs; None for a sample.
    """

    name: str
    kind: str
    path: Path | None
    inputs: Inputs
    comparison: Comparison

    @property
    def title(self) -> str:
        return title_of(self.name)

    def config(self) -> dict[str, Any]:
        """For the result file."""
        return {
            "model": self.name,
            "class": type(self.comparison.model).__name__,
            "kind": self.kind,
            "inputs": None if self.path is None else str(self.path),
            "says": self.inputs.says,
            "documents": self.inputs.n_documents,
            "batch": len(next(iter(self.inputs.batches[0].values()))),
            "n_keys": self.comparison.n_keys,
            "seed": self.comparison.seed,
            "dtype": "float32",
            "transformers": version("transformers"),
        }


def title_of(name: str) -> str:
    """What to call a model.

    Example:
        >>> title_of("minilm"), title_of("openai/clip-vit-base-patch32")
        ('MiniLM', 'clip-vit-base-patch32')
    """
    return "MiniLM" if name == "minilm" else Path(name).name or name


def located(name: str) -> str:
    """Where to load a model from."""
    return minilm_path() if name == "minilm" else name


def prepare(
    name: str,
    *,
    kind: str | None,
    path: Path | None,
    length: int | None,
    documents: int,
    batch: int,
    threads: int,
    seed: int,
    console: Console,
) -> Prepared:
    """Loads a model and its inputs, and runs it once.

    Args:
        name: minilm, or a path or a hub name.
        kind: of the inputs; None for what the model reads.
        path: a file or a folder with them; None for a sample.

    Raises:
        InputError: says what is wrong with the file or the folder.
        ValueError: says what is wrong with the model, or that it has nothing to replace.
    """
    torch.set_num_threads(threads)
    title = escape(title_of(name))
    with console.status(f"loading {title}") as status:
        model, kind = load_subject(located(name), kind)
        inputs = load_inputs(
            located(name),
            model,
            kind,
            path,
            n_documents=documents,
            length=length,
            batch_size=batch,
            seed=seed,
            found=lambda n: status.update(f"reading: {n} of {documents} documents that are long enough"),
        )
        status.update(f"running {title}")
        comparison = Comparison(model, inputs.batches, seed, _bars(console))
    return Prepared(name, kind, path, inputs, comparison)


def compare(
    prepared: Prepared,
    contenders: Sequence[Contender],
    *,
    max_error: float,
    threads: int,
    memory: bool,
    json: Path | None,
    plot: Path | None,
    console: Console,
) -> list[Row]:
    """Measures everything, prints the tables, and writes what was asked for.

    Args:
        contenders: none for those by default.
        max_error: of the contender `Tuned` by default.
    """
    comparison, title, says = prepared.comparison, prepared.title, prepared.inputs.says
    chosen = without_dense(list(contenders) or default_contenders(comparison.n_keys, max_error))
    machine = f"{results.machine()['cpu']}, {threads} thread{'s' * (threads > 1)}"
    console.print(f"[bold]smyrf compare[/]: {escape(f'{title}, {says}; {machine}')}", highlight=False)
    rows = [comparison.dense()]

    def keep() -> None:
        if json is not None:
            found = [row.as_dict(rows[0]) for row in rows]
            results.write(json, results.command_line(), threads, prepared.config(), found)

    for contender in chosen:
        rows.append(comparison.row(contender))
        keep()
    _time(comparison, rows, console)
    keep()
    if memory:
        for i, row in enumerate(comparison.track(rows.copy(), "peak memory", len(rows))):
            rows[i] = _with_memory(prepared, row, rows[0], threads)
            keep()
    console.print(drift_table(rows, f"How far the outputs of {escape(title)} move, without retraining"))
    console.print(cost_table(rows, f"What {escape(title)} costs"))
    for line in remarks(rows):
        console.print(escape(line), highlight=False)
    if json is not None:
        console.print(f"written: {json}")
    if plot is not None:
        for file in write_plot(rows, plot, f"{title}, {says}, no retraining"):
            console.print(f"written: {file}")
    return rows


def _bars(console: Console) -> Track:
    """Bars in a terminal; elsewhere a line for each thing that is begun."""
    if console.is_terminal:
        return partial(track, console=console, transient=True)

    def say(sequence: Iterable[T], description: str, total: int) -> Iterable[T]:
        console.print(f"{description} …", highlight=False)
        return sequence

    return say


def _with_memory(prepared: Prepared, row: Row, dense: Row, threads: int) -> Row:
    if not row.methods and dense.extra_bytes is not None:  # the same model
        return replace(row, extra_bytes=dense.extra_bytes)
    first = prepared.inputs.first(1)
    try:
        found = extra_bytes(located(prepared.name), prepared.kind, first, row.methods, threads, row.label)
    except RuntimeError as error:
        return replace(row, note=str(error))
    return replace(row, extra_bytes=found)


def _time(comparison: Comparison, rows: list[Row], console: Console) -> None:
    with console.status("times") as status:
        if not console.is_terminal:
            console.print("times …")
        for i, row in comparison.times(rows.copy()):
            rows[i] = row
            if row.seconds is not None:
                status.update(f"times: {row.label} {duration(row.seconds)} per document")
