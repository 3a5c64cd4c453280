"""A budget that follows the error during training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from smyrf.attention import four_axes
from smyrf.methods import Method, Smyrf, Tangent, method_from_dict
from smyrf.call import Call
from smyrf.nn import MultiheadAttention, SmyrfAttention
from smyrf.tuning.estimate import Sample
from smyrf.tuning.search import check_counts, check_seed, check_target


class Observation(NamedTuple):
    """What was estimated of a layer, and what followed.

    Args:
        step: calls of the schedule before the observed forward pass.
        layer: the module's name in the model.
        error: estimated relative error of the output, of the method that was in use.
        method: from then on.
    """

    step: int
    layer: str
    error: float
    method: Method


class AdaptiveSchedule:
    """Raises or lowers the budget of a model's attention during training, to keep its error below a bound.

    Attention sharpens as a model learns, so that a budget which is enough at first may be too little later.
    Call the schedule once after every step of a training loop. Every so many steps it has the next forward
    pass in training mode watched, and the error of each layer estimated on a sample of rows of one document.
    A layer above `max_error` then gets `factor` times its key visits, one below ``low * max_error`` that much
    fewer. Methods change at these calls alone: all passes of a step, also those that activation checkpointing
    runs again, use the same.

    Args:
        model: with `smyrf.nn.SmyrfAttention` or `smyrf.nn.MultiheadAttention` in it, or one of these. Their
            methods are where the schedule starts: the budget of `Tangent` and the rounds of `Smyrf`
            are changed; `Dense` and other layers are left alone.
        max_error: bound on the relative error of the output of a layer.
        every: steps between estimates.
        low: below this share of the bound the budget is lowered.
        factor: of a change.
        shares: least and greatest key visits, as shares of the keys.
        rows: queries in the sample.
        seed: of the sample and of clusters; PyTorch's own generator is never used.

    Attributes:
        history: every `Observation` there was.

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
            raise ValueError(f"{shares=} must be two rising numbers in (0, 1]")
        self.layers: dict[str, SmyrfAttention | MultiheadAttention] = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, SmyrfAttention | MultiheadAttention) and isinstance(module.method, Smyrf | Tangent)
        }
        if not self.layers:
            raise ValueError(
                f"model: {type(model).__name__} has no smyrf.nn.SmyrfAttention or smyrf.nn.MultiheadAttention with a "
                "Smyrf or Tangent, so there is nothing to schedule"
            )
        for name, module in self.layers.items():
            if isinstance(module.method, Tangent) and module.method.n_near is not None:
                raise ValueError(f"method={module.method} of layer {name!r} has its own n_near, whatever the budget is")
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
        # Here and not as a decorator: it imports the compiler, which takes a second.
        self._observed = torch.compiler.disable(self._observe)  # type: ignore[no-untyped-call]
        self._watch()

    def __call__(self) -> None:
        """To be called after every step of the training loop."""
        for name, (error, n_queries, n_keys) in self._seen.items():
            layer = self.layers[name]
            layer.method = self.adapted(layer.method, error, n_queries, n_keys)
            self.history.append(Observation(self.step, name, error, layer.method))
        self._seen = {}
        self.step += 1
        self._watch()

    def adapted(self, method: Method, error: float, n_queries: int, n_keys: int) -> Method:
        """The method to use after an error was estimated.

        Example:
            >>> import smyrf
            >>> layer = smyrf.nn.SmyrfAttention(smyrf.Smyrf(8, 32))
            >>> schedule = AdaptiveSchedule(layer, max_error=0.1)
            >>> [schedule.adapted(layer.method, error, 512, 512).n_hashes for error in (0.2, 0.07, 0.02)]
            [10, 8, 6]
        """
        if self.low * self.max_error <= error <= self.max_error:
            change = 1.0
        else:  # an error that is not a number is not one below the bound
            change = 1 / self.factor if error < self.max_error else self.factor
        least, most = self.shares
        if isinstance(method, Smyrf):
            per_round = -(-n_keys // method.n_clusters(n_queries, n_keys))
            rounds = math.ceil(method.n_hashes * change) if change > 1 else math.floor(method.n_hashes * change)
            limits = least * n_keys / per_round, most * n_keys / per_round
            return replace(method, n_hashes=_within(method.n_hashes, rounds, *limits))
        if isinstance(method, Tangent) and isinstance(method.budget, int):
            visits = math.ceil(method.budget * change) if change > 1 else math.floor(method.budget * change)
            return replace(method, budget=_within(method.budget, visits, least * n_keys, most * n_keys))
        if isinstance(method, Tangent):
            return replace(method, budget=min(max(method.budget * change, least), most))
        return method

    def state_dict(self) -> dict[str, Any]:
        """All that a run which is stopped between two steps needs to go on as if it had not been, for JSON too."""
        return {
            "step": self.step,
            "methods": {name: layer.method.to_dict() for name, layer in self.layers.items()},
            "history": [{**seen._asdict(), "method": seen.method.to_dict()} for seen in self.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`; the methods of the model's layers become those of that time.

        Raises:
            ValueError: names what does not fit; then nothing was changed.
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
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"state is not that of a schedule: {error!r}") from error
        if step < 0 or not all(isinstance(method, Smyrf | Tangent) for method in methods.values()):
            raise ValueError(f"state is not that of a schedule: {step=}, methods {list(methods.values())}")
        if methods.keys() != self.layers.keys():
            raise ValueError(f"state is for the layers {sorted(methods)}, but the model has {sorted(self.layers)}")
        for name, layer in self.layers.items():
            layer.method = methods[name]
        self.step, self.history, self._seen = step, history, {}
        self._watch()

    def _watch(self) -> None:
        """Has the next forward pass of each layer observed, if it is time."""
        due = self.step % self.every == 0
        for name, layer in self.layers.items():
            layer.observer = partial(self._observed, name) if due else None

    def _observe(
        self, name: str, q: Tensor, k: Tensor, v: Tensor, scale: float | None, key_mask: Tensor | None, is_causal: bool
    ) -> None:
        self.layers[name].observer = None  # once, also if it is run again for activation checkpointing
        q, k, v = (four_axes(x.detach()) for x in (q, k, v))
        key_mask = None if key_mask is None else key_mask.reshape(len(q), k.shape[2])  # (batch, M)
        call = Call(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, key_mask, is_causal)
        method = self.layers[name].method
        if len(call.q) == 0 or method.is_exact(call.n_queries, call.n_keys):
            return  # nothing is approximated at this length, so there is nothing to learn about the budget
        document = call.take([self.step // self.every % len(call.q)])
        error = Sample(document, self.rows, self.seed + self.step).error(method)
        self._seen[name] = (error, call.n_queries, call.n_keys)


def _within(now: int, number: int, least: float, most: float) -> int:
    """The number within its limits; what is raised does not fall because this sequence is a short one."""
    bounded = max(min(max(number, math.ceil(least)), math.floor(most)), 1)
    return max(bounded, now) if number >= now else min(bounded, now)


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)
