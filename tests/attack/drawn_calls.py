"""Random calls of `smyrf.attention`: methods × backends × dtypes × strides × masks × magnitudes × NaN and inf.

Shapes: batch, heads, N queries, M keys, D width, E value width.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import smyrf
from smyrf.backends import backends
from tests.attack import oracle

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
STRIDES = ("contiguous", "contiguous", "heads inside", "transposed", "expanded", "sliced", "offset")
BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def draw_kind(draw: random.Random) -> str:
    """The kind of method."""
    return draw.choices(("exact", "smyrf", "tangent", "per head"), (3, 4, 4, 1))[0]


@dataclass(frozen=True)
class Drawn:
    """The call of a case; `options` are the keyword arguments, tensors are in the dtype of the case."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    is_exact: bool
    is_smyrf: bool
    says: str

    @property
    def mask(self) -> Tensor | None:
        return self.options["key_mask"]

    @property
    def is_causal(self) -> bool:
        return self.options["is_causal"]

    @property
    def scale(self) -> float:
        given = self.options["scale"]
        return self.q.shape[-1] ** -0.5 if given is None else given

    @property
    def seen(self) -> Tensor:
        return oracle.visible(self.q.shape[2], self.k.shape[2], self.mask, self.is_causal)

    def run(self, **changes: Any) -> Tensor:
        """The output ``(batch, heads, N, E)``."""
        options = {**self.options, **changes}
        q, k, v = (options.pop(name, getattr(self, name)) for name in "qkv")
        return smyrf.attention(q, k, v, **options)


def draw_call(draw: random.Random, kind: str) -> Drawn:
    """A call of a kind."""
    n, m = (_length(draw) for _ in "nm")
    if draw.random() < 0.5:
        m = n
    large = n * m > 300_000
    batch = draw.choice((1, 1, 2) if large else (1, 1, 2, 3))
    kv_heads = 1 if large else draw.choice((1, 1, 2, 3))
    heads = kv_heads * draw.choice((1, 1, 1, 2) if large else (1, 1, 1, 2, 3))
    d, e = (int(2 ** draw.uniform(0, 5.3)) for _ in "de")
    name = draw.choices(list(DTYPES), (2, 2, 4, 3))[0]
    generator = torch.Generator().manual_seed(draw.getrandbits(40))
    magnitudes = [draw.choice((1e-3, 0.1, 1.0, 1.0, 1.0, 1.0, 10.0, 100.0, 1e4, "mixed")) for _ in "qkv"]
    shapes = ((batch, heads, n, d), (batch, kv_heads, m, d), (batch, kv_heads, m, e))
    strides = [draw.choice(STRIDES) for _ in "qkv"]
    q, k, v = (
        strided(_random(shape, one, generator), how, DTYPES[name])
        for shape, one, how in zip(shapes, magnitudes, strides, strict=True)
    )
    if draw.random() < 0.08:  # ties everywhere
        k = k[:, :, :1].expand_as(k)
    if draw.random() < 0.05:
        q = torch.zeros_like(q)
    if draw.random() < 0.1:  # equal values: their weights must sum to one
        v = v[:, :, :1].expand_as(v)
    mask, mask_kind = _mask(draw, batch, m, generator)
    bad = ""
    if draw.random() < 0.2:
        which, what = draw.choice("qkkvv"), draw.choice(list(BAD))
        x = {"q": q, "k": k, "v": v}[which].clone()
        for _ in range(draw.choice((1, 1, 2, 5))):
            at = tuple(draw.randrange(size) for size in x.shape[:3])
            channel = slice(None) if draw.random() < 0.3 else draw.randrange(x.shape[3])
            x[(*at, channel)] = BAD[what]
        q, k, v = (x if which == one else old for one, old in (("q", q), ("k", k), ("v", v)))
        bad = f", {what} in {which}"
    method, is_exact = _method(draw, kind, n, m, heads)
    # Exact attention in half precision is PyTorch's own, to whose limits large scores would be attributed.
    scale = draw.choice((None, None, None, None, 1.0, 0.0, -0.3, 30.0, 1e3))
    options = {
        "method": method,
        "key_mask": mask,
        "is_causal": draw.random() < 0.4,
        "scale": scale,
        "dropout_p": draw.choices((0.0, 1.0, 0.3), (18, 1, 1))[0],
        "enable_gqa": heads != kv_heads,
        "generator": draw.getrandbits(30),
        "backend": draw.choice([None, None, *(one for one, says in backends().items() if "not avail" not in says)]),
    }
    if options["backend"] == "reference" and large:
        options["backend"] = None
    says = (
        f"{method}, backend={options['backend']}, {name}, q {shapes[0]} k {shapes[1]} e {e}, strides {strides}, "
        f"mask {mask_kind}, causal={options['is_causal']}, scale={scale}, dropout={options['dropout_p']}, "
        f"magnitudes {magnitudes}{bad}"
    )
    only_smyrf = isinstance(method, smyrf.Smyrf) and not is_exact
    return Drawn(q, k, v, options, is_exact, only_smyrf, says)


