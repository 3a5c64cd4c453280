"""`Call`, the record of one attention call, and `why_dense`, which decides if a method or dense attention serves it.

Shapes: batch, heads, N queries, M keys, D width, E value width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from smyrf.methods import CausalLayout, Layout, Method


class Reason(str, Enum):
    """Why dense attention serves a call or a layer.

    Example:
        >>> print(Reason.ONE_QUERY)
        one query
    """

    # of a call
    EXACT = "the method is exact at this length"
    ONE_QUERY = "one query"
    FEW_KEYS = "fewer keys than the minimum"
    BIAS = "its mask adds a bias to the scores"
    HEAD_MASK = "its mask differs between heads"
    OTHER_MASK = "its mask is neither padding nor causal"
    MASK_AXES = "it has a mask and more than four axes"
    WEIGHTS = "attention weights were asked for"
    TENSOR_CLASS = "its tensors are nested, have no data or are of another class"
    FUNCTORCH = "it is inside a transform of torch.func"
    FORWARD_MODE = "it has forward-mode derivatives"
    FOREIGN = "only PyTorch's function takes its arguments"
    CONTINUES = "its queries continue a cache"
    WINDOW = "its window is shorter than the text"
    # of a layer and its calls
    POSITION_BIAS = "a position bias is added to its scores"
    # of a layer
    ASKED = "Dense was asked for"
    NOT_GIVEN = "no method was given for it"
    NOT_REPLACED = "it was not replaced"
    PLANNED = "the plan leaves it dense"
    NOT_DISPATCHED = "it does not ask transformers for its attention"
    NO_SDPA = "its model does not support scaled_dot_product_attention"
    OWN_PROCESSOR = "its processor does not call PyTorch's attention"
    SPLIT = "it is split over several devices"
    UNSCALED = "its scores are not scaled"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Call:
    """Arguments of one attention call, from the public boundary to the kernel.

    Args:
        q: ``(batch, heads, N, D)``.
        k: ``(batch, kv_heads, M, D)``; head h uses key head h · kv_heads // heads.
        v: ``(batch, kv_heads, M, E)``.
        scale: of the scores.
        key_mask: ``(batch, M)`` bool, True = may be attended to.
        is_causal: query i sees keys j <= i.
        dropout_p: share of the attention weights that is dropped.
        seed: ``()`` int64 on the CPU, of the clusters; None if the method draws none.
        dropout_seed: ``()`` int64 on the CPU; None without dropout.
        only_dense: why no method can serve the call; None if one can.
        name: of the module that makes the call; "" if it is not known.

    Example:
        >>> x = torch.randn(2, 3, 5, 4)
        >>> call = Call(x, x, x, scale=0.5)
        >>> call.n_queries, call.n_keys, call.n_rows
        (5, 5, 6)
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    key_mask: Tensor | None = None
    is_causal: bool = False
    dropout_p: float = 0.0
    seed: Tensor | None = None
    dropout_seed: Tensor | None = None
    only_dense: Reason | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if self.only_dense is not None:  # only PyTorch's function reads it
            return
        q, k, v, mask = self.q.shape, self.k.shape, self.v.shape, self.key_mask
        if not (
            len(q) == len(k) == len(v) == 4
            and (k[0], k[3]) == (q[0], q[3])
            and v[:3] == k[:3]
            and (q[1] == k[1] or (k[1] > 0 and q[1] % k[1] == 0))
        ):
            raise ValueError(f"q {tuple(q)}, k {tuple(k)} and v {tuple(v)} do not belong together")
        if mask is not None and (mask.dtype != torch.bool or mask.shape != (k[0], k[2])):
            raise ValueError(f"key_mask must be bool {(k[0], k[2])}, not {mask.dtype} {tuple(mask.shape)}")

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v."""
        return self.q, self.k, self.v

    @property
    def n_queries(self) -> int:
        """N."""
        return self.q.shape[2]

    @property
    def n_keys(self) -> int:
        """M."""
        return self.k.shape[2]

    @property
    def n_rows(self) -> int:
        """B = batch · heads, the independent problems of the call."""
        return self.q.shape[0] * self.q.shape[1]

    @property
    def heads_per_key_head(self) -> int:
        """Query heads that share a key head."""
        return self.q.shape[1] // self.k.shape[1]

    def plan(self, method: Method) -> Layout | CausalLayout:
        """Sizes and cost of a method on this call."""
        return method.plan(self.n_queries, self.n_keys, self.is_causal)

    def key_visits(self, method: Method) -> int:
        """Keys that a query would be compared with, averaged over queries."""
        return self.plan(method).key_visits

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
        return replace(self, q=q, k=k, v=v, key_mask=None if self.key_mask is None else self.key_mask[documents])

    def head(self, document: int, head: int) -> Call:
        """One head of one row of the batch, with the key head that it uses.

        Example:
            >>> q, k = torch.randn(3, 4, 5, 6), torch.randn(3, 2, 7, 6)
            >>> one = Call(q, k, k, 0.5).head(document=1, head=3)
            >>> one.q.shape, torch.equal(one.k[0, 0], k[1, 1])
            (torch.Size([1, 1, 5, 6]), True)
        """
        its = head // self.heads_per_key_head
        rows = slice(document, document + 1)
        q, k, v = self.q[rows, head : head + 1], self.k[rows, its : its + 1], self.v[rows, its : its + 1]
        return replace(self, q=q, k=k, v=v, key_mask=None if self.key_mask is None else self.key_mask[rows])

    def heads(self, chosen: list[int]) -> Call:
        """Some query heads, each with the key head that it uses.

        Example:
            >>> q, k = torch.randn(1, 4, 5, 6), torch.randn(1, 2, 7, 6)
            >>> Call(q, k, k, 0.5).heads([0, 3]).k.shape
            torch.Size([1, 2, 7, 6])
        """
        at = torch.tensor(chosen, device=self.q.device)
        of_keys = at // self.heads_per_key_head
        q, k, v = self.q.index_select(1, at), self.k.index_select(1, of_keys), self.v.index_select(1, of_keys)
        return replace(self, q=q, k=k, v=v)

    def read_rows(self, document: int = 0) -> Tensor:
        """Queries whose outputs are read: all but padding, where queries and keys are the same tokens.

        Example:
            >>> x, mask = torch.randn(1, 2, 4, 3), torch.tensor([[True, True, False, True]])
            >>> Call(x, x, x, 0.5, mask).read_rows()
            tensor([0, 1, 3])
        """
        if self.key_mask is None or self.n_queries != self.n_keys or not bool(self.key_mask[document].any()):
            return torch.arange(self.n_queries)
        return self.key_mask[document].nonzero()[:, 0].cpu()

    def sample_rows(self, n_rows: int, seed: int, document: int = 0) -> Tensor:
        """A random sample of `read_rows`, in ascending order; all of them if there are no more than `n_rows`.

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


