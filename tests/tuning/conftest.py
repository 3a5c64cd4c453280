"""Fixtures of the tests of tuning."""

import pytest
import torch

from smyrf.tuning import timing
from smyrf.tuning.timing import Timing


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """No test reads or leaves measured times on this machine."""
    monkeypatch.setenv("SMYRF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(timing, "_remembered", {})
    return tmp_path / "cache" / "crossover.json"


@pytest.fixture
def clock(monkeypatch):
    """A machine on which a method is `clock["speedup"]` times faster than dense attention."""
    state = {"speedup": 2.0, "n_measured": 0}

    def measure(call, method, backend):
        state["n_measured"] += 1
        return Timing(1.0, 1.0 / state["speedup"])

    monkeypatch.setattr(timing, "_measure", measure)
    return state


@pytest.fixture(scope="session")
def smooth():
    """Makes q, k and v like those of real heads: structured, so that a budget buys accuracy."""

    def make(*shape, sharpness=2.0):
        *lead, length, width = shape
        low = torch.randn(*lead, length, 4) @ torch.randn(4, width)
        q, k = (sharpness * low + 0.3 * torch.randn(*shape) for _ in range(2))
        return q, k, torch.randn(*shape)

    return make
