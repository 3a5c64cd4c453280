"""`attend` with PyTorch's operators: O(N) memory, exact gradients, any strides.

Forward walks over the rows (heads), their lists and chunks of groups: gather the vectors, attend, and merge the results
into one output and log-sum-exp per query. Backward walks the same way and recomputes each chunk with the merged
log-sum-exp. Both are custom operators, so that `torch.compile` sees one node with a known shape.

Shapes: B rows (batch × heads), N queries, M keys, D width, E value width, L groups, C query and S key slots per group,
        F far keys per group, G groups in a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from smyrf.backends.forward_mode import refuse_forward_mode
from smyrf.backends.operators import differentiable, register
from smyrf.backends.torch import grouped_attention
from smyrf.backends.torch.gather import Rows, Walk, units
from smyrf.backends.torch.workspace import Workspace, workspace
from smyrf.call import Call
from smyrf.grouping.groups import Groups, pack, unpack

# Queries whose rounds are merged at once.
MERGE_ROWS = 1 << 13


def attend(call: Call, groups: Sequence[Groups]) -> tuple[Tensor, Tensor]:
    """Attention of each query to the keys of its groups (`smyrf.grouping.stages.Attend`)."""
    refuse_forward_mode((call.q, call.k, call.v), "backend='torch'", "pass backend='reference'")
    tensors, layout = pack(groups)
    return _attend(call.q, call.k, call.v, tensors, layout, call.scale, call.dropout_p, call.dropout_seed)


@torch.library.custom_op("smyrf::attend", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Sequence[Tensor],
    layout: Sequence[int],
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    wide, (batch, heads, n_queries, _) = torch.promote_types(q.dtype, torch.float32), q.shape
    out = q.new_empty((batch * heads, n_queries, v.shape[-1]), dtype=wide)  # (B, N, E)
    lse = q.new_empty((batch * heads, n_queries), dtype=wide)  # (B, N)
    vectors, lists = (Rows(q), Rows(k), Rows(v)), unpack(tensors, layout)
    with torch.autocast(q.device.type, enabled=False), workspace(q.device) as scratch:
        for unit in units(lists):
            walk = Walk(vectors, lists, unit, scale=scale, dropout_p=dropout_p, seed=seed, scratch=scratch)
            # One slot more than there are, read by queries that are in no slot.
            o = scratch.get("o", (walk.n_slots + 1, v.shape[-1]), wide)  # Σ exp(S − base) v
            mass = scratch.get("mass", (walk.n_slots + 1,), wide)  # Σ exp(S − base)
            base = scratch.get("base", (walk.n_slots + 1,), wide)
            o[-1], mass[-1], base[-1] = 0.0, 0.0, -torch.inf
            o_groups = o[:-1].view(-1, walk.slots, o.shape[-1])  # (P·R·L, C, E)
            mass_groups, base_groups = mass[:-1].view(-1, walk.slots), base[:-1].view(-1, walk.slots)
            for part in walk.chunks():
                grouped_attention.forward(
                    walk.block(part), o_groups[part], mass_groups[part], base_groups[part], scratch
                )
            rows = out[unit.rows].flatten(0, 1)  # (R·N, E)
            # Mass and base of what has been merged so far: they outlive the unit if the rows have more lists.
            merged = scratch.get("merged so far", (2, len(rows)), wide)
            _merge(rows, merged, o, mass, base, walk.slot, scratch, first=unit.lists.start == 0)
            if unit.lists.stop == len(lists):
                torch.log(merged[0], out=lse[unit.rows].view(-1)).add_(merged[1])
    return out.view(*q.shape[:3], -1).to(q.dtype), lse.view(q.shape[:3])


@torch.library.custom_op("smyrf::attend_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Sequence[Tensor],
    layout: Sequence[int],
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
) -> list[Tensor]:
    """Gradients of q, k and v, then of those `tensors` that are not indices."""
    wide = torch.promote_types(q.dtype, torch.float32)
    inputs = [q, k, v, *differentiable(tensors)]
    grads = [x.new_zeros(x.shape, dtype=wide) for x in inputs]
    dq, dk, dv = (x.view(-1, x.shape[-1]) for x in grads[:3])  # (B·N, D), (B·M, D), (B·M, E)
    lists = unpack(tensors, layout)
    of_far = iter(grads[3:])
    dfars = [None if g.far is None else (next(of_far), next(of_far), next(of_far)) for g in lists]
    grad_rows, out_rows = grad.reshape(-1, grad.shape[-1]), out.reshape(-1, out.shape[-1])  # (B·N, E)
    starts = range(0, len(grad_rows), MERGE_ROWS)  # piece by piece: the products would be another output
    parts = [(grad_rows[i : i + MERGE_ROWS].to(wide) * out_rows[i : i + MERGE_ROWS]).sum(-1) for i in starts]
    delta = torch.cat(parts)  # (B·N,)
    # A query without any key has no weights: exp(S − inf) is zero, where exp(S + inf) would not be.
    lse_rows = lse.flatten().masked_fill(lse.flatten() == -torch.inf, torch.inf)  # (B·N,)

    vectors = Rows(q), Rows(k), Rows(v)
    with torch.autocast(q.device.type, enabled=False), workspace(q.device) as scratch:
        for unit in units(lists):
            walk = Walk(vectors, lists, unit, scale=scale, dropout_p=dropout_p, seed=seed, scratch=scratch)
            of_slots = scratch.get("dq of slots", (walk.n_slots + 1, dq.shape[-1]), wide)
            of_slots[-1] = 0.0
            dq_groups = of_slots[:-1].view(-1, walk.slots, dq.shape[-1])
            dfar = dfars[unit.lists.start]
            for part in walk.chunks():
                block, rows, key_rows, empty = (
                    walk.block(part),
                    walk.query_rows(part),
                    walk.key_rows(part),
                    walk.empty(part),
                )
                g = walk.gather("grad", grad_rows, rows)  # (G·C, E)
                s = lse_rows[rows]  # (G·C,)
                if empty is not None:
                    g.masked_fill_(empty[:, None], 0.0)
                    s.masked_fill_(empty, torch.inf)
                o = walk.gather("out", out_rows, rows) if walk.fused else g  # read only by the fused form
                slots = block.q.shape[:2]
                cq, ck, cv, cbias = grouped_attention.backward(
                    block, g.view(*slots, -1), o.view(*slots, -1), s.view(slots), delta[rows].view(slots), scratch
                )
                dq_groups[part] = cq
                dk.index_add_(0, key_rows, ck[:, : walk.size].flatten(0, 1).to(wide))
                dv.index_add_(0, key_rows, cv[:, : walk.size].flatten(0, 1).to(wide))
                if dfar is not None:
                    assert cbias is not None
                    far_rows = walk.far_rows(part)  # (G·F,)
                    for total, own in zip(dfar, (ck[:, walk.size :], cv[:, walk.size :], cbias), strict=True):
                        total[unit.rows].flatten(0, 1).index_add_(0, far_rows, own.flatten(0, 1).to(wide))
            here = slice(unit.rows.start * q.shape[2], unit.rows.stop * q.shape[2])
            for slot in walk.slot:  # one list after the other
                of_queries = scratch.get("dq of queries", (len(slot), dq.shape[-1]), wide)
                dq[here] += torch.index_select(of_slots, 0, slot, out=of_queries)
    return [d.to(x.dtype) for d, x in zip(grads, inputs, strict=True)]


register(_attend, _attend_backward)


def _merge(
    out: Tensor,
    merged: Tensor,
    o: Tensor,
    mass: Tensor,
    base: Tensor,
    slot: Tensor,
    scratch: Workspace,
    *,
    first: bool,
) -> None:
    """Eq. 15 in place: results of further lists, weighted by their shares of the softmax mass.

    The shares are computed relative to the largest base and divided by their sum, so that they add up to
    one however large the scores are.

    Args:
        out: ``(R·N, E)``, merged so far; with `first`, of any content, as is `merged`.
        merged: ``(2, R·N)``, mass and base of what is in `out`.
        o: ``(slots + 1, E)``, Σ exp(S − base) v of P lists.
        mass, base: ``(slots + 1,)``, their Σ exp(S − base) and bases.
        slot: ``(P, R·N)``, where each query stands in them.
    """
    for start in range(0, len(out), MERGE_ROWS):
        here = slice(start, start + MERGE_ROWS)
        places, (mass_before, base_before) = slot[:, here], merged[:, here]  # (P, r), (r,) twice
        flat = places.reshape(-1)  # (P·r,)
        bases = base.index_select(0, flat).view_as(places)  # (P, r)
        top = bases.amax(0) if first else torch.maximum(bases.amax(0), base_before)  # (r,)
        shift = top.masked_fill(top == -torch.inf, 0.0)  # a query that has met no key: exp(-inf - 0) = 0
        shares = bases.sub_(shift).exp_()  # (P, r)
        total = mass.index_select(0, flat).view_as(places).mul_(shares).sum(0)  # (r,)
        if not first:
            before = mass_before * (base_before - shift).exp_()  # (r,)
            total += before
        divisor = total.masked_fill(total == 0.0, 1.0)
        shares = shares.div_(divisor).T  # (r, P)
        if len(slot) == 1:
            parts = scratch.get("parts", (len(shares), o.shape[1]), o.dtype)
            torch.index_select(o, 0, places[0], out=parts).mul_(shares)
        else:  # a weighted sum of rows in one pass: Σ_p share_np · o[place_np]
            parts = F.embedding_bag(places.T.contiguous(), o, mode="sum", per_sample_weights=shares.contiguous())
        if first:
            out[here] = parts
        else:
            out[here].mul_(before.div_(divisor)[:, None]).add_(parts)
        merged[0, here], merged[1, here] = total, top
