"""SMYRF: attention in O(N log N) for models that already exist."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smyrf import nn
    from smyrf.attention import attention
    from smyrf.backends import backends
    from smyrf.methods import Dense, PerHead, Smyrf, Tangent
    from smyrf.models.diffusers import intercept_diffusers
    from smyrf.models.plan import Plan
    from smyrf.models.replace import dense, replace_attention, restore_attention
    from smyrf.models.sdpa import intercept_sdpa
    from smyrf.tuning.schedule import AdaptiveSchedule
    from smyrf.tuning.search import tune

__all__ = [
    "AdaptiveSchedule",
    "Dense",
    "PerHead",
    "Plan",
    "Smyrf",
    "Tangent",
    "attention",
    "backends",
    "dense",
    "intercept_diffusers",
    "intercept_sdpa",
    "nn",
    "replace_attention",
    "restore_attention",
    "tune",
]
__version__ = "0.1.0"

# Where each public name is defined. Names are imported on first use, so that `import smyrf.methods` needs no framework.
_SOURCES = {
    "AdaptiveSchedule": "smyrf.tuning.schedule",
    "Dense": "smyrf.methods",
    "PerHead": "smyrf.methods",
    "Plan": "smyrf.models.plan",
    "Smyrf": "smyrf.methods",
    "Tangent": "smyrf.methods",
    "attention": "smyrf.attention",
    "backends": "smyrf.backends",
    "dense": "smyrf.models.replace",
    "intercept_diffusers": "smyrf.models.diffusers",
    "intercept_sdpa": "smyrf.models.sdpa",
    "replace_attention": "smyrf.models.replace",
    "restore_attention": "smyrf.models.replace",
    "tune": "smyrf.tuning.search",
}
_SUBMODULES = ("call", "experiments", "grouping", "methods", "models", "nn", "tools", "tuning")


class _Package(ModuleType):
    """This package; its functions `attention` and `backends` are not hidden by the modules of the same name."""

    def __getattr__(self, name: str) -> Any:
        if name in _SUBMODULES:
            return import_module(f"smyrf.{name}")
        if name not in _SOURCES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_SOURCES[name]), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _SOURCES and isinstance(value, ModuleType)):  # importing a submodule binds it here
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
