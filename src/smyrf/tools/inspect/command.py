"""Run `smyrf inspect` on validated arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from smyrf.atomic_write import write_json
from smyrf.call import Call
from smyrf.methods import Method
from smyrf.models.calls import model_calls
from smyrf.tools.analysis.hardness import Hardness, hardness
from smyrf.tools.analysis.inspection import HeadInspection, inspect_heads
from smyrf.tools.analysis.tokens import TokenView, token_texts, token_view
from smyrf.tools.compare.contenders import default_methods
from smyrf.tools.compare.inputs import Inputs
from smyrf.tools.compare.load_model import load_subject
from smyrf.tools.encoders import load_processor, model_title
from smyrf.tools.inspect import table, text
from smyrf.tools.inspect.layers import HeadSet, by_family, by_head, by_layer
from smyrf.tools.inspect.plot import plot_all
from smyrf.tools.progress import track
from smyrf.tools.results import write_results
from smyrf.tools.tables import print_written


@dataclass(frozen=True)
class Loaded:
    """A model's attention on its inputs.

    Args:
        name: as for `smyrf.tools.encoders`.
        kind: what it reads: text, images or audio.
        calls: its attention calls, with all documents.
        about: further fields of its configuration in result files.
    """

    name: str
    kind: str
    inputs: Inputs
    calls: list[Call]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Title of tables and plots."""
        return f"{model_title(self.name)}, {self.inputs.says}"

    @property
    def n_keys(self) -> int:
        """Largest number of keys of a call."""
        return max(call.n_keys for call in self.calls)

    @property
    def n_queries(self) -> int:
        """Largest number of queries of a call."""
        return max(call.n_queries for call in self.calls)

    def config(self) -> dict[str, Any]:
        """Configuration for the result file."""
        return {
            "model": self.name,
            "kind": self.kind,
            "says": self.inputs.says,
            "documents": self.inputs.n_documents,
            "n_keys": self.n_keys,
            "layers": [call.name for call in self.calls],
            "only_dense": {i: call.only_dense for i, call in enumerate(self.calls) if call.only_dense},
            **self.about,
        }


def load(
    name: str,
    *,
    kind: str | None = None,
    path: Path | None = None,
    length: int | None = None,
    documents: int = 1,
    seed: int = 0,
    console: Console | None = None,
) -> Loaded:
    """Load a model and its inputs, and capture its attention calls.

    Args:
        name, kind, path, length, documents, seed, console: as for `load_subject`.

    Raises:
        InputError: says what is wrong with the file or the folder.
        ValueError: says what is wrong with the model.
    """
    console = Console(quiet=True) if console is None else console
    subject = load_subject(name, kind=kind, path=path, length=length, documents=documents, seed=seed, console=console)
    with console.status(f"running {escape(subject.title)}"):
        try:
            calls = model_calls(subject.model, subject.inputs.batches[0])
        except Exception as error:  # a foreign model may raise anything, as for token ids beyond its vocabulary
            raise ValueError(f"{type(subject.model).__name__} cannot be run on its inputs: {error}") from error
    return Loaded(name, subject.kind, subject.inputs, calls, {"transformers": version("transformers")})


