"""A call as the extension takes it."""

from __future__ import annotations

from dataclasses import replace

import torch

from smyrf.call import Call


def prepare(call: Call) -> Call:
    """The call as the other stages take it (`smyrf.grouping.stages.Prepare`).

    The extension computes in float32 or float64. Half precision is widened once for all stages; where gradients are
    needed each stage widens by itself, so that backward saves the half-precision tensors.
    """
    if call.q.device.type != "cpu":
        raise ValueError(f"backend='native' runs on the CPU, but q is on {call.q.device}")
    wide = torch.promote_types(call.q.dtype, torch.float32)
    needs_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v))
    if call.q.dtype == wide or needs_gradients:
        return call
    return replace(call, q=call.q.to(wide), k=call.k.to(wide), v=call.v.to(wide))
