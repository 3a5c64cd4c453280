"""Misuse of every function below `smyrf.attention`: stages of the backends, raw operators, the extension.

A valid call of each target is recorded; a case changes one argument, or a few together, and calls it. The promise is an
exception or a right result, never a crash, and a next valid call that is as right as ever.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import resource
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smyrf import Smyrf, Tangent
from smyrf.backends.native import extension
from smyrf.backends.registry import BACKENDS, attend
from smyrf.call import Call
from smyrf.grouping.group import group
from smyrf.grouping.groups import FarKeys, Groups
from smyrf.grouping.stages import Tree
from smyrf.methods import Level
from tests.attack import extension_misuse
from tests.attack.extension_shapes import SHAPES
from tests.attack.native_calls import recorded_native_calls
from tests.attack.recorded_calls import Recorded, leaves_of, rebuild, recorded_operator_calls, with_leaf
from tests.attack.verdict import Case, Verdict

PROCESSES, SECONDS = 2, 60.0
# Address space of a case: a size of 2**40 must fail, not fill the machine. Sanitizers need more than there is.
ADDRESS_SPACE = None if "libasan" in os.environ.get("LD_PRELOAD", "") else 8 << 30
# Exceptions that say nothing to a caller.
UNCLEAR = (StopIteration, SystemError, GeneratorExit)
# Changes that leave the meaning as it was.
NEUTRAL = ("strided", "negated view")
# Sizes for which the loops of the reference, in Python, would run for years.
HUGE = tuple(f"= {number}" for number in (2**31, 2**40, 2**62, 2**63 - 1, 2**64))
TOGETHER = (("k", "v"), ("q", "k"), ("q", "v"), ("q", "k", "v"), ("queries", "keys"), ("far_keys", "far_values"))


def prepare(folder: Path) -> None:
    """Limit the address space of the process."""
    if ADDRESS_SPACE is not None:
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))


def cases(seed: int, n_cases: int | None) -> Iterator[Case]:
    """All changes of all arguments of all targets; `n_cases` of them, drawn with the seed."""
    found: list[Case] = [
        {"kind": target, "arguments": list(names), "change": change}
        for target, arguments in targets().items()
        for names, change in _changes(arguments)
        if ("storage" not in change or "native" in target) and not ("reference" in target and change in HUGE)
    ]
    for target, arguments in targets().items():
        if target.startswith("_native.") and extension_misuse.function_of(target) in SHAPES:
            found += extension_misuse.cases(target, arguments[""])
    if n_cases is not None and n_cases < len(found):
        found = random.Random(seed).sample(found, n_cases)
    yield from found


def check(case: Case) -> Verdict:
    """Call a target with changed arguments."""
    arguments = targets()[case["kind"]].copy()
    failures = extension_misuse.check(case, arguments[""]) if extension_misuse.owns(case) else _check(case, arguments)
    if not _equal(_canary(), _first_canary()):
        failures.append("a valid call afterwards gives another result")
    what = f"{case['kind']} with {', '.join(case['arguments']) or case['sizes']} {case['change']}"
    return Verdict(tuple(f"{what}: {one}" for one in failures))


def _check(case: Case, arguments: dict[str, Any]) -> list[str]:
    before = _result(case["kind"], arguments) if case["change"] in NEUTRAL else None
    for name in case["arguments"]:
        value = _fresh(arguments[name])
        arguments[name] = (TENSOR_CHANGES if isinstance(value, Tensor) else OTHER_CHANGES)[case["change"]](value)
    failures = []
    try:
        result = _result(case["kind"], arguments)
    except UNCLEAR as error:
        failures.append(f"raises a bare {type(error).__name__}")
    except Exception:
        pass
    else:
        if before is not None and not _equal(before, result):
            failures.append("gives another result for the same numbers")
    return failures


# --- targets ----------------------------------------------------------------------------------------------------


def problem(dtype: torch.dtype = torch.float32) -> Call:
    """A small valid call of all stages."""
    generator = torch.Generator().manual_seed(0)

    def random_numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    mask = torch.rand(2, 67, generator=generator) < 0.8
    q, k, v = random_numbers(2, 4, 61, 8), random_numbers(2, 2, 67, 8), random_numbers(2, 2, 67, 6)
    return Call(q, k, v, 0.35, mask, seed=torch.tensor(3), dropout_seed=torch.tensor(5))


METHOD, TANGENT = Smyrf(2, 16), Tangent(24, levels=2)


@cache
def targets() -> dict[str, dict[str, Any]]:
    """The arguments of a valid call of each target, by name."""
    found: dict[str, dict[str, Any]] = {}
    call = problem()
    flat = {"q": call.q, "k": call.k, "v": call.v, "scale": call.scale}
    levels = [number for level in call.plan(TANGENT).levels for number in level]
    for name, backend in BACKENDS.items():
        masked = {**flat, "key_mask": call.key_mask}
        found[f"sort_by_hash {name}"] = {**masked, "seed": call.seed, "n_hashes": 2, "n_clusters": 4}
        found[f"build_tree {name}"] = {**masked, "n_leaves": 4, "rank": 3}
        tree = backend.build_tree(backend.prepare(call), call.plan(TANGENT).levels[-1].n_clusters, 3)
        sizes = {f"level_{i}": number for i, number in enumerate(levels)}
        found[f"select_and_fold {name}"] = {**masked, **tree._asdict(), **sizes}
        (groups,) = group(backend.prepare(call), TANGENT, backend, call.plan(TANGENT))
        lists = {"queries": groups.queries, "keys": groups.keys, "causal": False}
        plain = {**flat, **lists, "dropout_p": 0.3, "dropout_seed": call.dropout_seed}
        shape = (*groups.queries.shape, groups.keys.shape[-1])
        times = {"multiplicity": torch.ones(shape, dtype=torch.int16)}
        far = {f"far_{part}": x for part, x in groups.far._asdict().items()}
        for where in ("stage", "checked"):
            found[f"attend {name} {where}"] = {**plain, **times, **far}
            found[f"attend {name} {where} and backward"] = {**plain, **far}
    for name, one in {**recorded_operator_calls(_all_stages), **recorded_native_calls(_all_stages)}.items():
        leaves = leaves_of(one)
        if isinstance(one.function, type) or not any(_is_address(value) for value in leaves.values()):
            found[name] = {"": one, **leaves}
    return found


def _is_address(value: Any) -> bool:
    """Whether a number is the address of a tensor that is gone: a function that takes it cannot be called again."""
    return isinstance(value, int) and abs(value) > 2**32


def _all_stages() -> None:
    """Run every stage forward and backward, in two precisions."""
    import smyrf

    for dtype in (torch.float32, torch.float64):
        call = problem(dtype)
        for backend, method in itertools.product(BACKENDS, (METHOD, TANGENT, Smyrf(2, 16, deduplicate=True))):
            q, k, v = (x.clone().requires_grad_() for x in call.qkv)
            options = {"key_mask": call.key_mask, "enable_gqa": True, "generator": 1, "dropout_p": 0.1}
            smyrf.attention(q, k, v, method=method, backend=backend, **options).square().sum().backward()
        for backend in BACKENDS.values():  # the stages of Tangent, where one operator serves the whole call
            q, k, v = (x.clone().requires_grad_() for x in call.qkv)
            prepared = backend.prepare(replace(call, q=q, k=k, v=v))
            backend.attend(prepared, group(prepared, TANGENT, backend))[0].square().sum().backward()
    extension.instruction_sets()


def _result(kind: str, arguments: Mapping[str, Any]) -> Any:
    if "" in arguments:
        one: Recorded = arguments[""]
        for path, value in arguments.items():
            if path:
                one = with_leaf(one, path, value)
        return rebuild(one, _fresh)
    stage, name, *rest = kind.split()
    return STAGES[stage](name, rest, **{key: _fresh(value) for key, value in arguments.items()})


def _sort_by_hash(name: str, rest: list[str], q: Any, k: Any, v: Any, scale: Any, **more: Any) -> Any:
    call = Call(q, k, v, scale, more["key_mask"], seed=more["seed"])
    return BACKENDS[name].sort_by_hash(call, Smyrf(more["n_hashes"], 16), more["n_clusters"])


def _build_tree(name: str, rest: list[str], q: Any, k: Any, v: Any, scale: Any, **more: Any) -> Any:
    return BACKENDS[name].build_tree(Call(q, k, v, scale, more["key_mask"]), more["n_leaves"], more["rank"])


def _select_and_fold(name: str, rest: list[str], q: Any, k: Any, v: Any, scale: Any, **more: Any) -> Any:
    numbers = [value for key, value in more.items() if key.startswith("level_")]
    n_fields = len(Level._fields)
    levels = tuple(Level(*numbers[i : i + n_fields]) for i in range(0, len(numbers), n_fields))
    tree = Tree(**{key: more[key] for key in Tree._fields})
    k, v = (x.requires_grad_() if isinstance(x, Tensor) and x.dtype.is_floating_point else x for x in (k, v))
    found = BACKENDS[name].select_and_fold(Call(q, k, v, scale, more["key_mask"]), tree, levels)
    loss = sum(x.nan_to_num(0, 0, 0).sum() for x in found if x.requires_grad)
    return [*(x.detach() for x in found), *(torch.autograd.grad(loss, (k, v)) if isinstance(loss, Tensor) else ())]


def _attend(name: str, rest: list[str], q: Any, k: Any, v: Any, scale: Any, **more: Any) -> Any:
    far = FarKeys(*(more[f"far_{part}"] for part in FarKeys._fields)) if "far_keys" in more else None
    lists = [Groups(more["queries"], more["keys"], more["causal"], more.get("multiplicity"), far)]
    wanted = [x for x in (q, k, v) if "backward" in rest and isinstance(x, Tensor) and x.dtype.is_floating_point]
    for x in wanted:
        x.requires_grad_()
    call = Call(q, k, v, scale, dropout_p=more["dropout_p"], dropout_seed=more["dropout_seed"])
    out, lse = attend(call, lists, name) if "checked" in rest else BACKENDS[name].attend(call, lists)
    return [out.detach(), lse, *(torch.autograd.grad(out.sum(), wanted) if wanted else ())]


STAGES: dict[str, Callable[..., Any]] = {
    "sort_by_hash": _sort_by_hash,
    "build_tree": _build_tree,
    "select_and_fold": _select_and_fold,
    "attend": _attend,
}


# --- changes ----------------------------------------------------------------------------------------------------


def _changes(arguments: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    for name, value in arguments.items():
        if name:
            yield from (((name,), change) for change in _possible(value))
    for names in TOGETHER:
        if all(isinstance(arguments.get(name), Tensor) for name in names):
            shared = set.intersection(*(set(_possible(arguments[name])) for name in names))
            yield from (
                (names, change) for change in sorted(shared) if change not in NEUTRAL and "endless" not in change
            )


def _possible(value: Any) -> list[str]:
    if isinstance(value, Tensor):
        return [name for name in TENSOR_CHANGES if _applies(name, value)]
    if _is_address(value):
        return []
    return list(OTHER_CHANGES)


def _applies(name: str, x: Tensor) -> bool:
    axis = int(name[-1]) if name[-1].isdigit() and " axis " in name else 0
    if axis >= max(x.dim(), 1) or (" axis " in name and x.dim() == 0):
        return False
    if name in ("NaN", "infinite", "negated view"):
        return x.dtype.is_floating_point
    if name.startswith("index "):
        return not x.dtype.is_floating_point and x.dtype != torch.bool
    return x.dim() >= {"strided": 2, "transposed": 2, "expanded": 1}.get(name, 0)


def _with_number(number: int) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        wide = x.to(torch.int64, copy=True)
        wide.view(-1)[-1:] = number
        return wide if not -(2**31) <= number < 2**31 else wide.to(x.dtype)

    return change


def _with_storage(n_bytes: Callable[[int], int], offset: int = 0) -> Callable[[Tensor], Tensor]:
    """x on a storage of other size, `offset` times its own length after the start."""

    def change(x: Tensor) -> Tensor:
        size = x.numel()
        x = torch.cat([x.reshape(-1)] * (1 + offset))[offset * size :].view(x.shape)
        storage = x.untyped_storage()
        storage.resize_(n_bytes(storage.nbytes()))
        return x

    return change


def _strided(x: Tensor) -> Tensor:
    wide = x.new_zeros((*x.shape[:-1], 2 * x.shape[-1]))
    wide[..., ::2] = x
    return wide[..., ::2]


def _filled(number: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.full_like(x, number)


TENSOR_CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "missing": lambda x: None,
    "a list": lambda x: x.tolist(),
    "a number": lambda x: 3,
    "an array": lambda x: x.numpy(),
    "text": lambda x: "x",
    **{
        str(dtype).removeprefix("torch."): (lambda x, dtype=dtype: x.to(dtype))
        for dtype in (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool)
    },
    "complex": lambda x: x.to(torch.complex64),
    **{f"empty axis {i}": (lambda x, i=i: x.narrow(i, 0, 0)) for i in range(4)},
    **{f"longer axis {i}": (lambda x, i=i: torch.cat([x, x], i)) for i in range(4)},
    **{f"shorter axis {i}": (lambda x, i=i: x.narrow(i, 0, max(x.shape[i] - 1, 0))) for i in range(4)},
    **{f"single axis {i}": (lambda x, i=i: x.narrow(i, 0, min(x.shape[i], 1))) for i in range(4)},
    **{
        f"endless axis {i}": (lambda x, i=i: x.narrow(i, 0, 1).expand(*x.shape[:i], 2**40, *x.shape[i + 1 :]))
        for i in range(4)
    },
    "fewer axes": lambda x: x[0] if x.dim() else x,
    "more axes": lambda x: x[None],
    "no axes": lambda x: x.flatten()[:1].sum(),
    "transposed": lambda x: x.mT.contiguous(),
    "strided": _strided,
    "negated view": lambda x: torch._neg_view(-x),
    "expanded": lambda x: x.flatten()[:1].expand(x.shape) if x.numel() else x,
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "without storage": _with_storage(lambda size: 0),
    "with half its storage": _with_storage(lambda size: size // 2),
    "with a storage one byte too small": _with_storage(lambda size: max(size - 1, 0)),
    "after the end of its storage": _with_storage(lambda size: size // 2, offset=1),
    "NaN": _filled(math.nan),
    "infinite": _filled(math.inf),
    "index -2": _with_number(-2),
    "index 10**6": _with_number(10**6),
    "index 2**31 - 1": _with_number(2**31 - 1),
    "index -2**31": _with_number(-(2**31)),
    "index 2**32 + 3": _with_number(2**32 + 3),
    "index -2**63": _with_number(-(2**63)),
}
NUMBERS = (0, -1, 1, 7, 2**31, 2**40, 2**62, -(2**62), 2**63 - 1, -(2**63), 2**64)
NO_NUMBERS = (0.5, math.nan, math.inf, -1e308, None, "x", True, [], ())
OTHER_CHANGES: dict[str, Callable[[Any], Any]] = {
    f"= {value!r}": (lambda x, value=value: value) for value in (*NUMBERS, *NO_NUMBERS)
}


def _fresh(value: Any) -> Any:
    """A copy that a call may write to; what cannot be copied is passed on."""
    if not isinstance(value, Tensor) or value.is_meta or value.layout != torch.strided or value.is_neg():
        return value
    needed = value.numel() and 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
    if value.untyped_storage().nbytes() < needed * value.element_size() or value.numel() > 2**30:
        return value
    return value.detach().clone() if value.is_contiguous() else value.detach()


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor):
        return torch.allclose(ours.double(), theirs.double(), 1e-5, 1e-6, equal_nan=True)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    return True


def _canary() -> Tensor:
    import smyrf

    call = problem()
    return smyrf.attention(*call.qkv, method=METHOD, key_mask=call.key_mask, enable_gqa=True, generator=2)


_first_canary = cache(_canary)
