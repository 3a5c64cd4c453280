"""`read_mask`: a mask of another library as a key mask and a causal flag.

Shapes: batch, heads, N queries, M keys.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from smyrf.call import Call, Reason

# A float mask hides a key by -inf or by a number up to this one, which is -1e4 in bfloat16; anything else is a bias.
HIDDEN = -9984.0


def read_mask(call: Call, mask: Tensor) -> Call:
    """The call with its mask as `key_mask` and `is_causal`, or with the reason why only dense attention can apply it.

    Args:
        call: before its mask is read.
        mask: as in ``F.scaled_dot_product_attention``, bool (True = may be attended to) or a float that is added.
            Its two to four axes broadcast to ``(batch, heads, N, M)``. A mask that is the same for all queries
            is read without being expanded.

    Example:
        >>> x = torch.randn(1, 2, 3, 4)
        >>> read_mask(Call(x, x, x, 0.5), torch.tensor([[True, True, False]])).key_mask
        tensor([[ True,  True, False]])
        >>> read_mask(Call(x, x, x, 0.5), torch.ones(3, 3).tril().bool()).is_causal
        True
        >>> print(read_mask(Call(x, x, x, 0.5), torch.randn(3, 3)).only_dense)
        its mask adds a bias to the scores
    """
    shape = (*call.q.shape[:3], call.n_keys)
    mask = mask[(None,) * (4 - mask.dim())]  # (batch or 1, heads or 1, N or 1, M or 1)
    if not all(size in (1, full) for size, full in zip(mask.shape, shape, strict=True)):
        return replace(call, only_dense=Reason.FOREIGN)
    for axis in (1, 2):  # an expanded axis holds one value
        if mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, 1)
    if mask.dtype != torch.bool:
        if mask.requires_grad:  # a learned bias, whatever its values are now
            return replace(call, only_dense=Reason.BIAS)
        seen = mask == 0
        if not bool((mask[~seen] <= HIDDEN).all()):  # NaN is not hidden either
            return replace(call, only_dense=Reason.BIAS)
        mask = seen
    if mask.shape[1] > 1 and not bool((mask == mask[:, :1]).all()):
        return replace(call, only_dense=Reason.HEAD_MASK)
    mask = mask[:, 0]  # (batch or 1, N or 1, M or 1)
    last = mask[:, -1].expand(shape[0], call.n_keys)  # (batch, M)
    # Looking at the data would break a compiled graph, so there padding stays a mask even if it hides nothing.
    key_mask = None if not torch.compiler.is_compiling() and bool(last.all()) else last
    if mask.shape[1] == 1 or bool((mask == mask[:, -1:]).all()):
        return replace(call, key_mask=key_mask)
    causal = torch.ones(shape[2:], dtype=torch.bool, device=mask.device).tril()
    if call.n_queries >= call.n_keys and bool((mask == causal & last[:, None]).all()):
        return replace(call, key_mask=key_mask, is_causal=True)
    return replace(call, only_dense=Reason.OTHER_MASK)
