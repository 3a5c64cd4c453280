"""The joint tree of queries and keys, in the extension.

Shapes: as in `smyrf.grouping.stages`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smyrf.backends.native.extension import native, ready, running
from smyrf.backends.torch.tree import empty_tree
from smyrf.call import Call
from smyrf.grouping.stages import Tree


def build_tree(call: Call, n_leaves: int, rank: int) -> Tree:
    """The joint tree of queries and keys (`smyrf.grouping.stages.BuildTree`)."""
    return Tree(*_build_tree(call.q.detach(), call.k.detach(), call.key_mask, n_leaves, rank))


@torch.library.custom_op("smyrf::build_tree_native", mutates_args=(), device_types="cpu")
def _build_tree(
    q: Tensor, k: Tensor, key_mask: Tensor | None, n_leaves: int, rank: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    queries, is_copy, keys, leaf_of_key = results = empty_tree(q, k, n_leaves)
    native.build_tree(
        q=ready(q),
        k=ready(k),
        key_mask=None if key_mask is None else key_mask.contiguous(),
        rank=rank,
        queries=queries,
        is_copy=is_copy,
        keys=keys,
        leaf_of_key=leaf_of_key,
        **running(),
    )
    return results


@_build_tree.register_fake
def _(q: Tensor, k: Tensor, key_mask: Any, n_leaves: int, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return empty_tree(q, k, n_leaves)
