"""Batches for a model: from a file or a folder, or from a sample that needs no download."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from smyrf.tools.compare.images import read_images, sample_images
from smyrf.tools.compare.input_files import InputError
from smyrf.tools.compare.sounds import read_sounds, sample_sounds
from smyrf.tools.compare.texts import choose_documents, read_documents
from smyrf.tools.encoders import documents, load_processor, stretch_positions
from smyrf.tools.error_text import first_line

# Keyword arguments of a model, with documents along the first axis.
Batch: TypeAlias = dict[str, Tensor]
# Default tokens of a document; fewer if the model has fewer positions.
LENGTH = 512


@dataclass(frozen=True)
class Inputs:
    """Inputs of a model.

    Args:
        batches: keyword arguments for the model.
        n_documents: in all batches.
        says: a description, for titles.
    """

    batches: tuple[Batch, ...]
    n_documents: int
    says: str

    def first(self, n_documents: int) -> Batch:
        """The first documents of the first batch.

        Example:
            >>> Inputs(({"input_ids": torch.zeros(4, 7)},), 4, "").first(1)["input_ids"].shape
            torch.Size([1, 7])
        """
        return {name: tensor[:n_documents] for name, tensor in self.batches[0].items()}


def load_inputs(
    name: str,
    model: Any,
    kind: str,
    source: Path | None,
    *,
    n_documents: int,
    length: int | None,
    batch_size: int,
    seed: int,
    found: Callable[[int], object] = lambda n: None,
) -> Inputs:
    """Load inputs of one kind.

    Args:
        name: of the model, whose tokenizer or processor is loaded.
        model: `stretch_positions` changes it if it has too few positions.
        kind: text, images or audio.
        source: a file with text or a folder; None for a sample.
        length: tokens of a text.
        found: called with the number of documents so far.

    Raises:
        InputError: says what is wrong with the file or the folder.
        ValueError: says what is wrong with the length or the processor.
    """
    if length is not None and kind != "text":
        raise ValueError(f"{length=} is for text, and it reads {kind}")
    processor = load_processor(name, kind)
    if kind == "text":
        return _texts(processor, model, source, n_documents, length, batch_size, found)
    if kind == "images":
        for module in ("PIL", *(["matplotlib"] if source is None else [])):
            if find_spec(module) is None:
                raise ValueError(f"it reads images, which needs {module}: pip install 'smyrf[plots]'")
        images = sample_images(n_documents, seed) if source is None else read_images(source, n_documents)
        says = ("crop", "of a photograph") if source is None else ("image", f"from {source.name}")

        def process(some: list[Any]) -> Any:
            return processor(images=some, return_tensors="pt")

        return _processed(process, model, images, batch_size, _count(images, n_documents, *says))
    rate = processor.sampling_rate
    sounds = sample_sounds(n_documents, rate, seed) if source is None else read_sounds(source, n_documents, rate)
    says = ("sound", "synthesised") if source is None else ("sound", f"from {source.name}")
    # Some extractors always cut and pad to the length of their model; the others pad only on request.
    padding = inspect.signature(type(processor).__call__).parameters.get("padding")
    pads = {"padding": True} if padding is not None and padding.default is False else {}

    def extract(some: list[Tensor]) -> Any:
        return processor([one.numpy() for one in some], sampling_rate=rate, return_tensors="pt", **pads)

    return _processed(extract, model, sounds, batch_size, _count(sounds, n_documents, *says))


def _texts(
    tokenizer: Any,
    model: Any,
    source: Path | None,
    n_documents: int,
    length: int | None,
    batch_size: int,
    found: Callable[[int], object],
) -> Inputs:
    if length is None:
        length = min(LENGTH, getattr(model.config, "max_position_embeddings", LENGTH))
    if source is None:
        rows = documents(tokenizer, n_documents, length).tolist()
    else:
        rows = choose_documents(read_documents(source), tokenizer, n_documents, length, found)
    if not rows:
        raise InputError("it holds no text that the model's tokenizer reads")
    positions = stretch_positions(model, length)
    batches = []
    for start in range(0, len(rows), batch_size):
        some = rows[start : start + batch_size]
        longest = max(len(ids) for ids in some)
        pad = tokenizer.pad_token_id or 0
        batch = {"input_ids": torch.tensor([ids + [pad] * (longest - len(ids)) for ids in some])}
        batch |= {name: row[:, :longest].expand(len(some), -1) for name, row in positions.items()}
        if any(len(ids) < longest for ids in some):
            batch["attention_mask"] = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in some])
        batches.append(batch)
    says = f"of {length:,} tokens from " + ("Python's documentation" if source is None else source.name)
    if n_short := sum(len(ids) < length for ids in rows):
        says += f", {n_short} of them shorter"
    return Inputs(tuple(batches), len(rows), _count(rows, n_documents, "document", says))


def _processed(process: Callable[[list[Any]], Any], model: Any, items: list[Any], batch_size: int, says: str) -> Inputs:
    known = inspect.signature(model.forward).parameters
    batches = []
    for start in range(0, len(items), batch_size):
        try:
            made = process(items[start : start + batch_size])
        except Exception as error:  # foreign code may raise anything
            raise ValueError(f"its processor cannot read {says}: {first_line(error)}") from error
        batches.append({name: tensor for name, tensor in made.items() if name in known})
        if not batches[-1]:  # an encoder whose inputs another part of the model computes
            raise ValueError(f"{type(model).__name__} takes nothing that its processor gives: {', '.join(made)}")
    return Inputs(tuple(batches), len(items), says)


def _count(items: list[Any], wanted: int, one: str, rest: str) -> str:
    return f"{len(items)} {one}{'s' * (len(items) != 1)} {rest}" + ", all there are" * (len(items) < wanted)
