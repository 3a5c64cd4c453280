"""The paper's language experiments: fine-tuning with another attention.

Example:
    >>> from smyrf.nlp import PRESETS
    >>> PRESETS["imdb/smyrf-8x32"].paper
    {'imdb': (92.64,)}
"""

from smyrf.nlp.data import load_splits
from smyrf.nlp.pages import write_report
from smyrf.nlp.presets import PRESETS, Preset
from smyrf.nlp.recipe import Recipe
from smyrf.nlp.report import build_tables
from smyrf.nlp.results import Result, load_results
from smyrf.nlp.tables import markdown
from smyrf.nlp.tasks import TASKS, Task
from smyrf.nlp.train import finetune, model_folder

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
