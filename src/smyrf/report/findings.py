"""What a report shows: a model's heads, its outputs with other attention, a tuned plan, a text as heads see it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from smyrf.analysis.calls import model_calls
from smyrf.analysis.inspection import HeadInspection, inspect_heads
from smyrf.analysis.tokens import TokenView
from smyrf.bench import results
from smyrf.compare import command as comparing
from smyrf.compare.contenders import Tuned, default_methods
from smyrf.compare.run import Row
from smyrf.inspect.command import Loaded, explain, view_tokens
from smyrf.inspect.layers import by_family
from smyrf.inspect.table import sentences
from smyrf.methods import Method, method_label
from smyrf.tuning.plan import Plan

# Documents whose maps are looked at, and singular values of a long map.
N_INSPECTED, N_VALUES = 2, 64


@dataclass(frozen=True)
class Findings:
    """Everything about a model that a page shows.

    Args:
        title: the model.
        says: what it was run on.
        rows: the model with each attention, dense first.
        heads: every head of every layer.
        hard: sentences on what makes heads hard.
        plan: what `smyrf.tune` gives it.
        max_error: that the plan was made for.
        views: a text as some heads see it; none for a model that does not read text.
        machine: where it was measured.
        command: that made it.
    """

    title: str
    says: str
    rows: tuple[Row, ...]
    heads: tuple[HeadInspection, ...]
    hard: tuple[str, ...]
    plan: Plan
    max_error: float
    views: tuple[TokenView, ...]
    machine: dict[str, Any]
    command: str


def gather(
    prepared: comparing.Prepared,
    methods: list[Method],
    *,
    max_error: float,
    memory: bool,
    threads: int,
    rows: int,
    console: Console,
) -> Findings:
    """Measures everything about a model.

    Args:
        methods: none for those by default.
        max_error: of a tuned plan.
        memory: measure peak memory too.
        rows: queries of each document that are looked at.

    Raises:
        ValueError: says what is wrong with the model.
    """
    comparison, seed = prepared.comparison, prepared.comparison.seed
    chosen = methods or default_methods(comparison.n_keys)
    tuned = Tuned(max_error, fallback=False)
    compared = comparing.compare(
        prepared,
        [*chosen, tuned],
        max_error=max_error,
        threads=threads,
        memory=memory,
        json=None,
        plot=None,
        console=console,
    )
    calls = model_calls(comparison.model, prepared.inputs.first(N_INSPECTED))
    total = sum(call.q.shape[1] for call in calls if not call.only_dense)
    found = inspect_heads(calls, chosen, rows=rows, n_values=N_VALUES, seed=seed)
    heads = list(track(found, "heads", total=total, console=console, transient=True))
    hard = explain(heads)
    views = []
    if prepared.kind == "text":
        loaded = Loaded(prepared.name, prepared.kind, prepared.inputs, calls)
        for head in _shown(heads):
            for numbers in by_family(heads).values():
                method = heads[0].outcomes[numbers[len(numbers) // 2]].method
                views.append(view_tokens(loaded, method, layer=head.layer, head=head.head, seed=seed))
    return Findings(
        title=prepared.title,
        says=prepared.inputs.says,
        rows=tuple(compared),
        heads=tuple(heads),
        hard=tuple(line.strip() for one in hard for line in sentences(one)),
        plan=comparison.plans[tuned],
        max_error=max_error,
        views=tuple(views),
        machine={**results.machine(), "threads": threads},
        command=results.command_line(),
    )


def _shown(heads: list[HeadInspection]) -> list[HeadInspection]:
    """The head in the middle and the hardest one, by the error of the last method."""
    ordered = sorted(heads, key=lambda head: head.outcomes[-1].error)
    return [ordered[len(ordered) // 2], ordered[-1]][: len(heads)]


def view_label(view: TokenView) -> str:
    """What a view is called where one is chosen."""
    return f"layer {view.layer}, head {view.head}: {method_label(view.method)}"


def write_page(findings: Findings, path: Path) -> None:
    """Writes the page, under a temporary name first."""
    from smyrf.atomic import write_text
    from smyrf.report.page import build_page

    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, build_page(findings))
