"""Masks of other libraries, read: which keys are hidden from all queries, and whether the rest is causal.

Shapes: batch, heads, N queries, M keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# A float mask hides by -inf or by a number like this one, -1e4 in bfloat16; what is greater is a bias.
HIDDEN = -9984.0


class ReadMask(NamedTuple):
    """What `smyrf.attention` takes instead of a mask.

    Args:
        key_mask: ``(batch, M)`` bool, True = may be attended to; None if nothing is hidden.
        is_causal: query i sees keys j <= i.
        only_dense: why only dense attention can honour the mask; "" if others can.
    """

    key_mask: Tensor | None
    is_causal: bool
    only_dense: str


def read_mask(mask: Tensor, batch: int, n_queries: int, n_keys: int) -> ReadMask:
    """A mask as a key mask and a causal flag, or why it is neither.

    Args:
        mask: as in ``F.scaled_dot_product_attention``, bool (True = may be attended to) or a float that is added,
            of up to four axes that broadcast to ``(batch, heads, N, M)``. One that is the same for all queries
            is read without being expanded.

    Example:
        >>> padding = torch.tensor([[True, True, False]])
        >>> read_mask(padding[:, None, None], 1, 3, 3)
        ReadMask(key_mask=tensor([[ True,  True, False]]), is_causal=False, only_dense='')
        >>> read_mask(torch.ones(3, 3).tril().bool(), 1, 3, 3)
        ReadMask(key_mask=None, is_causal=True, only_dense='')
    """
    mask = mask[(None,) * (4 - mask.dim())]  # (batch or 1, heads or 1, N or 1, M or 1)
    for axis in (1, 2):  # what was expanded is one thing
        if mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, 1)
    if mask.dtype != torch.bool:
        if mask.requires_grad:  # a bias that is learned, whatever it is now
            return ReadMask(None, False, "its mask adds a bias to the scores")
        seen = mask == 0
        if not bool((mask[~seen] <= HIDDEN).all()):  # NaN is not hidden either
            return ReadMask(None, False, "its mask adds a bias to the scores")
        mask = seen
    if mask.shape[1] > 1 and not bool((mask == mask[:, :1]).all()):
        return ReadMask(None, False, "its mask differs between heads")
    mask = mask[:, 0]  # (batch or 1, N or 1, M or 1)
    last = mask[:, -1].expand(batch, n_keys)  # (batch, M)
    # In a compiled graph a look at the data would break it, so there padding stays a mask whatever it hides.
    key_mask = None if not torch.compiler.is_compiling() and bool(last.all()) else last
    if mask.shape[1] == 1 or bool((mask == mask[:, -1:]).all()):
        return ReadMask(key_mask, False, "")
    ones = torch.ones(n_queries, n_keys, dtype=torch.bool, device=mask.device)
    if n_queries >= n_keys and bool((mask == ones.tril() & last[:, None]).all()):
        return ReadMask(key_mask, True, "")
    return ReadMask(None, False, "its mask is neither padding nor causal")
