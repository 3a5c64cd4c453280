"""The tasks of the paper's language experiments: their files, labels and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Hub(NamedTuple):
    """A dataset on the Hugging Face hub: its name, and a configuration or a folder of a revision."""

    name: str
    configuration: str | None = None
    folder: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class Task:
    """A classification task, or a regression task if it has no labels.

    Args:
        name: name on the command line and on the hub: ``sst2``.
        title: name in the paper's tables, and folder of the official files: ``SST-2``.
        texts: columns that the model reads, one or two.
        labels: class names by index; () for regression.
        metrics: names for `smyrf.experiments.nlp.metrics.compute_metrics`; tables show the first.
        hub: location on the hub.
        splits: evaluation splits by the hub's names, in the order of the paper's tables.
        holds_out: whether some training rows are held out if the evaluation split is missing.
        has_broken_lines: whether the official file has lines with too few fields, which are skipped as is usual.
        files: stems of the files that may hold a split.
        columns: column names of the official files that differ from the hub's.
        header: columns of official TSV files without a header line.
    """

    name: str
    title: str
    texts: tuple[str, ...]
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    hub: Hub
    splits: tuple[str, ...] = ("validation",)
    files: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {"train": ("train",), "validation": ("dev", "validation")}
    )
    columns: Mapping[str, str] = field(default_factory=dict)
    header: tuple[str, ...] = ()
    holds_out: bool = False
    has_broken_lines: bool = False

    @property
    def metric(self) -> str:
        """The main metric, which tables show."""
        return self.metrics[0]


def _glue(
    name: str, title: str, texts: tuple[str, ...], labels: tuple[str, ...], *metrics: str, **more: object
) -> Task:
    return Task(name, title, texts, labels, metrics, Hub("nyu-mll/glue", name), **more)  # type: ignore[arg-type]


_PAIR = ("sentence1", "sentence2")
# For tasks with two metrics the paper does not say which one it reports. QQP: its text says accuracy. MRPC: 88.41 is
# the F1 of BERT base, whose accuracy is about 84. STS-B: both correlations agree within half a point.
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _glue(
            "cola",
            "CoLA",
            ("sentence",),
            ("unacceptable", "acceptable"),
            "matthews",
            header=("source", "label", "star", "sentence"),
        ),
        _glue(
            "mnli",
            "MNLI",
            ("premise", "hypothesis"),
            ("entailment", "neutral", "contradiction"),
            "accuracy",
            splits=("validation_matched", "validation_mismatched"),
            files={
                "train": ("train",),
                "validation_matched": ("dev_matched", "validation_matched"),
                "validation_mismatched": ("dev_mismatched", "validation_mismatched"),
            },
            columns={"sentence1": "premise", "sentence2": "hypothesis", "gold_label": "label"},
        ),
        _glue(
            "mrpc",
            "MRPC",
            _PAIR,
            ("not_equivalent", "equivalent"),
            "f1",
            "accuracy",
            columns={"Quality": "label", "#1 String": "sentence1", "#2 String": "sentence2"},
        ),
        _glue("qnli", "QNLI", ("question", "sentence"), ("entailment", "not_entailment"), "accuracy"),
        _glue(
            "qqp",
            "QQP",
            ("question1", "question2"),
            ("not_duplicate", "duplicate"),
            "accuracy",
            "f1",
            columns={"is_duplicate": "label"},
            has_broken_lines=True,
        ),
        _glue("rte", "RTE", _PAIR, ("entailment", "not_entailment"), "accuracy"),
        _glue("sst2", "SST-2", ("sentence",), ("negative", "positive"), "accuracy"),
        _glue("stsb", "STS-B", _PAIR, (), "pearson", "spearman", columns={"score": "label"}),
        _glue("wnli", "WNLI", _PAIR, ("not_entailment", "entailment"), "accuracy"),
        Task(
            "imdb",
            "IMDB",
            ("text",),
            ("neg", "pos"),
            ("accuracy",),
            Hub("stanfordnlp/imdb"),
            splits=("test",),
            files={"train": ("train",), "test": ("test", "dev", "validation")},
        ),
        Task(
            "hyperpartisan",
            "Hyperpartisan",
            ("text",),
            ("false", "true"),
            ("accuracy", "f1"),
            # The hub's Parquet copy: the dataset itself is a script, which `datasets` no longer runs.
            Hub("SemEvalWorkshop/hyperpartisan_news_detection", folder="byarticle", revision="refs/convert/parquet"),
            files={
                "train": ("train", "train_byarticle"),
                "validation": ("validation", "dev", "test", "test_byarticle"),
            },
            columns={"hyperpartisan": "label"},
            holds_out=True,
        ),
    )
}


def find_task(name: str) -> Task:
    """Find a task by name, in any spelling.

    Raises:
        ValueError: there is no such task.

    Example:
        >>> find_task("SST-2").name, find_task("stsb").title
        ('sst2', 'STS-B')
    """
    plain = name.lower().replace("-", "").replace("_", "")
    if plain not in TASKS:
        raise ValueError(f"task={name!r} must be one of {', '.join(TASKS)}")
    return TASKS[plain]
