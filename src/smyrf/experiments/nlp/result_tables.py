"""The paper's tables, built from results: a row per training and evaluation method, with the paper's results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any, NamedTuple

from smyrf.experiments.nlp.presets import GLUE_TASKS, MODEL_TITLES, PRESETS
from smyrf.experiments.nlp.recipe import Recipe, short_name
from smyrf.experiments.nlp.results import Evaluation, Result
from smyrf.experiments.nlp.tasks import TASKS
from smyrf.methods import Method, Smyrf
from smyrf.methods.registry import METHODS

GLUE = "glue"
# Settings that runs in one cell of a table must share; other values make another row.
_SETTINGS = ("pad", "batch_size", "epochs", "max_steps", "warmup", "weight_decay", "n_train", "n_eval")
# Input hashes, which make another row too if they differ.
_INPUTS = ("model", "data")


class Column(NamedTuple):
    """A task and one of its splits."""

    task: str
    split: str

    @property
    def title(self) -> str:
        """Title of the column in the paper.

        Example:
            >>> Column("mnli", "validation_mismatched").title, Column("sst2", "validation").title
            ('MNLI-mm', 'SST-2')
        """
        title = TASKS[self.task].title
        return title + {"validation_matched": "-m", "validation_mismatched": "-mm"}.get(self.split, "")


@dataclass(frozen=True)
class Cell:
    """The results of one row in one column.

    Args:
        by_seed: our metric in percent, by seed; empty if there is no run.
        paper: the paper's result in percent, or None.
        paper_model: model of the paper's result.
        rate: learning rate; the best if there are several.
        n_rates: learning rates that were tried.
    """

    by_seed: Mapping[int, float]
    paper: float | None = None
    paper_model: str = ""
    rate: float = 0.0
    n_rates: int = 1

    @property
    def mean(self) -> float | None:
        """Mean over seeds.

        Example:
            >>> Cell({0: 90.0, 1: 92.0}).mean, Cell({}).mean
            (91.0, None)
        """
        return mean(self.by_seed.values()) if self.by_seed else None

    @property
    def std(self) -> float | None:
        """Standard deviation over seeds; None for fewer than two.

        Example:
            >>> Cell({0: 90.0, 1: 92.0, 2: 94.0}).std, Cell({0: 90.0}).std
            (2.0, None)
        """
        return stdev(self.by_seed.values()) if len(self.by_seed) > 1 else None


@dataclass(frozen=True)
class Row:
    """A combination of training method, evaluation method and length.

    Args:
        settings: settings in which rows of the table differ; only rows with the same settings are compared.
    """

    train_method: Method
    eval_method: Method
    max_length: int
    settings: Mapping[str, Any]
    cells: Mapping[Column, Cell]

    @property
    def is_dense(self) -> bool:
        """Whether both methods are dense attention."""
        return self.train_method.is_dense and self.eval_method.is_dense

    @property
    def label(self) -> str:
        """Label in tables.

        Example:
            >>> from smyrf.methods import Dense
            >>> Row(Smyrf(8, 32), Dense(), 512, {"epochs": 1.0}, {}).label
            'Smyrf 8×32 → Dense, epochs=1.0'
        """
        name = self.train_method.label
        name += "" if self.train_method == self.eval_method else f" → {self.eval_method.label}"
        return ", ".join([name, *(f"{setting}={value}" for setting, value in self.settings.items())])


@dataclass(frozen=True)
class Table:
    """A table of the paper for one model of ours.

    Args:
        name: glue, imdb, backandforth, ablation or hyperpartisan.
        model: path or hub name.
        columns: at least one.
        rows: dense attention at full length first.
        is_grouped: whether some runs had batches of similar lengths.
    """

    name: str
    title: str
    model: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    is_grouped: bool = False

    @property
    def max_length(self) -> int:
        """Length of the longest row, to which memory is relative."""
        return max(row.max_length for row in self.rows)

    def memory(self, row: Row) -> float:
        """Key visits per query in training, relative to dense attention at full length."""
        return row.train_method.key_visits(row.max_length) / self.max_length

    def dense(self, row: Row) -> Row | None:
        """The row with dense attention at full length and the same settings, or None."""
        for other in self.rows:
            is_full = other.is_dense and other.max_length == self.max_length
            if is_full and all(row.settings.get(name, value) == value for name, value in other.settings.items()):
                return other
        return None

    @property
    def common_columns(self) -> tuple[Column, ...]:
        """Columns that all rows have."""
        return tuple(column for column in self.columns if all(column in row.cells for row in self.rows))

    def average(self, row: Row) -> Cell | None:
        """Mean over the columns that all rows have; None if there are none.

        Only seeds that all these columns have are averaged, each on its own.
        """
        ours = [row.cells[column] for column in self.common_columns]
        if not ours:
            return None
        seeds = set.intersection(*(set(cell.by_seed) for cell in ours))
        paper = [cell.paper for cell in ours if cell.paper is not None]
        return Cell(
            {seed: mean(cell.by_seed[seed] for cell in ours) for seed in sorted(seeds)},
            mean(paper) if len(paper) == len(ours) else None,
            ours[0].paper_model,
        )

    def gap(self, row: Row, column: Column) -> Cell | None:
        """Difference to dense attention in points, seed by seed, and the paper's; None without a dense row."""
        dense = self.dense(row)
        if dense is None or dense is row or column not in dense.cells or column not in row.cells:
            return None
        return subtract(row.cells[column], dense.cells[column])

    def to_dict(self) -> dict[str, Any]:
        """The table as JSON."""
        return {
            "name": self.name,
            "title": self.title,
            "model": self.model,
            "rows": list(map(self._row_dict, self.rows)),
        }

    def _row_dict(self, row: Row) -> dict[str, Any]:
        cells = [
            {
                "task": column.task,
                "split": column.split,
                "by_seed": dict(cell.by_seed),
                "mean": cell.mean,
                "std": cell.std,
                "learning_rate": cell.rate,
                "paper": cell.paper,
                "paper_model": cell.paper_model or None,
            }
            for column, cell in row.cells.items()
        ]
        return {
            "label": row.label,
            "settings": dict(row.settings),
            "train_method": row.train_method.to_dict(),
            "eval_method": row.eval_method.to_dict(),
            "max_length": row.max_length,
            "memory": self.memory(row),
            "cells": cells,
        }


