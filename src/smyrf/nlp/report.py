"""The paper's tables, rebuilt from results: a row for each way to train and evaluate, ours beside the paper's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from statistics import mean, stdev
from typing import Any, NamedTuple

from smyrf.methods import Dense, Method, Smyrf
from smyrf.nlp.presets import GLUE_TASKS, PRESETS, Preset
from smyrf.nlp.recipe import Recipe, describe
from smyrf.nlp.results import Evaluation, Result
from smyrf.nlp.tasks import TASKS

GLUE = "glue"
# Settings that two runs of one cell of a table must share; others make another row.
_SETTINGS = ("pad", "batch_size", "epochs", "max_steps", "warmup", "weight_decay", "n_train", "n_eval")


class Column(NamedTuple):
    """A task and one of its splits."""

    task: str
    split: str

    @property
    def title(self) -> str:
        """As the paper has it.

        Example:
            >>> Column("mnli", "validation_mismatched").title, Column("sst2", "validation").title
            ('MNLI-mm', 'SST-2')
        """
        title = TASKS[self.task].title
        return title + {"validation_matched": "-m", "validation_mismatched": "-mm"}.get(self.split, "")


@dataclass(frozen=True)
class Cell:
    """What one row has in one column.

    Args:
        by_seed: our metric in percent, by seed; empty where there is none.
        paper: the paper's figure in percent, or None.
        paper_model: that the paper's figure belongs to.
        rate: the learning rate; the best where there are several.
        n_rates: that were tried.
    """

    by_seed: Mapping[int, float]
    paper: float | None = None
    paper_model: str = ""
    rate: float = 0.0
    n_rates: int = 1

    @property
    def mean(self) -> float | None:
        """Over the seeds.

        Example:
            >>> Cell({0: 90.0, 1: 92.0}).mean, Cell({}).mean
            (91.0, None)
        """
        return mean(self.by_seed.values()) if self.by_seed else None

    @property
    def std(self) -> float | None:
        """Of the seeds, of which two are needed.

        Example:
            >>> Cell({0: 90.0, 1: 92.0, 2: 94.0}).std, Cell({0: 90.0}).std
            (2.0, None)
        """
        return stdev(self.by_seed.values()) if len(self.by_seed) > 1 else None


@dataclass(frozen=True)
class Row:
    """A way to train and evaluate.

    Args:
        setting: what tells it from another row of the same methods, or "".
    """

    train_method: Method
    eval_method: Method
    max_length: int
    setting: str
    cells: Mapping[Column, Cell]

    @property
    def label(self) -> str:
        """For tables.

        Example:
            >>> Row(Smyrf(8, 32), Dense(), 512, "", {}).label
            'Smyrf 8×32 → Dense'
        """
        name = describe(self.train_method)
        name += "" if self.train_method == self.eval_method else f" → {describe(self.eval_method)}"
        return name + (f", {self.setting}" if self.setting else "")


@dataclass(frozen=True)
class Table:
    """A table of the paper for one model of ours.

    Args:
        name: glue, imdb, backandforth, ablation or hyperpartisan.
        model: as it was named.
        columns: at least one.
        rows: those with dense attention at the full length first.
    """

    name: str
    title: str
    model: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    @property
    def max_length(self) -> int:
        """The longest of its rows, to which memory is relative."""
        return max(row.max_length for row in self.rows)

    def memory(self, row: Row) -> float:
        """Key visits of a query in training, as a share of those of dense attention at the full length."""
        return row.train_method.key_visits(row.max_length) / self.max_length

    def dense(self) -> Row | None:
        """The row with dense attention in training and evaluation at the full length, if it is there."""
        for row in self.rows:
            if row.train_method == row.eval_method == Dense() and row.max_length == self.max_length:
                return row
        return None

    def average(self, row: Row) -> Cell | None:
        """Mean over the columns, as the paper has it; None unless the row has all of them.

        Seeds that all columns have are averaged one by one.
        """
        cells = [row.cells.get(column) for column in self.columns]
        ours = [cell for cell in cells if cell is not None and cell.by_seed]
        if len(ours) < len(self.columns):
            return None
        seeds = set.intersection(*(set(cell.by_seed) for cell in ours))
        paper = [cell.paper for cell in ours if cell.paper is not None]
        return Cell(
            {seed: mean(cell.by_seed[seed] for cell in ours) for seed in sorted(seeds)},
            mean(paper) if len(paper) == len(ours) else None,
            ours[0].paper_model,
        )

    def gap(self, row: Row, column: Column) -> Cell | None:
        """Points above dense attention, seed by seed; the paper's beside it. None without a dense row."""
        dense = self.dense()
        if dense is None or dense is row or column not in dense.cells or column not in row.cells:
            return None
        return subtract(row.cells[column], dense.cells[column])


