"""`smyrf finetune` and `smyrf finetune report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from smyrf.tools.cli.default_command import RunByDefault
from smyrf.tools.cli.validation import need, need_at_least, need_model, need_writable, refuse

app = typer.Typer(cls=RunByDefault, help="Fine-tune an encoder with sparse attention: the paper's language tables.")
# Options by the names that a recipe has for them, for error messages.
OPTIONS = {
    "max_length": "--max-length",
    "batch_size": "--batch",
    "learning_rate": "--lr",
    "weight_decay": "--weight-decay",
    "n_train": "--train-rows",
    "n_eval": "--eval-rows",
    "max_steps": "--max-steps",
    "epochs": "--epochs",
    "warmup": "--warmup",
    "seed": "--seed",
    "pad": "--pad",
    "model": "--model",
    "data": "--data",
    "preset": "--preset",
}
METHOD = "dense, smyrf:8x32, tangent:0.25, with options as in smyrf:8x32,transform=none"


@app.command(hidden=True)
def run(
    task: Annotated[
        str | None,
        typer.Argument(
            help="cola, mnli, mrpc, qnli, qqp, rte, sst2, stsb, wnli, imdb or hyperpartisan; by default all tasks of "
            "--preset.",
            show_default=False,
        ),
    ] = None,
    list_presets: Annotated[
        bool, typer.Option("--list", help="Show the presets, their settings and the paper's figures.")
    ] = False,
    preset: Annotated[
        str | None, typer.Option(help="A row of the paper's tables, from --list; other options override its settings.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Path or hub name of an encoder, or minilm; the paper's by default.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the task's files, or with folders of tasks: train and dev (IMDB: test) as .tsv, .csv, "
            ".jsonl or .parquet; the hub by default."
        ),
    ] = None,
    train_method: Annotated[
        str | None, typer.Option(help=f"Attention in training: {METHOD}. Dense by default.")
    ] = None,
    eval_method: Annotated[
        list[str] | None,
        typer.Option(help="Attention in evaluation; may be given several times; by default as in training."),
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens per text; longer texts are truncated.")] = None,
    pad: Annotated[
        str | None,
        typer.Option(help="max_length, as in the paper; longest, of a batch; or grouped, batches of similar lengths."),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Batch size, over all processes.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the training split.")] = None,
    lr: Annotated[
        list[float] | None, typer.Option(help="Learning rate; given several times, reports show the best.")
    ] = None,
    warmup: Annotated[float | None, typer.Option(help="Fraction of the steps with linear warm-up.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay of AdamW.")] = None,
    seed: Annotated[
        list[int] | None, typer.Option(help="Seed; given several times, tables show mean ± std; 0 by default.")
    ] = None,
    train_rows: Annotated[int | None, typer.Option(help="Train on a sample of this many rows.")] = None,
    eval_rows: Annotated[int | None, typer.Option(help="Evaluate on a sample of this many rows.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Stop after this many optimisation steps.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; PyTorch's setting by default.")] = None,
    keep_model: Annotated[bool, typer.Option(help="Keep the trained models.")] = True,
    output: Annotated[Path, typer.Option(help="Folder for results, checkpoints and models.")] = Path("runs"),
    json: Annotated[Path | None, typer.Option(help="Write the tables to this file; with --list, the presets.")] = None,
) -> None:
    """Fine-tune an encoder on a task with one attention method, and evaluate it with the same or with others.

    Each run writes a JSON file to --output. The same command again skips finished runs and resumes interrupted ones.
    `smyrf finetune report DIR` makes tables and plots of such a folder.
    """
    from smyrf.atomic_write import write_json
    from smyrf.experiments.nlp.presets import PRESETS, find_preset, preset_for
    from smyrf.experiments.nlp.tasks import find_task

    if json is not None:
        need_writable("json", json)
    if list_presets:
        from smyrf.experiments.nlp.format_tables import figure_table, notes, preset_table

        rows = list(PRESETS.values())
        Console().print(preset_table(rows), figure_table(rows))
        Console().print(*notes(rows), sep="\n", highlight=False)
        if json is not None:
            write_json(json, [row.to_dict() for row in rows])
        return
    if task is None and preset is None:
        refuse("TASK or --preset is missing; --list shows the presets")
    need_at_least(1, threads=threads)
    changes: dict[str, Any] = {
        "model": model,
        "max_length": max_length,
        "pad": pad,
        "batch_size": batch,
        "epochs": epochs,
        "learning_rates": tuple(dict.fromkeys(lr or [])) or None,
        "warmup": warmup,
        "weight_decay": weight_decay,
        "n_train": train_rows,
        "n_eval": eval_rows,
        "max_steps": max_steps,
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    if train_method is not None:
        changes["train_method"] = _method("--train-method", train_method)
    if eval_method:
        changes["eval_methods"] = tuple(dict.fromkeys(_method("--eval-method", one) for one in eval_method))
    try:
        row = preset_for(task or "") if preset is None else find_preset(preset)
        tasks = None if task is None else (find_task(task).name,)
        if preset is not None and tasks is not None and tasks[0] not in row.tasks:
            refuse(f"--preset {preset} has no task {task!r}; it has {', '.join(row.tasks)}")
        recipes = row.recipes(tasks, tuple(dict.fromkeys(seed or [0])), **changes)
    except (TypeError, ValueError) as error:
        refuse(_by_options(error))
    for module in ("transformers", "datasets", "accelerate", "sklearn"):
        need(module, "finetune")
    need_model(recipes[0].model)
    need_writable("output", output / "a.run.json")

    import torch

    from smyrf.experiments.launch_env import is_first_process
    from smyrf.experiments.nlp.run_recipes import run_recipes
    from smyrf.experiments.run_lock import LockedError
    from smyrf.experiments.save_errors import SaveError

    if threads is not None:
        torch.set_num_threads(threads)
    console = Console(quiet=not is_first_process())
    try:
        tables = run_recipes(recipes, output, data, preset=preset or "", keep_model=keep_model, console=console)
    except LockedError as error:
        refuse(f"--output {output}: {error}")
    except (SaveError, ValueError) as error:
        refuse(_by_options(error))
    if json is not None and is_first_process():
        write_json(json, [table.to_dict() for table in tables])


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder with results of smyrf finetune; subfolders are searched.")],
    output: Annotated[
        Path | None, typer.Option(help="Folder for report.md, report.json and plots; FOLDER by default.")
    ] = None,
    plots: Annotated[bool, typer.Option(help="Also plot the metric against memory.")] = True,
) -> None:
    """Rebuild the paper's tables from a folder of results, with the paper's figures beside ours."""
    from smyrf.experiments.nlp.format_tables import rich_table
    from smyrf.experiments.nlp.result_tables import build_tables
    from smyrf.experiments.nlp.results import load_results
    from smyrf.experiments.nlp.write_report import write_report

    if plots:
        need("matplotlib", "plots")
    output = folder if output is None else output
    try:
        results = load_results(folder)
    except ValueError as error:
        refuse(str(error))
    need_writable("output", output / "report.md")
    console = Console()
    tables = build_tables(results)
    for table in tables:
        console.print(rich_table(table))
    for path in write_report(tables, output, plots=plots):
        console.print(f"written: {escape(str(path))}", highlight=False, soft_wrap=True)


def _method(option: str, text: str) -> Any:
    from smyrf.methods import parse_method

    try:
        return parse_method(text)
    except ValueError as error:
        refuse(f"{option} {error}")


def _by_options(error: Exception) -> str:
    """The message of an error, with command-line options in place of recipe fields."""
    text = str(error)
    for name, option in OPTIONS.items():
        if text.startswith(f"{name}="):
            value = text.removeprefix(f"{name}=")
            return f"{option} {value}"
    return text
