"""From a call to lists of groups, by any method."""

from __future__ import annotations

from smyrf.call import Call
from smyrf.grouping.by_method import plain_groups
from smyrf.grouping.causal import causal_groups
from smyrf.grouping.groups import Groups
from smyrf.grouping.stages import Backend
from smyrf.methods import CausalLayout, Layout, Method


def group(call: Call, method: Method, backend: Backend, layout: Layout | CausalLayout | None = None) -> list[Groups]:
    """Who meets whom: lists of groups that form one softmax.

    Args:
        call: as `backend.prepare` returns it.
        layout: sizes of the method on this call; computed if not given.

    Example:
        >>> import torch
        >>> from smyrf import Smyrf
        >>> from smyrf.backends import find_backend
        >>> q, k = torch.randn(2, 3, 24, 5), torch.randn(2, 3, 31, 5)
        >>> call = Call(q, k, k, scale=1.0, seed=torch.tensor(0))
        >>> rounds = group(call, Smyrf(4, 8), find_backend("torch"))
        >>> len(rounds), rounds[0].shape
        (4, (6, 3, 8, 11))
    """
    layout = call.plan(method) if layout is None else layout
    if isinstance(layout, CausalLayout):
        return causal_groups(call, method, layout, backend)
    return plain_groups(call, method, layout, backend)
