"""SMYRF: attention in O(N log N) for models that already exist."""

from smyrf import nn
from smyrf.attention import attention
from smyrf.methods import Dense, Smyrf, Tangent

__all__ = ["Dense", "Smyrf", "Tangent", "attention", "nn"]
__version__ = "0.1.0"
