"""A small part of each attack; ``make attack`` runs the whole."""

import dataclasses
import itertools
import json
import random
from collections import Counter
from functools import cache

import pytest
import torch

from smyrf.backends import registry
from smyrf.grouping import stages
from tests.attack import agreement, crashing, damages, drawn_calls, files, fuzz, kills, misuse, oracle, page, pool
from tests.attack.verdict import Verdict

# Damages that take seconds, and readers that take little: no model is loaded.
SLOW = ("zip bomb", "a pipe")
QUICK_READERS = ("Plan.load", "bench quality --qkv .npz", "bench quality --qkv .safetensors", "biggan sample g.pth")


@pytest.mark.parametrize("first", [0, 1000])
def test_fuzzed_calls_keep_every_promise(first):
    found = [fuzz.check(case) for case in fuzz.cases(first, 40) if not _is_large(case)]
    assert len(found) >= 20
    assert [one.failures for one in found if one.failures] == []


def _is_large(case):
    draw = random.Random(case["seed"])
    drawn_calls.draw_kind(draw)
    drawn = drawn_calls.draw_call(draw, case["kind"])
    return drawn.q.shape[2] * drawn.k.shape[2] > 40_000


def test_the_checks_of_fuzzing_see_a_wrong_result(monkeypatch):
    """An output that is a thousandth too large, one that sees hidden keys, and one that sees later ones."""
    right = drawn_calls.smyrf.attention
    wrong = {
        "scaled": lambda *args, **options: 1.001 * right(*args, **options) + 1e-3,
        "unmasked": lambda *args, **options: right(*args, **{**options, "key_mask": None}),
        "not causal": lambda *args, **options: right(*args, **{**options, "is_causal": False}),
    }
    cases = [case for case in fuzz.cases(0, 60) if not _is_large(case)]
    for attention in wrong.values():
        monkeypatch.setattr(drawn_calls.smyrf, "attention", attention)
        assert sum(bool(fuzz.check(case).failures) for case in cases) >= 4


def _tampered(backend):
    """Wrong backends: one stage of `backend` is changed a little."""

    def unsorted(*args):
        return tuple(x.roll(1, -1) for x in backend.sort_by_hash(*args))

    def other_tree(*args):
        tree = backend.build_tree(*args)
        return tree._replace(queries=tree.queries.roll(1, 1))

    def without_gradient(call, tree, levels):
        return stages.Selection(*(x.detach() for x in backend.select_and_fold(call, tree, levels)))

    def with_other_gradient(call, tree, levels):
        found = backend.select_and_fold(call, tree, levels)
        return found._replace(far_bias=found.far_bias.detach() + 1.01 * (found.far_bias - found.far_bias.detach()))

    def louder(*args):
        out, lse = backend.attend(*args)
        return 1.0001 * out, lse

    return {
        "sort_by_hash": unsorted,
        "build_tree": other_tree,
        "select_and_fold": without_gradient,
        "select_and_fold in its bias": with_other_gradient,
        "attend": louder,
    }


@cache
def _approximated(kind, n_cases):
    """Seeds of short calls in float64 for which a method is not exact."""

    def fits(seed):
        drawn = drawn_calls.draw_call(random.Random(seed), kind)
        n, m = drawn.q.shape[2], drawn.k.shape[2]
        return (
            drawn.q.dtype == torch.float64
            and n * m < 20_000
            and drawn.options["dropout_p"] == 0.0
            and all(bool(x.isfinite().all()) for x in (drawn.q, drawn.k, drawn.v))
            and not drawn.options["method"].plan(n, m, drawn.is_causal).is_exact
        )

    return list(itertools.islice(filter(fits, itertools.count()), n_cases))