def subtract(cell: Cell, other: Cell) -> Cell:
    """The difference of two cells, over the seeds that both have.

    Example:
        >>> subtract(Cell({0: 91.0, 1: 90.0}, 92.0), Cell({0: 92.0, 1: 92.0, 2: 93.0}, 94.5)).by_seed
        {0: -1.0, 1: -2.0}
    """
    both = {seed: value - other.by_seed[seed] for seed, value in cell.by_seed.items() if seed in other.by_seed}
    known = cell.paper is not None and other.paper is not None and cell.paper_model == other.paper_model
    return Cell(both, cell.paper - other.paper if known else None, cell.paper_model)  # type: ignore[operator]


def build(results: Sequence[Result]) -> list[Table]:
    """All tables that the results have something for, model by model."""
    tables = []
    for model in dict.fromkeys(result.recipe.model for result in results):
        found = [
            (result.recipe, one) for result in results if result.recipe.model == model for one in result.evaluations
        ]
        for name, title, some in _parts(found):
            if some:
                tables.append(_table(name, title, model, some))
    return tables


_Found = list[tuple[Recipe, Evaluation]]


def _parts(found: _Found) -> Iterable[tuple[str, str, _Found]]:
    """Evaluations that belong into one table, with its name and title."""

    def of(*tasks: str) -> _Found:
        return [(recipe, one) for recipe, one in found if recipe.task in tasks]

    def same(some: _Found) -> _Found:
        return [(recipe, one) for recipe, one in some if one.method == recipe.train_method]

    def crossed(some: _Found) -> _Found:
        trained = {recipe.train_method for recipe, one in some if one.method != recipe.train_method}
        return [(recipe, one) for recipe, one in some if recipe.train_method in trained] if trained else []

    glue, imdb, news = of(*GLUE_TASKS, "wnli"), of("imdb"), of("hyperpartisan")
    ablated = [(recipe, one) for recipe, one in same(imdb) if _is_ablation(recipe.train_method)]
    sizes = {(r.train_method.n_hashes, r.train_method.cluster_size) for r, _ in ablated}  # type: ignore[union-attr]
    yield GLUE, "GLUE", same(glue)
    yield "glue-backandforth", "GLUE, trained with one attention and evaluated with another", crossed(glue)
    yield "imdb", "IMDB", [(r, one) for r, one in same(imdb) if not _is_ablation(r.train_method)]
    yield "backandforth", "IMDB, trained with one attention and evaluated with another", crossed(imdb)
    if ablated:
        rows = [(r, one) for r, one in same(imdb) if _sizes(r.train_method) in sizes or r.train_method == Dense()]
        yield "ablation", "IMDB, LSH ablation", rows
    yield "hyperpartisan", "Hyperpartisan", same(news)
    yield "hyperpartisan-backandforth", "Hyperpartisan, back and forth", crossed(news)


def _is_ablation(method: Method) -> bool:
    return isinstance(method, Smyrf) and (method.transform, method.hashing) != ("asymmetric", "projection")


def _sizes(method: Method) -> tuple[int, int] | None:
    return (method.n_hashes, method.cluster_size) if isinstance(method, Smyrf) else None