def _length(draw: random.Random) -> int:
    """Log-uniform: half of all lengths below 55, one in nine above 1,000."""
    return int(math.exp(draw.uniform(0.0, math.log(3001))))


def _random(shape: tuple[int, ...], magnitude: float | str, generator: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if magnitude == "mixed":
        return x * 10.0 ** (4 * torch.rand((*shape[:-1], 1), generator=generator, dtype=torch.float64) - 3)
    return x * magnitude


def strided(x: Tensor, how: str, dtype: torch.dtype) -> Tensor:
    """The numbers of x in a dtype, with other strides; "expanded" repeats the first batch entry and head."""
    x = x.to(dtype)
    if how == "heads inside":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "transposed":
        return x.mT.contiguous().mT
    if how == "expanded":
        return x[:1, :1].expand_as(x)
    if how == "sliced":
        padded = x.new_full((*x.shape[:2], 2 * x.shape[2], x.shape[3] + 3), math.nan)
        padded[:, :, ::2, 2:-1] = x
        return padded[:, :, ::2, 2:-1]
    if how == "offset":  # not aligned to a vector register
        flat = x.new_empty(x.numel() + 1)
        flat[1:] = x.flatten()
        return flat[1:].view(x.shape)
    return x


def _mask(draw: random.Random, batch: int, m: int, generator: torch.Generator) -> tuple[Tensor | None, str]:
    kind = draw.choice(("none", "none", "random", "padding", "one row empty", "one key", "all"))
    if kind == "none":
        return None, kind
    mask = torch.rand(batch, m, generator=generator) < draw.choice((0.1, 0.5, 0.9))
    if kind == "padding":
        mask = torch.arange(m) < torch.randint(m + 1, (batch, 1), generator=generator)
    if kind == "one key":
        mask = torch.arange(m) == torch.randint(m, (batch, 1), generator=generator)
    if kind == "all":
        mask = torch.ones(batch, m, dtype=torch.bool)
    if kind == "one row empty":
        mask[draw.randrange(batch)] = False
    return mask, kind


def _method(draw: random.Random, kind: str, n: int, m: int, heads: int) -> tuple[smyrf.Method, bool]:
    if kind == "per head":
        found = [_method(draw, draw.choice(("exact", "smyrf", "tangent")), n, m, heads) for _ in range(heads)]
        return smyrf.PerHead(tuple(one for one, _ in found)), all(exact for _, exact in found)
    if kind == "exact":
        some = [smyrf.Dense(), smyrf.Dense(), smyrf.Smyrf(draw.choice((1, 3)), max(n, 1)), smyrf.Tangent(1.0)]
        return draw.choice([*some, smyrf.Tangent(m + draw.choice((0, 1, 1000)))]), True
    if kind == "smyrf":
        return (
            smyrf.Smyrf(
                n_hashes=draw.choice((1, 2, 3, 4, 8)),
                cluster_size=draw.choice((1, 2, 7, 16, 32, 64)),
                transform=draw.choice(("asymmetric",) * 4 + ("none", "xbox", "h2lsh", "l2lsh")),
                hashing=draw.choice(("projection",) * 5 + ("cross_polytope",)),
                deduplicate=draw.random() < 0.2,
            ),
            False,
        )
    budget = draw.choice((0.05, 0.125, 0.25, 0.5, 0.9, 1, 3, 16, 64, 128, 300))
    sizes = {
        name: draw.choice(values)
        for name, values in (("levels", (1, 2, 3)), ("cluster_size", (1, 8, 50)), ("n_near", (1, 9)), ("n_far", (1, 5)))
        if draw.random() < 0.12
    }
    return smyrf.Tangent(budget, **sizes, **({"rank": draw.choice((1, 3))} if draw.random() < 0.1 else {})), False
