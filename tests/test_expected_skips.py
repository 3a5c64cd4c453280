"""Which skipped tests fail a run."""

from types import SimpleNamespace

from expected_skips import EXPECTED, unexpected


def skipped(reason, n=1, when="setup"):
    where = {"when": when} if when else {}
    return [
        SimpleNamespace(nodeid=f"a.py::test_{i}", longrepr=("a.py", 3, f"Skipped: {reason}"), **where) for i in range(n)
    ]


def test_a_reason_that_is_not_listed_is_reported_with_its_number():
    assert unexpected([]) == []
    assert unexpected(skipped("there is no Chromium", 9)) == []
    assert unexpected(skipped("could not import 'transformers'", 3) + skipped("there is no Chromium")) == [
        "3 skipped, 0 expected: could not import 'transformers'"
    ]


def test_a_listed_reason_has_a_greatest_number():
    reason, limit = next((reason, limit) for reason, limit in EXPECTED.items() if limit is not None)
    assert unexpected(skipped(reason, limit)) == []
    assert unexpected(skipped(reason, limit + 1)) == [f"{limit + 1} skipped, {limit} expected: {reason}"]


def test_a_module_counts_once():
    assert unexpected(skipped("could not import 'x'", 2, when=None)) == ["1 skipped, 0 expected: could not import 'x'"]
