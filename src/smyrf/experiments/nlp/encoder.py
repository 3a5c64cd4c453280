"""The encoder that is fine-tuned: its files, and whether it can do what a recipe asks."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from smyrf.experiments.nlp.recipe import Recipe
from smyrf.experiments.nlp.tasks import TASKS
from smyrf.methods import Dense
from smyrf.models.replace import replace_attention
from smyrf.tools.encoders import load_pretrained, minilm_path

# Files of a model that decide its outputs: weights, shape, tokenizer.
_FILES = ("*.safetensors", "*.bin", "config.json", "tokenizer*", "vocab*", "merges.txt", "*.model", "*tokens*.json")


def load_config(recipe: Recipe) -> Any:
    """The config of a recipe's model, as a classifier for its task.

    Raises:
        ValueError: it cannot be loaded, is no encoder, is too short, or its attention cannot be replaced.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    task = TASKS[recipe.task]
    config = _loaded(AutoConfig, recipe.model, num_labels=max(1, len(task.labels)))
    if config.is_encoder_decoder:
        raise ValueError(f"model={recipe.model!r} is an encoder with a decoder: only encoders are fine-tuned")
    if task.labels:
        config.id2label = dict(enumerate(task.labels))
        config.label2id = {name: number for number, name in enumerate(task.labels)}
    config.problem_type = "single_label_classification" if task.labels else "regression"
    config.output_hidden_states = config.output_attentions = False  # a classifier's logits are all that is read
    try:
        with torch.device("meta"):  # without weights: what it is made of
            model = AutoModelForSequenceClassification.from_config(copy.deepcopy(config))
    except ValueError as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"model={recipe.model!r} cannot classify: {first}") from error
    _check_length(recipe, model)
    for method in (recipe.train_method, *recipe.eval_methods):
        if not isinstance(method, Dense):
            replace_attention(model, method)
    return config


def load_tokenizer(recipe: Recipe, config: Any) -> Any:
    """The tokenizer of a recipe's model.

    Raises:
        ValueError: it cannot be loaded, has no token for padding, or no words.
    """
    from transformers import AutoTokenizer

    tokenizer = _loaded(AutoTokenizer, recipe.model, "its tokenizer ")
    if tokenizer.pad_token_id is None or config.pad_token_id is None:
        raise ValueError(f"model={recipe.model!r} has no token for padding: it is not an encoder")
    # Where its files are missing transformers makes one of a handful of special tokens, and all text is unknown.
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise ValueError(f"model={recipe.model!r} has a tokenizer without words: are its files missing?")
    return tokenizer


def load_classifier(recipe: Recipe, config: Any) -> Any:
    """The model with its pretrained weights and, where it has none for the task, a new last layer.

    Raises:
        ValueError: the weights are those of another model.
    """
    from transformers import AutoModelForSequenceClassification

    # A classifier of another task has a last layer of another shape, which is replaced too.
    options = {"config": copy.deepcopy(config), "ignore_mismatched_sizes": True, "output_loading_info": True}
    model, found = _loaded(AutoModelForSequenceClassification, recipe.model, **options)
    new = [*found["missing_keys"], *(key if isinstance(key, str) else key[0] for key in found["mismatched_keys"])]
    # Layers on top of the encoder may be new, its pooler too: encoders are published without.
    prefix = f"{model.base_model_prefix}."
    if wrong := sorted(key for key in new if key.startswith(prefix) and ".pooler." not in key):
        raise ValueError(
            f"model={recipe.model!r}: its weights do not fit its config: {wrong[0]} is missing or has another shape, "
            f"and {len(wrong) - 1} more"
        )
    return model


def hash_model(name: str, config: Any) -> str:
    """What tells a model from another of the same name: a hash of its files, or its commit on the hub."""
    folder = Path(minilm_path() if name == "minilm" else name)
    if not folder.is_dir():
        return str(getattr(config, "_commit_hash", None) or "")
    found = hashlib.sha256()
    for path in sorted({path for pattern in _FILES for path in folder.glob(pattern)}):
        found.update(path.name.encode())
        with open(path, "rb") as file:
            while part := file.read(1 << 22):
                found.update(part)
    return found.hexdigest()[:16]


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' own bars and reports: that a new layer is not in the checkpoint is no news."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _loaded(kind: Any, name: str, what: str = "", **options: Any) -> Any:
    try:
        with quiet():
            return load_pretrained(kind, minilm_path() if name == "minilm" else name, what, **options)
    except ValueError as error:
        raise ValueError(f"model={name!r}: {error}") from error


def _check_length(recipe: Recipe, model: nn.Module) -> None:
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            # RoBERTa's and its like's positions begin behind the number of the padding token.
            n_positions = module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
            if recipe.max_length > n_positions:
                raise ValueError(
                    f"max_length={recipe.max_length} is more than the {n_positions} positions of model={recipe.model!r}"
                )
