"""`AdaptiveSchedule`: budgets that follow the error during training."""

import copy
import json
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import smyrf
from smyrf import AdaptiveSchedule, Dense, Smyrf, Tangent
from smyrf.nn import MultiheadAttention, SmyrfAttention

LENGTH = 160


class Model(nn.Module):
    """Two layers of attention and a classifier, small enough to train here."""

    def __init__(self, method, width=16):
        super().__init__()
        self.first, self.second = (MultiheadAttention(width, 2, batch_first=True, method=method, seed=1) for _ in "ab")
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = x + self.first(x, x, x)[0]
        x = x + self.second(x, x, x)[0]
        return self.head(x.mean(1))


def train(model, schedule, steps, optimizer, start=0):
    """Class = which of three directions some of the tokens have."""
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        label = torch.randint(3, (4,), generator=generator)
        x = torch.randn(4, LENGTH, 16, generator=generator)
        x[torch.arange(4), :20, label] += 3.0
        loss = nn.functional.cross_entropy(model(x), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule()
    return loss.item()


def inputs(sharpness=1.0, batch=2, length=LENGTH):
    low = torch.randn(batch, 2, length, 3) @ torch.randn(3, 8)
    q, k = (low + 0.3 * torch.randn(batch, 2, length, 8) for _ in range(2))
    return sharpness * q, k, torch.randn(batch, 2, length, 8)


def test_the_budget_rises_when_attention_sharpens_and_falls_when_it_is_easy():
    layer = SmyrfAttention(Tangent(0.3))
    schedule = AdaptiveSchedule(layer, max_error=0.1, every=1, shares=(0.1, 0.9))
    budgets = []
    for sharpness in (10.0, 0.01):
        for _ in range(12):
            layer(*inputs(sharpness))
            schedule()
        budgets.append(layer.method.budget)
    assert budgets[0] > 0.4 and budgets[1] == 0.1
    errors = [seen.error for seen in schedule.history]
    assert max(errors[:12]) > 0.1 and errors[-1] < 0.1
    assert [seen.step for seen in schedule.history] == list(range(24))
    assert all(seen.layer == "" for seen in schedule.history)


@pytest.mark.parametrize("method", [Tangent(0.3), Tangent(80), Smyrf(4, 16)])
@pytest.mark.parametrize("error", [0.0, 0.02, 0.07, 0.2, math.inf, math.nan])
def test_limits_are_never_left(method, error):
    schedule = AdaptiveSchedule(SmyrfAttention(method), max_error=0.1, shares=(0.2, 0.6))
    for _ in range(20):
        changed = schedule.adapted(method, error, 320, 320)
        before, after = (one.key_visits(320) for one in (method, changed))
        if 0.05 <= error <= 0.1:
            assert after == before
        elif error < 0.05:
            assert after <= before
        else:
            assert after >= before
        method = changed
        assert 0.19 <= method.memory_share(320) <= 0.6
    if not 0.05 <= error <= 0.1:
        assert method.memory_share(320) == pytest.approx(0.2 if error < 0.05 else 0.6, abs=0.01)


def test_the_estimate_is_of_the_error_that_the_layer_makes():
    layer = SmyrfAttention(Tangent(0.3), scale=0.5)
    schedule = AdaptiveSchedule(layer, max_error=0.1, rows=700)
    q, k, v = inputs(batch=1, length=700)
    mask = torch.arange(700)[None] < 640
    out = layer(q, k, v, key_mask=mask, is_causal=True)
    dense = smyrf.attention(q, k, v, method=Dense(), scale=0.5, key_mask=mask, is_causal=True)
    schedule()
    error = (out - dense)[:, :, :640].norm() / dense[:, :, :640].norm()
    assert error > 0.001
    assert schedule.history[0].error == pytest.approx(float(error), rel=1e-3)


def test_a_model_trains_within_the_bound():
    torch.manual_seed(1)
    model = Model(Tangent(0.25))
    schedule = AdaptiveSchedule(model, max_error=0.05, every=3)
    loss = train(model, schedule, 40, torch.optim.Adam(model.parameters(), 3e-3))
    assert loss < 0.9  # of log 3 at first
    assert {seen.layer for seen in schedule.history} == {"first", "second"}
    assert len(schedule.history) == 2 * 14
    for name in ("first", "second"):
        mine = [seen for seen in schedule.history if seen.layer == name]
        assert mine[-1].error <= 1.25 * 0.05
        assert mine[-1].method == getattr(model, name).method
    assert [layer.observer for layer in (model.first, model.second)] == [None, None]


@pytest.mark.parametrize("stop", [5, 6, 7])
def test_a_run_that_is_resumed_is_the_run_that_was_not_stopped(stop):
    def start():
        torch.manual_seed(1)
        model = Model(Smyrf(2, 16))
        return model, AdaptiveSchedule(model, max_error=0.2, every=3), torch.optim.SGD(model.parameters(), 0.05)

    model, schedule, optimizer = start()
    train(model, schedule, 12, optimizer)
    stopped, its_schedule, its_optimizer = start()
    train(stopped, its_schedule, stop, its_optimizer)
    state = json.loads(json.dumps(its_schedule.state_dict()))
    weights = copy.deepcopy(stopped.state_dict())
    resumed, new_schedule, new_optimizer = start()
    resumed.load_state_dict(weights)
    new_schedule.load_state_dict(state)
    train(resumed, new_schedule, 12 - stop, new_optimizer, start=stop)
    assert new_schedule.history == schedule.history
    assert new_schedule.state_dict() == schedule.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


def test_watching_changes_neither_outputs_nor_pytorchs_generator():
    layer = SmyrfAttention(Smyrf(2, 16))
    q, k, v = inputs()
    torch.manual_seed(3)
    alone, after = layer(q, k, v), torch.rand(1)
    AdaptiveSchedule(layer, max_error=0.1)
    torch.manual_seed(3)
    assert torch.equal(layer(q, k, v), alone)
    assert torch.equal(torch.rand(1), after)


def test_only_training_is_watched_and_once_per_step():
    layer = SmyrfAttention(Tangent(0.3))
    schedule = AdaptiveSchedule(layer, max_error=0.1, every=2)
    q, k, v = inputs()
    layer.eval()(q, k, v)
    schedule()
    assert schedule.history == []
    layer.train()
    schedule()
    q.requires_grad_()
    checkpoint(layer, q, k, v, use_reentrant=False).sum().backward()
    schedule()
    assert [seen.step for seen in schedule.history] == [2]


def test_it_goes_with_compilation_and_autocast():
    layer = SmyrfAttention(Tangent(0.3))
    schedule = AdaptiveSchedule(layer, max_error=0.1, every=1)
    compiled = torch.compile(layer, backend="eager")
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            compiled(*inputs(batch=1))
        schedule()
    assert len(schedule.history) == 2
    assert all(math.isfinite(seen.error) for seen in schedule.history)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"model": nn.Linear(3, 3)}, ValueError, "Linear has no smyrf.nn.SmyrfAttention"),
        ({"model": SmyrfAttention(Dense())}, ValueError, "nothing to schedule"),
        ({"model": None}, TypeError, "model must be"),
        ({"max_error": 2.0}, ValueError, "max_error=2.0"),
        ({"every": 0}, ValueError, "every=0"),
        ({"rows": 0.5}, TypeError, "rows=0.5"),
        ({"low": 1.0}, ValueError, "low=1.0"),
        ({"factor": 1.0}, ValueError, "factor=1.0"),
        ({"shares": (0.5, 0.2)}, ValueError, "shares="),
        ({"shares": (0.0, 0.2)}, ValueError, "shares="),
    ],
)
def test_bad_arguments_are_named(options, error, words):
    with pytest.raises(error, match=words):
        AdaptiveSchedule(**{"model": SmyrfAttention(Tangent(0.5)), "max_error": 0.1, **options})