def subtract(cell: Cell, other: Cell) -> Cell:
    """Subtract two cells, over the seeds that both have.

    Example:
        >>> subtract(Cell({0: 91.0, 1: 90.0}, 92.0), Cell({0: 92.0, 1: 92.0, 2: 93.0}, 94.5)).by_seed
        {0: -1.0, 1: -2.0}
    """
    both = {seed: value - other.by_seed[seed] for seed, value in cell.by_seed.items() if seed in other.by_seed}
    known = cell.paper is not None and other.paper is not None and cell.paper_model == other.paper_model
    return Cell(both, cell.paper - other.paper if known else None, cell.paper_model)  # type: ignore[operator]


def build_tables(results: Sequence[Result]) -> list[Table]:
    """Build all tables for which there are results, model by model."""
    tables = []
    for model in dict.fromkeys(result.recipe.model for result in results):
        found = [_Run(result, one) for result in results if result.recipe.model == model for one in result.evaluations]
        for name, title, some in _parts(found):
            if some:
                tables.append(_table(name, title, model, some))
    return tables


_Setup = tuple[Method, Method, int]  # training method, evaluation method and length, which define a row


class _Run(NamedTuple):
    """An evaluation, and the result that it belongs to."""

    result: Result
    evaluation: Evaluation

    @property
    def recipe(self) -> Recipe:
        return self.result.recipe

    @property
    def is_same(self) -> bool:
        """Whether the evaluation method is the training method."""
        return self.evaluation.method == self.recipe.train_method

    @property
    def column(self) -> Column:
        return Column(self.recipe.task, self.evaluation.split)

    @property
    def setup(self) -> _Setup:
        return self.recipe.train_method, self.evaluation.method, self.recipe.max_length

    def setting(self, name: str) -> Any:
        """Value of a setting; None if it has no effect, as padding with dense attention. Grouping changes batches."""
        is_dense = self.recipe.train_method.is_dense and self.evaluation.method.is_dense
        if name == "pad" and is_dense and self.recipe.pad != "grouped":
            return None
        return getattr(self.result.inputs if name in _INPUTS else self.recipe, name)


def _parts(found: list[_Run]) -> Iterable[tuple[str, str, list[_Run]]]:
    """The runs of each table, with its name and title."""
    for tasks, name, title in (
        ((*GLUE_TASKS, "wnli"), GLUE, "GLUE"),
        (("imdb",), "imdb", "IMDB"),
        (("hyperpartisan",), "hyperpartisan", "Hyperpartisan"),
    ):
        here = [run for run in found if run.recipe.task in tasks]
        same = [run for run in here if run.is_same]
        yield name, title, [run for run in same if not _is_ablation(run.recipe.train_method)]
        # Models evaluated with another method than in training, and the same models with their own.
        crossed = {run.recipe.train_method for run in here if not run.is_same}
        rows = [run for run in here if run.recipe.train_method in crossed]
        back = "backandforth" if name == "imdb" else f"{name}-backandforth"
        yield back, f"{title}, trained with one attention and evaluated with another", rows
        sizes = {_sizes(run.recipe.train_method) for run in same if _is_ablation(run.recipe.train_method)}
        rows = [run for run in same if _sizes(run.recipe.train_method) in sizes] if sizes else []
        dense = [run for run in same if run.recipe.train_method.is_dense] if rows else []
        yield "ablation" if name == "imdb" else f"{name}-ablation", f"{title}, LSH ablation", dense + rows


