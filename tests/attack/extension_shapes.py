"""Shapes of the tensors that the functions of `smyrf._native` take, and consistent shapes that are too large.

Symbols: b batch, h heads, g key heads, n queries, m keys, d width, e value width, H rounds, L groups or leaves, C query
slots and S key slots of each, F far keys of each. R = b · h rows, and of all levels A clusters, T far keys and K kept
keys of a row are computed as the extension does, modulo 2**64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_QKV = {"q": "b h n d", "k": "b g m d", "v": "b g m e", "key_mask": "b m"}
_ATTEND = {"out": "b h n e", "lse": "b h n", "grad": "b h n e", "dq": "b h n d", "dk": "b g m d", "dv": "b g m e"}
_SELECTED = {
    **{f"{prefix}far_keys": "R T d" for prefix in ("", "d_")},
    **{f"{prefix}far_values": "R T e" for prefix in ("", "d_")},
    **{f"{prefix}far_bias": "R T" for prefix in ("", "d_")},
    "near": "R L S",
    "centroids": "R A d",
    "kept": "R K",
}
_TREE = {"queries": "R L C", "order": "R m", "leaf_of_key": "R m"}
_FAR = {
    **{f"far.{prefix}keys": "R T d" for prefix in ("", "d_")},
    **{f"far.{prefix}values": "R T e" for prefix in ("", "d_")},
    **{f"far.{prefix}bias": "R T" for prefix in ("", "d_")},
    "far.index": "L F",
}
_LIST = {"queries": "R L C", "keys": "R L S", "multiplicity": "R L C S", **_FAR}

# By function, then by argument; arguments of a list of groups have no number.
SHAPES: dict[str, dict[str, str]] = {
    "attend_forward": {**_QKV, **_ATTEND, **{f"lists.{name}": shape for name, shape in _LIST.items()}},
    "attend_backward": {**_QKV, **_ATTEND, **{f"lists.{name}": shape for name, shape in _LIST.items()}},
    "sort_by_hash": {**_QKV, "vectors": "H d+2", "q_order": "b h H n", "k_order": "b h H m"},
    "build_tree": {**_QKV, "queries": "R L C", "is_copy": "R L C", "keys": "R m", "leaf_of_key": "R m"},
    "select_and_fold": {**_QKV, **_TREE, **_SELECTED},
    "select_and_fold_backward": {**_QKV, **_ATTEND, **_TREE, **_SELECTED},
    "tangent_forward": {**_QKV, **_ATTEND, **_TREE, **_SELECTED},
    "tangent_backward": {**_QKV, **_ATTEND, **_TREE, **_SELECTED},
}
# Tensors that a function writes to.
OUTPUTS: dict[str, tuple[str, ...]] = {
    "attend_forward": ("out", "lse"),
    "attend_backward": ("dq", "dk", "dv", "lists.far.d_keys", "lists.far.d_values", "lists.far.d_bias"),
    "sort_by_hash": ("q_order", "k_order"),
    "build_tree": ("queries", "is_copy", "keys", "leaf_of_key"),
    "select_and_fold": ("near", "far_keys", "far_values", "far_bias", "centroids", "kept"),
    "select_and_fold_backward": ("dk", "dv"),
    "tangent_forward": (
        *("queries", "order", "near", "far_keys", "far_values", "far_bias", "centroids", "kept", "out", "lse"),
    ),
    "tangent_backward": ("dq", "dk", "dv"),
}
# Leaves have as many query slots as queries divided by leaves, rounded up.
_EVEN_LEAVES = ("build_tree", "tangent_forward", "tangent_backward")
LARGE = (2**31, 2**38, 2**62)
LARGE_PAIR = (2**38, 2**24)
# Elements of a tensor that are really there; further ones repeat them.
MOST_REAL = 1 << 16


def symbols(function: str, leaves: Mapping[str, Any]) -> list[str]:
    """The symbols of the tensors of a call that are free."""
    found = {one for name in leaves for one in _shape(function, name).split()}
    found |= {"L", "S", "F"} if any(name.startswith("levels.") for name in leaves) else set()
    found |= {"L", "F"} if "T" in found else set()
    return sorted(found - {"R", "A", "T", "K", "d+2"} - ({"C"} if function in _EVEN_LEAVES else set()))


def too_large(names: list[str]) -> Iterator[dict[str, int]]:
    """Sizes of which one or two are large, one other may be 0, and all others are 1."""
    for one, size in itertools.product(names, LARGE):
        for zero in (None, *(name for name in names if name != one)):
            yield _sizes(names, {one: size}, zero)
    for one, other in itertools.permutations(names, 2):
        for zero in (None, *(name for name in names if name not in (one, other))):
            yield _sizes(names, {one: LARGE_PAIR[0], other: LARGE_PAIR[1]}, zero)


def _sizes(names: list[str], large: dict[str, int], zero: str | None) -> dict[str, int]:
    return {**dict.fromkeys(names, 1), **large, **({} if zero is None else {zero: 0})}


def resized(function: str, leaves: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any] | None:
    """The arguments of a call with other sizes, all zeros; None if PyTorch has no such tensors."""
    n_levels = sum(name.startswith("levels.") for name in leaves) // 3
    sizes = _derived(function, sizes, max(n_levels, 1))
    changed: dict[str, Any] = {}
    for name, value in leaves.items():
        if isinstance(value, Tensor):
            if name == "key_mask":
                changed[name] = None
                continue
            shape = [sizes["d"] + 2 if one == "d+2" else sizes[one] for one in _shape(function, name).split()]
            tensor = _tensor(shape, value.dtype)
            if tensor is None:
                return None
            changed[name] = tensor
        elif name.startswith("levels."):  # all of one size
            changed[name] = sizes["LSF"[int(name[-1])]]
    return changed


def _derived(function: str, sizes: Mapping[str, int], n_levels: int) -> dict[str, int]:
    """Sizes with those that follow from them."""
    found = dict(sizes)
    if function in _EVEN_LEAVES:
        found["C"] = -(-found["n"] // found["L"]) if found["L"] else 0
    rows = found.get("b", 1) * found.get("h", found.get("g", 1))
    clusters = n_levels * found.get("L", 1)
    products = {"R": rows, "A": clusters, "T": clusters * found.get("F", 1), "K": clusters * found.get("S", 1)}
    return {**found, **{name: (size + 2**63) % 2**64 - 2**63 for name, size in products.items()}}


def _shape(function: str, name: str) -> str:
    """The shape of an argument, "" if it is no tensor; the number of a list does not count."""
    return SHAPES[function].get(".".join(part for part in name.split(".") if not part.isdigit()), "")


def is_output(function: str, name: str) -> bool:
    """Whether a function writes to an argument."""
    return ".".join(part for part in name.split(".") if not part.isdigit()) in OUTPUTS[function]


def _tensor(shape: list[int], dtype: torch.dtype) -> Tensor | None:
    """Zeros of a shape: the last axes are there, the first ones repeat them."""
    first = len(shape)
    while first > 0 and 0 <= math.prod(shape[first - 1 :]) <= MOST_REAL:
        first -= 1
    try:
        return torch.zeros([1] * first + shape[first:], dtype=dtype).expand(shape)
    except RuntimeError:  # a negative size, or more than 2**63 elements
        return None
