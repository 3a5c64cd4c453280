"""Skipped tests that a complete installation may have: with --strict-skips, any other fails the run."""

from collections import Counter

# How many tests or modules may give each reason; None for any number.
EXPECTED = {
    # On every machine.
    "images and sounds have no padding here": 2,
    "there is no SMYRF_NATIVE: this is not the run with sanitizers": 1,
    # Without a C++ compiler, as in .ci/pure.
    "not available: it was not built when smyrf was installed, because no C++17 compiler was found": 4,
    "it was not built when smyrf was installed, because no C++17 compiler was found": 1,
    "the native kernel was not built": 1,
    # By system.
    "there is no Chromium": None,
    "peak memory is read from /proc, which this system does not have": None,
    "reads /proc": None,
    "there is no fork": None,
    "it was built without OpenMP, and misses nothing": None,
    "modes, links and locks are those of POSIX": None,
}


def unexpected(skipped):
    """A line for each reason that is given too often.

    Args:
        skipped: reports of skipped tests, and of modules that skip themselves on import.
    """
    # pytest imports a module once for its tests and once for its examples.
    distinct = {(getattr(report, "when", None) and report.nodeid, report.longrepr) for report in skipped}
    found = Counter(reason.removeprefix("Skipped: ") for _, (_, _, reason) in distinct)
    allowed = {reason: EXPECTED.get(reason, 0) for reason in found}
    return [
        f"{found[reason]} skipped, {limit} expected: {reason}"
        for reason, limit in sorted(allowed.items())
        if limit is not None and found[reason] > limit
    ]
