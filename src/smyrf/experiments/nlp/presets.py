"""The rows of the paper's language tables as recipes, with the paper's settings and results, and rows for Tangent.

All results here are quoted from the paper. Comments and notes state what was assumed where the paper is silent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from smyrf.experiments.nlp.recipe import Recipe
from smyrf.experiments.nlp.tasks import find_task
from smyrf.methods import Dense, Method, Smyrf, Tangent

# The paper says "BERT (base)" and "RoBERTa (base)"; uncased is assumed.
BERT, ROBERTA, BERT_LARGE = "google-bert/bert-base-uncased", "FacebookAI/roberta-base", "google-bert/bert-large-uncased"
MODEL_TITLES = {BERT: "BERT", ROBERTA: "RoBERTa", BERT_LARGE: "BERT large"}
# "The learning rate was selected via grid search among the values …": on the split that is reported.
GLUE_RATES = (5e-5, 3e-5, 2e-5)
# Columns of the GLUE table; WNLI is not in it.
GLUE_TASKS = ("cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb")


@dataclass(frozen=True)
class Preset:
    """A row of a table of the paper.

    Args:
        name: name on the command line.
        table: glue, imdb, backandforth, ablation or hyperpartisan.
        tasks: columns of the row.
        recipe: settings of the row for its first task; `recipes` returns all.
        rates: learning rates, the best of which is reported.
        paper: the paper's results in percent, by task and evaluation split; empty for a row that is not in the paper.
        note: assumptions, or what the result is.
    """

    name: str
    table: str
    tasks: tuple[str, ...]
    recipe: Recipe
    rates: tuple[float, ...]
    paper: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The preset as JSON."""
        figures = {task: list(figure) for task, figure in self.paper.items()}
        plain = {"name": self.name, "table": self.table, "tasks": list(self.tasks), "learning_rates": list(self.rates)}
        return {**plain, "recipe": self.recipe.to_dict(), "paper": figures, "note": self.note}

    def recipes(
        self, tasks: tuple[str, ...] | None = None, seeds: tuple[int, ...] = (0,), **changes: Any
    ) -> list[Recipe]:
        """Make a recipe for each task, learning rate and seed.

        Args:
            tasks: the preset's by default.
            changes: settings that replace the paper's; `learning_rates` for a grid.

        Example:
            >>> [recipe.learning_rate for recipe in PRESETS["glue/smyrf-2x32"].recipes(("rte",))]
            [5e-05, 3e-05, 2e-05]
        """
        changes, own = dict(changes), self.recipe.train_method
        one, several = changes.pop("learning_rate", None), changes.pop("learning_rates", None)
        if one is not None and several is not None:
            raise ValueError(f"learning_rate={one} and learning_rates={several} must not be given together")
        rates = (one,) if one is not None else several or self.rates
        if "eval_methods" not in changes and "train_method" in changes:
            # The new method takes the place of the old one in evaluation too.
            methods = [changes["train_method"] if method == own else method for method in self.recipe.eval_methods]
            changes["eval_methods"] = tuple(dict.fromkeys(methods))
        return [
            replace(self.recipe, task=task, learning_rate=rate, seed=seed, **changes)
            for seed in seeds
            for task in (self.tasks if tasks is None else tasks)
            for rate in rates
        ]


def _glue(name: str, method: Method, figures: str, max_length: int = 128, model: str = BERT, note: str = "") -> Preset:
    """Make a row of the GLUE table: 3 epochs, batch size 16, 10% warm-up."""
    paper = {
        task: tuple(float(one) for one in figure.split("/"))
        for task, figure in zip(GLUE_TASKS, figures.split(), strict=False)
        if figure != "–"
    }
    tasks = tuple(paper) or GLUE_TASKS
    recipe = Recipe(
        task=tasks[0],
        model=model,
        train_method=method,
        max_length=max_length,
        batch_size=16,
        epochs=3,
        warmup=0.1,
        learning_rate=GLUE_RATES[0],
    )
    return Preset(f"glue/{name}", "glue", tasks, recipe, GLUE_RATES, paper, note)


def _imdb(
    name: str,
    method: Method,
    figure: float | None,
    model: str,
    *eval_methods: Method,
    task: str = "imdb",
    note: str = "",
) -> Preset:
    """Make a row on IMDB: 512 tokens, 3 epochs, batch size 8, learning rate 3e-5, no warm-up (none is mentioned)."""
    recipe = Recipe(
        task=task,
        model=model,
        train_method=method,
        eval_methods=eval_methods,
        max_length=512,
        batch_size=8,
        epochs=3,
        warmup=0.0,
        learning_rate=3e-5,
    )
    paper = {} if figure is None else {task: (figure,)}
    return Preset(name, name.split("/")[0], (task,), recipe, (3e-5,), paper, note)


