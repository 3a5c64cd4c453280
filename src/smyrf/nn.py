"""Modules on top of `smyrf.attention`.

Shapes: B batch, N queries, M keys, "width" the embedding width, split over heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from smyrf.attention import check_dropout, check_scale, read_arguments, serve
from smyrf.backends import check_backend
from smyrf.methods import Method, PerHead, Smyrf, check_method
from smyrf.seeds import check_generator

__all__ = ["MultiheadAttention", "SmyrfAttention"]


# Is shown q, k, v, scale, key_mask and is_causal of a forward pass in training, before it runs.
Observer: TypeAlias = Callable[[Tensor, Tensor, Tensor, float | None, Tensor | None, bool], None]


class SmyrfAttention(nn.Module):
    """Attention as a layer without weights.

    Args:
        method: what to compute; the paper's method by default.
        dropout: share of the attention weights that is dropped in training.
        scale: of the scores; width ** -0.5 by default.
        seed: makes every call use the same clusters; None draws new ones from PyTorch's generator, as dropout always
            does.
        backend: as in `smyrf.attention`.

    Example:
        >>> import torch, smyrf
        >>> layer = smyrf.nn.SmyrfAttention(smyrf.Smyrf(n_hashes=4, cluster_size=16))
        >>> q, k, v = torch.randn(3, 2, 4, 100, 8).unbind()
        >>> layer(q, k, v).shape
        torch.Size([2, 4, 100, 8])
    """

    def __init__(
        self,
        method: Method | None = None,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
        seed: int | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.method = Smyrf() if method is None else method
        check_method(self.method)
        check_generator(seed, "seed")
        check_scale(scale)
        check_dropout("dropout", dropout)
        check_backend(backend)
        self.dropout = dropout
        self.scale = scale
        self.seed = seed
        self.backend = backend
        self.observer: Observer | None = None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Arguments and result as in `smyrf.attention`."""
        if self.observer is not None and self.training:
            self.observer(q, k, v, self.scale, key_mask, is_causal)
        dropout = self.dropout if self.training else 0.0
        call = read_arguments(q, k, v, key_mask, is_causal, self.scale, dropout, enable_gqa)
        out = serve(call, self.method, backend=self.backend, generator=self.seed, dropout_generator=None)
        return out.reshape(*q.shape[:-1], v.shape[-1])

    def extra_repr(self) -> str:
        backend = "" if self.backend is None else f", backend={self.backend!r}"
        return f"{self.method}, dropout={self.dropout}, scale={self.scale}, seed={self.seed}{backend}"


class MultiheadAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` with a method: the same arguments, the same weights.

    State dicts load in both directions. Masks follow PyTorch's module: in `key_padding_mask` True means "ignore". There
    are two differences. `need_weights` is False by default: this module exists to avoid the N × M map, and only `Dense`
    can return it. An arbitrary `attn_mask` needs `Dense`; for a causal one pass ``is_causal=True``, with or without the
    mask itself. In ``nn.TransformerEncoder`` pass ``enable_nested_tensor=False``.

    Args:
        method: what to compute; the paper's method by default.
        seed: makes every call use the same clusters; None draws new ones from PyTorch's generator, as dropout always
            does.
        backend: as in `smyrf.attention`.

    Example:
        >>> import torch, smyrf
        >>> ours = smyrf.nn.MultiheadAttention(32, 4, batch_first=True, method=smyrf.Dense())
        >>> theirs = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        >>> ours.load_state_dict(theirs.state_dict())
        <All keys matched successfully>
        >>> x = torch.randn(2, 10, 32)
        >>> torch.allclose(ours(x, x, x)[0], theirs(x, x, x)[0], atol=1e-6)
        True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        method: Method | None = None,
        seed: int | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        # nn.TransformerEncoderLayer has a fused path that reads our weights and runs dense attention
        # itself. This is the flag by which it can tell that the path is not for this module.
        self._qkv_same_embed_dim = False
        self.method = Smyrf() if method is None else method
        check_method(self.method)
        if isinstance(self.method, PerHead) and len(self.method.methods) != num_heads:
            raise ValueError(f"method has {len(self.method.methods)} methods for {num_heads=}")
        check_generator(seed, "seed")
        check_backend(backend)
        self.seed = seed
        self.backend = backend
        self.observer: Observer | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Arguments and results as in PyTorch's module.

        Returns:
            the output, shaped like `query`, and the weights: None, or with `need_weights` ``(B, N, M)``, or
            ``(B, heads, N, M)`` without `average_attn_weights`.
        """
        self._check_inputs(query, key, value)
        dense = self.method.is_dense
        if need_weights and not dense:
            raise ValueError(
                f"need_weights=True needs the N × M map, which method={self.method} never forms: use Dense()"
            )
        if attn_mask is not None and not is_causal and not dense:
            raise ValueError(
                f"attn_mask of shape {tuple(attn_mask.shape)} cannot be honoured by method={self.method}: use Dense(), "
                "is_causal=True for a causal mask, or key_padding_mask"
            )
        if is_causal and (self.bias_k is not None or self.add_zero_attn):
            raise ValueError(f"{is_causal=} does not go with add_bias_kv or add_zero_attn, whose keys have no position")
        batched = query.dim() == 3
        if not batched:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))

        q, k, v = self._project(query, key, value)  # (B, heads, N, D), (B, heads, M, D) twice
        key_mask = self._key_mask(key_padding_mask, k)
        if self.observer is not None and self.training:
            self.observer(q, k, v, None, key_mask, is_causal)
        weights: Tensor | None = None
        if need_weights or (attn_mask is not None and not is_causal):
            out, weights = self._dense_with_map(q, k, v, key_mask, attn_mask, is_causal)
        else:
            dropout = self.dropout if self.training else 0.0
            call = read_arguments(q, k, v, key_mask, is_causal, None, dropout, False)
            out = serve(call, self.method, backend=self.backend, generator=self.seed, dropout_generator=None)
        out = self.out_proj(out.transpose(1, 2).flatten(2))  # (B, N, width)

        if not need_weights or weights is None:
            weights = None
        elif average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def extra_repr(self) -> str:
        backend = "" if self.backend is None else f", backend={self.backend!r}"
        return f"{self.embed_dim}, {self.num_heads}, {self.method}, seed={self.seed}{backend}"

    def _reset_parameters(self) -> None:
        # PyTorch's initialisation asks the flag that the constructor has turned off for another reason.
        self._qkv_same_embed_dim, flag = self.in_proj_weight is not None, self._qkv_same_embed_dim
        super()._reset_parameters()
        self._qkv_same_embed_dim = flag

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        for name, x, width in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            if x.is_nested:
                raise TypeError(f"{name} must not be a nested tensor: pad it and pass key_padding_mask")
            if x.dim() not in (2, 3) or x.dim() != query.dim():
                raise ValueError(f"query, key and value must all have 2 or all 3 axes: {name} has {tuple(x.shape)}")
            if x.shape[-1] != width:
                raise ValueError(f"{name} has the shape {tuple(x.shape)}, but its width must be {width}")
            if x.dtype != self.out_proj.weight.dtype and not torch.is_autocast_enabled(x.device.type):
                raise TypeError(f"{name} is {x.dtype}, but the weights are {self.out_proj.weight.dtype}")

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (
            nn.functional.linear(x, weight, bias)
            for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )  # (B, N, width), (B, M, width) twice
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(len(k), -1, -1)], dim=1)
            v = torch.cat([v, self.bias_v.expand(len(v), -1, -1)], dim=1)
        if self.add_zero_attn:
            k, v = (nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        q, k, v = (x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2) for x in (q, k, v))
        return q, k, v

    def _key_mask(self, key_padding_mask: Tensor | None, k: Tensor) -> Tensor | None:
        """PyTorch's mask, True or -inf = ignore, as ours, ``(B, M)`` True = may be attended to."""
        if key_padding_mask is None:
            return None
        if key_padding_mask.dtype == torch.bool:
            mask = ~key_padding_mask
        elif key_padding_mask.dtype.is_floating_point:
            mask = key_padding_mask == 0
            if not torch.compiler.is_compiling() and bool((key_padding_mask[~mask] != -torch.inf).any()):
                raise ValueError(
                    "key_padding_mask must hold only 0 and -inf, or be bool: a finite bias cannot be applied"
                )
        else:
            raise TypeError(f"key_padding_mask must be bool or floating, not {key_padding_mask.dtype}")
        n_added = k.shape[2] - mask.shape[-1]  # keys that this module has added
        expected = (self.bias_k is not None) + self.add_zero_attn
        if mask.dim() != 2 or len(mask) != len(k) or n_added != expected:
            raise ValueError(
                f"key_padding_mask has the shape {tuple(mask.shape)}, but {(len(k), k.shape[2] - expected)} is needed"
            )
        return nn.functional.pad(mask, (0, n_added), value=True)

    def _dense_with_map(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor]:
        """Dense attention with its N × M map, for weights and arbitrary masks."""
        if key_mask is not None:  # weight zero times NaN is NaN
            hidden = ~key_mask[:, None, :, None]  # (B, 1, M, 1)
            k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
        scores = (q * self.head_dim**-0.5) @ k.transpose(-1, -2)  # (B, heads, N, M)
        if attn_mask is not None:
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.view(len(q), self.num_heads, *attn_mask.shape[1:])  # (B, heads, N, M)
            n_added = k.shape[2] - attn_mask.shape[-1]
            attn_mask = nn.functional.pad(attn_mask, (0, n_added), value=0)
            scores = scores.masked_fill(attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        elif is_causal:
            scores = scores.masked_fill(~scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        if key_mask is not None:
            scores = scores.masked_fill(~key_mask[:, None, None], -torch.inf)
        alive = (scores != -torch.inf).any(-1, keepdim=True)  # a query that may see nothing gets zeros
        weights = torch.where(alive, torch.where(alive, scores, 0.0).softmax(-1), 0.0)
        weights = nn.functional.dropout(weights, self.dropout, self.training)
        return weights @ v, weights
