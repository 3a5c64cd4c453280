"""What a report shows: a model's heads, its outputs with other attention, a tuned plan, a text as heads see it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from smyrf.methods import Method
from smyrf.models.calls import model_calls
from smyrf.models.plan import Plan
from smyrf.tools.analysis.hardness import Hardness
from smyrf.tools.analysis.inspection import HeadInspection, inspect_heads
from smyrf.tools.analysis.tokens import TokenView
from smyrf.tools.bench import results
from smyrf.tools.compare import command as comparing
from smyrf.tools.compare.contenders import Tuned, default_methods
from smyrf.tools.compare.run import Row
from smyrf.tools.inspect.command import Loaded, explain, view_tokens
from smyrf.tools.inspect.layers import by_family

# Documents whose maps are looked at, and tokens of a text that are shown: the page of a long one must open.
N_INSPECTED, N_TOKENS = 2, 512


@dataclass(frozen=True)
class Findings:
    """Everything about a model that a page shows.

    Args:
        title: the model.
        says: what it was run on.
        kind: of that: text, images or audio.
        n_documents: with which the outputs were compared.
        n_inspected: the first of them, in which the heads were looked at.
        rows: the model with each attention, dense first.
        heads: every head of every layer.
        hard: what makes heads hard, for a method of each family.
        plan: what `smyrf.tune` gives it.
        max_error: that the plan was made for.
        views: the first document as some heads see it; none for a model that does not read text.
        config: what it was run with, for the result file.
        machine: where it was measured.
        threads: that it was measured with.
        command: that made it.
    """

    title: str
    says: str
    kind: str
    n_documents: int
    n_inspected: int
    rows: tuple[Row, ...]
    heads: tuple[HeadInspection, ...]
    hard: tuple[Hardness, ...]
    plan: Plan
    max_error: float
    views: tuple[TokenView, ...]
    config: dict[str, Any]
    machine: dict[str, Any]
    threads: int
    command: str


def gather(
    prepared: comparing.Prepared,
    methods: list[Method],
    *,
    max_error: float,
    memory: bool,
    threads: int,
    rows: int,
    n_values: int,
    console: Console,
) -> Findings:
    """Measures everything about a model.

    Args:
        methods: none for those by default.
        max_error: of a tuned plan.
        memory: measure peak memory too.
        rows: queries of each document that are looked at.
        n_values: singular values of a long map; 0 for none of any map.

    Raises:
        ValueError: says what is wrong with the model.
    """
    comparison, seed = prepared.comparison, prepared.comparison.seed
    chosen = methods or default_methods(max(call.n_queries for call in comparison.calls))
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
    n_inspected = min(N_INSPECTED, prepared.inputs.n_documents)
    calls = model_calls(comparison.model, prepared.inputs.first(n_inspected))
    total = sum(call.q.shape[1] for call in calls if not call.only_dense)
    found = inspect_heads(calls, chosen, rows=rows, n_values=n_values, seed=seed)
    heads = list(track(found, "heads", total=total, console=console, transient=True))
    views = []
    if prepared.kind == "text":
        loaded = Loaded(prepared.name, prepared.kind, prepared.inputs, calls)
        for head in _shown(heads):
            for numbers in by_family(heads).values():
                method = heads[0].outcomes[numbers[len(numbers) // 2]].method
                views.append(
                    view_tokens(loaded, method, layer=head.layer, head=head.head, n_tokens=N_TOKENS, seed=seed)
                )
    return Findings(
        title=prepared.title,
        says=prepared.inputs.says,
        kind=prepared.kind,
        n_documents=prepared.inputs.n_documents,
        n_inspected=n_inspected,
        rows=tuple(compared),
        heads=tuple(heads),
        hard=tuple(explain(heads)),
        plan=comparison.plans[tuned],
        max_error=max_error,
        views=tuple(views),
        config=prepared.config() | {"inspected": n_inspected, "rows": rows, "singular": n_values},
        machine=results.machine(),
        threads=threads,
        command=results.command_line(),
    )


def _shown(heads: list[HeadInspection]) -> list[HeadInspection]:
    """The head in the middle and the hardest one, by the error of the last method."""
    ordered = sorted(heads, key=lambda head: head.outcomes[-1].error)
    return [ordered[(len(ordered) - 1) // 2], ordered[-1]][: len(heads)]


def view_label(view: TokenView) -> str:
    """What a view is called where one is chosen."""
    return f"layer {view.layer}, head {view.head}: {view.method.label}"


def write_page(findings: Findings, path: Path) -> None:
    """Writes the page, under a temporary name first."""
    from smyrf.atomic_write import write_text
    from smyrf.tools.report.page import build_page

    write_text(path, build_page(findings))


def write_data(findings: Findings, path: Path) -> None:
    """Writes everything that the page shows as JSON, with what is needed to repeat it, under a temporary name first.

    ``results`` are the rows of `smyrf compare`, ``heads`` and ``hardness`` those of `smyrf inspect`, ``plan`` is what
    `smyrf.models.plan.Plan` loads, and ``views`` are those of `smyrf inspect tokens`.
    """
    dense, plan = findings.rows[0], findings.plan
    layers = [{**vars(layer), "method": layer.method.to_dict()} for layer in plan.layers]
    also = {
        "title": findings.title,
        "heads": [head.as_dict() for head in findings.heads],
        "hardness": [one.as_dict() for one in findings.hard],
        "plan": {"max_error": plan.max_error, "machine": plan.machine, "layers": layers},
        "views": [view.as_dict() for view in findings.views],
    }
    rows = [row.as_dict(dense) for row in findings.rows]
    results.write(path, findings.command, findings.threads, findings.config, rows, also)
