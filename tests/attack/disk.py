"""A full disk, a read-only folder, a strict umask and linked outputs, for every command that writes.

The promise: another exit code than 0 with one sentence that names the file or folder, no traceback, old files as they
were, and a run that goes on once there is space again.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from tests.attack.commands import WRITERS, make_folder, start, wait, warm_up
from tests.attack.sources import Sources
from tests.attack.verdict import Case, Verdict

PROCESSES, SECONDS = 1, 600.0
KINDS = ("full disk", "almost full disk", "file size limit", "read-only folder", "umask 077", "private file", "link")
_folder = Path()


def cases(seed: int, n_cases: int | None) -> Iterator[Case]:
    """Every kind for every command that writes."""
    found = [{"kind": kind, "command": name} for kind in KINDS for name in WRITERS]
    yield from found[:n_cases]


def prepare(folder: Path) -> None:
    """Import everything before the first fork."""
    global _folder
    _folder = folder
    warm_up()


@cache
def _sources() -> Sources:
    return Sources(_folder / "sources")


@cache
def _whole(name: str) -> Path:
    folder = _folder / f"whole {name}"
    make_folder(name, folder, _sources())
    code, said = wait(start(WRITERS[name].words, folder))
    assert code == 0, said[-1500:]
    return folder


def check(case: Case) -> Verdict:
    """Run one command in one of these situations."""
    kind, name = case["kind"], case["command"]
    folder = _folder / "place"
    make_folder(name, folder, _sources())
    try:
        if kind in ("full disk", "almost full disk", "read-only folder"):
            failures = _on_another_disk(kind, name, folder)
        elif kind == "file size limit":
            failures = _with_limit(name, folder)
        else:
            failures = _with_modes(kind, name, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Verdict(tuple(f"{name}, {kind}: {one}" for one in failures))


def _on_another_disk(kind: str, name: str, folder: Path) -> list[str]:
    """Outputs on a file system of their own, which only root can mount."""
    out = folder / "out"
    size = {"full disk": 8192, "almost full disk": _size(_whole(name) / "out") * 6 // 10, "read-only folder": 1 << 26}
    if name == "finetune report":
        size["full disk"] = size["almost full disk"] = _size(out) + 8192
    old = folder / "old"
    out.rename(old)
    out.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size[kind]}", "tmpfs", str(out)], capture_output=True, text=True
    )
    if done.returncode:
        raise OSError(f"a file system cannot be mounted: {done.stderr.strip()}")
    try:
        shutil.copytree(old, out, dirs_exist_ok=True)
        if kind == "full disk":
            with suppress(OSError), (out / "filler").open("wb") as file:
                file.write(bytes(size[kind]))
        if kind == "read-only folder":
            subprocess.run(["mount", "-o", "remount,ro", str(out)], check=True)
        code, said = wait(start(WRITERS[name].words, folder))
        failures = _refusal(code, said)
        if kind == "almost full disk" and code == 0:
            failures = []  # enough for this run
        if WRITERS[name].resumes and kind == "almost full disk":
            subprocess.run(["mount", "-o", "remount,size=64m", str(out)], check=True)
            code, said = wait(start(WRITERS[name].words, folder))
            if code:
                failures.append(f"does not go on with more space: {said[-400:]}")
        return failures
    finally:
        subprocess.run(["umount", str(out)], check=True)


def _with_limit(name: str, folder: Path) -> list[str]:
    """No file may grow beyond a few bytes: what a full disk is to a writer, for those who cannot mount one."""

    def limit() -> None:
        cat = subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # what the command prints is no file of its own
        for standard in (1, 2):
            os.dup2(cat.stdin.fileno(), standard)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))

    child = start(WRITERS[name].words, folder, limit)
    code, _ = wait(child)
    time.sleep(0.2)  # until all is printed
    return _refusal(code, child.log.read_text(errors="replace"))


def _refusal(code: int, said: str) -> list[str]:
    if code == 0:
        return ["succeeds"]
    if code < 0:
        return [f"ends by {signal.Signals(-code).name}"]
    if "Traceback" in said:
        return [f"a traceback: {said.strip().splitlines()[-1][:200]}"]
    *before, last = said.strip().splitlines() or [""]
    captions = [line for line in before if "error: ‖" in line]  # what a table calls its error
    if not last.startswith("error:") or "\n".join(before).count("error:") > len(captions):
        return [f"not one sentence: {said[-300:]!r}"]
    return []


def _with_modes(kind: str, name: str, folder: Path) -> list[str]:
    out = folder / "out"
    if kind == "umask 077":
        code, said = wait(start(WRITERS[name].words, folder, lambda: os.umask(0o077) and None))
        open_to_all = [path for path in out.rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
        if name == "finetune report":
            open_to_all = [path for path in open_to_all if not path.name.endswith(".run.json")]
        return _unless_ended(code, said) + [f"others may read {path.name}" for path in open_to_all[:3]]
    if WRITERS[name].resumes or name == "finetune report":
        return []  # their files have names of their own
    shutil.rmtree(out)
    shutil.copytree(_whole(name) / "out", out)
    failures = []
    files = [path for path in out.rglob("*") if path.is_file() and path.suffix != ".lock"]
    if kind == "private file":
        for path in files:
            path.chmod(0o600)
        code, said = wait(start(WRITERS[name].words, folder))
        failures = _unless_ended(code, said)
        failures += [
            f"{path.name} was private and is not" for path in files if stat.S_IMODE(path.stat().st_mode) != 0o600
        ]
        return failures
    targets = folder / "targets"
    targets.mkdir()
    for number, path in enumerate(files):
        path.rename(targets / str(number))
        path.symlink_to(targets / str(number))
    code, said = wait(start(WRITERS[name].words, folder))
    failures = _unless_ended(code, said)
    return failures + [f"{path.name} was a link and is a file" for path in files if not path.is_symlink()]


def _unless_ended(code: int, said: str) -> list[str]:
    return [f"fails: {said[-300:]}"] if code else []


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
