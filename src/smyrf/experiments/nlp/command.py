"""What `smyrf finetune` does once its arguments are known to be good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from smyrf.experiments.nlp.recipe import Recipe
from smyrf.experiments.nlp.report import Table, build_tables
from smyrf.experiments.nlp.tables import rich_table
from smyrf.experiments.nlp.tasks import TASKS
from smyrf.experiments.nlp.train import Prepared, count_steps, finished, model_folder, prepare, result_file, train
from smyrf.tools.bench.results import command_line
from smyrf.tools.bench.table import duration


def finetune_all(
    recipes: Sequence[Recipe],
    output: Path,
    data: Path | None,
    *,
    preset: str,
    keep_model: bool,
    console: Console,
) -> list[Table]:
    """Runs recipes one after another, and shows their mean and standard deviation.

    All of them are prepared before the first is trained: what is wrong with the last is said at once.

    Raises:
        ValueError: says what is wrong with the model or the data.
    """
    ready: dict[Recipe, Prepared] = {}
    for recipe in recipes:
        if (kind := _without_chance(recipe)) not in ready:
            console.print(f"reading {TASKS[recipe.task].title}", highlight=False)
            ready[kind] = prepare(recipe, data)
    runs = [ready[_without_chance(recipe)]._replace(recipe=recipe) for recipe in recipes]
    done = [finished(prepared, output) for prepared in runs]
    results = []
    for number, (prepared, before) in enumerate(zip(runs, done, strict=True), 1):
        recipe = prepared.recipe
        title = f"{number} of {len(recipes)}: {TASKS[recipe.task].title}, {recipe.label}, {recipe.max_length} tokens"
        title += f", learning rate {recipe.learning_rate:g}, seed {recipe.seed}"
        file = result_file(output, prepared)
        if before is not None:
            result = before
            lacks = ", without its model" if keep_model and not model_folder(output, result).exists() else ""
            console.print(escape(f"{title}: finished before{lacks}, {file}"), highlight=False, soft_wrap=True)
        else:
            n_rows = len(prepared.splits["train"])
            steps = count_steps(recipe, n_rows)
            console.print(escape(f"{title}: {steps:,} steps on {n_rows:,} rows"), highlight=False, soft_wrap=True)
            result = train(
                prepared, output, preset=preset, keep_model=keep_model, command=command_line(), console=console
            )
            took = "" if result.seconds is None else f" in {duration(result.seconds)}"
            console.print(escape(f"  trained{took}; written: {file}"), highlight=False, soft_wrap=True)
        results.append(result)
    tables = build_tables(results)
    for table in tables:
        console.print(rich_table(table))
    return tables


def _without_chance(recipe: Recipe) -> Recipe:
    """What is prepared alike for all seeds and learning rates."""
    return replace(recipe, seed=0, learning_rate=1.0)
