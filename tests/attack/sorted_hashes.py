"""Whether an order of queries or keys sorts their hashes, as far as rounding can tell them apart.

Hashes are computed in float64, each with a bound of the rounding error of a backend. An order is right if there are
ascending numbers within these bounds: a tie may be broken either way, everything else is decided.

Shapes: batch, heads, N queries or keys, D width, X extra coordinates, H rounds.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from smyrf.call import Call
from smyrf.grouping.hashing import draw_vectors
from smyrf.grouping.transforms import TRANSFORMS, Lifted
from smyrf.methods import Smyrf

# From this length on the native backend sorts buckets of hashes, at least 2**18 of them over the span of all.
BUCKETS_FROM, BUCKET_SHARE = 512, 2.0**-17


def wrong_orders(call: Call, method: Smyrf, n_clusters: int, orders: tuple[Tensor, Tensor], backend: str) -> list[str]:
    """What is wrong with the result of `sort_by_hash`, one sentence for queries and one for keys."""
    failures = []
    repeat = call.heads_per_key_head
    q = call.q.detach().double() * call.scale
    k = call.k.detach().double().repeat_interleave(repeat, dim=1)
    visible = None
    if call.key_mask is not None:
        visible = call.key_mask[:, None].expand(k.shape[:3])  # (batch, heads, M)
        k = k.masked_fill(~visible[..., None], 0.0)
    sides = _bounds(q, k, call, method, n_clusters, backend)
    for name, order, shown, (low, high) in zip(("queries", "keys"), orders, (None, visible), sides, strict=True):
        order = order.long()  # (batch, heads, H, N)
        if not torch.equal(order.sort(-1).values, torch.arange(order.shape[-1]).expand_as(order)):
            failures.append(f"{backend}: the order of {name} is no permutation")
            continue
        is_number = low.isfinite() & high.isfinite()  # the factor of h2lsh is infinite for a query of zeros
        low, high = low.masked_fill(~is_number, -torch.inf), high.masked_fill(~is_number, torch.inf)
        low, high = low.gather(-1, order), high.gather(-1, order)
        if shown is not None:
            shown = shown[:, :, None].expand_as(order).gather(-1, order)
            if bool((shown[..., 1:] & ~shown[..., :-1]).any()):
                failures.append(f"{backend}: a masked key comes before a visible one")
            high = high.masked_fill(~shown, torch.inf)
        n_wrong = int((low.cummax(-1).values > high).sum())
        if n_wrong:
            failures.append(f"{backend}: {n_wrong} of {order.numel()} {name} are not sorted by their hashes")
    return failures


def _bounds(
    q: Tensor, k: Tensor, call: Call, method: Smyrf, n_clusters: int, backend: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """The least and the largest hash ``(batch, heads, H, N)`` that rounding allows, of the queries and of the keys."""
    eps = torch.finfo(torch.promote_types(call.q.dtype, torch.float32)).eps
    of_sort = eps if backend == "reference" else torch.finfo(torch.float32).eps
    relative = (q.shape[-1] + 8) * eps  # of a squared norm or an inner product
    lifted = [_lift(method.transform, q, k, change) for change in (1.0, 1.0 + relative, 1.0 - relative)]
    width = q.shape[-1] + len(lifted[0][0].extra)
    vectors = draw_vectors(method.hashing, call.seed, width, method.n_hashes, n_clusters).double()
    for side, x in enumerate((q, k)):
        vectors_of = torch.stack([one[side].apply(x) for one in lifted])  # (3, batch, heads, N, D + X)
        u = vectors_of[0]
        error = vectors_of.amax(0) - vectors_of.amin(0) + relative * u.abs()
        if method.hashing == "cross_polytope":
            yield _bucket_bounds(u, error, vectors)
            continue
        hashes, errors = _multiply(u, vectors), _multiply(error, vectors.abs())  # (batch, heads, H, N)
        errors = errors + 2 * of_sort * _multiply(u.abs(), vectors.abs())
        if backend == "native" and hashes.shape[-1] >= BUCKETS_FROM:
            errors = errors + BUCKET_SHARE * (hashes.amax(-1, keepdim=True) - hashes.amin(-1, keepdim=True))
        yield hashes - errors, hashes + errors


def _lift(name: str, q: Tensor, k: Tensor, change: float) -> tuple[Lifted, Lifted]:
    """F and G where the squared norms of all vectors, but not the largest norms, are `change` times what they are."""
    q_sq, k_sq = q.square().sum(-1), k.square().sum(-1)
    largest = q_sq.amax(-1, keepdim=True), k_sq.amax(-1, keepdim=True)
    return TRANSFORMS[name](change * q_sq, change * k_sq, *largest)


def _multiply(u: Tensor, vectors: Tensor) -> Tensor:
    return torch.einsum("bhnx,rx->bhrn", u, vectors)


def _bucket_bounds(u: Tensor, error: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last of the directions that may be the nearest."""
    rotated = torch.einsum("bhnx,rdx->bhrnd", u, vectors)  # (batch, heads, H, N, R)
    slack = torch.einsum("bhnx,rdx->bhrnd", error, vectors.abs())
    both, slack = torch.cat([rotated, -rotated], dim=-1), torch.cat([slack, slack], dim=-1)
    may_win = both + slack >= (both - slack).amax(-1, keepdim=True)
    numbers = torch.arange(both.shape[-1], dtype=u.dtype)
    return (
        torch.where(may_win, numbers, torch.inf).amin(-1),
        torch.where(may_win, numbers, -torch.inf).amax(-1),
    )
