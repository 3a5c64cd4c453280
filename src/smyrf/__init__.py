"""SMYRF: attention in O(N log N) for models that already exist."""

from smyrf import nn
from smyrf.attention import attention
from smyrf.kernels import backends
from smyrf.methods import Dense, PerHead, Smyrf, Tangent
from smyrf.models.diffusers import intercept_diffusers
from smyrf.models.replace import dense, replace_attention, restore_attention
from smyrf.models.sdpa import intercept_sdpa
from smyrf.tuning.plan import Plan
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
