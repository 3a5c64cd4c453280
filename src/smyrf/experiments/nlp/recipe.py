"""`Recipe`: a complete, frozen description of a fine-tuning run."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import Any, NamedTuple

from smyrf.experiments.nlp.tasks import find_task
from smyrf.experiments.validation import check_between, check_ints, known_fields
from smyrf.methods import Dense, Method, check_method, method_from_dict
from smyrf.seeds import check_seed

PADS = ("max_length", "longest", "grouped")
# Upper limits, far above any use.
_MOST = {"epochs": 1e6, "learning_rate": 1e30}


class InputHashes(NamedTuple):
    """Hashes of the data and the model that a recipe names: other content under the same name makes another run.

    Args:
        data: hash of the texts and labels of all splits.
        model: hash of the model's files, or its commit on the hub; "" if there is none.
    """

    data: str
    model: str


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One model, fine-tuned on one task with one method and one seed, and evaluated with one or more methods.

    Args:
        task: a name in `smyrf.experiments.nlp.tasks.TASKS`.
        model: path or hub name of an encoder.
        train_method: attention during training.
        eval_methods: attention during evaluation, one after another; () for the method of training.
        max_length: tokens per text; longer texts are truncated.
        pad: "max_length", as in the paper; "longest", of a batch, which is faster but leaves fewer keys to skip; or
            "grouped", the same with batches of similar lengths, which is faster still.
        batch_size: rows per optimisation step, over all processes.
        epochs: passes over the training split.
        max_steps: stop after this many steps; None for no limit.
        learning_rate: peak value; it decays linearly to 0.
        warmup: fraction of the steps with linear warm-up.
        weight_decay: weight decay of AdamW.
        n_train, n_eval: sample sizes of the splits; None for all rows.
        seed: seed of the new layer's weights, the order of rows, dropout and hashes.

    Example:
        >>> from smyrf.methods import Smyrf
        >>> recipe = Recipe(task="rte", model="bert-base-uncased", train_method=Smyrf(2, 32))
        >>> recipe.label
        'Smyrf 2×32'
        >>> Recipe.from_dict(recipe.to_dict()) == recipe
        True
    """

    task: str
    model: str
    train_method: Method = field(default_factory=Dense)
    eval_methods: tuple[Method, ...] = ()
    max_length: int = 128
    pad: str = "max_length"
    batch_size: int = 16
    epochs: float = 3.0
    max_steps: int | None = None
    learning_rate: float = 3e-5
    warmup: float = 0.1
    weight_decay: float = 0.0
    n_train: int | None = None
    n_eval: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "task", find_task(self.task).name)
        if not isinstance(self.model, str) or not self.model:
            raise TypeError(f"model={self.model!r} must be a path or a hub name, as a str")
        if isinstance(self.eval_methods, Method):
            raise TypeError(f"eval_methods={self.eval_methods!r} must be a tuple of methods")
        check_method(self.train_method)
        methods = tuple(self.eval_methods) or (self.train_method,)
        for method in methods:
            check_method(method)
        if len(set(methods)) < len(methods):
            raise ValueError(f"eval_methods: {', '.join(method.label for method in methods)} has a method twice")
        object.__setattr__(self, "eval_methods", methods)
        if self.pad not in PADS:
            raise ValueError(f"pad={self.pad!r} must be one of {', '.join(PADS)}")
        check_ints(self, {"max_length": 4, "batch_size": 1})
        limits = {"max_steps": 1, "n_train": 2, "n_eval": 2}
        check_ints(self, {name: least for name, least in limits.items() if getattr(self, name) is not None})
        for name, most in _MOST.items():
            check_between(self, (name,), most, zero=False)
        check_between(self, ("warmup", "weight_decay"), 1.0, zero=True)
        check_seed(self.seed, bits=32)

    @property
    def label(self) -> str:
        """Label of the training method, for tables."""
        return self.train_method.label

    def name(self, inputs: InputHashes) -> str:
        """Name of the run's files: its main settings, then a hash of all of them.

        Example:
            >>> from smyrf.methods import Smyrf
            >>> recipe = Recipe(task="rte", model="some/bert", train_method=Smyrf(2, 32), seed=1)
            >>> recipe.name(InputHashes("a", "b")).rsplit("-", 1)[0]
            'rte-bert-smyrf-2x32-128-seed1'
        """
        words = [self.task, short_name(self.model)[:60], self.label, str(self.max_length), f"seed{self.seed}"]
        plain = "-".join(re.sub(r"[^a-z0-9.]+", "-", word.lower().replace("×", "x")).strip("-") for word in words)
        everything = json.dumps([self.to_dict(), *inputs], sort_keys=True)
        return f"{plain}-{hashlib.sha256(everything.encode()).hexdigest()[:8]}"

    def to_dict(self) -> dict[str, Any]:
        """The recipe as JSON; `from_dict` reads it."""
        plain = {name: value for name, value in asdict(self).items() if not name.endswith(("method", "methods"))}
        methods = [method.to_dict() for method in self.eval_methods]
        return {**plain, "train_method": self.train_method.to_dict(), "eval_methods": methods}

    @staticmethod
    def from_dict(data: object) -> Recipe:
        """Read a recipe from JSON.

        Raises:
            ValueError: a field is unknown, missing or invalid.
        """
        options = known_fields(Recipe, data, "a recipe")
        try:
            options["train_method"] = method_from_dict(options["train_method"])
            options["eval_methods"] = tuple(method_from_dict(one) for one in options["eval_methods"])
            return Recipe(**options)
        except (KeyError, TypeError) as error:
            raise ValueError(f"a recipe: {error}") from error


def short_name(model: str) -> str:
    """Name of a model without its folder or owner.

    Example:
        >>> short_name("google-bert/bert-base-uncased"), short_name("./my-encoder/")
        ('bert-base-uncased', 'my-encoder')
    """
    return PurePath(model).name or "model"
