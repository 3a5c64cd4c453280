"""The stages that a backend implements, and what they hand to one another.

A call runs through them in this order: `prepare`; for Smyrf `sort_by_hash`, for Tangent `build_tree` and
`select_and_fold`; then `attend`. The rules that backends obey:

- Results equal the reference's to rounding, gradients included. Where rounding decides which key is chosen, either
  choice is right.
- A row (one head of one batch entry) gives the same result whatever the batch around it.
- Memory grows linearly with the length.
- A query without keys gives the output 0 and the log-sum-exp -inf.

Shapes: batch, heads, B = batch · heads rows, N queries, M keys, D width, E value width, H rounds, L leaves, C queries
        per leaf, S near keys, T far keys of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from torch import Tensor

from smyrf.call import Call
from smyrf.grouping.groups import Groups
from smyrf.methods import Level, Smyrf, Tangent, TangentLayout


class Tree(NamedTuple):
    """Queries and keys in the order of their joint tree, leaf by leaf.

    Args:
        queries: ``(B, L, C)`` int32, the queries of each leaf; copies fill up a length that L does not divide.
        is_copy: ``(B, L, C)`` bool, which of them are copies: they have a place but no output.
        keys: ``(B, M)`` int32, the keys in the order of the tree.
        leaf_of_key: ``(B, M)`` int32, the leaf of each key in that order.
    """

    queries: Tensor
    is_copy: Tensor
    keys: Tensor
    leaf_of_key: Tensor


class Selection(NamedTuple):
    """Near keys of each leaf, and far keys of each cluster of each level.

    Args:
        near: ``(B, L, S)`` int32, -1 where masked.
        far_keys: ``(B, T, D)``, level by level, cluster by cluster.
        far_values: ``(B, T, E)``.
        far_bias: ``(B, T)``.
    """

    near: Tensor
    far_keys: Tensor
    far_values: Tensor
    far_bias: Tensor


# The call in the form that the other stages take.
Prepare: TypeAlias = Callable[[Call], Call]
# (call, method, L) → orders of queries (batch, heads, H, N) and keys (batch, heads, H, M) by their hashes, int32;
# masked keys come last.
SortByHash: TypeAlias = Callable[[Call, Smyrf, int], tuple[Tensor, Tensor]]
# (call, L, rank) → the joint tree with L leaves, a power of two, in `rank` directions.
BuildTree: TypeAlias = Callable[[Call, int, int], Tree]
# (call, tree, levels) → near and far keys. Gradients flow from far keys, their values and biases to k and v.
SelectAndFold: TypeAlias = Callable[[Call, Tree, tuple[Level, ...]], Selection]
# (call, lists of groups) → output (batch, heads, N, E), and log-sum-exps (batch, heads, N) without gradient.
Attend: TypeAlias = Callable[[Call, Sequence[Groups]], tuple[Tensor, Tensor]]
# (call, method, layout) → output (batch, heads, N, E) of a plain call, by all stages of Tangent at once.
AttendTangent: TypeAlias = Callable[[Call, Tangent, TangentLayout], Tensor]


@dataclass(frozen=True)
class Backend:
    """One implementation of all stages, forward and backward.

    Args:
        name: by which `backend=` asks for it.
        runs_on: device and requirements, in a few words.
        attend_tangent: for a backend that has `build_tree`, `select_and_fold` and `attend` in one operator; the result
            is the same.
        borrowed: stages that another backend runs, with that backend's name.
    """

    name: str
    runs_on: str
    prepare: Prepare
    sort_by_hash: SortByHash
    build_tree: BuildTree
    select_and_fold: SelectAndFold
    attend: Attend
    attend_tangent: AttendTangent | None = None
    borrowed: Mapping[str, str] = field(default_factory=dict)
