"""What `smyrf inspect` does once its arguments are known to be good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import track

from smyrf.atomic_write import write_json
from smyrf.call import Call
from smyrf.methods import Method
from smyrf.models.calls import model_calls
from smyrf.tools.analysis.hardness import Hardness, hardness
from smyrf.tools.analysis.inspection import HeadInspection, inspect_heads
from smyrf.tools.analysis.tokens import TokenView, token_texts, token_view
from smyrf.tools.bench import results
from smyrf.tools.compare.command import located, title_of
from smyrf.tools.compare.contenders import default_methods
from smyrf.tools.compare.inputs import Inputs, load_inputs
from smyrf.tools.compare.load_model import load_subject
from smyrf.tools.encoders import load_processor
from smyrf.tools.inspect import table, text
from smyrf.tools.inspect.layers import Row, by_family, by_head, by_layer
from smyrf.tools.inspect.plot import plot_all


@dataclass(frozen=True)
class Loaded:
    """A model's attention on its inputs.

    Args:
        name: minilm, or a path or a hub name.
        kind: what it reads: text, images or audio.
        calls: its attention calls, with all documents.
        about: what else the result file says of it.
    """

    name: str
    kind: str
    inputs: Inputs
    calls: list[Call]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Of tables and plots."""
        return f"{title_of(self.name)}, {self.inputs.says}"

    @property
    def n_keys(self) -> int:
        """Of the attention call that has most of them."""
        return max(call.n_keys for call in self.calls)

    @property
    def n_queries(self) -> int:
        """Of the attention call that has most of them."""
        return max(call.n_queries for call in self.calls)

    def config(self) -> dict[str, Any]:
        """For the result file."""
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
    """Loads a model and its inputs, and takes its attention calls.

    Args:
        name: minilm, or a path or a hub name.
        kind: of the inputs; None for what the model reads.
        path: a file or a folder with them; None for a sample.

    Raises:
        InputError: says what is wrong with the file or the folder.
        ValueError: says what is wrong with the model.
    """
    console = Console(quiet=True) if console is None else console
    title = escape(title_of(name))
    with console.status(f"loading {title}") as status:
        model, kind = load_subject(located(name), kind)
        inputs = load_inputs(
            located(name), model, kind, path, n_documents=documents, length=length, batch_size=documents, seed=seed
        )
        status.update(f"running {title}")
        try:
            calls = model_calls(model, inputs.batches[0])
        except Exception as error:  # a tokenizer may know more words than the model; whatever it is, it is named
            raise ValueError(f"{type(model).__name__} cannot be run on its inputs: {error}") from error
    return Loaded(name, kind, inputs, calls, {"transformers": version("transformers")})


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
    """Looks at every head, prints the tables, and writes what was asked for.

    Args:
        methods: none for those by default.
        all_heads: a row of the tables for each head, not for each layer.
        json: file for everything.
        output: folder for plots.
    """
    chosen = list(methods) or default_methods(loaded.n_queries)
    found = inspect_heads(loaded.calls, chosen, layers=layers, rows=rows, n_values=n_values, seed=seed)
    console.print(f"[bold]smyrf inspect[/]: {escape(loaded.title)}", highlight=False)
    its = range(len(loaded.calls)) if layers is None else layers
    total = sum(loaded.calls[layer].q.shape[1] for layer in its if not loaded.calls[layer].only_dense)
    if not console.is_terminal:
        console.print(f"{total} head{'s' * (total != 1)} …", highlight=False)
    heads = list(track(found, "heads", total=total, console=console, transient=True))
    hard = explain(heads)
    if json is not None:
        config = loaded.config() | {"rows": rows, "singular": n_values, "seed": seed}
        numbers = [i for numbers in by_family(heads).values() for i in numbers]
        also = {"hardness": [hardness(heads, i).as_dict() for i in numbers]}
        results.write(json, results.command_line(), threads, config, [head.as_dict() for head in heads], also)
    show(heads, hard, all_heads=all_heads, title=title_of(loaded.name), console=console)
    for layer in its:
        if loaded.calls[layer].only_dense:
            console.print(f"layer {layer} is passed over: {loaded.calls[layer].only_dense}", highlight=False)
    written = [json] if json is not None else []
    if output is not None:
        written += plot_all(heads, hard, output, loaded.title)
    for file in written:
        console.print(f"written: {escape(str(file))}", highlight=False, soft_wrap=True)
    return heads


def explain(heads: Sequence[HeadInspection]) -> list[Hardness]:
    """What makes heads hard, for the method of each family with the fewest key visits: there heads differ most."""
    return [hardness(heads, numbers[0]) for numbers in by_family(heads).values()]


def show(
    heads: Sequence[HeadInspection], hard: Sequence[Hardness], *, all_heads: bool, title: str, console: Console
) -> None:
    """Prints all tables."""
    rows = by_head(heads) if all_heads else by_layer(heads)
    every = Row("all", tuple(heads))
    each = "head" if all_heads else "layer, mean over its heads"
    console.print(table.map_table(rows, every, f"Attention maps of {escape(title)} by {each}"))
    if heads[0].outcomes:
        console.print(table.error_table(rows, every, f"Error of the output by {'head' if all_heads else 'layer'}"))
        console.print(table.mass_table(rows, every, "Softmax mass that is captured"))
        console.print(table.balance_table(every, "Clusters"))
    for one in hard if len(heads) > 1 else ():  # one head is neither harder than another nor easier
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
    """Shows the first document as a head sees it.

    Args:
        token: whose strongest keys are shown too; None for nobody's.
    """
    view = view_tokens(loaded, method, layer=layer, head=head, round=round, n_strongest=n_strongest, seed=seed)
    if token is not None and not 0 <= token < len(view.tokens):
        raise ValueError(f"{token=} must be from 0 to {len(view.tokens) - 1}")
    if json is not None:
        write_json(json, view.as_dict())
    text.show(view, token, f"{title_of(loaded.name)}, {len(view.tokens)} tokens", console)
    if json is not None:
        console.print(f"written: {escape(str(json))}", highlight=False, soft_wrap=True)
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
        ValueError: names what is wrong, also a model that reads something else.
    """
    if loaded.kind != "text":
        raise ValueError(f"reads {loaded.kind}, which has no tokens to show")
    tokenizer = load_processor(located(loaded.name), "text")
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
