"""`attention`: the function under everything, with the conventions of PyTorch's own.

Shapes: "…" any leading axes, N queries, M keys, D width, E value width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from smyrf.backends import attend, check_backend
from smyrf.backends.forward_mode import in_forward_mode
from smyrf.grouping.causal import causal_groups
from smyrf.grouping.group import group
from smyrf.methods import Method, PerHead, Smyrf, check_method, is_one_block
from smyrf.models.sdpa_mode import exact_attention
from smyrf.seeds import check_generator, draw_seed

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    method: Method,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
    generator: torch.Generator | int | None = None,
    backend: str | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ) v, exactly or by the given method.

    Args:
        q: ``(…, heads, N, D)``.
        k: ``(…, kv_heads, M, D)``.
        v: ``(…, kv_heads, M, E)``.
        method: `smyrf.Smyrf`, `smyrf.Tangent` or `smyrf.Dense`, or one for each head in a `smyrf.PerHead`.
        key_mask: ``(…, M)`` bool without the axis of heads, True = may be attended to. A masked key has
            weight zero, whatever is in it; where all are masked the output is zero.
        is_causal: query i sees keys j <= i, position 0 of both aligned.
        scale: of the scores; D ** -0.5 by default (the paper's formulas have 1).
        dropout_p: share of the attention weights that is dropped, always, as in PyTorch's function.
        enable_gqa: allow `heads` to be a multiple of `kv_heads`.
        generator: a seed or a generator makes clusters and dropout repeatable; None uses PyTorch's own.
            The same seed gives the same result for a row whatever the batch around it (dropout apart).
        backend: one of `smyrf.backends()`, or None for the fastest: "native" on a CPU, else "torch".

    Returns:
        ``(…, heads, N, E)``, in the dtype of `v`.

    Example:
        >>> import torch, smyrf
        >>> q, k, v = torch.randn(3, 2, 4, 1000, 16).unbind()
        >>> smyrf.attention(q, k, v, method=smyrf.Smyrf(n_hashes=4, cluster_size=64)).shape
        torch.Size([2, 4, 1000, 16])
        >>> exact = smyrf.attention(q, k, v, method=smyrf.Smyrf(cluster_size=1000))  # one cluster
        >>> dense = smyrf.attention(q, k, v, method=smyrf.Dense())
        >>> torch.allclose(exact, dense, atol=1e-5)
        True

    References:
        Daras, Odena, Kitaev, Dimakis: SMYRF: Efficient Attention using Asymmetric Clustering, 2020.
    """
    return seeded_attention(
        q,
        k,
        v,
        method=method,
        key_mask=key_mask,
        is_causal=is_causal,
        scale=scale,
        dropout_p=dropout_p,
        enable_gqa=enable_gqa,
        generator=generator,
        dropout_generator=generator,
        backend=backend,
    )


def seeded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    method: Method,
    key_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    enable_gqa: bool,
    generator: torch.Generator | int | None,
    dropout_generator: torch.Generator | int | None,
    backend: str | None = None,
) -> Tensor:
    """`attention` with clusters from one generator and dropout from another."""
    check_method(method)
    check_backend(backend)
    check_generator(generator)
    check_generator(dropout_generator, "dropout_generator")
    check_scale(scale)
    check_dropout("dropout_p", dropout_p)
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}={flag!r} must be a bool")
    check_tensors(q, k, v, key_mask, enable_gqa)
    if isinstance(method, PerHead):
        return _by_head(
            q,
            k,
            v,
            method,
            key_mask=key_mask,
            is_causal=is_causal,
            scale=scale,
            dropout_p=dropout_p,
            generator=generator,
            dropout_generator=dropout_generator,
            backend=backend,
        )

    device = q.device.type
    # As for PyTorch's own function, which is on autocast's list.
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype, not {q.dtype}, {k.dtype} and {v.dtype}")

    lead = q.shape[:-2]  # (…, heads)
    q, k, v = (four_axes(x) for x in (q, k, v))  # (batch, heads, N, D), (batch, kv_heads, M, D or E)
    if key_mask is not None:
        key_mask = key_mask.reshape(len(q), k.shape[2])  # (batch, M)
        # Weight zero times NaN is NaN: what must not count is taken out before it is multiplied.
        hidden = ~key_mask[:, None, :, None]  # (batch, 1, M, 1)
        k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)

    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if scale <= 0.0:  # PyTorch's function multiplies its -inf by it, or takes its root
        q, scale = q * scale, 1.0
    n_queries, n_keys = q.shape[2], k.shape[2]
    short = is_causal and is_one_block(n_queries, n_keys)
    exact = short or method.is_exact(n_queries, n_keys)
    # PyTorch's function has no causal mask together with a key mask except as an N × M matrix, which is made for
    # short sequences alone, and takes no generator for its dropout; there, and where a backend is asked for, exact
    # attention is a list too.
    asked = backend is not None or (dropout_p > 0.0 and dropout_generator is not None)
    if q.numel() == 0 or (exact and not asked and (short or key_mask is None or not is_causal)):
        mask = None if key_mask is None else key_mask[:, None, None]  # (batch, 1, 1, M)
        if short and mask is not None:
            mask, is_causal = mask & mask.new_ones(n_queries, n_keys).tril(), False  # (batch, 1, N, M)
        out = _exact(q, k, v, mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale)
    else:
        # Only what is random draws a number: PyTorch's own generator is left alone otherwise.
        seed = draw_seed(generator if isinstance(method, Smyrf) else 0)
        make = causal_groups if is_causal else group
        groups = make(q, k, v, method, seed=seed, scale=scale, key_mask=key_mask)
        if dropout_p > 0.0 and (dropout_generator is not generator or not isinstance(method, Smyrf)):
            seed = draw_seed(dropout_generator)
        out, _ = attend(q, k, v, groups, scale=scale, dropout_p=dropout_p, seed=seed, backend=backend)
    return out if len(lead) == 2 else out.reshape(*lead, *out.shape[-2:])