def inspect(
    loaded: Loaded,
    methods: Sequence[Method],
    *,
    layers: Sequence[int] | None,
    rows: int,
    n_values: int,
    seed: int,
    threads: int,
    all_heads: bool,
    json: Path | None,
    output: Path | None,
    console: Console,
) -> list[HeadInspection]:
    """Inspect every head, print the tables, and write what was asked for.

    Args:
        methods: empty for the default.
        all_heads: one row of the tables per head instead of one per layer.
        json: file for all results.
        output: folder for plots.
    """
    chosen = list(methods) or default_methods(loaded.n_queries)
    found = inspect_heads(loaded.calls, chosen, layers=layers, rows=rows, n_values=n_values, seed=seed)
    console.print(f"[bold]smyrf inspect[/]: {escape(loaded.title)}", highlight=False)
    its = range(len(loaded.calls)) if layers is None else layers
    total = sum(loaded.calls[layer].q.shape[1] for layer in its if not loaded.calls[layer].only_dense)
    heads = list(track(found, f"{total} head{'s' * (total != 1)}", total=total, console=console))
    hard = explain(heads)
    if json is not None:
        config = loaded.config() | {"rows": rows, "singular": n_values, "seed": seed}
        numbers = [i for numbers in by_family(heads).values() for i in numbers]
        also = {"hardness": [hardness(heads, i).as_dict() for i in numbers]}
        write_results(json, [head.as_dict() for head in heads], threads=threads, config=config, also=also)
    show(heads, hard, all_heads=all_heads, title=model_title(loaded.name), console=console)
    for layer in its:
        if loaded.calls[layer].only_dense:
            console.print(f"layer {layer} is skipped: {loaded.calls[layer].only_dense}", highlight=False)
    written = [json] if json is not None else []
    if output is not None:
        written += plot_all(heads, hard, output, loaded.title)
    print_written(written, console)
    return heads


def explain(heads: Sequence[HeadInspection]) -> list[Hardness]:
    """What makes heads hard for the method of each family with the fewest key visits, where heads differ most."""
    return [hardness(heads, numbers[0]) for numbers in by_family(heads).values()]


def show(
    heads: Sequence[HeadInspection], hard: Sequence[Hardness], *, all_heads: bool, title: str, console: Console
) -> None:
    """Print all tables."""
    rows = by_head(heads) if all_heads else by_layer(heads)
    every = HeadSet("all", tuple(heads))
    each = "head" if all_heads else "layer, averaged over heads"
    console.print(table.map_table(rows, every, f"Attention maps of {escape(title)} by {each}"))
    if heads[0].outcomes:
        console.print(table.error_table(rows, every, f"Error of the output by {'head' if all_heads else 'layer'}"))
        console.print(table.mass_table(rows, every, "Captured softmax mass"))
        console.print(table.balance_table(every, "Clusters"))
    for one in hard if len(heads) > 1 else ():  # a single head cannot be compared
        for line in table.sentences(one):
            console.print(escape(line), highlight=False, soft_wrap=True)


def tokens(
    loaded: Loaded,
    method: Method,
    *,
    layer: int,
    head: int,
    round: int,
    token: int | None,
    n_strongest: int,
    seed: int,
    json: Path | None,
    console: Console,
) -> TokenView:
    """Show the first document as a head sees it.

    Args:
        token: also show the strongest keys of this token; None for none.
    """
    view = view_tokens(loaded, method, layer=layer, head=head, round=round, n_strongest=n_strongest, seed=seed)
    if token is not None and not 0 <= token < len(view.tokens):
        raise ValueError(f"{token=} must be from 0 to {len(view.tokens) - 1}")
    if json is not None:
        write_json(json, view.as_dict())
    text.show(view, token, f"{model_title(loaded.name)}, {len(view.tokens)} tokens", console)
    print_written([json] if json is not None else [], console)
    return view


def view_tokens(
    loaded: Loaded,
    method: Method,
    *,
    layer: int = 0,
    head: int = 0,
    document: int = 0,
    round: int = 0,
    n_strongest: int = 8,
    n_tokens: int | None = None,
    seed: int = 0,
) -> TokenView:
    """`smyrf.tools.analysis.tokens.token_view` of a document of a model that reads text.

    Raises:
        ValueError: as for `token_view`; or the model does not read text.
    """
    if loaded.kind != "text":
        raise ValueError(f"reads {loaded.kind}, which has no tokens to show")
    tokenizer = load_processor(loaded.name, "text")
    words = token_texts(tokenizer, loaded.inputs.batches[0]["input_ids"][document].tolist())
    return token_view(
        loaded.calls,
        words,
        method,
        layer=layer,
        head=head,
        document=document,
        round=round,
        n_strongest=n_strongest,
        n_tokens=n_tokens,
        seed=seed,
    )
