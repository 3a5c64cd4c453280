"""Load the encoder to fine-tune, and check that it can do what a recipe asks."""

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
from smyrf.models.replace import replace_attention
from smyrf.tools.encoders import load_pretrained, minilm_path
from smyrf.tools.error_text import first_line

# Files that determine the outputs of a model: weights, config, tokenizer.
_FILES = ("*.safetensors", "*.bin", "config.json", "tokenizer*", "vocab*", "merges.txt", "*.model", "*tokens*.json")


def load_config(recipe: Recipe) -> Any:
    """Load the config of a recipe's model, as a classifier for its task.

    Raises:
        ValueError: it cannot be loaded, is not an encoder, has too few positions, or attention that cannot be replaced.
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
    config.output_hidden_states = config.output_attentions = False  # only the logits are read
    try:
        with torch.device("meta"):  # modules without weights
            model = AutoModelForSequenceClassification.from_config(copy.deepcopy(config))
    except Exception as error:  # a user's files can be wrong in any way
        raise ValueError(f"model={recipe.model!r} cannot classify: {first_line(error)}") from error
    _check_length(recipe, model)
    for method in (recipe.train_method, *recipe.eval_methods):
        if not method.is_dense:
            replace_attention(model, method)
    return config


def load_tokenizer(recipe: Recipe, config: Any) -> Any:
    """Load the tokenizer of a recipe's model.

    Raises:
        ValueError: the tokenizer cannot be loaded, has no padding token, or an empty vocabulary.
    """
    from transformers import AutoTokenizer

    tokenizer = _loaded(AutoTokenizer, recipe.model, "its tokenizer ")
    if tokenizer.pad_token_id is None or config.pad_token_id is None:
        raise ValueError(f"model={recipe.model!r} has no padding token: it is not an encoder")
    # If the files are missing, transformers makes a tokenizer that has only special tokens.
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise ValueError(f"model={recipe.model!r} has a tokenizer without words: are its files missing?")
    return tokenizer


def load_classifier(recipe: Recipe, config: Any) -> Any:
    """Load the model with its pretrained weights, and with a new last layer if they have none for the task.

    Raises:
        ValueError: the weights do not fit the config.
    """
    from transformers import AutoModelForSequenceClassification

    # The last layer of a classifier for another task has another shape; it is replaced too.
    options = {"config": copy.deepcopy(config), "ignore_mismatched_sizes": True, "output_loading_info": True}
    model, found = _loaded(AutoModelForSequenceClassification, recipe.model, **options)
    new = [*found["missing_keys"], *(key if isinstance(key, str) else key[0] for key in found["mismatched_keys"])]
    # Layers on top of the encoder may be new, and so may its pooler: encoders are published without them.
    prefix = f"{model.base_model_prefix}."
    if wrong := sorted(key for key in new if key.startswith(prefix) and ".pooler." not in key):
        raise ValueError(
            f"model={recipe.model!r}: its weights do not fit its config: {wrong[0]} is missing or has another shape, "
            f"and {len(wrong) - 1} more"
        )
    return model


def hash_model(name: str, config: Any) -> str:
    """Identify the exact model behind a name: a hash of its files, or its commit on the hub."""
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
    """Silence transformers' progress bars and its report of newly initialised layers."""
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
            # In RoBERTa and its relatives positions start after the padding index.
            n_positions = module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
            if recipe.max_length > n_positions:
                raise ValueError(
                    f"max_length={recipe.max_length} is more than the {n_positions} positions of model={recipe.model!r}"
                )
