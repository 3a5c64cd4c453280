"""The paper's language experiments: fine-tuning encoders with sparse attention.

Example:
    >>> from smyrf.experiments.nlp import PRESETS
    >>> PRESETS["imdb/smyrf-8x32"].paper
    {'imdb': (92.64,)}
"""

from smyrf.experiments.nlp.data import load_splits
from smyrf.experiments.nlp.format_tables import markdown
from smyrf.experiments.nlp.presets import PRESETS, Preset
from smyrf.experiments.nlp.recipe import Recipe
from smyrf.experiments.nlp.result_tables import build_tables
from smyrf.experiments.nlp.results import Result, load_results
from smyrf.experiments.nlp.tasks import TASKS, Task
from smyrf.experiments.nlp.train import finetune, model_folder
from smyrf.experiments.nlp.write_report import write_report

__all__ = [
    "PRESETS",
    "TASKS",
    "Preset",
    "Recipe",
    "Result",
    "Task",
    "build_tables",
    "finetune",
    "load_results",
    "load_splits",
    "markdown",
    "model_folder",
    "write_report",
]
