"""All backends by name, and which one serves a call: the one asked for, or the best for the device.

Nothing else in the package asks which device or extension there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from smyrf.backends.native.backend import MISSING, NATIVE
from smyrf.backends.reference.backend import REFERENCE
from smyrf.backends.torch.backend import TORCH
from smyrf.call import Call
from smyrf.grouping.groups import Groups
from smyrf.grouping.stages import Backend

BACKENDS: dict[str, Backend] = {"reference": REFERENCE, "torch": TORCH}
# Why a backend is not available.
_missing: dict[str, str] = {}

if NATIVE is None:
    _missing["native"] = MISSING
else:
    BACKENDS["native"] = NATIVE


def backends() -> dict[str, str]:
    """Backends by name, each with what it runs on and which stages it borrows, or why it is not available.

    Example:
        >>> backends()["reference"]
        'any device; slow, differentiable twice'
    """
    found = {}
    for name, one in BACKENDS.items():
        borrowed = [f"{stage} from {other}" for stage, other in one.borrowed.items()]
        found[name] = one.runs_on + (f"; borrows {', '.join(borrowed)}" if borrowed else "")
    return found | {name: f"not available: {why}" for name, why in _missing.items()}


def find_backend(name: str | None, device: torch.device | None = None) -> Backend:
    """The backend of a name; without one, the fastest for the device.

    On a CPU that is the native backend at all sizes that `benchmarks/crossover.py` tries.

    Example:
        >>> find_backend(None, torch.device("cuda")).name, find_backend("reference").name
        ('torch', 'reference')
    """
    check_backend(name)
    if name is None:
        name = "native" if "native" in BACKENDS and (device is None or device.type == "cpu") else "torch"
    return BACKENDS[name]


def check_backend(backend: object) -> None:
    """Raises unless `backend` is None or the name of an available backend."""
    if backend is None:
        return
    if isinstance(backend, str) and backend in _missing:
        raise ValueError(f"{backend=} is not available: {_missing[backend]}")
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"{backend=} must be None or one of {', '.join(BACKENDS)}")


def attend(call: Call, groups: Sequence[Groups], backend: str | None = None) -> tuple[Tensor, Tensor]:
    """Attention of each query to the keys of its groups, as one softmax over all lists.

    Args:
        groups: lists of groups, each with batch · heads rows.
        backend: one of `backends()`, or None for the fastest.

    Returns:
        the output ``(batch, heads, N, E)`` and the log-sum-exp of each query's scores ``(batch, heads, N)``, float32 or
        wider and without gradient; 0 and -inf for a query without keys.

    Example:
        >>> import torch
        >>> from smyrf.grouping.groups import all_pairs
        >>> q, k, v = torch.randn(3, 2, 4, 7, 5).unbind()
        >>> out, lse = attend(Call(q, k, v, scale=5**-0.5), [all_pairs(8, 7, 7, None, q.device)])
        >>> torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v), atol=1e-5)
        True
    """
    chosen = find_backend(backend, call.q.device)
    _check(call, groups)
    groups = [_with_int32(one, call) for one in groups]
    out, lse = chosen.attend(chosen.prepare(call), groups)
    return out.to(call.v.dtype), lse


def _check(call: Call, groups: Sequence[Groups]) -> None:
    """Raises unless the groups belong to the call."""
    q, k, v = call.q, call.k, call.v
    batch, heads, _, width = q.shape
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype, not {q.dtype}, {k.dtype} and {v.dtype}")
    if call.key_mask is not None:
        raise ValueError("call.key_mask must be None: groups hold -1 for masked keys")
    if call.dropout_p > 0.0 and call.dropout_seed is None:
        raise ValueError(f"dropout_p={call.dropout_p} needs a dropout_seed")
    if not groups:
        raise ValueError("groups must hold at least one list")
    for one in groups:
        rows, n_groups, _, _ = one.shape
        if rows != batch * heads or one.keys.shape[:2] != (rows, n_groups):
            raise ValueError(
                f"groups has queries {tuple(one.queries.shape)} and keys {tuple(one.keys.shape)}, "
                f"but q has batch · heads = {batch * heads} rows"
            )
        if one.multiplicity is not None and one.multiplicity.shape != one.shape:
            raise ValueError(f"groups has multiplicity {tuple(one.multiplicity.shape)}, but {one.shape} is needed")
        if one.far is not None:
            _check_far(one, width, v.shape[3])


def _with_int32(groups: Groups, call: Call) -> Groups:
    """The same list with int32 indices, checked before they are converted."""
    indices = [("queries", groups.queries, -1, call.n_queries), ("keys", groups.keys, -1, call.n_keys)]
    if groups.far is not None:
        indices.append(("far keys", groups.far.of_group, 0, groups.far.bias.shape[1]))
    for name, index, least, end in indices:
        for value in (int(index.min()), int(index.max())) if index.numel() else ():
            if not least <= value < end:
                raise IndexError(f"groups: {value} of {name} is out of range: it must be from {least} to {end - 1}")
    return replace(groups, queries=groups.queries.int(), keys=groups.keys.int())


def _check_far(groups: Groups, width: int, value_width: int) -> None:
    far = groups.far
    assert far is not None
    if groups.causal:
        raise ValueError("groups has a causal list with far keys")
    rows, n_groups, _, _ = groups.shape
    table = (rows, far.bias.shape[-1])
    shapes = [tuple(x.shape) for x in far]
    if shapes[:3] != [(*table, width), (*table, value_width), table] or shapes[3][:1] != (n_groups,):
        raise ValueError(f"groups has far keys of shapes {shapes}")
