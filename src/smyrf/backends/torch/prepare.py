"""A call as PyTorch's operators take it: zeros where keys are masked."""

from __future__ import annotations

from dataclasses import replace

from smyrf.call import Call


def prepare(call: Call) -> Call:
    """The call as the other stages take it (`smyrf.grouping.stages.Prepare`).

    Weight zero times NaN is NaN: what must not count is removed before it is multiplied.
    """
    if call.key_mask is None:
        return call
    hidden = ~call.key_mask[:, None, :, None]  # (batch, 1, M, 1)
    return replace(call, k=call.k.masked_fill(hidden, 0.0), v=call.v.masked_fill(hidden, 0.0))
