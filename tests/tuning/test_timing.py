"""Dense attention stays where it is as fast; times are measured once and kept on disk."""

import json
from pathlib import Path

import pytest
import torch

import smyrf
from smyrf import Dense
from smyrf.tuning import search
from smyrf.tuning import timing as timing_module
from smyrf.tuning.machine import cache_folder
from smyrf.tuning.timing import Timing


@pytest.mark.parametrize(("speedup", "dense"), [(0.5, True), (0.95, True), (1.03, True), (1.1, False)])
def test_dense_stays_where_it_is_as_fast(clock, smooth, speedup, dense):
    clock["speedup"] = speedup
    layer = smyrf.tune(smooth(1, 2, 200, 8), max_error=0.3).layers[0]
    assert isinstance(layer.method, Dense) == dense
    assert layer.reason == (search.AS_FAST if dense else search.CHEAPEST)
    assert layer.speedup == (1.0 if dense else pytest.approx(speedup))
    assert layer.error == 0.0 or not dense


def test_a_plan_says_from_how_many_keys_on_it_is_faster(monkeypatch, smooth):
    monkeypatch.setattr(timing_module, "_measure", lambda call, method, backend: Timing(1.0, 300 / call.n_keys))
    layer = smyrf.tune(smooth(1, 2, 1300, 8), max_error=0.3).layers[0]
    assert (layer.method == Dense(), layer.from_keys) == (False, 325)  # at 162 it would take twice as long
    assert smyrf.tune(smooth(1, 2, 1300, 8), max_error=0.3, fallback=False).layers[0].from_keys == 0
    assert smyrf.tune(smooth(1, 2, 200, 8), max_error=0.3).layers[0].from_keys == 0  # dense


def test_times_are_measured_once_and_kept_on_disk(clock, cache, monkeypatch, smooth):
    qkv = smooth(1, 2, 200, 8)
    first = smyrf.tune(qkv, max_error=0.3)
    n_measured = clock["n_measured"]
    assert n_measured > 0
    assert smyrf.tune(qkv, max_error=0.3) == first
    monkeypatch.setattr(timing_module, "_remembered", {})  # as in a new process
    assert smyrf.tune(qkv, max_error=0.3) == first
    assert clock["n_measured"] == n_measured
    assert list(cache.parent.iterdir()) == [cache]
    torch.set_num_threads(2)
    try:  # another number of threads is another machine
        smyrf.tune(qkv, max_error=0.3)
    finally:
        torch.set_num_threads(1)
    assert clock["n_measured"] > n_measured


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"a": 1}', b'{"a": [1, "x"]}', b"\xff\xfe"])
def test_a_corrupt_cache_is_ignored_and_written_anew(clock, cache, smooth, content):
    cache.parent.mkdir()
    cache.write_bytes(content)
    assert smyrf.tune(smooth(1, 2, 200, 8), max_error=0.3).layers[0].speedup == 2.0
    assert len(json.loads(cache.read_text())) == clock["n_measured"]


BAD_TIMES = [
    "[1e999, 1]", "[1, -Infinity]", "[NaN, 1]", "[-1, 1]", "[0, 1]", "[1, 5e-324]", f"[{10**400}, 1]",
    f"[{'9' * 5000}, 1]", '["1", 1]', "[true, 1]", "[null, 1]", "[1]", "[1, 1, 1]", "[[1], 1]", '"12"', "3", "null",
    '{"1": 1, "2": 2}',
]  # fmt: skip


def test_a_bad_entry_of_the_cache_is_ignored_and_the_others_stay(clock, cache, smooth):
    qkv = smooth(1, 2, 200, 8)
    plan = smyrf.tune(qkv, max_error=0.3)
    good = json.loads(cache.read_text())
    (first, _), *others = good.items()
    n_measured = clock["n_measured"]
    bad = [f'"bad {i}": {times}' for i, times in enumerate(BAD_TIMES)] + [f"{json.dumps(first)}: [1e999, 1]"]
    cache.write_text(f'{{{", ".join(bad)}, "other": [3, 1.5], {json.dumps(dict(others))[1:]}')
    timing_module._remembered.clear()  # as in a new process
    assert smyrf.tune(qkv, max_error=0.3) == plan
    assert clock["n_measured"] == n_measured + 1
    assert json.loads(cache.read_text()) == good | {"other": [3.0, 1.5]}


def test_a_cache_that_cannot_be_written_is_done_without(clock, tmp_path, monkeypatch, smooth):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SMYRF_CACHE", str(tmp_path / "file"))
    assert smyrf.tune(smooth(1, 2, 200, 8), max_error=0.3).layers[0].speedup == 2.0


def test_the_cache_is_where_users_expect_it(monkeypatch, tmp_path):
    monkeypatch.delenv("SMYRF_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "smyrf"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "smyrf"


def test_a_user_without_a_home_has_a_temporary_cache(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("SMYRF_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert cache_folder().is_dir()
    assert cache_folder() == cache_folder()


def test_real_times_are_positive_and_a_short_call_stays_dense(smooth):
    plan = smyrf.tune(smooth(1, 2, 128, 8), max_error=0.5)
    assert plan.methods == (Dense(),)
    assert all(one.dense > 0 and one.method > 0 for one in timing_module._remembered.values())
