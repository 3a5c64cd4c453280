"""Versions are pinned in one place."""

from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_pre_commit_runs_the_tools_that_constraints_pin():
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    assert "rev:" not in config  # a hook from elsewhere would have a version of its own
    pins = (ROOT / "constraints.txt").read_text()
    for tool in ("ruff", "mypy"):
        assert f"entry: .venv/bin/{tool}" in config
        assert f"\n{tool}==" in pins
