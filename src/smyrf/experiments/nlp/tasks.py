"""The tasks of the paper's language experiments: what their files hold, and by which metrics they are judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Hub(NamedTuple):
    """A dataset on the hub: its name, and a configuration, or a folder of a revision."""

    name: str
    configuration: str | None = None
    folder: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class Task:
    """A task of classification, or of regression where it has no label names.

    Args:
        name: as it is typed and as the hub spells it: ``sst2``.
        title: as the paper's tables spell it: ``SST-2``, which is also the folder of its official files.
        texts: columns that the model reads, one or two.
        labels: names of the classes, in the order of their numbers; () for a score.
        metrics: names in `smyrf.experiments.nlp.metrics.METRICS`; the first is what tables show.
        hub: where it is on the hub.
        splits: for evaluation, by the hub's name; the paper's tables show them in this order.
        holds_out: where the split for evaluation is missing, a part of the training rows takes its place.
        has_broken_lines: the official file has lines with too few fields, which everybody leaves out.
        files: names of the files, without their endings, that may hold a split.
        columns: official headers that are spelled differently from the hub's columns.
        header: columns of official TSV files that have no header line.
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
        """The one that tables show."""
        return self.metrics[0]


def _glue(
    name: str, title: str, texts: tuple[str, ...], labels: tuple[str, ...], *metrics: str, **more: object
) -> Task:
    return Task(name, title, texts, labels, metrics, Hub("nyu-mll/glue", name), **more)  # type: ignore[arg-type]


_PAIR = ("sentence1", "sentence2")
# Where GLUE has two metrics the paper does not say which it shows. Accuracy of QQP is in its text; 88.41 for MRPC is
# what BERT base has in F1, not in accuracy (about 84); for STS-B both correlations agree within half a point.
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
            # The hub's own copy as parquet: the dataset itself is a script, which `datasets` no longer runs.
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
    """A task by its name, however it is spelled.

    Raises:
        ValueError: there is none of that name.

    Example:
        >>> find_task("SST-2").name, find_task("stsb").title
        ('sst2', 'STS-B')
    """
    plain = name.lower().replace("-", "").replace("_", "")
    if plain not in TASKS:
        raise ValueError(f"task={name!r} must be one of {', '.join(TASKS)}")
    return TASKS[plain]