def _table(name: str, title: str, model: str, found: _Found) -> Table:
    order = (*GLUE_TASKS, "wnli", "imdb", "hyperpartisan")
    splits = {(recipe.task, one.split) for recipe, one in found}
    columns = tuple(Column(t, s) for t in order for s in TASKS[t].splits if (t, s) in splits)
    ways: dict[Any, _Found] = {}
    for recipe, one in found:
        ways.setdefault((recipe.train_method, one.method, recipe.max_length), []).append((recipe, one))
    rows = []
    for (train_method, eval_method, max_length), some in ways.items():
        for setting, part in _by_setting(some).items():
            cells = {
                column: cell
                for column in columns
                if (cell := _cell(column, part, _paper(name, column, train_method, eval_method, max_length, model)))
            }
            rows.append(Row(train_method, eval_method, max_length, setting, cells))
    longest = max(row.max_length for row in rows)
    rows.sort(key=lambda row: _order(row, longest))
    return Table(name, title, model, columns, tuple(rows))


def _order(row: Row, longest: int) -> tuple[Any, ...]:
    """Dense first, then by method with the dearest first, then what was cut short."""
    kind = ["Dense", "Smyrf", "Tangent", "PerHead"].index(type(row.train_method).__name__)
    cost = row.train_method.key_visits(row.max_length)
    return row.max_length < longest, kind, -cost, describe(row.train_method), row.train_method != row.eval_method


def _by_setting(found: _Found) -> dict[str, _Found]:
    """Runs of the same methods, apart where a setting differs inside a column: named by what differs."""
    values: dict[str, set[Any]] = {name: set() for name in _SETTINGS}
    for task in {recipe.task for recipe, _ in found}:
        for name in _SETTINGS:
            there = {getattr(recipe, name) for recipe, _ in found if recipe.task == task}
            if len(there) > 1:
                values[name] |= there
    differ = [name for name in _SETTINGS if values[name]]
    parts: dict[str, _Found] = {}
    for recipe, one in found:
        setting = ", ".join(f"{name}={getattr(recipe, name)}" for name in differ)
        parts.setdefault(setting, []).append((recipe, one))
    return parts


def _cell(column: Column, found: _Found, paper: tuple[float | None, str]) -> Cell | None:
    """The runs of one cell: the learning rate with the best mean, as the paper chose it."""
    by_rate: dict[float, dict[int, float]] = {}
    for recipe, one in found:
        if (recipe.task, one.split) == column:
            value = 100.0 * one.metrics[TASKS[recipe.task].metric]
            by_rate.setdefault(recipe.learning_rate, {})[recipe.seed] = value
    if not by_rate:
        return None
    rate = max(by_rate, key=lambda one: mean(by_rate[one].values()))
    return Cell(by_rate[rate], *paper, rate, len(by_rate))


def _paper(
    table: str, column: Column, train_method: Method, eval_method: Method, max_length: int, model: str
) -> tuple[float | None, str]:
    """The paper's figure for a cell, and its model: one of the same kind if it has one, else whichever it has."""

    def rank(preset: Preset) -> tuple[bool, bool, bool]:
        of = preset.recipe.model
        ours = PurePath(model).name.lower()
        return preset.table == table, ("roberta" in of) == ("roberta" in ours), ("large" in of) == ("large" in ours)

    found = [
        preset
        for preset in PRESETS.values()
        if column.task in preset.paper
        and preset.recipe.train_method == train_method
        and preset.recipe.eval_methods[0] == eval_method
        and preset.recipe.max_length == max_length
    ]
    if not found:
        return None, ""
    best = max(found, key=rank)
    name = PurePath(best.recipe.model).name
    names = {"bert-base-uncased": "BERT", "bert-large-uncased": "BERT large", "roberta-base": "RoBERTa"}
    return best.paper[column.task][TASKS[column.task].splits.index(column.split)], names[name]