def _is_ablation(method: Method) -> bool:
    return isinstance(method, Smyrf) and (method.transform, method.hashing) != ("asymmetric", "projection")


def _sizes(method: Method) -> tuple[int, int] | None:
    return (method.n_hashes, method.cluster_size) if isinstance(method, Smyrf) else None


def _table(name: str, title: str, model: str, found: list[_Run]) -> Table:
    order = (*GLUE_TASKS, "wnli", "imdb", "hyperpartisan")
    there = {run.column for run in found}
    columns = [Column(task, split) for task in order for split in TASKS[task].splits]
    columns = [column for column in columns if column in there]
    setups = list(dict.fromkeys(run.setup for run in found))
    paper_model = _paper_model(name, columns, setups, model)
    differ = _differing(found)
    rows = []
    for setup in setups:
        figures = {column: _figure(name, column, setup, paper_model) for column in columns}
        here = [run for run in found if run.setup == setup]
        for settings in dict.fromkeys(_settings(run, differ) for run in here):
            part = [run for run in here if _settings(run, differ) == settings]
            cells = {column: _cell(column, part, figures[column], MODEL_TITLES[paper_model]) for column in columns}
            own = {column: cell for column, cell in cells.items() if cell is not None}
            rows.append(Row(*setup, dict(settings), own))
    if name.startswith(GLUE) and len(columns) == 1:
        title = title.replace("GLUE", columns[0].title, 1)
    longest = max(row.max_length for row in rows)
    rows.sort(key=lambda row: _order(row, longest))
    is_grouped = any(run.recipe.pad == "grouped" for run in found)
    return Table(name, title, model, tuple(columns), tuple(rows), is_grouped)


def _order(row: Row, longest: int) -> tuple[Any, ...]:
    """Sort key: dense first, then by kind of method with the most expensive first, then truncated rows."""
    kind = (not row.train_method.is_dense, list(METHODS).index(row.train_method.kind))
    cost = row.train_method.key_visits(row.max_length)
    return row.max_length < longest, kind, -cost, row.train_method.label, row.train_method != row.eval_method


def _differing(found: list[_Run]) -> list[str]:
    """Settings in which runs of one column differ. The data of samples of different sizes differ anyway."""
    differ = []
    for name in (*_SETTINGS, *_INPUTS):
        alike: dict[Any, set[Any]] = {}
        for run in found:
            key = (run.column, run.recipe.n_train, run.recipe.n_eval) if name == "data" else run.column
            alike.setdefault(key, set()).add(run.setting(name))
        for values in alike.values():
            if name == "pad" and "grouped" not in values:
                values.discard(None)
        if any(len(values) > 1 for values in alike.values()):
            differ.append(name)
    return differ


def _settings(run: _Run, differ: list[str]) -> tuple[tuple[str, Any], ...]:
    named = [(name, run.setting(name)) for name in differ]
    return tuple((name, value) for name, value in named if not (name == "pad" and value is None))


def _cell(column: Column, found: list[_Run], paper: float | None, paper_model: str) -> Cell | None:
    """Make a cell: of the learning rates with most seeds, the one with the best mean, as in the paper."""
    by_rate: dict[float, dict[int, float]] = {}
    for run in found:
        if run.column == column:
            value = 100.0 * run.evaluation.metrics[TASKS[column.task].metric]
            by_rate.setdefault(run.recipe.learning_rate, {})[run.recipe.seed] = value
    if not by_rate:
        return None
    rate = max(by_rate, key=lambda one: (len(by_rate[one]), mean(by_rate[one].values())))
    return Cell(by_rate[rate], paper, "" if paper is None else paper_model, rate, len(by_rate))


def _paper_model(table: str, columns: list[Column], setups: list[_Setup], model: str) -> str:
    """The model whose results stand beside ours: the one with most cells in the paper, then the most similar one."""
    ours = short_name(model).lower()

    def rank(of: str) -> tuple[int, bool, bool]:
        n_cells = sum(_figure(table, column, setup, of) is not None for column in columns for setup in setups)
        return n_cells, ("roberta" in of) == ("roberta" in ours), ("large" in of) == ("large" in ours)

    return max(MODEL_TITLES, key=rank)


def _figure(table: str, column: Column, setup: _Setup, model: str) -> float | None:
    """The paper's result for a cell; if two of its tables have one, that of this table."""
    train_method, eval_method, max_length = setup
    found = [
        preset
        for preset in PRESETS.values()
        if column.task in preset.paper
        and preset.recipe.model == model
        and preset.recipe.train_method == train_method
        and preset.recipe.eval_methods[0] == eval_method
        and preset.recipe.max_length == max_length
    ]
    if not found:
        return None
    best = max(found, key=lambda preset: preset.table == table)
    return best.paper[column.task][TASKS[column.task].splits.index(column.split)]
