"""Methods: frozen descriptions of what to compute, with sizes, cost, labels and JSON. No framework is imported."""

from smyrf.methods.base import Layout, Method
from smyrf.methods.causal import BASE_LENGTH, CausalLayout, CausalPart, is_one_block
from smyrf.methods.dense import Dense
from smyrf.methods.levels import Level
from smyrf.methods.parsing import parse_method, parse_methods
from smyrf.methods.per_head import PerHead
from smyrf.methods.registry import METHODS, check_method, method_from_dict
from smyrf.methods.smyrf import HASHINGS, TRANSFORMS, Smyrf, SmyrfLayout
from smyrf.methods.tangent import Tangent, TangentLayout

__all__ = [
    "BASE_LENGTH",
    "HASHINGS",
    "METHODS",
    "TRANSFORMS",
    "CausalLayout",
    "CausalPart",
    "Dense",
    "Layout",
    "Level",
    "Method",
    "PerHead",
    "Smyrf",
    "SmyrfLayout",
    "Tangent",
    "TangentLayout",
    "check_method",
    "is_one_block",
    "method_from_dict",
    "parse_method",
    "parse_methods",
]
