"""The C++ extension; `smyrf.backends.native.extension` loads it."""

def instruction_sets() -> list[str]: ...
def forward(
    wide: bool,
    sizes: list[int],
    q: list[int],
    k: list[int],
    v: list[int],
    lists: list[list[int]],
    scale: float,
    dropout_p: float,
    seed: int,
    out: int,
    lse: int,
    threads: int,
    isa: str,
    /,
) -> None: ...
def backward(
    wide: bool,
    sizes: list[int],
    q: list[int],
    k: list[int],
    v: list[int],
    lists: list[list[int]],
    scale: float,
    dropout_p: float,
    seed: int,
    grad: list[int],
    out: int,
    lse: int,
    dq: int,
    dk: int,
    dv: int,
    threads: int,
    isa: str,
    /,
) -> None: ...
def sort_by_hash(
    wide: bool,
    sizes: list[int],
    q: list[int],
    k: list[int],
    mask: int,
    vectors: int,
    scale: float,
    q_order: int,
    k_order: int,
    threads: int,
    isa: str,
    /,
) -> None: ...
def fold_level(wide: bool, sizes: list[int], tensors: list[int], threads: int, isa: str, /) -> None: ...
