"""Kernels: every method ends in one primitive, ``attend(q, k, v, groups) -> (out, lse)``.

A backend is a function with the keyword arguments of `smyrf.kernels.reference.attend`. The rules that
backends obey: all lists form one softmax; results equal the reference's to rounding, gradients too; a
query without keys gives 0 and -inf; no dependency beyond O(N) on the length. A new one is one more
line in `BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from smyrf import extension
from smyrf.groups import Groups
from smyrf.kernels import reference, torch_backend


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
    from smyrf.kernels import native

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
        >>> from smyrf.groups import all_pairs
        >>> q, k, v = torch.randn(3, 2, 4, 7, 5).unbind()
        >>> out, lse = attend(q, k, v, [all_pairs(8, 7, 7, None, q.device)])
        >>> torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v), atol=1e-5)
        True
    """
    check_backend(backend)
    rows = q.shape[0] * q.shape[1]
    if not groups:
        raise ValueError("groups must hold at least one list")
    for one in groups:
        if len(one.queries) != rows or len(one.keys) != rows:
            raise ValueError(
                f"groups has queries {tuple(one.queries.shape)} and keys {tuple(one.keys.shape)}, "
                f"but q has batch · heads = {rows} rows"
            )
    if dropout_p > 0.0 and seed is None:
        raise ValueError(f"{dropout_p=} needs a seed")
    run = BACKENDS[backend or best_backend(q.device)]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return run(q, k, v, groups, scale=scale, dropout_p=dropout_p, seed=seed)


def check_backend(backend: object) -> None:
    """Raises unless `backend` is None or a name in `BACKENDS`."""
    if isinstance(backend, str) and backend in _missing:
        raise ValueError(f"{backend=} is not available: {_missing[backend]}")
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"{backend=} must be None or one of {', '.join(BACKENDS)}")
