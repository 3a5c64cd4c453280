"""`AdaptiveSchedule`: a budget that follows the error during training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from smyrf.call import Call, four_axes, why_dense
from smyrf.methods import Method, method_from_dict
from smyrf.nn import MultiheadAttention, SmyrfAttention
from smyrf.seeds import check_seed
from smyrf.tuning.estimate import Sample
from smyrf.tuning.search import check_counts, check_target


class Observation(NamedTuple):
    """The estimated error of a layer, and the method that it got.

    Args:
        step: calls of the schedule before the observed forward pass.
        layer: the module's name in the model.
        error: estimated relative error of the output, with the method before the change.
        method: from then on.
    """

    step: int
    layer: str
    error: float
    method: Method


class AdaptiveSchedule:
    """Raise or lower the budget of a model's attention during training, to keep its error below a bound.

    Attention sharpens as a model learns, so a budget that is enough at first may be too small later. Call the
    schedule once after every step of a training loop. Every `every` steps it observes the next forward pass in
    training mode, and estimates the error of each layer on a sample of rows of one document. A layer above
    `max_error` then gets `factor` times its key visits; a layer below ``low * max_error`` gets its key visits
    divided by `factor`. Methods change only at these calls: all passes of a step use the same method, including
    those that activation checkpointing repeats.

    Args:
        model: contains `smyrf.nn.SmyrfAttention` or `smyrf.nn.MultiheadAttention`, or is one of these. The schedule
            starts from their methods: it changes the budget of `Tangent` and the rounds of `Smyrf`, and
            leaves `Dense` and other layers alone.
        max_error: bound on the relative error of a layer's output.
        every: steps between estimates.
        low: below this share of the bound the budget is lowered.
        factor: by which key visits change.
        shares: least and greatest key visits, as shares of the keys.
        rows: queries in the sample.
        seed: of the sample and of clusters; PyTorch's own generator is never used.

    Attributes:
        history: all observations so far.

    Example:
        >>> import torch, smyrf
        >>> model = smyrf.nn.MultiheadAttention(32, 4, batch_first=True, method=smyrf.Tangent(0.2))
        >>> schedule = smyrf.AdaptiveSchedule(model, max_error=0.01, every=2)
        >>> for step in range(6):
        ...     x = torch.randn(1, 200, 32)
        ...     loss = model(x, x, x)[0].square().mean()  # and backward(), and a step of the optimizer
        ...     schedule()
        >>> [(seen.step, seen.method.budget) for seen in schedule.history]
        [(0, 0.25), (2, 0.3125), (4, 0.390625)]
        >>> model.method
        Tangent(budget=0.390625, ...)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_error: float,
        every: int = 100,
        low: float = 0.5,
        factor: float = 1.25,
        shares: tuple[float, float] = (1 / 64, 1.0),
        rows: int = 64,
        seed: int = 0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        check_target(max_error)
        check_counts(every=every, rows=rows)
        check_seed(seed)
        if not _is_number(low) or not 0.0 <= low < 1.0:
            raise ValueError(f"{low=} must be a number in [0, 1)")
        if not _is_number(factor) or not 1.0 < factor < math.inf:
            raise ValueError(f"{factor=} must be a number greater than 1")
        if not isinstance(shares, Sequence) or len(shares) != 2 or not all(_is_number(share) for share in shares):
            raise TypeError(f"{shares=} must be two numbers")
        if not 0.0 < shares[0] <= shares[1] <= 1.0:
            raise ValueError(f"{shares=} must be two numbers in (0, 1], in ascending order")
        self.layers: dict[str, SmyrfAttention | MultiheadAttention] = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, SmyrfAttention | MultiheadAttention) and module.method.is_scalable
        }
        if not self.layers:
            raise ValueError(
                f"model: {type(model).__name__} has no smyrf.nn.SmyrfAttention or smyrf.nn.MultiheadAttention with a "
                "Smyrf or Tangent, so there is nothing to schedule"
            )
        for name, module in self.layers.items():
            try:
                module.method.scaled(factor, 1, 1)
            except ValueError as error:
                raise ValueError(f"method={module.method} of layer {name!r} cannot be scheduled: {error}") from error
        self.max_error = max_error
        self.every = every
        self.low = low
        self.factor = factor
        self.shares = shares
        self.rows = rows
        self.seed = seed
        self.step = 0
        self.history: list[Observation] = []
        self._seen: dict[str, tuple[float, int, int]] = {}
        # Not as a decorator: it imports the compiler, which takes a second.
        self._observed = torch.compiler.disable(self._observe)  # type: ignore[no-untyped-call]
        self._watch()

    def __call__(self) -> None:
        """Adapt the methods. Call this after every step of the training loop."""
        for name, (error, n_queries, n_keys) in self._seen.items():
            layer = self.layers[name]
            layer.method = self.adapted(layer.method, error, n_queries, n_keys)
            self.history.append(Observation(self.step, name, error, layer.method))
        self._seen = {}
        self.step += 1
        self._watch()

    def adapted(self, method: Method, error: float, n_queries: int, n_keys: int) -> Method:
        """The method to use after an error was estimated on N queries and M keys.

        Example:
            >>> import smyrf
            >>> layer = smyrf.nn.SmyrfAttention(smyrf.Smyrf(8, 32))
            >>> schedule = AdaptiveSchedule(layer, max_error=0.1)
            >>> [schedule.adapted(layer.method, error, 512, 512).n_hashes for error in (0.2, 0.07, 0.02)]
            [10, 8, 6]
        """
        if self.low * self.max_error <= error <= self.max_error:
            change = 1.0
        else:  # NaN counts as above the bound
            change = 1 / self.factor if error < self.max_error else self.factor
        return method.scaled(change, n_queries, n_keys, self.shares)

    def state_dict(self) -> dict[str, Any]:
        """The state with which a run that was stopped between two steps resumes exactly; it fits JSON."""
        return {
            "step": self.step,
            "methods": {name: layer.method.to_dict() for name, layer in self.layers.items()},
            "history": [{**seen._asdict(), "method": seen.method.to_dict()} for seen in self.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`, which also restores the methods of the model's layers.

        Raises:
            ValueError: names what does not fit; nothing was changed.
        """
        try:
            step = int(state["step"])
            methods = {name: method_from_dict(method) for name, method in state["methods"].items()}
            history = [
                Observation(
                    int(seen["step"]), str(seen["layer"]), float(seen["error"]), method_from_dict(seen["method"])
                )
                for seen in state["history"]
            ]
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"state is not that of a schedule: {error!r}") from error
        if step < 0 or not all(method.is_scalable for method in methods.values()):
            raise ValueError(f"state is not that of a schedule: {step=}, methods {list(methods.values())}")
        if methods.keys() != self.layers.keys():
            raise ValueError(f"state is for the layers {sorted(methods)}, but the model has {sorted(self.layers)}")
        for name, layer in self.layers.items():
            layer.method = methods[name]
        self.step, self.history, self._seen = step, history, {}
        self._watch()

    def _watch(self) -> None:
        """Observe the next forward pass of each layer, if an estimate is due."""
        due = self.step % self.every == 0
        for name, layer in self.layers.items():
            layer.observer = partial(self._observed, name) if due else None

    def _observe(
        self, name: str, q: Tensor, k: Tensor, v: Tensor, scale: float | None, key_mask: Tensor | None, is_causal: bool
    ) -> None:
        layer = self.layers[name]
        layer.observer = None  # once, even if activation checkpointing repeats the pass
        q, k, v = (four_axes(x.detach()) for x in (q, k, v))
        key_mask = None if key_mask is None else key_mask.reshape(len(q), k.shape[2])  # (batch, M)
        call = Call(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, key_mask, is_causal)
        if len(call.q) == 0 or why_dense(call, layer.method) is not None:
            return  # nothing is approximated, so there is nothing to learn about the budget
        document = call.take([self.step // self.every % len(call.q)])
        sample = Sample(document, self.rows, self.seed + self.step, getattr(layer, "backend", None))
        error = sample.error(layer.method)
        self._seen[name] = (error, call.n_queries, call.n_keys)


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)
