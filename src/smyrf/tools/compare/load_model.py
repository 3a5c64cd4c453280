"""Load a transformers model of any kind together with inputs for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from smyrf.tools.compare.input_files import InputError
from smyrf.tools.compare.inputs import Inputs, load_inputs
from smyrf.tools.encoders import load_model, model_title

# What a model reads, by its main argument; and the tower that reads each, in a model with several.
KINDS = {"input_ids": "text", "pixel_values": "images", "input_features": "audio", "input_values": "audio"}
TOWERS = {"text": "text_model", "images": "vision_model", "audio": "audio_model"}


@dataclass(frozen=True)
class Subject:
    """A model and its inputs.

    Args:
        name: as for `smyrf.tools.encoders`.
        kind: what it reads: text, images or audio.
        path: of the inputs; None for a sample.
    """

    name: str
    kind: str
    path: Path | None
    model: Any
    inputs: Inputs

    @property
    def title(self) -> str:
        return model_title(self.name)


def load_subject(
    name: str,
    *,
    kind: str | None = None,
    path: Path | None = None,
    length: int | None = None,
    documents: int = 1,
    batch: int | None = None,
    seed: int = 0,
    console: Console | None = None,
) -> Subject:
    """Load a model and its inputs.

    Args:
        kind: of the inputs; None for what the model reads.
        path: a file or a folder with them; None for a sample.
        batch: documents in a batch; all by default.

    Raises:
        InputError: says what is wrong with the file or the folder.
        ValueError: says what is wrong with the model.
    """
    console = Console(quiet=True) if console is None else console
    with console.status(f"loading {escape(model_title(name))}") as status:
        model, reads = load_reader(name, kind)
        inputs = load_inputs(
            name,
            model,
            reads,
            path,
            n_documents=documents,
            length=length,
            batch_size=documents if batch is None else batch,
            seed=seed,
            found=lambda n: status.update(f"reading: {n} of {documents} documents that are long enough"),
        )
    return Subject(name, reads, path, model, inputs)


def load_reader(name: str, kind: str | None) -> tuple[Any, str]:
    """A transformers model in float32, and which of text, images and audio it reads.

    Takes the encoder of an encoder–decoder, and the tower for `kind` of a model with two (CLIP, SigLIP).

    Args:
        kind: what it must read; None for anything.

    Raises:
        InputError: it reads something else.
        ValueError: says why the model cannot be loaded.
    """
    model = load_model(name, dtype=torch.float32)  # half precision would hide small drift, and is slower on a CPU
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    model = _tower(model, kind)
    reads = KINDS.get(model.main_input_name)
    if reads is None:
        raise ValueError(f"reads {model.main_input_name!r}, which is neither text nor images nor audio")
    if kind not in (None, reads):
        raise InputError(f"{type(model).__name__} reads {reads}, not {kind}")
    return model, reads


def _tower(model: Any, kind: str | None) -> Any:
    towers = {one: getattr(model, attribute) for one, attribute in TOWERS.items() if hasattr(model, attribute)}
    return model if len(towers) < 2 else towers.get(kind or "text", model)
