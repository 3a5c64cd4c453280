"""The stages of a drawn call, one by one: its groups by each backend, and attention to given groups.

Shapes: batch, heads, N queries, M keys, E value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smyrf import PerHead, Smyrf
from smyrf.attention import read_arguments
from smyrf.backends.registry import BACKENDS
from smyrf.call import Call
from smyrf.grouping.group import group
from smyrf.grouping.groups import Groups
from smyrf.grouping.stages import Backend, Tree
from smyrf.methods import Method
from smyrf.seeds import draw_seed
from tests.attack.drawn_calls import Drawn
from tests.attack.sorted_hashes import wrong_orders

# Relative changes of q, k and v, in units of rounding, that do what rounding does to the directions of a tree.
ROUNDING, TRIALS = 500, 3


@dataclass
class Grouped:
    """Lists of groups of one call, with what `sort_by_hash` and `build_tree` returned on the way.

    Args:
        chosen: results of `sort_by_hash` and `build_tree`, in the order of their calls.
        failures: what is wrong with them.
    """

    lists: list[Groups] = field(default_factory=list)
    chosen: list[Any] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class Part(NamedTuple):
    """The heads of a drawn call that one method serves."""

    call: Call
    method: Method
    heads: list[int]


def parts_of(drawn: Drawn, **changes: Tensor) -> list[Part]:
    """The parts of a drawn call, one unless each head has its method; q, k and v may be others."""
    q, k, v = (changes.get(name, getattr(drawn, name)) for name in "qkv")
    options = drawn.options
    call = read_arguments(
        q, k, v, options["key_mask"], options["is_causal"], options["scale"], 0.0, options["enable_gqa"]
    )
    call = replace(call, seed=draw_seed(options["generator"]))
    if not isinstance(options["method"], PerHead):
        return [Part(call, options["method"], list(range(call.q.shape[1])))]
    return [Part(call.heads(heads), method, heads) for method, heads in options["method"].groups().items()]


def group_by(name: str, call: Call, method: Method, check: bool = False) -> Grouped:
    """Group a call by all stages of a backend.

    Args:
        check: verify that queries and keys are sorted by their hashes.
    """
    backend, found = BACKENDS[name], Grouped()

    def sort_by_hash(part: Call, smyrf: Smyrf, n_clusters: int) -> tuple[Tensor, Tensor]:
        orders = backend.sort_by_hash(part, smyrf, n_clusters)
        found.chosen.append(orders)
        if check:
            found.failures += wrong_orders(part, smyrf, n_clusters, orders, name)
        return orders

    def build_tree(part: Call, n_leaves: int, rank: int) -> Tree:
        found.chosen.append(backend.build_tree(part, n_leaves, rank))
        return found.chosen[-1]

    found.lists = _group(replace(backend, sort_by_hash=sort_by_hash, build_tree=build_tree), call, method)
    return found


def group_as(grouped: Grouped, name: str, call: Call, method: Method) -> list[Groups]:
    """Group a call of other numbers by the orders and trees of another: near keys are selected and folded anew."""
    chosen = iter(grouped.chosen)
    backend = replace(BACKENDS[name], sort_by_hash=lambda *_: next(chosen), build_tree=lambda *_: next(chosen))
    return _group(backend, call, method)


def _group(backend: Backend, call: Call, method: Method) -> list[Groups]:
    return group(backend.prepare(call), method, backend, call.plan(method))


def attend_to(lists: Sequence[Groups], name: str, call: Call) -> Tensor:
    """Attention of a call to given groups ``(batch, heads, N, E)``, in float32 or wider."""
    backend = BACKENDS[name]
    return backend.attend(backend.prepare(call), lists)[0]


def same_groups(ours: Sequence[Groups], theirs: Sequence[Groups]) -> bool:
    """Whether the same queries meet the same keys; far keys are numbers, which round."""
    return len(ours) == len(theirs) and all(
        a.shape == b.shape
        and torch.equal(a.queries, b.queries)
        and torch.equal(a.keys, b.keys)
        and (a.multiplicity is None or torch.equal(a.multiplicity, b.multiplicity))
        for a, b in zip(ours, theirs, strict=True)
    )


def rounding_decides(call: Call, method: Method, generator: torch.Generator) -> bool:
    """Whether changes of the size of rounding errors give the reference other groups, in float64."""
    change = ROUNDING * torch.finfo(torch.promote_types(call.q.dtype, torch.float32)).eps
    call = replace(call, q=call.q.double(), k=call.k.double(), v=call.v.double())
    before = group_by("reference", call, method).lists
    for _ in range(TRIALS):
        q, k, v = (x * (1.0 + change * torch.randn(x.shape, generator=generator, dtype=x.dtype)) for x in call.qkv)
        if not same_groups(before, group_by("reference", replace(call, q=q, k=k, v=v), method).lists):
            return True
    return False
