"""Kernels: every method ends in one primitive, ``attend(q, k, v, groups) -> (out, lse)``.

A backend is a function with the keyword arguments of `smyrf.backends.reference.attend.attend`. The rules that
backends obey: all lists form one softmax; results equal the reference's to rounding, gradients too; a
query without keys gives 0 and -inf; no dependency beyond O(N) on the length. A new one is one more
line in `BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from smyrf.backends.native import extension
from smyrf.backends.reference import attend as reference
from smyrf.backends.torch import attend as torch_backend
from smyrf.grouping.groups import Groups


class Backend(Protocol):
    """The signature of a backend."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        groups: Sequence[Groups],
        *,
        scale: float,
        dropout_p: float,
        seed: Tensor | None,
    ) -> tuple[Tensor, Tensor]: ...


BACKENDS: dict[str, Backend] = {
    "reference": reference.attend,
    "torch": torch_backend.attend,
}
# Why a backend is not there.
_missing: dict[str, str] = {}

if extension.MISSING:
    _missing["native"] = extension.MISSING
else:
    from smyrf.backends.native import attend as native

    BACKENDS["native"] = native.attend


def backends() -> dict[str, str]:
    """Kernels by name, each with what it needs or runs on, or why it is not there.

    Example:
        >>> backends()["reference"]
        'any device; slow, differentiable twice'
    """
    found = {"reference": "any device; slow, differentiable twice", "torch": "any device; PyTorch's operators"}
    if "native" in BACKENDS:
        found["native"] = f"CPU; C++ for {extension.instruction_sets()[-1]}"
    return found | {name: f"not available: {why}" for name, why in _missing.items()}


def best_backend(device: torch.device) -> str:
    """The fastest kernel that is there: on a CPU the native one, at all sizes that `benchmarks/crossover.py` tries.

    Example:
        >>> import torch
        >>> best_backend(torch.device("cuda"))
        'torch'
    """
    return "native" if device.type == "cpu" and "native" in BACKENDS else "torch"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: Sequence[Groups],
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each query to the keys of its groups, as one softmax over all lists.

    Args:
        q: ``(batch, heads, N, D)``.
        k: ``(batch, kv_heads, M, D)``; head h uses key head h · kv_heads // heads.
        v: ``(batch, kv_heads, M, E)``.
        groups: lists of groups, each with batch · heads rows.
        scale: of the scores; D ** -0.5 by default.
        dropout_p: share of the weights that is dropped; needs a `seed`.
        seed: ``()`` int64 on the CPU.
        backend: one of `BACKENDS`, or None for the best that is there.

    Returns:
        the output ``(batch, heads, N, E)`` and the log-sum-exp of each query's scores ``(batch, heads,
        N)``, float32 or wider and without gradient; 0 and -inf for a query without keys.

    Example:
        >>> import torch
        >>> from smyrf.grouping.groups import all_pairs
        >>> q, k, v = torch.randn(3, 2, 4, 7, 5).unbind()
        >>> out, lse = attend(q, k, v, [all_pairs(8, 7, 7, None, q.device)])
        >>> torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v), atol=1e-5)
        True
    """
    check_backend(backend)
    _check(q, k, v, groups)
    if dropout_p > 0.0 and seed is None:
        raise ValueError(f"{dropout_p=} needs a seed")
    run = BACKENDS[backend or best_backend(q.device)]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return run(q, k, v, groups, scale=scale, dropout_p=dropout_p, seed=seed)


def _check(q: Tensor, k: Tensor, v: Tensor, groups: Sequence[Groups]) -> None:
    """Raises unless the shapes belong together."""
    (batch, heads, _, width), kv_heads = q.shape, k.shape[1]
    if (k.shape[0], k.shape[3]) != (batch, width) or k.shape[:3] != v.shape[:3] or (kv_heads and heads % kv_heads):
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not belong together")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype, not {q.dtype}, {k.dtype} and {v.dtype}")
    if not groups:
        raise ValueError("groups must hold at least one list")
    for one in groups:
        rows, n_groups, slots, size = one.shape
        if rows != batch * heads or one.keys.shape[:2] != (rows, n_groups):
            raise ValueError(
                f"groups has queries {tuple(one.queries.shape)} and keys {tuple(one.keys.shape)}, "
                f"but q has batch · heads = {batch * heads} rows"
            )
        if one.repeats is not None and one.repeats.shape != (rows, n_groups, slots, size):
            raise ValueError(f"groups has repeats {tuple(one.repeats.shape)}, but {one.shape} is needed")
        if one.extra is not None:
            if one.causal:
                raise ValueError("groups has a causal list with extra keys")
            whole = (rows, n_groups, one.extra.bias.shape[-1])
            if [tuple(x.shape) for x in one.extra] != [(*whole, width), (*whole, v.shape[3]), whole]:
                raise ValueError(f"groups has extra keys of shapes {[tuple(x.shape) for x in one.extra]}")


def check_backend(backend: object) -> None:
    """Raises unless `backend` is None or a name in `BACKENDS`."""
    if backend is None:
        return
    if isinstance(backend, str) and backend in _missing:
        raise ValueError(f"{backend=} is not available: {_missing[backend]}")
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"{backend=} must be None or one of {', '.join(BACKENDS)}")
