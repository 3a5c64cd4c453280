"""Errors of Tangent attention on hard inputs and on a pretrained model."""

import importlib.util
from pathlib import Path

import pytest
import torch

from smyrf import Tangent
from smyrf.tools.analysis.error import output_errors

HARD = (
    "as they are",
    *(f"logits × {factor:g}" for factor in (0.05, 8.0, 100.0)),
    "lognormal key norms",
    "eight keys × 20",
    "attention sinks",
    "near-uniform attention",
    "q = k",
    "one match for each query",
    "no structure",
    *(f"{share}% of the keys masked" for share in (50, 90, 99)),
)


@pytest.fixture(scope="module")
def hard_errors(n=1024, d=32):
    """Errors on one of the inputs of benchmarks/stress.py, made of synthetic vectors."""
    spec = importlib.util.spec_from_file_location("stress", Path(__file__).parents[2] / "benchmarks" / "stress.py")
    stress = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stress)
    torch.manual_seed(1)
    centres = torch.randn(24, d)
    q = 2 * centres[torch.randint(24, (1, 2, n))] + 0.5 * torch.randn(1, 2, n, d)
    k = centres[torch.randint(24, (1, 2, n))] + 0.3 * torch.randn(1, 2, n, d)
    cases = {name: inputs for name, *inputs in stress.cases(d**-0.5 * q, k, torch.randn(1, 2, n, d))}
    assert tuple(cases) == HARD
    return lambda name: stress.errors(*cases[name], budget=128)


@pytest.mark.parametrize("name", HARD)
def test_never_worse_than_smyrf_at_equal_key_visits(hard_errors, name):
    """And finite, and within the budget: `stress.errors` checks both."""
    found = hard_errors(name)
    assert found["tangent"] <= found["smyrf"] + 1e-6
    assert found["tangent, 2 levels"] <= found["smyrf"] + 1e-6


def test_masks_lower_the_error(hard_errors):
    whole, half, most, almost_all = (hard_errors(name) for name in ("as they are", *HARD[-3:]))
    for method in ("tangent", "tangent, 2 levels"):
        assert almost_all[method] < 1e-5
        assert most[method] < half[method] < whole[method]


def test_error_on_minilm(minilm):
    """The figures that the documentation states, on other text than it states them for."""
    for method, bound in (
        (Tangent(128, levels=1), 0.11),
        (Tangent(256, levels=1), 0.037),
        (Tangent(128, levels=2), 0.08),
        (Tangent(256, levels=2), 0.03),
    ):
        errors = output_errors(minilm, method)
        assert method.key_visits(512) <= method.budget
        assert sum(errors) / len(errors) <= bound, method
