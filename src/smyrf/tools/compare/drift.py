"""Drift: how far the outputs of a model move from those with dense attention.

Shapes: T tokens of all documents, B documents, W width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from smyrf.tools.analysis.error import relative_error

# Quantile of the tokens' cosines that is reported as the worst.
WORST_SHARE = 0.01


class Outputs(NamedTuple):
    """Last hidden states of a model.

    Args:
        tokens: ``(T, W)``, without padding.
        pooled: ``(B, W)``, mean over the tokens of each document.
    """

    tokens: Tensor
    pooled: Tensor


@dataclass(frozen=True)
class Drift:
    """Outputs against those of dense attention.

    Args:
        error: ‖output − dense‖ / ‖dense‖ over all tokens.
        token_cosine: cosine of a token with the dense one, averaged over tokens.
        worst_token_cosine: first percentile over tokens.
        pooled_cosine: cosine of a document's mean-pooled embedding with the dense one, averaged over documents.
        worst_pooled_cosine: minimum over documents.
        agreement: share of documents whose nearest neighbour is the same; None for fewer than three documents,
            or if outputs are not finite.
    """

    error: float
    token_cosine: float
    worst_token_cosine: float
    pooled_cosine: float
    worst_pooled_cosine: float
    agreement: float | None


def drift(outputs: Outputs, dense: Outputs) -> Drift:
    """Compare outputs with those of dense attention.

    Example:
        >>> one = Outputs(torch.eye(4), torch.eye(4))
        >>> drift(one, one)
        Drift(error=0.0, token_cosine=1.0, worst_token_cosine=1.0, pooled_cosine=1.0, ..., agreement=1.0)
    """
    by_token = cosines(outputs.tokens, dense.tokens)
    by_document = cosines(outputs.pooled, dense.pooled)
    finite = bool(outputs.pooled.isfinite().all())
    return Drift(
        relative_error(outputs.tokens, dense.tokens),
        float(by_token.mean()),
        lowest(by_token, WORST_SHARE),
        float(by_document.mean()),
        float(by_document.min()),
        neighbour_agreement(outputs.pooled, dense.pooled) if len(dense.pooled) > 2 and finite else None,
    )


def valid_outputs(hidden: Tensor, valid: Tensor | None) -> Outputs:
    """Tokens and document means of a batch, without padding.

    Args:
        hidden: ``(B, N, W)``.
        valid: ``(B, N)`` bool, False for padding; None if there is none.

    Example:
        >>> hidden = torch.tensor([[[1.0, 1.0], [3.0, 1.0]], [[5.0, 0.0], [7.0, 7.0]]])
        >>> tokens, pooled = valid_outputs(hidden, torch.tensor([[True, True], [True, False]]))
        >>> tokens.shape, pooled
        (torch.Size([3, 2]), tensor([[2., 1.],
                [5., 0.]]))
    """
    if valid is None:
        return Outputs(hidden.flatten(0, 1), hidden.mean(1))
    kept = torch.where(valid[..., None], hidden, 0.0)  # (B, N, W); padding may be anything, NaN included
    return Outputs(hidden[valid], kept.sum(1) / valid.sum(1, keepdim=True))


def cosines(outputs: Tensor, dense: Tensor) -> Tensor:
    """Cosine of each row of ``(…, W)`` with the same row of the other.

    Example:
        >>> cosines(torch.tensor([[2.0, 0.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
        tensor([1.0000, 0.6000])
    """
    return F.cosine_similarity(outputs, dense, dim=-1).clamp(-1.0, 1.0)


def lowest(values: Tensor, share: float) -> float:
    """The quantile at `share`; the minimum if there are few values.

    Example:
        >>> lowest(torch.arange(1.0, 201.0), 0.01)
        2.0
    """
    return float(values.kthvalue(max(1, math.floor(share * len(values)))).values)


def nearest(pooled: Tensor) -> Tensor:
    """Nearest neighbour by cosine of each of B embeddings ``(B, W)``, as indices ``(B,)``.

    Example:
        >>> nearest(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]))
        tensor([1, 0, 1])
    """
    directions = F.normalize(pooled, dim=-1)
    similar = directions @ directions.T  # (B, B)
    return similar.fill_diagonal_(-torch.inf).argmax(1)


def neighbour_agreement(pooled: Tensor, dense: Tensor) -> float:
    """Share of documents whose nearest neighbour is the same as with dense attention.

    Example:
        >>> dense = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.2, 1.0]])
        >>> moved = torch.tensor([[1.0, 0.0], [0.5, 1.0], [0.0, 1.0], [0.2, 1.0]])
        >>> nearest(dense), nearest(moved), neighbour_agreement(moved, dense)
        (tensor([1, 0, 3, 2]), tensor([1, 3, 3, 2]), 0.75)
    """
    return float((nearest(pooled) == nearest(dense)).float().mean())
