"""The model that is compared: loaded, and what it reads."""

from __future__ import annotations

from typing import Any

from smyrf.tools.compare.input_files import InputError
from smyrf.tools.encoders import load_model

# What a model reads, by its main argument; and the part of a model of several kinds that reads each.
KINDS = {"input_ids": "text", "pixel_values": "images", "input_features": "audio", "input_values": "audio"}
TOWERS = {"text": "text_model", "images": "vision_model", "audio": "audio_model"}


def load_subject(name: str, kind: str | None) -> tuple[Any, str]:
    """A transformers model in float32, and which of text, images and audio it reads.

    Of an encoder–decoder the encoder is taken, of a model with two towers (CLIP, SigLIP) the one for `kind`.

    Args:
        name: a local path or a name on the hub.
        kind: what it is to read; None for what it reads by itself.

    Raises:
        InputError: it reads something else.
        ValueError: says why the model cannot be loaded.
    """
    import torch

    model = load_model(name, dtype=torch.float32)  # half precision would drown small drift, and is slower on a CPU
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
    if len(towers) < 2:
        return model
    return towers.get(kind or "text", model)
