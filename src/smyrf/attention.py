"""`attention`: the public function; conventions follow ``F.scaled_dot_product_attention``.

Shapes: "…" any leading axes, N queries, M keys, D width, E value width.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from smyrf.backends import check_backend, find_backend
from smyrf.backends.dense import dense_attention
from smyrf.call import Call, four_axes, why_dense
from smyrf.grouping.group import group
from smyrf.grouping.nonfinite import separate_nonfinite
from smyrf.methods import CausalLayout, Layout, Method, PerHead, Tangent, TangentLayout, check_method, is_one_block
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
        key_mask: ``(…, M)`` bool without the axis of heads, True = may be attended to. A masked key has weight zero,
            whatever it holds; where all keys are masked the output is zero.
        is_causal: query i sees keys j <= i; position 0 of both is aligned.
        scale: of the scores; D ** -0.5 by default (the paper's formulas have 1).
        dropout_p: share of the attention weights that is dropped, also in eval mode, as in PyTorch's function.
        enable_gqa: allow `heads` to be a multiple of `kv_heads`.
        generator: a seed or a generator makes clusters and dropout repeatable; None uses PyTorch's own. The same seed
            gives the same result for a row whatever the batch around it (dropout excepted).
        backend: one of `smyrf.backends()`, which runs every stage of the call, or None for the fastest: "native" on a
            CPU, else "torch".

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
    check_method(method)
    check_backend(backend)
    check_generator(generator)
    call = read_arguments(q, k, v, key_mask, is_causal, scale, dropout_p, enable_gqa)
    out = serve(call, method, backend=backend, generator=generator, dropout_generator=generator)
    return out.reshape(*q.shape[:-1], v.shape[-1])


def read_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    enable_gqa: bool,
) -> Call:
    """Check the arguments of `attention` and make its record, with four axes, under autocast's dtype."""
    check_scale(scale)
    check_dropout("dropout_p", dropout_p)
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}={flag!r} must be a bool")
    check_tensors(q, k, v, key_mask, enable_gqa)
    device = q.device.type
    # As for PyTorch's own function, which is on autocast's list.
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype, not {q.dtype}, {k.dtype} and {v.dtype}")
    q, k, v = (four_axes(x) for x in (q, k, v))  # (batch, heads, N, D), (batch, kv_heads, M, D or E)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    # PyTorch's function multiplies its -inf by the scale, or takes its root: it must be positive.
    if scale < 0.0:
        q, scale = -q, -scale
    elif scale == 0.0:
        q, scale = q.masked_fill(q.isfinite(), 0.0), 1.0  # NaN stays; the gradient is 0, where that of q · 0 can be NaN
    key_mask = None if key_mask is None else key_mask.reshape(len(q), k.shape[2])  # (batch, M)
    return Call(q, k, v, scale, key_mask, is_causal, dropout_p)


def serve(
    call: Call,
    method: Method,
    *,
    backend: str | None,
    generator: torch.Generator | int | None,
    dropout_generator: torch.Generator | int | None,
) -> Tensor:
    """Output of a call ``(batch, heads, N, E)``, with clusters from one generator and dropout from another."""
    if isinstance(method, PerHead):
        return _by_head(call, method, backend, generator, dropout_generator)
    if call.q.numel() == 0:
        return dense_attention(call)
    rest = None
    if call.is_causal:
        call, rest = separate_nonfinite(call)
    layout = call.plan(method)
    # PyTorch's function takes a causal mask together with a key mask only as an N × M matrix, which is made only for
    # short sequences, and takes no generator for its dropout. There, and where a backend is asked for, exact attention
    # is a list of groups too.
    asked = backend is not None or (call.dropout_p > 0.0 and dropout_generator is not None)
    needs_matrix = call.is_causal and call.key_mask is not None and not is_one_block(call.n_queries, call.n_keys)
    if not asked and not needs_matrix and why_dense(call, method, layout=layout) is not None:
        out = dense_attention(call)
    else:
        is_random = method.is_random and not layout.is_exact
        seed = draw_seed(generator) if is_random else None  # PyTorch's generator advances only for what is random
        dropout_seed = None
        if call.dropout_p > 0.0:
            dropout_seed = seed if is_random and dropout_generator is generator else draw_seed(dropout_generator)
        out = _run_stages(replace(call, seed=seed, dropout_seed=dropout_seed), method, backend, layout)
    return out if rest is None else out + rest


def _run_stages(call: Call, method: Method, backend: str | None, layout: Layout | CausalLayout) -> Tensor:
    """All stages of one backend, outside of autocast, whose dtype has been applied."""
    device = call.q.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return _run_stages(call, method, backend, layout)
    run = find_backend(backend, call.q.device)
    prepared = run.prepare(call)
    if run.attend_tangent is not None and isinstance(method, Tangent) and isinstance(layout, TangentLayout):
        return run.attend_tangent(prepared, method, layout).to(call.v.dtype)
    out, _ = run.attend(prepared, group(prepared, method, run, layout))
    return out.to(call.v.dtype)


def _by_head(
    call: Call,
    method: PerHead,
    backend: str | None,
    generator: torch.Generator | int | None,
    dropout_generator: torch.Generator | int | None,
) -> Tensor:
    """`serve` with the heads of each method in a call of their own."""
    heads = call.q.shape[1]
    if len(method.methods) != heads:
        raise ValueError(f"method has {len(method.methods)} methods for the {heads} heads of q {tuple(call.q.shape)}")
    parts, order = [], []
    for n, (one, chosen) in enumerate(method.groups().items()):
        dropout = dropout_generator
        if isinstance(dropout, int):  # heads of different methods must not drop the same places
            dropout = (dropout + n) % 2**63
        part = call if len(chosen) == heads else call.heads(chosen)
        parts.append(serve(part, one, backend=backend, generator=generator, dropout_generator=dropout))
        order += chosen
    if len(parts) == 1:
        return parts[0]
    place = torch.tensor(order, device=call.q.device).argsort()
    return torch.cat(parts, dim=1).index_select(1, place)  # (batch, heads, N, E)


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