def _exact(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, dropout_p: float, is_causal: bool, scale: float
) -> Tensor:
    """PyTorch's attention.

    On a CPU its fused kernel wants values as wide as keys, which zeros make them, and vectors whose numbers lie side by
    side. Else it forms the N × M map: two to five times the time, and 4 GiB for each head at 65,536 queries on 16,384
    keys. Forward-mode derivatives are defined for that map alone, and dropout is applied to it alone.
    """
    gqa, width = q.shape[1] != k.shape[1], v.shape[-1]
    if q.device.type == "cpu" and not dropout_p and not in_forward_mode((q, k, v)):
        wide = max(width, q.shape[-1])
        q, k, v = (F.pad(x, (0, wide - x.shape[-1])) if x.shape[-1] < wide else x for x in (q, k, v))
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return exact_attention(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=gqa)[..., :width]


def _by_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    method: PerHead,
    *,
    key_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    generator: torch.Generator | int | None,
    dropout_generator: torch.Generator | int | None,
    backend: str | None,
) -> Tensor:
    """`seeded_attention`, the heads of each method in a call of their own."""
    heads = 1 if q.dim() == 2 else q.shape[-3]
    if len(method.methods) != heads:
        raise ValueError(f"method has {len(method.methods)} methods for the {heads} heads of q {tuple(q.shape)}")
    parts, order = [], []
    for n, (one, chosen) in enumerate(method.groups().items()):
        mine, its_k, its_v = q, k, v
        if len(chosen) < heads:
            at = torch.tensor(chosen, device=q.device)
            mine = q.index_select(-3, at)  # (…, chosen, N, D)
            at = at // (heads // k.shape[-3])  # key heads
            its_k, its_v = k.index_select(-3, at), v.index_select(-3, at)  # (…, chosen, M, D or E)
        dropout = dropout_generator
        if isinstance(dropout, int):  # heads of different groups must not drop the same places
            dropout = (dropout + n) % 2**63
        parts.append(
            seeded_attention(
                mine,
                its_k,
                its_v,
                method=one,
                key_mask=key_mask,
                is_causal=is_causal,
                scale=scale,
                dropout_p=dropout_p,
                enable_gqa=True,
                generator=generator,
                dropout_generator=dropout,
                backend=backend,
            )
        )
        order += chosen
    if len(parts) == 1:
        return parts[0]
    place = torch.tensor(order, device=q.device).argsort()
    return torch.cat(parts, dim=-3).index_select(-3, place)  # (…, heads, N, E)


def check_scale(scale: object) -> None:
    """Raises unless `scale` is None or a finite number."""
    if scale is None:
        return
    if not isinstance(scale, int | float) or isinstance(scale, bool):
        raise TypeError(f"{scale=} must be a number or None")
    if not math.isfinite(scale):
        raise ValueError(f"{scale=} must be finite")


def check_dropout(name: str, dropout: object) -> None:
    """Raises unless `dropout` is a number from 0 to 1."""
    if not isinstance(dropout, int | float) or isinstance(dropout, bool):
        raise TypeError(f"{name}={dropout!r} must be a number")
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(f"{name}={dropout} must be in [0, 1]")


def four_axes(x: Tensor) -> Tensor:
    """``(…, heads, N, D)`` → ``(batch, heads, N, D)``."""
    if x.dim() == 2:
        return x[None, None]
    return x if x.dim() == 4 else x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def check_tensors(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, enable_gqa: bool) -> None:
    """Raises unless `attention` can take these."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, not {x.dtype}")
        if x.dim() < 2:
            raise ValueError(f"{name} must have at least two axes (length, width), not the shape {tuple(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} but q is on {q.device}")
        if 0 in x.shape[-2:]:
            raise ValueError(f"{name} has the shape {tuple(x.shape)}: its length and width must not be zero")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim():
        raise ValueError(f"q, k and v must have the same number of axes: {shapes}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have the same width: {shapes}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k and v must agree in all axes but the last: {shapes}")
    if q.shape[:-3] != k.shape[:-3]:
        raise ValueError(f"q and k must have the same leading axes: {shapes}")
    if q.dim() > 2 and q.shape[-3] != k.shape[-3]:
        if not enable_gqa:
            raise ValueError(f"q and k must have the same number of heads unless enable_gqa=True: {shapes}")
        if k.shape[-3] == 0 or q.shape[-3] % k.shape[-3]:
            raise ValueError(f"with enable_gqa=True the heads of q must be a multiple of those of k: {shapes}")
    if key_mask is None:
        return
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
        kind = key_mask.dtype if isinstance(key_mask, Tensor) else type(key_mask).__name__
        raise TypeError(f"key_mask must be a bool tensor (True = may be attended to), not {kind}")
    expected = (*q.shape[:-3], k.shape[-2])
    if key_mask.shape != expected:
        raise ValueError(f"key_mask has the shape {tuple(key_mask.shape)}, but {tuple(expected)} is needed: {shapes}")
    if key_mask.device != q.device:
        raise ValueError(f"key_mask is on {key_mask.device} but q is on {q.device}")
