"""The C++ extension; `smyrf.backends.native.extension` loads it.

Kernels take structs of sizes, strides and addresses, built by keyword. An address is `tensor.data_ptr()`, 0 for no
tensor; callers keep the tensors alive during the call. Strides are in elements. Tensors are float32, or float64 with
`double_precision`, indices int32, masks bool; they are contiguous unless there are strides for them.

Shapes: B rows (batch × heads), N queries, M keys, D width, E value width, L groups or clusters, C query slots and S key
        slots per group, T far keys of a row, F far keys per group, H hashing rounds, A clusters of the level above, f
        clusters of a level below each of them, n candidates.

Raises:
    TypeError: an argument is missing, unknown or of another type.
    ValueError: sizes that cannot be, such as heads that are not a multiple of kv_heads. Raised by the kernels.
    IndexError: an index outside of its tensor. Raised by the kernels.
"""

class Execution:
    """Precision, number of threads, and instruction set (by name; "" for the best)."""

    def __init__(self, *, double_precision: bool, threads: int, isa: str = "") -> None: ...

class Rows:
    """A tensor (batch, heads, length, width) whose last axis is contiguous."""

    def __init__(self, *, address: int, batch_stride: int, head_stride: int, row_stride: int) -> None: ...

class FarKeys:
    """Far keys of one list: a table for each row, and the far keys of each group in it.

    Args:
        n_rows: T.
        n_per_group: F.
        keys, values: (B, T, D), (B, T, E).
        bias: (B, T), added to the scores; -inf for a key that is not there.
        index: (L, F), rows of the table. Groups may share one.
        d_keys, d_values, d_bias: gradients, zero before `attend_backward`, which adds to them.
    """

    def __init__(
        self,
        *,
        n_rows: int,
        n_per_group: int,
        keys: int,
        values: int,
        bias: int,
        index: int,
        d_keys: int = 0,
        d_values: int = 0,
        d_bias: int = 0,
    ) -> None: ...

class GroupList:
    """One list of groups.

    Args:
        n_groups, n_query_slots, n_key_slots: L, C, S.
        queries, keys: (B, L, C) and (B, L, S); an index of -1 is an empty slot.
        queries_row_stride, keys_row_stride: 0 if all rows share them.
        causal: query slot i sees the key slots j <= i.
        multiplicity: (B, L, C, S) int16, divides the weights.
    """

    def __init__(
        self,
        *,
        n_groups: int,
        n_query_slots: int,
        n_key_slots: int,
        queries: int,
        queries_row_stride: int,
        keys: int,
        keys_row_stride: int,
        causal: bool,
        multiplicity: int = 0,
        far: FarKeys | None = None,
    ) -> None: ...

class AttendParams:
    """The arguments of `attend`: q (batch, heads, N, D), k (batch, kv_heads, M, D), v (batch, kv_heads, M, E)."""

    def __init__(
        self,
        *,
        execution: Execution,
        batch: int,
        heads: int,
        kv_heads: int,
        n_queries: int,
        n_keys: int,
        width: int,
        value_width: int,
        q: Rows,
        k: Rows,
        v: Rows,
        lists: list[GroupList],
        scale: float,
        dropout_p: float = 0.0,
        seed: int = 0,
    ) -> None: ...

class AttendOutput:
    """Output (B, N, E) and log-sum-exp (B, N)."""

    def __init__(self, *, out: int, lse: int) -> None: ...

class AttendGradients:
    """Gradient of the output, output and log-sum-exp; dq (B, N, D), dk and dv (batch · kv_heads, M, …), zero before."""

    def __init__(self, *, grad: Rows, out: int, lse: int, dq: int, dk: int, dv: int) -> None: ...

class HashParams:
    """The arguments of `sort_by_hash`.

    Args:
        key_mask: (batch, M); keys with False come last.
        vectors: (H, D + 2), one hash vector per round.
        scale: of the queries.
        q_order, k_order: (B, H, N) and (B, H, M), written.
    """

    def __init__(
        self,
        *,
        execution: Execution,
        batch: int,
        heads: int,
        kv_heads: int,
        n_queries: int,
        n_keys: int,
        width: int,
        n_hashes: int,
        q: Rows,
        k: Rows,
        vectors: int,
        scale: float,
        q_order: int,
        k_order: int,
        key_mask: int = 0,
    ) -> None: ...

class LevelParams:
    """The arguments of `fold_level`. A place is a position in the order of the tree.

    Args:
        k, v: (batch, kv_heads, M, D) and (batch, kv_heads, M, E).
        key_mask: (batch, M); masked keys have no effect, whatever they hold.
        order: (B, M), the key at each place.
        leaf_of_key, key_spread, value_weight: (B, M), by place.
        n_parents, fan_out: A, f; L = A · f / B.
        n_candidates, n_near, n_far: n, S, F.
        candidates: (A, n), places; 0 for all keys, n = M.
        leaves_per_cluster: of a cluster whose own keys come first; 0 if they do not.
        centroids, spread: (A, f, D), (A, f).
        kept: (B, L, S), written: numbers among the candidates, ascending.
        far_keys, far_values, far_bias: (B, L · F, D), (B, L · F, E), (B, L · F), written.
    """

    def __init__(
        self,
        *,
        execution: Execution,
        batch: int,
        heads: int,
        kv_heads: int,
        n_keys: int,
        width: int,
        value_width: int,
        k: Rows,
        v: Rows,
        order: int,
        leaf_of_key: int,
        key_spread: int,
        value_weight: int,
        n_parents: int,
        fan_out: int,
        n_candidates: int,
        n_near: int,
        n_far: int,
        leaves_per_cluster: int,
        centroids: int,
        spread: int,
        kept: int,
        kept_row_stride: int,
        far_keys: int,
        far_keys_row_stride: int,
        far_values: int,
        far_values_row_stride: int,
        far_bias: int,
        far_bias_row_stride: int,
        key_mask: int = 0,
        candidates: int = 0,
    ) -> None: ...

def instruction_sets() -> list[str]:
    """Instruction sets that this machine can run, the best last."""

def attend_forward(params: AttendParams, output: AttendOutput, /) -> None:
    """Attend from each query to the keys of its groups, as one softmax over all lists."""

def attend_backward(params: AttendParams, gradients: AttendGradients, /) -> None:
    """Gradients of `attend_forward`."""

def sort_by_hash(params: HashParams, /) -> None:
    """Order queries and keys by their hashes, in each round."""

def fold_level(params: LevelParams, /) -> None:
    """Select the near keys of each cluster of a level, and fold its other candidates into far keys."""
