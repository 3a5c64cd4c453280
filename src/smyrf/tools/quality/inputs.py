"""q, k and v to measure on: read from a file, and brought into a form that every method takes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy
import torch
from torch import Tensor

from smyrf.attention import attention
from smyrf.call import Call
from smyrf.methods import Dense

SUFFIXES = (".safetensors", ".npz")
_NAME = re.compile(r"(q|k|v|scale)(?:\.(\d+))?")


def load_qkv(path: Path) -> list[Call]:
    """Layers of a .safetensors or .npz file; nothing is ever unpickled.

    The file contains tensors q, k and v, ``(batch, heads, N, D)`` or without leading axes, and optionally a number
    scale; tensors of several layers are named q.0, k.0, v.0, q.1 and so on.

    Raises:
        ValueError: names the file, and the tensor that is missing or wrong.
    """
    tensors = _read(path)
    layers: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{path} has a tensor {name!r}, but only q, k, v and scale, or q.0, k.0, … are known")
        part = layers.setdefault(int(match[2] or 0), {})
        if match[1] in part:
            raise ValueError(f"{path} has both {match[1]} and {match[1]}.0: which is the first layer?")
        part[match[1]] = tensor
    if not layers:
        raise ValueError(f"{path} holds no tensors")
    return [_layer(path, number, layers[number]) for number in sorted(layers)]


def uniform(calls: Sequence[Call]) -> list[Call]:
    """Convert calls to float32 with as many key heads as query heads, and check that all have one length.

    Example:
        >>> import torch
        >>> x = torch.ones(1, 1, 3, 2, dtype=torch.float64)
        >>> call = uniform([Call(x.expand(1, 4, 3, 2), x, x, 0.5)])[0]
        >>> call.k.shape, call.v.dtype
        (torch.Size([1, 4, 3, 2]), torch.float32)
    """
    found = []
    for call in calls:
        q, k, v = call.qkv
        repeat = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
        found.append(Call(q.float(), k.float(), v.float(), call.scale))
    lengths = sorted({(call.q.shape[2], call.k.shape[2]) for call in found})
    if len(lengths) > 1:
        raise ValueError(f"the layers differ in their numbers of queries and keys: {lengths}")
    return found


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} must be one of {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    if path.suffix == ".npz":
        try:  # opened here because NumPy leaves a broken file open
            with path.open("rb") as file, numpy.load(file, allow_pickle=False) as data:
                return {name: torch.from_numpy(data[name]) for name in data.files}
        except Exception as error:  # zipfile, zlib and NumPy raise many kinds
            # NumPy's message explains how to run a pickle.
            why = "it holds pickled objects, which are never loaded" if "pickle" in str(error) else error
            raise ValueError(f"{path} is not a readable .npz file: {why}") from error
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{path} is not a readable .safetensors file: {error}") from error


def _layer(path: Path, number: int, part: dict[str, Tensor]) -> Call:
    where = f"{path}, layer {number}"
    for name in ("q", "k", "v"):
        if name not in part:
            raise ValueError(f"{where} has no tensor {name}")
        shape = tuple(part[name].shape)
        if not 2 <= len(shape) <= 4 or 0 in shape:
            raise ValueError(f"{where}: {name} has the shape {shape}, not (batch, heads, length, width)")
        if not bool(part[name].isfinite().all()):
            raise ValueError(f"{where}: {name} has values that are not finite")
    q, k, v = (part[name] for name in ("q", "k", "v"))
    scale = part.get("scale")
    if scale is not None and (scale.numel() != 1 or not bool(scale.isfinite().all())):
        raise ValueError(f"{where}: scale must be one finite number, not {scale.tolist()}")
    number_or_none = None if scale is None else float(scale.item())
    try:  # one query is enough to have everything checked
        attention(q[..., :1, :], k, v, method=Dense(), scale=number_or_none, enable_gqa=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    q, k, v = (x[(None,) * (4 - x.dim())] for x in (q, k, v))
    return Call(q, k, v, q.shape[-1] ** -0.5 if number_or_none is None else number_or_none)