_OURS = "our method: not in the paper"
_SWAPPED = "the paper's table has its marks of SMYRF inference swapped; this is what its text says"
_HALF = Smyrf(8, 32)

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        #                                 CoLA  MNLI-m/mm   MRPC  QNLI  QQP   RTE   SST-2 STS-B
        _glue("bert-128", Dense(), "57.83 84.43/84.68 88.41 91.31 89.70 65.70 93.46 88.73"),
        _glue("smyrf-2x32", Smyrf(2, 32), "58.79 85.02/84.27 87.69 91.14 89.72 68.59 93.23 89.65"),
        _glue("smyrf-2x16", Smyrf(2, 16), "58.90 82.86/83.49 85.72 89.53 89.33 64.98 93.12 87.75"),
        _glue("bert-64", Dense(), "58.80 82.34/82.47 87.02 90.48 89.69 61.73 93.00 88.64", max_length=64),
        _glue("bert-32", Dense(), "56.40 64.51/63.41 77.89 79.81 88.59 55.23 92.66 83.53", max_length=32),
        _glue("bert-large", Dense(), "60.5 – – – 89.3", model=BERT_LARGE, note="settings assumed to be BERT base's"),
        _glue(
            "smyrf-large",
            Smyrf(2, 32),
            "60.4 – – – 90.2",
            model=BERT_LARGE,
            note="rounds and cluster size are not in the paper: assumed to be 2×32",
        ),
        _glue("tangent-50", Tangent(0.5), "", note=_OURS),
        _glue("tangent-25", Tangent(0.25), "", note=_OURS),
        _imdb("imdb/bert", Dense(), 94.12, BERT),
        _imdb("imdb/smyrf-8x32", _HALF, 92.64, BERT),
        _imdb("imdb/smyrf-16x8", Smyrf(16, 8), 92.52, BERT),
        _imdb("imdb/smyrf-8x8", Smyrf(8, 8), 91.46, BERT),
        _imdb("imdb/smyrf-8x4", Smyrf(8, 4), 88.78, BERT),
        _imdb("imdb/smyrf-4x4", Smyrf(4, 4), 87.49, BERT),
        _imdb("imdb/tangent-25", Tangent(0.25), None, BERT, note=_OURS),
        _imdb("imdb/tangent-12.5", Tangent(0.125), None, BERT, note=_OURS),
        _imdb("imdb/roberta", Dense(), 94.96, ROBERTA),
        _imdb("imdb/roberta-8x32", _HALF, 93.72, ROBERTA),
        _imdb("backandforth/bert", _HALF, 93.54, BERT, Dense(), _HALF, note=_SWAPPED),
        _imdb("backandforth/roberta", _HALF, 94.62, ROBERTA, Dense(), _HALF, note=_SWAPPED),
        _imdb("ablation/smyrf", _HALF, 93.7, ROBERTA),
        _imdb("ablation/e2lsh", Smyrf(8, 32, transform="none"), 89.3, ROBERTA),
        _imdb(
            "ablation/reformer",
            Smyrf(8, 32, transform="none", hashing="cross_polytope"),
            88.7,
            ROBERTA,
            note="cross-polytope LSH, as in the Reformer",
        ),
        _imdb(
            "hyperpartisan",
            _HALF,
            97.2,
            ROBERTA,
            task="hyperpartisan",
            note="the paper says only 512 tokens: model, method and settings are those of its IMDB rows",
        ),
    )
}


def find_preset(name: str) -> Preset:
    """Find a preset by name.

    Raises:
        ValueError: there is no such preset.
    """
    if name not in PRESETS:
        raise ValueError(f"preset={name!r} must be one of {', '.join(PRESETS)}")
    return PRESETS[name]


def preset_for(task: str) -> Preset:
    """Default settings of a task: the paper's, with dense attention and one learning rate.

    Raises:
        ValueError: there is no such task.
    """
    name = find_task(task).name
    preset = PRESETS[name if name == "hyperpartisan" else "imdb/bert" if name == "imdb" else "glue/bert-128"]
    recipe = replace(preset.recipe, task=name, train_method=Dense(), eval_methods=())
    return replace(preset, tasks=(name,), recipe=recipe, rates=(3e-5,))
