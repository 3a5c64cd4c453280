"""Bounds of rounding errors, and comparisons up to them.

Shapes: batch, heads, N queries, E value width.
"""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

from tests.attack.drawn_calls import Drawn


def eps(drawn: Drawn) -> float:
    """Of the dtype of the case."""
    return torch.finfo(drawn.v.dtype).eps


def wide_eps(drawn: Drawn) -> float:
    """Of the dtype of sums; half precision is widened."""
    return torch.finfo(torch.promote_types(drawn.v.dtype, torch.float32)).eps


def score_error(drawn: Drawn) -> float:
    """Bound of the rounding error of a score."""
    return float(score_errors(drawn).max())


def score_errors(drawn: Drawn) -> Tensor:
    """Bound of the rounding error of the scores of each query, ``(batch, heads, N)``."""
    q, k = drawn.q.double().norm(dim=-1), float(drawn.k.double().norm(dim=-1).max())
    return 4 * wide_eps(drawn) * math.sqrt(drawn.q.shape[-1]) * abs(drawn.scale) * k * q


def sum_error(drawn: Drawn) -> float:
    """Bound of the relative rounding error of a sum over all keys, whose terms may all be rounded the same way."""
    return drawn.k.shape[2] * wide_eps(drawn)


def compare(drawn: Drawn, ours: Tensor, theirs: Tensor, says: str, tally: Counter[str]) -> list[str]:
    """Outputs ``(batch, heads, N, E)`` are equal up to the rounding of scores and sums.

    A row whose scores are so large that rounding can change every weight is not compared.
    """
    largest = float(drawn.v.double().abs().max())
    relative = 16 * eps(drawn) + 2 * sum_error(drawn) + 4 * score_errors(drawn)  # (batch, heads, N)
    is_compared = relative < 0.5
    tally["rows compared"] += int(is_compared.sum())
    tally["rows left out: their scores round to any weight"] += int((~is_compared).sum())
    gaps = (ours.double() - theirs.double()).abs().amax(-1).nan_to_num(torch.inf)
    off = is_compared & (gaps > largest * relative)
    if not bool(off.any()):
        return []
    return [f"{says}: {int(off.sum())} of {off.numel()} rows, {gap(ours, theirs)}"]


def gap(one: Tensor, other: Tensor) -> str:
    """How many rows of two tensors differ, and by how much."""
    if one.numel() == 0:
        return "nothing"
    gaps = (one.double() - other.double()).abs()
    return f"{int((one != other).any(-1).sum())} rows differ, by up to {float(gaps.nan_to_num(torch.inf).max()):.3g}"
