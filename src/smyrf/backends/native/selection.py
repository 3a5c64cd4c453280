"""Select near keys and fold the others in the extension: the descent of the torch backend with a fused level.

Shapes: as in `smyrf.backends.torch.selection`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from smyrf.backends.forward_mode import refuse_forward_mode
from smyrf.backends.native.level import keep_and_fold
from smyrf.backends.torch import selection as descent
from smyrf.backends.torch.candidates import Candidates
from smyrf.backends.torch.rows import row_slices, take_mask, take_rows
from smyrf.backends.torch.workspace import workspace
from smyrf.call import Call
from smyrf.grouping.stages import Selection, Tree
from smyrf.methods import Level


def select_and_fold(call: Call, tree: Tree, levels: tuple[Level, ...]) -> Selection:
    """Near keys and far keys of each leaf (`smyrf.grouping.stages.SelectAndFold`)."""
    refuse_forward_mode((call.k, call.v), "backend='native'", "pass backend='reference'")
    return descent.run(_select_and_fold, call, tree, levels)


@torch.library.custom_op("smyrf::select_and_fold_native", mutates_args=(), device_types="cpu")
def _select_and_fold(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    queries: Tensor,
    keys: Tensor,
    leaf_of_key: Tensor,
    scale: float,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    levels, heads = descent.read_levels(sizes), q.shape[1]
    results = descent.empty_results(q, k, v, levels)
    with torch.autocast(q.device.type, enabled=False), workspace(q.device) as scratch:
        for rows in row_slices(len(queries), max(q.shape[2], k.shape[2])):
            mask = take_mask(key_mask, rows, heads)
            k_rows, v_rows = (descent._visible(take_rows(x, rows, heads), mask) for x in (k, v))
            order, leaf = keys[rows], leaf_of_key[rows]
            q_rows = take_rows(q, rows, heads)
            leaves, stats = descent.statistics(q_rows, k_rows, v_rows, mask, queries[rows], order, scale, scratch)
            candidates = Candidates.all_keys(k_rows, v_rows, mask, order, scratch)

            def fold_level(
                places: Tensor | None,
                level: Level,
                centroids: Tensor,
                spread: Tensor,
                leaves_per_cluster: int,
                kept: Tensor,
                far_keys: Tensor,
                far_values: Tensor,
                bias: Tensor,
            ) -> None:
                candidates.places = places
                old = SimpleNamespace(
                    everything=places is None,
                    candidates=candidates.vector_rows(slice(0, candidates.shape[0])).contiguous(),
                    hidden=candidates.is_hidden,
                    vectors=candidates.vectors,
                )
                known = (stats.spread, stats.weight, leaf.long())
                kept64 = kept.long()
                vectors = torch.cat([far_keys, far_values], dim=-1)
                keep_and_fold(
                    old, level, centroids, spread[..., None], known, leaves_per_cluster, kept64, vectors, bias
                )
                kept.copy_(kept64)
                far_keys.copy_(vectors[..., : far_keys.shape[-1]])
                far_values.copy_(vectors[..., far_keys.shape[-1] :])

            descent.descend(levels, leaves, stats, order, mask, [x[rows] for x in results], fold_level)
    return results


@_select_and_fold.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Any:
    return descent.empty_results(q, k, v, descent.read_levels(args[-1]))


descent.register_gradient(_select_and_fold)
