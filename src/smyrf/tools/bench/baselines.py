"""What methods are compared with: PyTorch's fused attention, and two eager baselines that store all scores.

Shapes: batch, heads, N positions, D width, H rounds, L clusters, C and S queries and keys per cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from smyrf.attention import attention
from smyrf.methods import Method, Smyrf
from smyrf.tools.bench.problems import DTYPES, Problem

# (q, k, v) → output.
AttentionFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

SDPA = "sdpa"
DENSE = "eager dense"
EAGER = "eager smyrf"
# Each can be left out.
BASELINES = (EAGER, SDPA, DENSE)


def attention_function(name: str, method: Method | None, backend: str | None = None) -> AttentionFunction:
    """The baseline of this name, or else `smyrf.attention` with a method and a backend.

    Example:
        >>> import torch
        >>> x = torch.randn(1, 2, 64, 8)
        >>> a, b = attention_function("sdpa", None)(x, x, x), attention_function("eager dense", None)(x, x, x)
        >>> torch.allclose(a, b, atol=1e-5)
        True
    """
    if name == SDPA:
        return F.scaled_dot_product_attention
    if name == DENSE:
        return eager_dense
    assert method is not None
    if name == EAGER:
        assert isinstance(method, Smyrf)
        return lambda q, k, v: eager_smyrf(q, k, v, method)
    return lambda q, k, v: attention(q, k, v, method=method, generator=0, backend=backend)


def eager_dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / √D) v with the N × N matrix in memory."""
    return ((q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5).softmax(-1) @ v


def eager_smyrf(q: Tensor, k: Tensor, v: Tensor, method: Smyrf) -> Tensor:
    """SMYRF as first published: all rounds gathered at once, all scores in memory.

    Needs a length that the cluster size divides; takes no masks.
    """
    n, width = q.shape[-2:]
    n_clusters = n // method.cluster_size
    generator = torch.Generator().manual_seed(0)
    x, y = q.detach() * width**-0.5, k.detach()
    x_sq, y_sq = x.square().sum(-1, keepdim=True), y.square().sum(-1, keepdim=True)  # (batch, heads, N, 1)
    radius = x_sq.amax(-2, keepdim=True) + y_sq.amax(-2, keepdim=True)
    x_rest, y_rest = (radius - x_sq).clamp_min(0).sqrt(), (radius - y_sq).clamp_min(0).sqrt()
    lifted_x = torch.cat([x, torch.zeros_like(x_rest), x_rest], -1)  # (batch, heads, N, D + 2)
    lifted_y = torch.cat([y, y_rest, torch.zeros_like(y_rest)], -1)
    a = torch.randn(width + 2, method.n_hashes, generator=generator).to(q)
    q_order = (lifted_x @ a).permute(3, 0, 1, 2).argsort(-1)  # (H, batch, heads, N)
    k_order = (lifted_y @ a).permute(3, 0, 1, 2).argsort(-1)

    def sort(x: Tensor, order: Tensor) -> Tensor:
        many = x.expand(method.n_hashes, *x.shape)
        rows = many.gather(-2, order[..., None].expand(*order.shape, x.shape[-1]))  # (H, batch, heads, N, D)
        return rows.reshape(*rows.shape[:-2], n_clusters, method.cluster_size, x.shape[-1])  # (…, L, C, D)

    scores = (sort(q, q_order) @ sort(k, k_order).transpose(-1, -2)) * width**-0.5  # (H, batch, heads, L, C, S)
    lse = scores.logsumexp(-1, keepdim=True)  # (…, L, C, 1)
    out = (scores - lse).exp() @ sort(v, k_order)  # (…, L, C, D)
    inverse = q_order.argsort(-1)[..., None]  # (H, batch, heads, N, 1)
    out = out.flatten(-3, -2).gather(-2, inverse.expand(*inverse.shape[:-1], v.shape[-1]))
    share = lse.flatten(-3, -2).gather(-2, inverse).softmax(0)  # (H, batch, heads, N, 1)
    return (out * share).sum(0)


def needed_bytes(name: str, problem: Problem, method: Method | None) -> int:
    """A lower bound of the memory that one call needs, to skip it before memory runs out."""
    item = DTYPES[problem.dtype].itemsize
    rows = problem.batch * problem.heads * problem.length
    inputs_and_output = 4 * rows * problem.width * item * (2 if problem.backward else 1)
    per_row = 0  # stored scores
    if name == DENSE:
        per_row = problem.length
    elif name == EAGER and method is not None:
        per_row = method.key_visits(problem.length)
    return inputs_and_output + rows * per_row * item * (3 if problem.backward else 2)
