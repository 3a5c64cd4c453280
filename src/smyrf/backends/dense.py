"""Exact attention by PyTorch's own function: what serves a call that no method needs to approximate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from smyrf.backends.forward_mode import in_forward_mode
from smyrf.call import Call

# ``F.scaled_dot_product_attention`` by a name that an interception can tell from a user's call.
exact_attention = torch.ops.aten.scaled_dot_product_attention.default


def dense_attention(call: Call) -> Tensor:
    """Output ``(batch, heads, N, E)`` of exact attention.

    On a CPU PyTorch's fused kernel needs values as wide as keys, which padding makes them, and a contiguous last axis.
    Otherwise it forms the N × M map: two to five times the time, and 4 GiB per head at 65,536 queries and 16,384 keys.
    Forward-mode derivatives and dropout are only implemented on that map.

    Example:
        >>> x = torch.randn(1, 2, 5, 4)
        >>> dense_attention(Call(x, x, x, scale=0.5)).shape
        torch.Size([1, 2, 5, 4])
    """
    q, k, v = call.q, call.k, call.v
    mask, is_causal, width = None, call.is_causal, v.shape[-1]
    if call.key_mask is not None:
        hidden = ~call.key_mask[:, None, :, None]  # (batch, 1, M, 1)
        k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)  # weight zero times NaN is NaN
        mask = call.key_mask[:, None, None]  # (batch, 1, 1, M)
        if is_causal:
            mask, is_causal = mask & mask.new_ones(call.n_queries, call.n_keys).tril(), False  # (batch, 1, N, M)
    if q.device.type == "cpu" and not call.dropout_p and not in_forward_mode((q, k, v)):
        wide = max(width, q.shape[-1])
        q, k, v = (F.pad(x, (0, wide - x.shape[-1])) if x.shape[-1] < wide else x for x in (q, k, v))
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    return exact_attention(q, k, v, mask, call.dropout_p, is_causal, scale=call.scale, enable_gqa=gqa)[..., :width]