def test_a_state_that_does_not_fit_changes_nothing():
    layer = SmyrfAttention(Tangent(0.5))
    schedule = AdaptiveSchedule(layer, max_error=0.1)
    good = schedule.state_dict()
    observed = {"step": 1, "layer": "", "error": 10**400, "method": {"kind": "dense"}}
    for state in (
        {},
        {**good, "methods": {"": {"kind": "x"}}},
        {**good, "methods": {"a": {"kind": "dense"}}},
        {**good, "step": math.inf},
        {**good, "history": [observed]},
    ):
        with pytest.raises(ValueError, match="state is"):
            schedule.load_state_dict(state)
    assert layer.method == Tangent(0.5)


def test_a_short_sequence_teaches_nothing_and_undoes_nothing():
    """At 50 tokens the method is exact: an error of zero must not lower what 400 tokens need."""
    model = MultiheadAttention(32, 4, batch_first=True, method=Tangent(64))
    schedule = AdaptiveSchedule(model, max_error=0.05, every=1)
    budgets = []
    for i in range(6):
        x = torch.randn(1, (400, 50)[i % 2], 32)
        model(x, x, x)
        schedule()
        budgets.append(model.method.budget)
    assert budgets == sorted(budgets)
    assert budgets[-1] > 80
    assert {seen.step for seen in schedule.history} == {0, 2, 4}


def test_sizes_that_do_not_follow_from_the_budget_are_refused():
    model = SmyrfAttention(Tangent(0.2, n_near=30))
    with pytest.raises(ValueError, match="n_near=30 sets the near keys, whatever the budget is"):
        AdaptiveSchedule(model, max_error=0.05)


@pytest.mark.parametrize(
    "change", [{"low": "a"}, {"factor": None}, {"shares": 0.5}, {"shares": ("a", "b")}, {"seed": 2**63}, {"every": 0}]
)
def test_bad_numbers_are_named(change):
    with pytest.raises((TypeError, ValueError), match=next(iter(change))):
        AdaptiveSchedule(SmyrfAttention(Tangent(0.2)), max_error=0.05, **change)
