"""The named backend runs every stage of a call, and no other does."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import smyrf
from problems import backends, clustered_problem, make_call
from smyrf import Dense, PerHead, Smyrf, Tangent, attention
from smyrf.backends import BACKENDS, find_backend
from smyrf.backends.native import extension
from smyrf.backends.registry import attend
from smyrf.grouping.groups import Groups

STAGES = ("prepare", "sort_by_hash", "build_tree", "select_and_fold", "attend")
WHOLE = "attend_tangent"  # the last three at once, in a backend that has it


@backends
def test_a_stage_is_the_backends_own_unless_it_is_listed_as_borrowed(backend):
    record = BACKENDS[backend]
    assert record.name == backend
    for stage in STAGES:
        owner = record.borrowed.get(stage, backend)
        assert getattr(record, stage).__module__.startswith(f"smyrf.backends.{owner}."), stage


def test_only_native_borrows_and_says_so():
    assert not BACKENDS["reference"].borrowed
    assert not BACKENDS["torch"].borrowed
    for name, record in BACKENDS.items():
        for stage, owner in record.borrowed.items():
            assert owner in BACKENDS
            assert f"{stage} from {owner}" in smyrf.backends()[name]


class Operators(TorchDispatchMode):
    """Records the custom operators that run, forward and backward."""

    def __init__(self):
        super().__init__()
        self.ran = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "smyrf":
            self.ran.add(func._schema.name.removeprefix("smyrf::"))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def stages(monkeypatch):
    """Records each stage that runs, as ``backend.stage``."""
    ran = set()

    def recorder(name, stage, function):
        def run(*args):
            ran.add(f"{name}.{stage}")
            return function(*args)

        return run

    for name, record in list(BACKENDS.items()):
        own = [*STAGES, WHOLE] if record.attend_tangent is not None else STAGES
        wrapped = {stage: recorder(name, stage, getattr(record, stage)) for stage in own}
        monkeypatch.setitem(BACKENDS, name, replace(record, **wrapped))
    return ran


@pytest.fixture
def extension_calls(monkeypatch):
    """Records each function of the extension that is called."""
    called = set()
    if extension.MISSING:
        return called

    def recorder(name, function):
        def run(*args, **kwargs):
            called.add(name)
            return function(*args, **kwargs)

        return run

    for name in dir(extension.native):
        function = getattr(extension.native, name)
        if not name.startswith("_") and callable(function) and not isinstance(function, type):
            monkeypatch.setattr(extension.native, name, recorder(name, function))
    return called


SMYRF, TANGENT = ("prepare", "sort_by_hash", "attend"), ("prepare", "build_tree", "select_and_fold", "attend")
CALLS = {
    "smyrf": (Smyrf(2, 32), {}, SMYRF),
    "smyrf, pairs once": (Smyrf(2, 32, deduplicate=True), {}, SMYRF),
    "smyrf, masked": (Smyrf(2, 32), {"masked": True}, SMYRF),
    "smyrf, causal": (Smyrf(2, 32), {"is_causal": True}, SMYRF),
    "smyrf, one cluster": (Smyrf(2, 300), {}, ("prepare", "attend")),
    "tangent": (Tangent(60), {}, TANGENT),
    "tangent, two levels": (Tangent(60, levels=2), {}, TANGENT),
    "tangent, masked": (Tangent(60), {"masked": True}, TANGENT),
    "tangent, causal": (Tangent(40), {"is_causal": True}, TANGENT),
    "tangent, causal and masked": (Tangent(40), {"is_causal": True, "masked": True}, TANGENT),
    "dense": (Dense(), {}, ("prepare", "attend")),
    "per head": (PerHead((Smyrf(2, 32), Tangent(60))), {}, SMYRF + TANGENT),
}
# Custom operators by backend. The reference has none.
OPERATORS = {
    "reference": {},
    "torch": {
        "sort_by_hash": {"sort_by_hash"},
        "build_tree": {"build_tree"},
        "select_and_fold": {"select_and_fold", "select_and_fold_backward"},
        "attend": {"attend", "attend_backward"},
    },
    "native": {
        "sort_by_hash": {"sort_by_hash_native"},
        "build_tree": {"build_tree_native"},
        "select_and_fold": {"select_and_fold_native", "select_and_fold_native_backward"},
        "attend": {"attend_native", "attend_native_backward"},
        WHOLE: {"attend_tangent_native", "attend_tangent_native_backward"},
    },
}


def plain_stages(backend, stages):
    """The stages of a plain call, where a backend may have those of Tangent in one operator."""
    if BACKENDS[backend].attend_tangent is None or "build_tree" not in stages:
        return stages
    return ("prepare", WHOLE, *(SMYRF if "sort_by_hash" in stages else ()))


@backends
@pytest.mark.parametrize("name", CALLS)
def test_the_named_backend_and_no_other_runs_every_stage(backend, name, stages, extension_calls):
    method, options, expected = CALLS[name]
    expected = expected if options.get("is_causal") else plain_stages(backend, expected)
    options = dict(options)
    q, k, v = (x.requires_grad_() for x in clustered_problem(300, 290, 8, 8, 1, 2, 2, torch.float32))
    mask = torch.rand(1, 290) < 0.8 if options.pop("masked", False) else None
    with Operators() as operators:
        out = attention(q, k, v, method=method, key_mask=mask, backend=backend, **options)
        in_forward = set(extension_calls)
        extension_calls.clear()
        out.sum().backward()
    assert stages == {f"{backend}.{stage}" for stage in expected}
    assert operators.ran == set().union(*(OPERATORS[backend].get(stage, set()) for stage in expected))
    assert bool(in_forward) == bool(extension_calls) == (backend == "native")


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("name", CALLS)
def test_reference_and_torch_run_without_the_extension(backend, name, monkeypatch):
    """Every function of the extension raises."""
    if not extension.MISSING:
        for function in [x for x in dir(extension.native) if not x.startswith("_")]:
            monkeypatch.setattr(extension.native, function, None)
    method, options, _ = CALLS[name]
    options = dict(options)
    q, k, v = (x.requires_grad_() for x in clustered_problem(300, 290, 8, 8, 1, 2, 2, torch.float32))
    mask = torch.rand(1, 290) < 0.8 if options.pop("masked", False) else None
    attention(q, k, v, method=method, key_mask=mask, backend=backend, **options).sum().backward()
    assert q.grad.isfinite().all()


@backends
def test_the_backend_of_attend_is_the_named_one(backend, stages):
    q, k, v = clustered_problem(30, 30, 5, 5, 1, 1, 1)
    index = torch.arange(30).view(1, 3, 10)
    attend(make_call(q, k, v), [Groups(index, index)], backend)
    assert stages == {f"{backend}.prepare", f"{backend}.attend"}


@backends
@pytest.mark.parametrize(("method", "expected"), [(Smyrf(2, 32), SMYRF), (Tangent(60), TANGENT)])
def test_modules_run_on_the_named_backend(backend, method, expected, stages):
    q, k, v = clustered_problem(300, 290, 8, 8, 1, 2, 2, torch.float32)
    expected = plain_stages(backend, expected)
    layer = smyrf.nn.SmyrfAttention(method, backend=backend)
    layer(q.requires_grad_(), k, v).sum().backward()
    assert stages == {f"{backend}.{stage}" for stage in expected}
    stages.clear()
    x = torch.randn(1, 300, 16, requires_grad=True)
    layer = smyrf.nn.MultiheadAttention(16, 2, batch_first=True, method=method, backend=backend)
    layer(x, x, x)[0].sum().backward()
    assert stages == {f"{backend}.{stage}" for stage in expected}
    assert f"backend='{backend}'" in repr(smyrf.nn.SmyrfAttention(method, backend=backend))


@pytest.mark.parametrize("make", [smyrf.nn.SmyrfAttention, lambda **x: smyrf.nn.MultiheadAttention(16, 2, **x)])
def test_modules_refuse_an_unknown_backend(make):
    with pytest.raises(ValueError, match="backend='metal' must be None or one of"):
        make(backend="metal")


def test_without_a_name_the_fastest_backend_of_the_device_runs(stages):
    fastest = "native" if "native" in BACKENDS else "torch"
    q, k, v = clustered_problem(300, 290, 8, 8, 1, 2, 2)
    attention(q, k, v, method=Smyrf(2, 32))
    assert stages == {f"{fastest}.{stage}" for stage in SMYRF}
    assert find_backend(None, torch.device("cpu")) is BACKENDS[fastest]
    assert find_backend(None, torch.device("cuda")) is BACKENDS["torch"]
