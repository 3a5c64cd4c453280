"""Run several recipes one after another, and tabulate their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from smyrf.experiments.nlp.format_tables import rich_table
from smyrf.experiments.nlp.recipe import Recipe
from smyrf.experiments.nlp.result_tables import Table, build_tables
from smyrf.experiments.nlp.tasks import TASKS
from smyrf.experiments.nlp.train import PreparedRun, count_steps, finished, model_folder, prepare, result_file, train
from smyrf.tools.results import command_line
from smyrf.tools.tables import duration


def run_recipes(
    recipes: Sequence[Recipe],
    output: Path,
    data: Path | None,
    *,
    preset: str,
    keep_model: bool,
    console: Console,
) -> list[Table]:
    """Run recipes one after another, and print tables of their mean and standard deviation.

    All recipes are prepared before the first is trained, so that an error in the last is reported at once.

    Raises:
        ValueError: a model or data set cannot be used.
    """
    ready: dict[Recipe, PreparedRun] = {}
    for recipe in recipes:
        if (kind := _shared_part(recipe)) not in ready:
            console.print(f"reading {TASKS[recipe.task].title}", highlight=False)
            ready[kind] = prepare(recipe, data)
    runs = [ready[_shared_part(recipe)]._replace(recipe=recipe) for recipe in recipes]
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


def _shared_part(recipe: Recipe) -> Recipe:
    """The recipe without its seed and learning rate: what it shares with others in preparation."""
    return replace(recipe, seed=0, learning_rate=1.0)