@pytest.mark.parametrize("name", list(_tampered(None)))
def test_the_checks_of_fuzzing_see_a_wrong_backend(name, monkeypatch):
    right = registry.BACKENDS["torch"]
    wrong = dataclasses.replace(right, **{name.split()[0]: _tampered(right)[name]})
    monkeypatch.setitem(registry.BACKENDS, "torch", wrong)
    monkeypatch.setattr(agreement, "BACKENDS", {"reference": registry.BACKENDS["reference"], "torch": wrong})
    kind = "smyrf" if name == "sort_by_hash" else "tangent"
    n_seen = 0
    for seed in _approximated(kind, 10):
        draw = random.Random(seed)
        drawn = drawn_calls.draw_call(draw, kind)
        weight = torch.randn(*drawn.q.shape[:3], drawn.v.shape[-1], dtype=torch.float64)
        with torch.no_grad():
            failures = agreement.check_outputs(draw, drawn, weight, Counter())
        n_seen += bool(failures + agreement.check_gradients(draw, drawn, weight, Counter()))
    assert n_seen >= 3  # some trees have a single leaf, some levels no far keys with weight


def test_the_oracle_is_softmax_attention():
    q, k, v = torch.randn(3, 1, 2, 7, 5, dtype=torch.float64).unbind()
    seen = oracle.visible(7, 7, None, is_causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(oracle.attend(q, k, v, seen, 5**-0.5), expected)
    low, high = oracle.bounds(v, seen, 2, is_causal=True)
    assert torch.equal(low[:, :, 0], v[:, :, 0]) and torch.equal(high[:, :, -1], v.amax(2))


def test_misuse_raises_and_crashes_nothing():
    chosen = [case for case in misuse.cases(0, 150) if case["change"] not in misuse.HUGE]
    assert [failure for case in chosen for failure in misuse.check(case).failures] == []


def test_a_crash_is_counted_and_named():
    found = list(pool.run(crashing, [{"kind": "fine"}, {"kind": "crash"}, {"kind": "fine"}]))
    assert [bool(verdict.failures) for _, verdict in found] == [False, True, False]
    assert "SIGSEGV" in found[1][1].failures[0]


@pytest.mark.parametrize("name", QUICK_READERS)
def test_damaged_files_get_one_sentence(name, tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    pytest.importorskip("PIL")
    monkeypatch.setenv("SMYRF_CACHE", str(tmp_path / "cache"))
    files._ready.cache_clear()
    monkeypatch.setattr(files, "_folder", tmp_path)
    monkeypatch.setattr(files, "HANG_SECONDS", 10)
    chosen = [case for case in files.cases(0, None) if case["kind"] == name and case["damage"] not in SLOW]
    found = [failure for case in chosen for failure in files.check(case).failures]
    assert found == []


def test_every_damage_is_tried():
    tried = {case["damage"] for case in files.cases(0, None)}
    kinds = [getattr(damages, kind) for kind in ("NAMED", "OBJECT", "TEXT", "GZIP", "ARRAYS", "TENSORS", "WEIGHTS")]
    assert tried == {name for kind in kinds for name in kind}


def test_kills_leave_the_old_file_or_the_new_one(tmp_path, monkeypatch):
    monkeypatch.setattr(kills, "_folder", tmp_path)
    verdict = kills.check({"kind": "write_json", "seed": 0, "kills": 6})
    assert verdict == Verdict((), 6)


def test_a_page_gets_the_counts(tmp_path):
    rows = [{"part": "fuzz", "cases": 20_000, "seconds": 90.0, "failures": []}]
    machine = {"commit": "abc", "python": "3.11", "torch": "2.6", "cpu": "a CPU"}
    data = {"results": rows, "machine": machine, "date": "2030-01-01T00:00", "command": "python -m tests.attack"}
    (tmp_path / "a.json").write_text(json.dumps(data))
    (tmp_path / "a.md").write_text(f"Before.\n{page.BEGIN}old\n{page.END}\nAfter.\n")
    page.write(tmp_path / "a.md", tmp_path / "a.json")
    text = (tmp_path / "a.md").read_text()
    assert "| 20,000 | 0 | 1.5 |" in text and "old" not in text
    assert text.startswith("Before.") and text.endswith("After.\n")
