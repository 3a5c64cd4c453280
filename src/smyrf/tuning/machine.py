"""This machine: its processor and versions for result files, and the folder where measurements are cached."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import tempfile
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy
import torch

from smyrf import __version__
from smyrf.backends import find_backend


def machine() -> dict[str, Any]:
    """Processor, system, versions, commit and default backend, for the record of a measurement.

    Example:
        >>> sorted(machine())
        ['backend', 'commit', 'cores', 'cpu', 'numpy', 'python', 'rich', 'smyrf', 'system', 'torch']
    """
    return {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "smyrf": __version__,
        "rich": _rich(),
        "commit": commit(),
        "backend": find_backend(None, torch.device("cpu")).name,
    }


def machine_summary(backend: str | None = None) -> str:
    """Everything that a time depends on besides the call, in one line: processor, threads, versions, backend.

    Args:
        backend: None for the best on a CPU.

    Example:
        >>> "smyrf" in machine_summary(), machine_summary("torch").endswith("torch kernel")
        (True, True)
    """
    kernel = find_backend(None, torch.device("cpu")).name if backend is None else backend
    return f"{cpu_and_threads()}, torch {torch.__version__}, smyrf {__version__}, {kernel} kernel"


def cpu_and_threads() -> str:
    """The processor's name and PyTorch's thread count.

    Example:
        >>> cpu_and_threads().startswith(cpu())
        True
    """
    threads = torch.get_num_threads()
    return f"{cpu()}, {threads} thread{'s' * (threads > 1)}"


@lru_cache
def cpu() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


@lru_cache
def commit() -> str | None:
    """The commit of the running source tree, with "+" if it has changes; None for an installed package.

    It is read once: a tree that changes later is not the one that was loaded.
    """
    return commit_of(Path(__file__).parents[1])


def commit_of(package: Path) -> str | None:
    """The commit of a package's source tree, with "+" if it has changes; None in the tree of another project."""
    root = package.parents[1]
    commands = (
        ("rev-parse", "--show-toplevel"),
        ("ls-files", "--error-unmatch", "__init__.py"),
        ("rev-parse", "--short=12", "HEAD"),
        ("diff", "--name-only", "HEAD", "--", "."),
    )
    hooks = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")  # set in a git hook, for the tree of the hook
    environment = {name: value for name, value in os.environ.items() if name not in hooks}
    run = partial(subprocess.run, cwd=package, env=environment, capture_output=True, text=True, check=True)
    try:
        top, _, sha, changes = (run(["git", *words]).stdout.strip() for words in commands)
        is_ours = re.search(r'^name = "smyrf"$', (root / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
        if not is_ours or not os.path.samefile(top, root) or package.parent.name != "src":
            return None
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None
    return f"{sha}+" if changes else sha


def cache_folder() -> Path:
    """``$SMYRF_CACHE``, or else ``smyrf`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    For a user without a home it is a folder that lasts as long as the process.
    """
    if folder := os.environ.get("SMYRF_CACHE"):
        return Path(folder)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "smyrf"
    try:
        return Path.home() / ".cache" / "smyrf"
    except RuntimeError:
        return Path(_temporary_folder().name)


@lru_cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="smyrf-")


def _rich() -> str | None:
    try:
        return version("rich")
    except PackageNotFoundError:
        return None
