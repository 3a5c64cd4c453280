"""`best_times` of several calls, on a clock that only they advance."""

import itertools

import pytest

from smyrf.tuning import timer


class Clock:
    """A clock that only the timed calls advance."""

    def __init__(self):
        self.now = 0.0
        self.made = []

    def call(self, name, duration, first=None):
        """A call that takes `duration` seconds, the first one `first`."""

        def run():
            self.now += first if first is not None and name not in self.made else duration
            self.made.append(name)

        return run


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(timer.time, "perf_counter", lambda: found.now)
    return found


def test_the_best_time_counts_and_slow_calls_run_once(clock):
    fast, slow = clock.call("fast", 0.001, first=0.003), clock.call("slow", 6.0)
    best = dict(timer.best_times({"fast": fast, "slow": slow}, budget=0.05))
    assert best["fast"] == pytest.approx(0.001)
    assert best["slow"] == pytest.approx(6.0)
    assert clock.made.count("fast") > 3
    assert clock.made.count("slow") == 1


def test_set_up_in_the_first_call_is_not_part_of_the_budget(clock):
    best = dict(timer.best_times({"first": clock.call("first", 0.001, first=0.1)}, budget=0.05))
    assert best["first"] == pytest.approx(0.001)


def test_short_calls_are_made_more_often_in_a_turn_than_long_ones(clock):
    list(timer.best_times({"short": clock.call("short", 1e-4), "long": clock.call("long", 0.125)}, budget=1.0))
    turns = [len(list(turn)) for name, turn in itertools.groupby(clock.made) if name == "long"]
    assert turns == [1, 2, 2, 2, 2]  # each except the first with a warm-up
    assert clock.made.count("short") > 9000


def test_every_turn_is_prepared_off_the_clock(clock):
    prepared = []

    def prepare(name):
        prepared.append(name)
        clock.now += 100.0

    calls = {name: clock.call(name, 0.01) for name in ("a", "b")}
    turns = list(timer.best_times(calls, budget=0.1, prepare=prepare))
    assert [name for name, _ in turns] == prepared
    assert dict(turns) == pytest.approx({"a": 0.01, "b": 0.01})
