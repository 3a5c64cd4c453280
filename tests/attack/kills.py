"""SIGKILL at random moments of every command that writes.

The promise: a file is the old one or the new one, never half; a later run leaves no temporary files; a training run
that was killed any number of times ends as one that was not, bit by bit.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.attack.commands import WRITERS, kill, make_folder, start, wait, warm_up
from tests.attack.sources import Sources
from tests.attack.verdict import Case, Verdict

PROCESSES, SECONDS = 1, 900.0
# Kills of each kind of command in a whole run, and rounds of kills of the function that writes all JSON files.
TRAINING_KILLS, WRITER_KILLS, STRESS_KILLS = 16, 5, 30
_folder = Path()


def cases(seed: int, n_cases: int | None) -> Iterator[Case]:
    """Two cases of each training command, one of each other, and one of the writer itself."""
    found: list[Case] = [{"kind": "write_json", "seed": seed, "kills": STRESS_KILLS}]
    for name, writer in WRITERS.items():
        for part in range(2 if writer.resumes else 1):
            n_kills = TRAINING_KILLS // 2 if writer.resumes else WRITER_KILLS
            found.append({"kind": name, "seed": seed + part, "kills": n_kills})
    yield from found[:n_cases]


def prepare(folder: Path) -> None:
    """Import everything before the first fork."""
    global _folder
    _folder = folder
    warm_up()


def check(case: Case) -> Verdict:
    """Kill one command as often as the case says."""
    draw = random.Random(f"{case['kind']} {case['seed']}")
    if case["kind"] == "write_json":
        return _kill_the_writer(draw, case["kills"])
    return (_kill_training if WRITERS[case["kind"]].resumes else _kill_writing)(case["kind"], draw, case["kills"])


@cache
def _sources() -> Sources:
    return Sources(_folder / "sources")


@cache
def _whole(name: str) -> tuple[float, dict[str, str], Path]:
    """Seconds of a run that is not killed, its files with their hashes, and its folder."""
    folder, whole = _folder / "place", _folder / f"whole {name}"  # a run's name depends on the paths of its inputs
    make_folder(name, folder, _sources())
    begin = time.monotonic()
    code, said = wait(start(WRITERS[name].words, folder))
    assert code == 0, said[-1500:]
    seconds = time.monotonic() - begin
    folder.rename(whole)
    return seconds, _content(whole / "out"), whole


def _kill_training(name: str, draw: random.Random, n_kills: int) -> Verdict:
    """Kill a run again and again, then let it end."""
    seconds, expected, _ = _whole(name)
    folder = _folder / "place"
    make_folder(name, folder, _sources())
    words, failures, done = WRITERS[name].words, [], 0
    for _ in range(4 * n_kills):
        if done == n_kills:
            break
        child = start(words, folder)
        time.sleep(draw.uniform(0.1, 0.6) * seconds)
        try:
            kill(child)
        except ProcessLookupError:
            break
        done += 1
        said = child.log.read_text(errors="replace")
        if "Traceback" in said or "error:" in said:
            failures.append(f"after {done} kills: {said[-400:]}")
            break
        if _has_result(folder / "out"):
            make_folder(name, folder, _sources())  # it ended before the kill: another round
    code, said = wait(start(words, folder))
    if code:
        failures.append(f"does not end after {done} kills: {said[-600:]}")
    elif (found := _content(folder / "out")) != expected:
        differing = sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
        failures.append(f"ends differently after {done} kills: {', '.join(differing)[:400]}")
    shutil.rmtree(folder, ignore_errors=True)
    return Verdict(tuple(f"{name}: {one}" for one in failures), done)


def _has_result(out: Path) -> bool:
    """Whether a run in the folder is finished: its last checkpoint is gone or is that of the last step."""
    return bool(list(out.glob("runs/*.run.json"))) or bool(list(out.glob("runs/*/checkpoint-12")))


def _kill_writing(name: str, draw: random.Random, n_kills: int) -> Verdict:
    """Kill a command that replaces old files, and look at them after each kill."""
    seconds, _, whole = _whole(name)
    names = _names(whole / "out")
    folder, failures, done = _folder / "place", [], 0
    make_folder(name, folder, _sources())
    shutil.rmtree(folder / "out")
    shutil.copytree(whole / "out", folder / "out")
    for _ in range(n_kills):
        child = start(WRITERS[name].words, folder)
        time.sleep(draw.uniform(0.2, 1.05) * seconds)
        kill(child)
        done += 1
        failures += [f"after a kill {one}" for one in _half_files(folder / "out")]
        if missing := names - _names(folder / "out"):
            failures.append(f"a kill has removed {', '.join(sorted(missing))}")
    code, said = wait(start(WRITERS[name].words, folder))
    if code:
        failures.append(f"does not run after {done} kills: {said[-400:]}")
    elif left := _names(folder / "out") - names:
        failures.append(f"a whole run leaves {', '.join(sorted(left))}")
    shutil.rmtree(folder, ignore_errors=True)
    return Verdict(tuple(f"{name}: {one}" for one in failures), done)


def _kill_the_writer(draw: random.Random, n_kills: int) -> Verdict:
    """Kill a child that replaces one file as fast as it can."""
    from smyrf.atomic_write import write_json

    folder = _folder / "stress"
    (folder / "out").mkdir(parents=True, exist_ok=True)
    path, failures = folder / "out" / "a.json", []
    write_json(path, {"number": 0, "rows": []})

    def forever() -> None:
        number = 0
        while True:
            number += 1
            write_json(path, {"number": number, "rows": [number] * 20_000})

    for _ in range(n_kills):
        child = start((), folder, forever)
        time.sleep(draw.uniform(0.02, 0.15))
        kill(child)
        data = json.loads(path.read_text())
        if any(one != data["number"] for one in data["rows"]):
            failures.append("a file is half old and half new")
    write_json(path, {"number": 0, "rows": []})
    if left := _names(folder / "out") - {"a.json"}:
        failures.append(f"write_json: {len(left)} temporary files of {n_kills} kills stay, such as {min(left)}")
    shutil.rmtree(folder)
    return Verdict(tuple(failures), n_kills)


def _names(out: Path) -> set[str]:
    return {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file() and path.suffix != ".lock"}


def _half_files(out: Path) -> list[str]:
    """Files that are neither old nor new, by their format."""
    found = []
    for path in sorted(out.rglob("*")):
        if path.suffix == ".json":
            try:
                json.loads(path.read_text())
            except ValueError as error:
                found.append(f"{path.name} is not JSON: {error}")
        if path.suffix == ".html" and not path.read_text().rstrip().endswith("</html>"):
            found.append(f"{path.name} ends early")
        if path.suffix == ".svg" and not path.read_text().rstrip().endswith("</svg>"):
            found.append(f"{path.name} ends early")
        if path.suffix == ".png" and not path.read_bytes().endswith(b"IEND\xaeB`\x82"):
            found.append(f"{path.name} ends early")
    return found


# What differs between two equal runs: dates and times.
TIMES = ("date", "seconds", "command", "machine", "train_runtime", "train_samples_per_second", "train_steps_per_second")


def _content(out: Path) -> dict[str, str]:
    """A hash of each file; of JSON without what depends on the clock."""
    found = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if not path.is_file() or path.suffix == ".lock" or name.startswith("cache/"):
            continue
        data = path.read_bytes()
        if path.suffix == ".json":
            data = json.dumps(_timeless(json.loads(data)), sort_keys=True).encode()
        found[name] = hashlib.sha256(data).hexdigest()[:16]
    return found


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(one) for key, one in value.items() if key not in TIMES}
    return [_timeless(one) for one in value] if isinstance(value, list) else value