def why_dense(
    call: Call,
    method: Method | None = None,
    min_keys: int = 0,
    backend: str | None = None,
    layout: Layout | CausalLayout | None = None,
) -> Reason | None:
    """Why a call is served by dense attention; None if the method serves it.

    Args:
        method: None asks whether any method could serve the call.
        min_keys: with fewer keys the call stays dense.
        backend: if one is named, it also serves calls for which the method is exact.
        layout: ``call.plan(method)``, if it is known.

    Example:
        >>> from smyrf.methods import Tangent
        >>> x = torch.randn(1, 2, 512, 4)
        >>> why_dense(Call(x, x, x, 0.5), Tangent(0.25)) is None
        True
        >>> why_dense(Call(x[:, :, :1], x, x, 0.5), Tangent(0.25))
        <Reason.ONE_QUERY: 'one query'>
    """
    if call.only_dense is not None:
        return call.only_dense
    if call.n_queries == 1:
        return Reason.ONE_QUERY
    if call.n_keys < min_keys:
        return Reason.FEW_KEYS
    if method is not None and backend is None and (layout or call.plan(method)).is_exact:
        return Reason.EXACT
    return None


def four_axes(x: Tensor) -> Tensor:
    """``(…, heads, N, D)`` → ``(batch, heads, N, D)``.

    Example:
        >>> four_axes(torch.ones(5, 4)).shape, four_axes(torch.ones(2, 3, 4, 5, 6)).shape
        (torch.Size([1, 1, 5, 4]), torch.Size([6, 4, 5, 6]))
    """
    if x.dim() == 2:
        return x[None, None]
    return x if x.dim() == 4 else x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
