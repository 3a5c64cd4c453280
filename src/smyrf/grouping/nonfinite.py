"""Keep NaN and infinity in later keys and values away from earlier queries of causal attention.

A hidden pair has the weight zero, and zero times NaN is NaN. So causal calls run on finite keys and values, and what
was not finite is added to the queries that see it: an output whose query sees a key that is not finite is NaN, and one
that sees a value that is not finite is NaN or infinite there, as in dense attention.

Shapes: N queries, M keys, E value width.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from smyrf.call import Call


def separate_nonfinite(call: Call) -> tuple[Call, Tensor | None]:
    """A causal call with finite keys and values, and what its output needs added, ``(batch, heads, N, E)`` or None.

    Example:
        >>> v = torch.tensor([1.0, torch.nan, 3.0]).view(1, 1, 3, 1)
        >>> call, rest = separate_nonfinite(Call(v.nan_to_num(), v.nan_to_num(), v, scale=1.0, is_causal=True))
        >>> call.v.flatten().tolist(), rest.flatten().tolist()
        ([1.0, 0.0, 3.0], [0.0, nan, nan])
    """
    k, v = call.k, call.v
    # Elsewhere a look at a number is impossible, or costs more than the treatment.
    if not torch.compiler.is_compiling() and all(_can_look(x) for x in (k, v)) and all(_is_finite(x) for x in (k, v)):
        return call, None
    finite_keys, finite_values = k.isfinite(), v.isfinite()
    with torch.no_grad():
        rest = v.masked_fill(finite_values, 0.0).masked_fill(~finite_keys.all(-1, keepdim=True), torch.nan)
        if call.key_mask is not None:
            rest = rest.masked_fill(~call.key_mask[:, None, :, None], 0.0)
        seen = torch.arange(call.n_queries, device=k.device).clamp(max=call.n_keys - 1)  # (N,), the last key of each
        rest = rest.cumsum(2)[:, :, seen].repeat_interleave(call.heads_per_key_head, dim=1)  # (batch, heads, N, E)
    k, v = k.masked_fill(~finite_keys, 0.0), v.masked_fill(~finite_values, 0.0)
    return replace(call, k=k, v=v), rest


def _can_look(x: Tensor) -> bool:
    """Whether the numbers of a tensor can be read at once."""
    return x.device.type == "cpu" and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _is_finite(x: Tensor) -> bool:
    """False if a number is not finite, or, rarely, if only the sum of all is not."""
    return math.isfinite(x.detach().sum(dtype=torch.promote_types(x.dtype, torch.float32)).item())
