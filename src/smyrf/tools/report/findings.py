"""Data of a report: a model's heads, its outputs with other attention, a tuned plan, a text as heads see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from smyrf.methods import Method
from smyrf.models.calls import model_calls
from smyrf.models.plan import Plan
from smyrf.tools.analysis.hardness import Hardness
from smyrf.tools.analysis.inspection import HeadInspection, inspect_heads
from smyrf.tools.analysis.tokens import TokenView
from smyrf.tools.compare.command import Prepared, compare
from smyrf.tools.compare.contenders import Tuned, default_methods
from smyrf.tools.compare.run import ModelRow
from smyrf.tools.inspect.command import Loaded, explain, view_tokens
from smyrf.tools.inspect.layers import by_family
from smyrf.tools.progress import track
from smyrf.tools.results import command_line, write_results
from smyrf.tuning.machine import machine

# Inspected documents, and tokens of a text that are shown, so that the page stays small.
N_INSPECTED, N_TOKENS = 2, 512


@dataclass(frozen=True)
class Findings:
    """Everything about a model that a page shows.

    Args:
        title: name of the model.
        says: description of its inputs.
        kind: of the inputs: text, images or audio.
        n_documents: on which outputs were compared.
        n_inspected: the first of them, on which heads were inspected.
        rows: the model with each attention, dense first.
        heads: every head of every layer.
        hard: what makes heads hard, for a method of each family.
        plan: found by `smyrf.tune`.
        max_error: target of the plan.
        views: the first document as some heads see it; empty for a model that does not read text.
        config: configuration for the result file.
        machine: processor and versions.
        threads: CPU threads used.
        command: the command that made the report.
    """

    title: str
    says: str
    kind: str
    n_documents: int
    n_inspected: int
    rows: tuple[ModelRow, ...]
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
    prepared: Prepared,
    methods: Sequence[Method],
    *,
    max_error: float,
    memory: bool,
    threads: int,
    rows: int,
    n_values: int,
    console: Console,
) -> Findings:
    """Measure everything that a report shows.

    Args:
        methods: empty for the default.
        max_error: target of the tuned plan.
        memory: measure peak memory too.
        rows: inspected queries of each document.
        n_values: singular values of a long map; 0 for none of any map.

    Raises:
        ValueError: says what is wrong with the model.
    """
    comparison, subject, seed = prepared.comparison, prepared.subject, prepared.comparison.seed
    chosen = list(methods) or default_methods(max(call.n_queries for call in comparison.calls))
    tuned = Tuned(max_error, fallback=False)
    compared = compare(
        prepared,
        [*chosen, tuned],
        max_error=max_error,
        threads=threads,
        memory=memory,
        json=None,
        plot=None,
        console=console,
    )
    n_inspected = min(N_INSPECTED, subject.inputs.n_documents)
    calls = model_calls(comparison.model, subject.inputs.first(n_inspected))
    total = sum(call.q.shape[1] for call in calls if not call.only_dense)
    found = inspect_heads(calls, chosen, rows=rows, n_values=n_values, seed=seed)
    heads = list(track(found, "heads", total=total, console=console))
    views = []
    if subject.kind == "text":
        loaded = Loaded(subject.name, subject.kind, subject.inputs, calls)
        for head in _shown(heads):
            for numbers in by_family(heads).values():
                method = heads[0].outcomes[numbers[len(numbers) // 2]].method
                views.append(
                    view_tokens(loaded, method, layer=head.layer, head=head.head, n_tokens=N_TOKENS, seed=seed)
                )
    return Findings(
        title=subject.title,
        says=subject.inputs.says,
        kind=subject.kind,
        n_documents=subject.inputs.n_documents,
        n_inspected=n_inspected,
        rows=tuple(compared),
        heads=tuple(heads),
        hard=tuple(explain(heads)),
        plan=comparison.plans[tuned],
        max_error=max_error,
        views=tuple(views),
        config=prepared.config() | {"inspected": n_inspected, "rows": rows, "singular": n_values},
        machine=machine(),
        threads=threads,
        command=command_line(),
    )


def _shown(heads: list[HeadInspection]) -> list[HeadInspection]:
    """The median head and the hardest one, by the error of the last method."""
    ordered = sorted(heads, key=lambda head: head.outcomes[-1].error)
    return [ordered[(len(ordered) - 1) // 2], ordered[-1]][: len(heads)]


def view_label(view: TokenView) -> str:
    """Label of a view in the menu."""
    return f"layer {view.layer}, head {view.head}: {view.method.label}"


def write_page(findings: Findings, path: Path) -> None:
    """Write the page, atomically."""
    from smyrf.atomic_write import write_text
    from smyrf.tools.report.page import build_page

    write_text(path, build_page(findings))


def write_data(findings: Findings, path: Path) -> None:
    """Write everything that the page shows as JSON, with what is needed to repeat it.

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
    write_results(path, rows, threads=findings.threads, config=findings.config, also=also)
