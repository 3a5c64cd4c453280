"""The official metrics, from scikit-learn and SciPy, as fractions; tables show percent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy


def _metrics() -> dict[str, Callable[[Any, Any], float]]:
    """Functions of labels and predictions, by name."""
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    return {
        "accuracy": accuracy_score,
        "f1": partial(f1_score, zero_division=0.0),
        "matthews": matthews_corrcoef,
        "pearson": lambda labels, predictions: pearsonr(labels, predictions).statistic,
        "spearman": lambda labels, predictions: spearmanr(labels, predictions).statistic,
    }


def compute_metrics(names: Sequence[str], labels: Any, logits: Any) -> dict[str, float]:
    """Compute metrics of a model's outputs.

    The correlation with constant predictions or labels is undefined; it counts as 0, as Matthews's does. A row with
    outputs that are not finite counts as wrong; scores with such a row have correlation 0.

    Args:
        names: accuracy, f1, matthews, pearson or spearman.
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
    found, metrics = {}, _metrics()
    for name in names:
        if name in ("pearson", "spearman") and (numpy.ptp(labels) == 0 or numpy.ptp(predictions) == 0):
            found[name] = 0.0
        else:
            found[name] = float(metrics[name](labels, predictions))
    return found
