"""The attention map of a method, a block of rows at a time.

Shapes: N queries, M keys, D width, E value width, R rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from smyrf.attention import attention
from smyrf.call import Call
from smyrf.methods import Method
from smyrf.tools.analysis.maps import check_head, head_vectors


def approximate_rows(head: Call, method: Method, rows: Tensor | None = None, seed: int = 0) -> Iterator[Tensor]:
    """Rows of Â, where a method's output is Â v: blocks ``(R, M)`` of at most E rows.

    Once its keys are chosen, the output of a method is linear in the values, so Âᵀ R is the gradient of the values for
    the cotangent R. A cotangent whose E columns are unit vectors gives E rows of Â, including the weights that far keys
    give to the keys folded into them.

    Args:
        head: one head of one document, from `Call.head`.
        rows: which queries; all by default.
        seed: of random methods.

    Example:
        >>> from smyrf import Tangent
        >>> q, k, v = torch.randn(3, 1, 1, 300, 16).unbind()
        >>> head = Call(q, k, v, 0.25)
        >>> map = torch.cat(list(approximate_rows(head, Tangent(0.25))))
        >>> map.shape, torch.allclose(map.sum(1), torch.ones(300), atol=1e-5)
        (torch.Size([300, 300]), True)
    """
    check_head(head)
    q, k, v = (x[None, None] for x in head_vectors(head))  # (1, 1, N, D), (1, 1, M, D), (1, 1, M, E)
    rows = torch.arange(q.shape[2]) if rows is None else rows
    mask = None if head.key_mask is None else head.key_mask.cpu()
    with torch.enable_grad():
        v = v.detach().requires_grad_()
        output = attention(
            q, k, v, method=method, key_mask=mask, is_causal=head.is_causal, scale=head.scale, generator=seed
        )  # (1, 1, N, E)
    for some in torch.split(rows, v.shape[-1]):
        cotangent = torch.zeros_like(output)
        cotangent[0, 0, some, torch.arange(len(some))] = 1.0
        (gradient,) = torch.autograd.grad(output, v, cotangent, retain_graph=True)  # (1, 1, M, E)
        yield gradient[0, 0, :, : len(some)].T
