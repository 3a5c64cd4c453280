"""The attention calls of a model, as `smyrf.attention` would have to make them.

Shapes: batch, heads, N queries, M keys, D width, E value width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from smyrf.attention import attention, four_axes
from smyrf.methods import Dense, Method
from smyrf.models.capture import CaptureAttention
from smyrf.models.masks import read_mask


@dataclass(frozen=True)
class Call:
    """Arguments of one attention call.

    Args:
        q: ``(batch, heads, N, D)``.
        k: ``(batch, kv_heads, M, D)``.
        v: ``(batch, kv_heads, M, E)``.
        scale: of the scores.
        key_mask: ``(batch, M)`` bool, True = may be attended to.
        is_causal: query i sees keys j <= i.
        only_dense: why only dense attention can do this; "" if others can.
        name: of the module that makes the call; "" if it is not known.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    key_mask: Tensor | None = None
    is_causal: bool = False
    only_dense: str = ""
    name: str = ""

    @property
    def n_queries(self) -> int:
        return self.q.shape[2]

    @property
    def n_keys(self) -> int:
        return self.k.shape[2]

    def key_visits(self, method: Method) -> int:
        """Keys that a query would be compared with; in causal attention the mean over queries."""
        return method.plan(self.n_queries, self.n_keys, self.is_causal).key_visits

    def take(self, documents: list[int]) -> Call:
        """Some rows of the batch.

        Example:
            >>> x = torch.randn(3, 2, 5, 4)
            >>> Call(x, x, x, 0.5).take([1, 2]).q.shape
            torch.Size([2, 2, 5, 4])
        """
        if documents == list(range(len(self.q))):
            return self
        q, k, v = (x[documents] for x in (self.q, self.k, self.v))
        mask = None if self.key_mask is None else self.key_mask[documents]
        return replace(self, q=q, k=k, v=v, key_mask=mask)

    def head(self, document: int, head: int) -> Call:
        """One head of one row of the batch, with the key head that it uses.

        Example:
            >>> q, k = torch.randn(3, 4, 5, 6), torch.randn(3, 2, 7, 6)
            >>> one = Call(q, k, k, 0.5).head(document=1, head=3)
            >>> one.q.shape, torch.equal(one.k[0, 0], k[1, 1])
            (torch.Size([1, 1, 5, 6]), True)
        """
        its = head * self.k.shape[1] // self.q.shape[1]
        rows = slice(document, document + 1)
        q, k, v = self.q[rows, head : head + 1], self.k[rows, its : its + 1], self.v[rows, its : its + 1]
        return replace(self, q=q, k=k, v=v, key_mask=None if self.key_mask is None else self.key_mask[rows])

    def read_rows(self, document: int = 0) -> Tensor:
        """Queries whose outputs somebody reads: where queries and keys are the same tokens, not those of padding.

        Example:
            >>> x, mask = torch.randn(1, 2, 4, 3), torch.tensor([[True, True, False, True]])
            >>> Call(x, x, x, 0.5, mask).read_rows()
            tensor([0, 1, 3])
        """
        if self.key_mask is None or self.n_queries != self.n_keys or not bool(self.key_mask[document].any()):
            return torch.arange(self.n_queries)
        return self.key_mask[document].nonzero()[:, 0].cpu()

    def sample_rows(self, n_rows: int, seed: int, document: int = 0) -> Tensor:
        """So many of `read_rows` at random, in their order; all if there are no more.

        Example:
            >>> x = torch.randn(1, 2, 9, 3)
            >>> len(Call(x, x, x, 0.5).sample_rows(4, seed=0))
            4
        """
        read = self.read_rows(document)
        order = torch.randperm(len(read), generator=torch.Generator().manual_seed(seed))
        return read[order[:n_rows]].sort().values  # (R,)

    def first_half(self) -> Call:
        """The first half of the queries on the first half of the keys.

        Example:
            >>> x = torch.randn(1, 2, 7, 4)
            >>> Call(x, x, x, 0.5).first_half().k.shape
            torch.Size([1, 2, 3, 4])
        """
        q = self.q[:, :, : max(self.n_queries // 2, 1)]
        k, v = (x[:, :, : max(self.n_keys // 2, 1)] for x in (self.k, self.v))
        mask = None if self.key_mask is None else self.key_mask[:, : k.shape[2]]
        return replace(self, q=q, k=k, v=v, key_mask=mask)


def model_calls(model: nn.Module, batch: Any) -> list[Call]:
    """Runs the model on a batch, in eval mode and without gradients, and takes its attention calls.

    Args:
        model: is left as it was found.
        batch: a mapping of keyword arguments, a tuple or list of arguments, or the only argument.

    Example:
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.randn(1, 5, 8)
        >>> calls = model_calls(layer, {"query": x, "key": x, "value": x, "need_weights": False})
        >>> len(calls), calls[0].q.shape
        (1, torch.Size([1, 2, 5, 4]))
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with _through_sdpa(model), torch.no_grad(), CaptureAttention() as capture, _callers(model, capture) as names:
            if isinstance(batch, Mapping):
                model(**batch)
            elif isinstance(batch, tuple | list):
                model(*batch)
            else:
                model(batch)
    finally:
        for module in training:
            module.training = True
    if not capture.calls:
        raise ValueError(
            f"model: {type(model).__name__} made no call of F.scaled_dot_product_attention on this batch, so there is "
            "nothing to approximate"
        )
    return [
        replace(_call(one.q, one.k, one.v, one.scale, mask, is_causal), name=names.get(i, ""))
        for i, (one, (mask, is_causal)) in enumerate(zip(capture.calls, capture.masks, strict=True))
    ]


def given_calls(qkv: Sequence[Any]) -> list[Call]:
    """Calls from what a user gives: one (q, k, v), or a sequence of (q, k, v) or (q, k, v, scale).

    Example:
        >>> x = torch.randn(1, 2, 5, 4)
        >>> given_calls((x, x, x))[0].scale, len(given_calls([(x, x, x), (x, x, x, 1.0)]))
        (0.5, 2)
    """
    if len(qkv) == 3 and all(isinstance(x, Tensor) for x in qkv):
        qkv = [qkv]
    calls = []
    for i, one in enumerate(qkv):
        if not isinstance(one, tuple | list) or len(one) not in (3, 4):
            raise TypeError(f"layer {i} must be (q, k, v) or (q, k, v, scale), not {type(one).__name__}")
        q, k, v = one[:3]
        scale = one[3] if len(one) == 4 else None
        try:  # one query is enough to have everything checked
            first = q[..., :1, :] if isinstance(q, Tensor) and q.dim() > 1 else q
            attention(first, k, v, method=Dense(), scale=scale, enable_gqa=True)
        except (TypeError, ValueError) as error:
            raise type(error)(f"layer {i}: {error}") from error
        if q.numel() == 0:
            raise ValueError(f"layer {i}: q has the shape {tuple(q.shape)}, and with it nothing to measure an error on")
        calls.append(_call(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, None, False))
    if not calls:
        raise ValueError("there is no layer to tune")
    return calls


def find_call(calls: Sequence[Call], layer: int, head: int = 0, document: int = 0) -> Call:
    """The call of a layer, which has this head and this document.

    Raises:
        ValueError: there is no such layer, head or document.

    Example:
        >>> x = torch.randn(1, 2, 5, 4)
        >>> find_call([Call(x, x, x, 0.5, name="first")], layer=0, head=1).name
        'first'
    """
    if not 0 <= layer < len(calls):
        raise ValueError(f"{layer=} must be from 0 to {len(calls) - 1}")
    call = calls[layer]
    for name, value, end in (("head", head, call.q.shape[1]), ("document", document, len(call.q))):
        if not 0 <= value < end:
            raise ValueError(f"{name}={value} must be from 0 to {end - 1}")
    return call


@contextmanager
def _through_sdpa(model: nn.Module) -> Iterator[None]:
    """Transformers models with another implementation call PyTorch's function inside the block."""
    found = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    configs = [config for config in found.values() if getattr(config, "_attn_implementation_internal", None)]
    before = [config._attn_implementation_internal for config in configs]
    try:
        change: Any = getattr(model, "set_attn_implementation", None)
        if change is not None and any(used != "sdpa" and not used.startswith("smyrf") for used in before):
            change("sdpa")  # which raises where the model cannot
        for config in configs:
            if config._attn_implementation_internal.startswith("smyrf"):
                config._attn_implementation_internal = "sdpa"
        yield
    finally:
        for config, used in zip(configs, before, strict=True):
            config._attn_implementation_internal = used


@contextmanager
def _callers(model: nn.Module, capture: CaptureAttention) -> Iterator[dict[int, str]]:
    """Inside the block, notes for each captured call the name of the innermost module that has made it."""
    names: dict[int, str] = {}
    starts: list[int] = []
    handles = []
    for name, module in model.named_modules():

        def enter(*_: Any) -> None:
            starts.append(len(capture.calls))

        def leave(*_: Any, name: str = name) -> None:
            for call in range(starts.pop(), len(capture.calls)):
                names.setdefault(call, name)  # inner modules come first

        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()


def _call(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, is_causal: bool) -> Call:
    n_axes = q.dim()
    q, k, v = (four_axes(x) for x in (q, k, v))
    if mask is None:
        return Call(q, k, v, scale, None, is_causal)
    if n_axes > 4:
        return Call(q, k, v, scale, only_dense="it has a mask and more than four axes")
    key_mask, causal, reason = read_mask(mask, len(q), q.shape[2], k.shape[2])
    return Call(q, k, v, scale, key_mask, causal or is_causal, reason)
