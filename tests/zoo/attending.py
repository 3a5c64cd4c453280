"""Find the modules of a model that compute attention, by the functions that they call."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)


class Attending(TorchFunctionMode):
    """Inside the block, notes the modules of a model that compute attention, or what looks like it.

    That is PyTorch's attention function, its `MultiheadAttention`, and a softmax of at least three axes.

    Args:
        model: whose modules are looked at.

    Attributes:
        n_queries: by the name of the module, the largest number of queries of its calls.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.n_queries: dict[str, int] = {}
        self._model = model
        self._inside: list[str] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> Attending:
        for name, module in self._model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(partial(self._enter, name)))
            self._hooks.append(module.register_forward_hook(self._leave))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)

    def _enter(self, name: str, *_: Any) -> None:
        self._inside.append(name)

    def _leave(self, *_: Any) -> None:
        self._inside.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        n_queries = 0
        if func is F.scaled_dot_product_attention or (func in _SOFTMAX and args and args[0].dim() >= 3):
            n_queries = args[0].shape[-2]
        elif func is F.multi_head_attention_forward:
            n_queries = args[0].shape[0]
        elif func is torch._native_multi_head_attention:
            n_queries = args[0].shape[1]
        if n_queries and self._inside:
            name = self._inside[-1]
            self.n_queries[name] = max(n_queries, self.n_queries.get(name, 0))
        return func(*args, **(kwargs or {}))
