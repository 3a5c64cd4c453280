"""`attend`, written directly from the equations: softmax inside each group, and the merge of eq. 15.

Shapes: B rows (batch × heads), N queries, M keys, D width, E value width, H lists, L groups, C query slots and S key
        slots per group, F far keys per group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from smyrf.backends.dropout import keep
from smyrf.backends.reference.prepare import prepare
from smyrf.call import Call
from smyrf.grouping.groups import Groups


def attend(call: Call, groups: Sequence[Groups]) -> tuple[Tensor, Tensor]:
    """Attention of each query to the keys of its groups (`smyrf.grouping.stages.Attend`)."""
    call = prepare(call)
    rounds = [attend_round(call, one, h) for h, one in enumerate(groups)]
    out, lse = merge_rounds(
        torch.stack([o for o, _ in rounds]),  # (H, B, N, E)
        torch.stack([s for _, s in rounds]),  # (H, B, N)
    )
    shape = call.q.shape[:3]
    return out.view(*shape, out.shape[-1]), lse.view(shape).detach()


def attend_round(call: Call, groups: Groups, round_index: int) -> tuple[Tensor, Tensor]:
    """Dense attention inside each group of one list.

    w_k = exp(q·k) / Σ_{k' ∈ K_q} exp(q·k'), o_q = Σ_k w_k v_k, and the logarithm of the denominator.

    Returns:
        ``(B, N, E)`` and ``(B, N)``; a query that meets no key has 0 and -inf.
    """
    q, k, v = (x.flatten(0, 1) for x in (call.q, call.k, call.v))  # (B, N, D), (B, M, D), (B, M, E)
    rows, n_groups, slots, size = groups.shape
    row = torch.arange(rows, device=q.device)[:, None, None]  # (B, 1, 1)
    gq = q[row, groups.queries.clamp(min=0)]  # (B, L, C, D)
    gk = k[row, groups.keys.clamp(min=0)]  # (B, L, S, D)
    gv = v[row, groups.keys.clamp(min=0)]  # (B, L, S, E)
    valid = (groups.keys >= 0)[:, :, None, :].expand(-1, -1, slots, -1)  # (B, L, C, S)
    if groups.causal:
        valid = valid & torch.ones(slots, size, dtype=torch.bool, device=q.device).tril()
    bias = q.new_zeros(valid.shape)
    if groups.multiplicity is not None:
        bias = bias - groups.multiplicity.to(bias).log()
    if groups.far is not None:
        far_keys, far_values, far_bias = groups.far.of_groups()  # (B, L, F, D), (B, L, F, E), (B, L, F)
        gk = torch.cat([gk, far_keys.to(gk)], dim=2)  # (B, L, S + F, D)
        gv = torch.cat([gv, far_values.to(gv)], dim=2)  # (B, L, S + F, E)
        far_bias = far_bias.to(bias)[:, :, None, :].expand(-1, -1, slots, -1)  # (B, L, C, F)
        valid = torch.cat([valid, far_bias != -torch.inf], dim=-1)
        bias = torch.cat([bias, far_bias.masked_fill(far_bias == -torch.inf, 0.0)], dim=-1)

    scores = call.scale * (gq @ gk.transpose(-1, -2)) + bias  # (B, L, C, S + F)
    alive = valid.any(-1, keepdim=True)  # (B, L, C, 1)
    # Rows without a key are computed on zeros and dropped afterwards, so that no NaN reaches a gradient.
    scores = torch.where(alive, scores.masked_fill(~valid, -torch.inf), 0.0)
    lse = scores.logsumexp(-1, keepdim=True)  # (B, L, C, 1)
    weights = torch.where(alive, scores.softmax(-1), 0.0)
    if call.dropout_p > 0.0:
        assert call.dropout_seed is not None
        kept = keep(
            call.dropout_seed,
            (row + round_index * rows).expand(-1, n_groups, 1).flatten(),  # (B·L,)
            groups.queries.flatten(0, 1),
            groups.key_numbers(k.shape[1]).flatten(0, 1),
            call.dropout_p,
        )
        weights = weights * kept.view_as(weights)
    o = weights @ gv  # (B, L, C, E)
    lse = torch.where(alive, lse, -torch.inf)[..., 0]  # (B, L, C)

    slot = slot_of(groups.queries, q.shape[1])  # (B, N)
    o = torch.cat([o.flatten(1, 2), o.new_zeros(rows, 1, o.shape[-1])], dim=1)  # (B, L·C + 1, E)
    lse = torch.cat([lse.flatten(1, 2), lse.new_full((rows, 1), -torch.inf)], dim=1)  # (B, L·C + 1)
    return o.gather(1, slot[..., None].expand(-1, -1, o.shape[-1])), lse.gather(1, slot)


def merge_rounds(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 15: each round is weighted by its share of the softmax mass, softmax over rounds of the LSEs.

    Args:
        outputs: ``(H, …, E)``.
        lses: ``(H, …)``, -inf where a round has no key for the query.

    Returns:
        ``(…, E)`` and ``(…)``.

    Example:
        >>> import torch
        >>> o = torch.tensor([[1.0], [4.0]])
        >>> merge_rounds(o, torch.tensor([1.0, 2.0]).log())[0]
        tensor([3.])
    """
    alive = (lses != -torch.inf).any(0)  # (…); NaN is alive, and stays NaN
    safe = torch.where(alive, lses, 0.0)
    shares = torch.where(alive, safe.softmax(0), 0.0)  # (H, …)
    return (shares[..., None] * outputs).sum(0), torch.where(alive, safe.logsumexp(0), -torch.inf)


def slot_of(queries: Tensor, n_queries: int) -> Tensor:
    """The slot of each query, ``(B, N)``; the number of slots where it is in none."""
    slots = queries.flatten(1).long()  # (B, L·C)
    rows, n_slots = slots.shape
    slot = torch.full((rows, n_queries + 1), n_slots, device=queries.device)
    where = torch.where(slots < 0, n_queries, slots)
    return slot.scatter_(1, where, torch.arange(n_slots, device=queries.device).expand(rows, -1))[:, :n_queries]
