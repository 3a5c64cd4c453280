"""Compare a model with itself under other attention: one row for dense attention and one for each contender."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from smyrf.call import Call
from smyrf.methods import Dense, Method
from smyrf.models.calls import model_calls
from smyrf.models.plan import Plan
from smyrf.models.replace import replace_attention, restore_attention
from smyrf.models.report import Report
from smyrf.tools.compare.contenders import Contender, Tuned
from smyrf.tools.compare.drift import Drift, Outputs, drift, valid_outputs
from smyrf.tools.compare.inputs import Batch
from smyrf.tools.progress import track
from smyrf.tuning.search import plan_layers
from smyrf.tuning.timer import best_times

# Documents that `Tuned` is tuned on, and seconds to time each row.
TUNED_DOCUMENTS = 4
TIMING_SECONDS = 1.5


@dataclass(frozen=True)
class Cost:
    """Cost of attention for one document, averaged over the model's attention calls.

    Args:
        key_visits: keys that a query is compared with.
        share: key visits relative to dense attention.
        score_bytes: size of the scores of all heads, the paper's memory.
    """

    key_visits: float
    share: float
    score_bytes: float


@dataclass(frozen=True)
class ModelRow:
    """One contender, or dense attention.

    Args:
        drift: of its outputs from those of dense attention.
        methods: of the replaced layers, by layer name.
        dense_layers: number of layers that stay dense, by reason.
        seconds: best time of a forward pass per document; None if it was not measured.
        extra_bytes: peak memory of a forward pass on one document; None if it was not measured.
        note: why something was not measured.
    """

    contender: Contender
    drift: Drift
    cost: Cost
    methods: Mapping[str, Method] = field(default_factory=dict)
    dense_layers: Mapping[str, int] = field(default_factory=dict)
    seconds: float | None = None
    extra_bytes: int | None = None
    note: str = ""

    @property
    def label(self) -> str:
        return self.contender.label

    @property
    def family(self) -> str:
        return self.contender.family

    def as_dict(self, dense: ModelRow) -> dict[str, Any]:
        """The row of a result file."""
        if isinstance(self.contender, Tuned):
            layers = {name: method.to_dict() for name, method in self.methods.items()}
            method = {"kind": "tuned", **asdict(self.contender), "layers": layers}
        else:
            method = self.contender.to_dict()
        return {
            "label": self.label,
            "family": self.family,
            "method": method,
            **{
                name: value if value is None or math.isfinite(value) else None
                for name, value in asdict(self.drift).items()
            },
            **asdict(self.cost),
            "layers_replaced": len(self.methods),
            "layers_dense": dict(self.dense_layers),
            "seconds": self.seconds,
            "time_relative_to_dense": relative_time(self, dense),
            "extra_bytes": self.extra_bytes,
            "note": self.note,
        }


def relative_time(row: ModelRow, dense: ModelRow) -> float | None:
    """Time as a multiple of that of dense attention, if both were measured."""
    return row.seconds / dense.seconds if row.seconds and dense.seconds else None


class Comparison:
    """A model on some batches, with dense attention and then with others; the model is left as it was found.

    Args:
        model: a transformers model.
        batches: keyword arguments for it.
        seed: of random methods.
        console: shows progress; nowhere by default.

    Raises:
        ValueError: says why the model cannot be run, or that it has nothing to replace.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Batch], seed: int = 0, console: Console | None = None
    ) -> None:
        self.layers = replace_attention(model, Dense()).layers  # raises where there is nothing to replace
        restore_attention(model)
        self.model, self.batches, self.seed = model, batches, seed
        self.console = Console(quiet=True) if console is None else console
        first = {name: tensor[:1] for name, tensor in batches[0].items()}
        try:
            with torch.no_grad():
                hidden = getattr(model(**first), "last_hidden_state", None)
        except Exception as error:  # a foreign model may raise anything
            shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in first.items())
            raise ValueError(f"{type(model).__name__} cannot be run on {shapes}: {error}") from error
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            raise ValueError(f"{type(model).__name__} has no last_hidden_state of the shape (batch, length, width)")
        # Only the shapes of the calls are needed.
        self.calls = [
            replace(call, q=call.q.to("meta"), k=call.k.to("meta"), v=call.v.to("meta"))
            for call in model_calls(model, first)
        ]
        self.outputs: Outputs | None = None
        self.plans: dict[Tuned, Plan] = {}  # results of tuning

    @property
    def n_keys(self) -> int:
        """Number of keys of the longest attention call."""
        return max(call.n_keys for call in self.calls)

    def dense(self) -> ModelRow:
        """Run the model as it is, and keep its outputs."""
        self.outputs = self._run("dense attention")
        if not bool(self.outputs.tokens.isfinite().all()):
            raise ValueError(f"{type(self.model).__name__} gives numbers that are not finite, even without replacement")
        return ModelRow(Dense(), drift(self.outputs, self.outputs), self._cost({}))

    def row(self, contender: Contender) -> ModelRow:
        """Run the model with other attention; call `dense` first."""
        assert self.outputs is not None
        method = self._tuned(contender) if isinstance(contender, Tuned) else contender
        report = replace_attention(self.model, method)
        try:  # if all layers stay dense, the outputs are known
            outputs = self._run(contender.label) if report.replaced else self.outputs
        finally:
            restore_attention(self.model)
        methods = {layer.name: layer.method for layer in report.replaced if layer.calls.served}
        return ModelRow(
            contender, drift(outputs, self.outputs), self._cost(methods), methods, dict(_dense_layers(report, methods))
        )

    def times(self, rows: Sequence[ModelRow]) -> Iterator[tuple[int, ModelRow]]:
        """Yield (number of a row, row with its time) repeatedly as times improve, so that progress can be shown.

        Rows in which all layers stay dense share the time of the first row.
        """
        batch = self.batches[0]
        same = [i for i, row in enumerate(rows) if not row.methods]
        n_documents = len(next(iter(batch.values())))

        def prepare(name: str) -> None:
            restore_attention(self.model)
            if methods := rows[int(name)].methods:
                replace_attention(self.model, methods)

        def call() -> None:
            with torch.no_grad():
                self.model(**batch)

        try:
            others = {str(i): call for i in range(len(rows)) if i == 0 or i not in same}
            for name, best in best_times(others, TIMING_SECONDS, prepare):
                for i in same if name == "0" else [int(name)]:
                    yield i, replace(rows[i], seconds=best / n_documents)
        finally:
            restore_attention(self.model)

    def _run(self, what: str) -> Outputs:
        torch.manual_seed(self.seed)
        found = []
        for batch in track(self.batches, what, total=len(self.batches), console=self.console):
            try:
                with torch.no_grad():
                    hidden = self.model(**batch).last_hidden_state
            except (IndexError, RuntimeError) as error:  # such as token ids beyond the vocabulary of the model
                raise ValueError(f"{type(self.model).__name__} cannot be run on its inputs: {error}") from error
            found.append(valid_outputs(hidden, valid_tokens(self.model, batch, hidden.shape[1])))
        return Outputs(*(torch.cat(parts) for parts in zip(*found, strict=True)))

    def _tuned(self, contender: Tuned) -> Plan:
        """A plan for the layers that can be replaced; a model may also attend outside of them."""
        batch = {name: tensor[:TUNED_DOCUMENTS] for name, tensor in self.batches[0].items()}
        names = {layer.name for layer in self.layers}
        calls = [call for call in model_calls(self.model, batch) if call.name in names]
        layers = plan_layers(
            calls, contender.max_error, fallback=contender.fallback, documents=TUNED_DOCUMENTS, seed=self.seed
        )
        found = tuple(track(layers, f"{contender.label}: tuning", total=len(calls), console=self.console))
        self.plans[contender] = Plan(found, contender.max_error, "")
        return self.plans[contender]

    def _cost(self, methods: Mapping[str, Method]) -> Cost:
        def of(call: Call, method: Method) -> tuple[float, float]:
            visits = call.key_visits(method)
            return visits, visits * call.n_queries * call.q.shape[1] * call.q.element_size()

        visits, score_bytes = zip(*(of(call, methods.get(call.name, Dense())) for call in self.calls), strict=True)
        dense = fmean(call.key_visits(Dense()) for call in self.calls)
        return Cost(fmean(visits), fmean(visits) / dense, fmean(score_bytes))


def valid_tokens(model: Any, batch: Batch, n_tokens: int) -> Tensor | None:
    """Which outputs are not padding, ``(batch, n_tokens)`` bool; None if all are valid.

    A model that reads raw sound has fewer outputs than samples, and converts the mask itself.
    """
    mask = batch.get("attention_mask")
    if mask is None or mask.shape[1] == n_tokens:
        return None if mask is None else mask.bool()
    shorten = getattr(model, "_get_feature_vector_attention_mask", None)
    return None if shorten is None else shorten(n_tokens, mask).bool()


def _dense_layers(report: Report, methods: Mapping[str, Method]) -> Counter[str]:
    """Number of layers that stayed dense, by reason."""
    found: Counter[str] = Counter()
    for layer in report.layers:
        if layer.name not in methods:
            found[layer.why or ", ".join(layer.calls.dense) or "it was not called"] += 1
    return found
