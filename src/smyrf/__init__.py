"""SMYRF: attention in O(N log N) for models that already exist."""

from smyrf import nn
from smyrf.attention import attention
from smyrf.methods import Dense, PerHead, Smyrf, Tangent

__all__ = ["Dense", "PerHead", "Smyrf", "Tangent", "attention", "nn"]
__version__ = "0.1.0"
