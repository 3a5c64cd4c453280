"""A call in the form of the equations: one key head per query head, float32 or wider, zeros where keys are masked."""

from __future__ import annotations

from dataclasses import replace

import torch

from smyrf.call import Call


def prepare(call: Call) -> Call:
    """The call as the other stages take it (`smyrf.grouping.stages.Prepare`).

    Example:
        >>> q, k = torch.randn(1, 4, 5, 8, dtype=torch.bfloat16), torch.randn(1, 2, 7, 8, dtype=torch.bfloat16)
        >>> call = prepare(Call(q, k, k, scale=1.0))
        >>> call.k.shape, call.k.dtype
        (torch.Size([1, 4, 7, 8]), torch.float32)
    """
    wide = torch.promote_types(call.q.dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (call.q, call.k, call.v))
    if call.heads_per_key_head > 1:
        k, v = (x.repeat_interleave(call.heads_per_key_head, dim=1) for x in (k, v))  # (batch, heads, M, …)
    if call.key_mask is not None:  # weight zero times NaN is NaN
        hidden = ~call.key_mask[:, None, :, None]  # (batch, 1, M, 1)
        k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
    return replace(call, q=q, k=k, v=v)
