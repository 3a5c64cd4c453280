"""The C++ extension; `smyrf.backends.native.extension` loads it.

Kernels take dense tensors on the CPU, by keyword, and write into tensors that the caller makes. Tensors are float32 or
float64, all of one dtype, indices int32, masks bool. Shapes, dtypes, strides, storage sizes and index ranges are
checked before anything is read.

Shapes: B rows (batch × heads), N queries, M keys, D width, E value width, L groups or leaves, C query slots and S key
        slots per group, T far keys of a row, F far keys per group, H hashing rounds, A clusters of the level above, f
        clusters of a level below each of them, n candidates.

Raises:
    TypeError: an argument is missing, unknown or of another type or dtype.
    ValueError: a shape that does not fit, or a tensor that is not contiguous where it must be.
    IndexError: an index outside of its tensor.
"""

from collections.abc import Sequence

from torch import Tensor

class FarKeys:
    """Far keys of one list: a table for each row, and the far keys of each group in it.

    Args:
        keys, values: (B, T, D), (B, T, E).
        bias: (B, T), added to the scores; -inf for a key that is not there.
        index: (L, F), rows of the table. Groups may share one.
        d_keys, d_values, d_bias: gradients, zero before `attend_backward`, which adds to them.
    """

    def __init__(
        self,
        *,
        keys: Tensor,
        values: Tensor,
        bias: Tensor,
        index: Tensor,
        d_keys: Tensor | None = None,
        d_values: Tensor | None = None,
        d_bias: Tensor | None = None,
    ) -> None: ...

class GroupList:
    """One list of groups.

    Args:
        queries, keys: (B, L, C) and (B, L, S), each row contiguous; a negative index is an empty slot.
        causal: query slot i sees the key slots j <= i.
        multiplicity: (B, L, C, S) int16, divides the weights.
    """

    def __init__(
        self,
        *,
        queries: Tensor,
        keys: Tensor,
        causal: bool,
        multiplicity: Tensor | None = None,
        far: FarKeys | None = None,
    ) -> None: ...

def instruction_sets() -> list[str]:
    """Instruction sets that this machine can run, the best last."""

def attend_forward(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Sequence[GroupList],
    scale: float,
    dropout_p: float,
    seed: int,
    out: Tensor,
    lse: Tensor,
    threads: int,
    isa: str,
) -> None:
    """Attend from each query to the keys of its groups, as one softmax over all lists.

    Args:
        q: (batch, heads, N, D), contiguous along the last axis, as k and v.
        k, v: (batch, kv_heads, M, D), (batch, kv_heads, M, E).
        out, lse: (batch, heads, N, E), (batch, heads, N), written.
        isa: an instruction set by name; "" for the best.
    """

def attend_backward(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Sequence[GroupList],
    scale: float,
    dropout_p: float,
    seed: int,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    threads: int,
    isa: str,
) -> None:
    """Gradients of `attend_forward`, added to dq, dk and dv, which have the shapes of q, k and v."""

def sort_by_hash(
    *,
    q: Tensor,
    k: Tensor,
    key_mask: Tensor | None,
    vectors: Tensor,
    scale: float,
    q_order: Tensor,
    k_order: Tensor,
    threads: int,
    isa: str,
) -> None:
    """Order queries and keys by their hashes, in each round.

    Args:
        key_mask: (batch, M); keys with False come last.
        vectors: (H, D + 2), one hash vector per round.
        scale: of the queries.
        q_order, k_order: (batch, heads, H, N) and (batch, heads, H, M), written.
    """

def build_tree(
    *,
    q: Tensor,
    k: Tensor,
    key_mask: Tensor | None,
    rank: int,
    queries: Tensor,
    is_copy: Tensor,
    keys: Tensor,
    leaf_of_key: Tensor,
    threads: int,
    isa: str,
) -> None:
    """Build the joint tree of queries and keys in `rank` directions.

    Args:
        key_mask: (batch, M); masked keys go where valid ones go.
        queries, is_copy: (B, L, C) int32 and bool, written: the queries of each leaf, and which of them are copies.
        keys, leaf_of_key: (B, M), written: the keys in the order of the tree, and their leaves.
    """

def select_and_fold(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    queries: Tensor,
    order: Tensor,
    leaf_of_key: Tensor,
    scale: float,
    levels: Sequence[Sequence[int]],
    near: Tensor,
    far_keys: Tensor,
    far_values: Tensor,
    far_bias: Tensor,
    centroids: Tensor,
    kept: Tensor,
    threads: int,
    isa: str,
) -> None:
    """Select the near keys of each cluster of each level, and fold its other candidates into far keys.

    A place is a position in the order of the tree. Results are in the order of levels and clusters.

    Args:
        key_mask: (batch, M); masked keys have no effect, whatever they hold.
        queries: (B, L, C), the queries of each leaf.
        order, leaf_of_key: (B, M), the key at each place, and its leaf.
        scale: of the queries.
        levels: clusters, near keys and far keys of each.
        near: (B, L, S) of the last level, written: keys, -1 where masked.
        far_keys, far_values, far_bias: (B, T, D), (B, T, E), (B, T), written.
        centroids: (B, ΣL, D), written.
        kept: (B, ΣL · S), written: numbers among the candidates of a cluster, ascending.
    """

def select_and_fold_backward(
    *,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    order: Tensor,
    levels: Sequence[Sequence[int]],
    far_keys: Tensor,
    far_values: Tensor,
    far_bias: Tensor,
    centroids: Tensor,
    kept: Tensor,
    d_far_keys: Tensor,
    d_far_values: Tensor,
    d_far_bias: Tensor,
    dk: Tensor,
    dv: Tensor,
    threads: int,
    isa: str,
) -> None:
    """Add the gradients of the keys and values that were folded to dk and dv.

    Args:
        d_far_keys, d_far_values, d_far_bias: gradients of the results of `select_and_fold`.
        dk, dv: of the shapes of k and v.
    """

def tangent_forward(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    scale: float,
    dropout_p: float,
    seed: int,
    rank: int,
    levels: Sequence[Sequence[int]],
    queries: Tensor,
    order: Tensor,
    near: Tensor,
    far_keys: Tensor,
    far_values: Tensor,
    far_bias: Tensor,
    centroids: Tensor,
    kept: Tensor,
    out: Tensor,
    lse: Tensor,
    threads: int,
    isa: str,
) -> None:
    """Tangent attention: `build_tree`, `select_and_fold` and `attend_forward` in one call.

    Args:
        queries: (B, L, C), written: the queries of each leaf, -1 for copies.
        order: (B, M), written: the keys in the order of the tree.
        near, far_keys, far_values, far_bias, centroids, kept: as for `select_and_fold`.
        out, lse: as for `attend_forward`.
    """

def tangent_backward(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    scale: float,
    dropout_p: float,
    seed: int,
    rank: int,
    levels: Sequence[Sequence[int]],
    queries: Tensor,
    order: Tensor,
    near: Tensor,
    far_keys: Tensor,
    far_values: Tensor,
    far_bias: Tensor,
    centroids: Tensor,
    kept: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    threads: int,
    isa: str,
) -> None:
    """Gradients of `tangent_forward`, added to dq, dk and dv, which have the shapes of q, k and v."""
