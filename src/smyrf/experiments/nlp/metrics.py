"""The official metrics, from scikit-learn and SciPy, as fractions; tables show percent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy


def _accuracy(labels: Any, predictions: Any) -> float:
    from sklearn.metrics import accuracy_score

    return accuracy_score(labels, predictions)


def _f1(labels: Any, predictions: Any) -> float:
    from sklearn.metrics import f1_score

    return f1_score(labels, predictions, zero_division=0.0)


def _matthews(labels: Any, predictions: Any) -> float:
    from sklearn.metrics import matthews_corrcoef

    return matthews_corrcoef(labels, predictions)


def _pearson(labels: Any, predictions: Any) -> float:
    from scipy.stats import pearsonr

    return pearsonr(labels, predictions).statistic


def _spearman(labels: Any, predictions: Any) -> float:
    from scipy.stats import spearmanr

    return spearmanr(labels, predictions).statistic


METRICS: dict[str, Callable[[Any, Any], float]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "matthews": _matthews,
    "pearson": _pearson,
    "spearman": _spearman,
}


def compute_metrics(names: Sequence[str], labels: Any, logits: Any) -> dict[str, float]:
    """Compute metrics of a model's outputs.

    The correlation with constant predictions or labels is undefined; it counts as 0, as Matthews's does. A row with
    outputs that are not finite counts as wrong; scores with such a row have correlation 0.

    Args:
        names: keys of `METRICS`.
        labels: ``(n,)``, classes or scores.
        logits: ``(n, classes)``, or ``(n, 1)`` for scores.

    Example:
        >>> compute_metrics(["accuracy", "f1"], [0, 1, 1, 1], [[2, 1], [0, 1], [1, 0], [0, 3]])
        {'accuracy': 0.75, 'f1': 0.8}
        >>> round(compute_metrics(["pearson"], [0.5, 1.0, 1.5], [[1.0], [2.0], [3.0]])["pearson"], 6)
        1.0
    """
    labels, logits = numpy.asarray(labels), numpy.asarray(logits)
    finite = numpy.isfinite(logits).all(axis=1)
    if logits.shape[1] == 1:
        predictions = logits[:, 0] if finite.all() else numpy.zeros(len(logits))
    else:
        wrong = (labels + 1) % logits.shape[1]
        predictions = numpy.where(finite, numpy.where(finite[:, None], logits, 0.0).argmax(axis=1), wrong)
    found = {}
    for name in names:
        if name in ("pearson", "spearman") and (numpy.ptp(labels) == 0 or numpy.ptp(predictions) == 0):
            found[name] = 0.0
        else:
            found[name] = float(METRICS[name](labels, predictions))
    return found
