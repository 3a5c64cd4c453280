"""Tiny models of architectures of transformers, with weights that make attention matter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from tests.zoo.batches import Batch


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Args:
        name: as people look for it.
        family: text encoder, decoder, encoder–decoder, vision, audio or multimodal.
        model: class in transformers.
        options: of its configuration; those of a part of it are a mapping.
        batch: makes inputs.
    """

    name: str
    family: str
    model: str
    options: Mapping[str, Any]
    batch: Callable[[], Batch]

    def build(self) -> Any:
        """The model, ready to run, always with the same weights."""
        model_class = getattr(transformers, self.model)
        _check_options(self.options, model_class.config_class)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = model_class(model_class.config_class(**self.options))
            _initialise(model)
        return model.eval()


def _check_options(options: Mapping[str, Any], config_class: Any) -> None:
    """Configurations swallow what they do not know.

    Raises:
        ValueError: names it.
    """
    known = {*inspect.signature(config_class).parameters, *config_class.attribute_map}
    known |= set(transformers.GenerationConfig().to_dict())
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"{config_class.__name__} has no {name=}")
        part = config_class.sub_configs.get(name)
        if isinstance(value, Mapping) and part is not None and part is not transformers.AutoConfig:
            _check_options(value, part)


def _initialise(model: nn.Module) -> None:
    """Weights that keep variances: with those that models start from, attention is almost uniform."""
    for module in model.modules():
        if isinstance(module, nn.utils.parametrize.ParametrizationList):
            continue
        for weight in module.parameters(recurse=False):
            if weight.dim() > 1 and weight.requires_grad:
                fan_in = weight[0].numel() if isinstance(module, nn.modules.conv._ConvNd) else weight.shape[-1]
                nn.init.normal_(weight, std=1.0 if isinstance(module, nn.Embedding) else fan_in**-0.5)
