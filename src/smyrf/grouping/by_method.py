"""Groups of a plain problem, one without a causal mask, by the function registered for a method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from smyrf.call import Call
from smyrf.grouping.clusters import smyrf_groups
from smyrf.grouping.groups import Groups, all_pairs
from smyrf.grouping.stages import Backend
from smyrf.grouping.tangent import tangent_groups
from smyrf.methods import METHODS, Layout, Method, Smyrf, Tangent

# (call, method, its layout, backend) → lists of groups.
Grouping: TypeAlias = Callable[[Call, Any, Any, Backend], list[Groups]]

GROUPINGS: dict[type[Method], Grouping] = {Smyrf: smyrf_groups, Tangent: tangent_groups}


def register(method: type[Method], grouping: Grouping) -> None:
    """Add a method: its kind to JSON and the command line, its grouping to `smyrf.attention`."""
    METHODS[method.kind] = method
    GROUPINGS[method] = grouping


def plain_groups(call: Call, method: Method, layout: Layout, backend: Backend) -> list[Groups]:
    """Lists of groups without a causal mask; a single group of all pairs where the method is exact."""
    if not layout.is_exact:
        return GROUPINGS[type(method)](call, method, layout, backend)
    mask = None if call.key_mask is None else call.key_mask.repeat_interleave(call.q.shape[1], dim=0)  # (B, M)
    return [all_pairs(call.n_rows, call.n_queries, call.n_keys, mask, call.q.device)]
