"""Processes that run cases: one that crashes or hangs is counted, named and replaced."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import IO

import smyrf
from tests.attack.verdict import Case, Verdict

ROOT = Path(__file__).parents[2]
# What sanitizers write about a mistake that did not end the process.
REPORTS = ("runtime error:", "ERROR: AddressSanitizer")
STARTUP_SECONDS = 300.0
# A size of 2**40 is an exception, as without a sanitizer, not the end of the process.
SANITIZER = "allocator_may_return_null=1:max_allocation_size_mb=8192"


def run(part: ModuleType, cases: Iterable[Case], minutes: float | None = None) -> Iterator[tuple[Case, Verdict]]:
    """Run cases in as many processes as the part asks for, until they or the minutes are used up."""
    todo, lock, done = iter(cases), threading.Lock(), queue.Queue()
    stop = threading.Event()
    end = None if minutes is None else time.monotonic() + 60 * minutes

    def work(folder: Path) -> None:
        worker = _Worker(part, folder)
        try:
            while not stop.is_set() and (end is None or time.monotonic() < end):
                with lock:
                    case = next(todo, None)
                if case is None:
                    break
                done.put((case, worker.run(case)))
        except BaseException as error:
            done.put(error)
        finally:
            worker.stop()
            worker.log.close()
            done.put(None)

    with tempfile.TemporaryDirectory(prefix="smyrf-attack-", ignore_cleanup_errors=True) as folder:
        threads = [
            threading.Thread(target=work, args=(Path(folder) / str(number),), daemon=True)
            for number in range(part.PROCESSES)
        ]
        for thread in threads:
            thread.start()
        running = len(threads)
        try:
            while running:
                found = done.get()
                if isinstance(found, BaseException):
                    raise found
                if found is None:
                    running -= 1
                else:
                    yield found
        finally:
            stop.set()
            for thread in threads:
                thread.join()


class _Worker:
    """One process, started when it is needed."""

    def __init__(self, part: ModuleType, folder: Path) -> None:
        self.part, self.folder = part, folder
        self.process: subprocess.Popen[str] | None = None
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115

    def run(self, case: Case) -> Verdict:
        fresh = self.process is None
        if fresh:
            self._start()
        process, begin = self.process, self.log.seek(0, os.SEEK_END)
        try:
            process.stdin.write(json.dumps(case) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass
        seconds = self.part.SECONDS + (STARTUP_SECONDS if fresh else 0.0)
        ready, _, _ = select.select([process.stdout], [], [], seconds)
        line = process.stdout.readline() if ready else ""
        if line:
            answer = json.loads(line)
            failures = (*answer["failures"], *self._reports(begin))
            return Verdict(failures, answer["count"], answer["tally"])
        if not ready:
            self.stop()
            return Verdict((f"no answer within {seconds:.0f} seconds",))
        code = process.wait()
        reports = self._reports(begin)
        self.stop()
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Verdict((f"the interpreter crashed: {name}", *reports))

    def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        source = str(Path(smyrf.__file__).parents[1])
        paths = [str(ROOT), source, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "COLUMNS": "200",
            "SMYRF_CACHE": str(self.folder / "cache"),
            "ASAN_OPTIONS": ":".join(filter(None, [os.environ.get("ASAN_OPTIONS"), SANITIZER])),
        }
        name = self.part.__name__.rsplit(".", 1)[-1]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.attack.worker", name, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )

    def _reports(self, begin: int) -> list[str]:
        self.log.seek(begin)
        text = self.log.read().decode(errors="replace")
        return [line.strip()[:300] for line in text.splitlines() if any(words in line for words in REPORTS)][:3]

    def stop(self) -> None:
        if self.process is None:
            return
        for file in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                file.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None
