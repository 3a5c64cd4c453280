"""Files that are written whole or not at all: their modes, links, and what a kill leaves behind."""

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from smyrf.atomic_write import replacing, write_json, write_text

posix = pytest.mark.skipif(os.name != "posix", reason="modes, links and locks are those of POSIX")


@pytest.fixture
def umask():
    """Set the umask, and restore it at the end."""
    old = os.umask(0o022)
    yield os.umask
    os.umask(old)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@posix
@pytest.mark.parametrize(("mask", "wanted"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_a_new_file_obeys_the_umask(tmp_path, umask, mask, wanted):
    umask(mask)
    write_text(tmp_path / "a.txt", "1")
    assert mode(tmp_path / "a.txt") == wanted


@posix
@pytest.mark.parametrize("own", [0o600, 0o640, 0o666, 0o444, 0o755])
def test_a_rewritten_file_keeps_its_mode(tmp_path, umask, own):
    (tmp_path / "a.txt").write_text("1")
    (tmp_path / "a.txt").chmod(own)
    with replacing(tmp_path / "a.txt") as temporary:
        temporary.write_text("2")
        assert mode(temporary) & ~own & 0o077 == 0  # nobody reads it before it is in place
    assert mode(tmp_path / "a.txt") == own
    assert (tmp_path / "a.txt").read_text() == "2"


def test_a_read_only_file_is_not_replaced(tmp_path, monkeypatch):
    """As root every file can be written, so the system's answer is replaced here."""
    (tmp_path / "a.txt").write_text("1")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match="read-only"):
        write_text(tmp_path / "a.txt", "2")
    assert names(tmp_path) == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "1"


@posix
@pytest.mark.parametrize("target", ["there/b.txt", "there/new.txt", "there/more/new.txt"])
def test_a_link_stays_and_its_target_is_replaced(tmp_path, target):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "b.txt").write_text("1")
    (tmp_path / "a.txt").symlink_to(target)
    write_text(tmp_path / "a.txt", "2")
    assert (tmp_path / "a.txt").is_symlink()
    assert not (tmp_path / target).is_symlink()
    assert (tmp_path / target).read_text() == "2"
    assert names(tmp_path) == ["a.txt", "there"]


@posix
@pytest.mark.parametrize("target", ["a.txt", "folder", os.devnull])
def test_a_link_to_itself_or_to_no_file_is_refused_and_stays(tmp_path, target):
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.txt").symlink_to(target)
    with pytest.raises(OSError, match=r" is not a file that can be replaced"):
        write_text(tmp_path / "a.txt", "1")
    assert names(tmp_path) == ["a.txt", "folder"]
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_an_error_leaves_the_old_file(tmp_path):
    write_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"a": float("nan")})

    def interrupted():
        with replacing(tmp_path / "a.json") as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (tmp_path / "a.json").read_text() == '{\n "a": 1\n}\n'
    assert names(tmp_path) == ["a.json"]


def test_a_name_of_any_length_that_the_system_takes_is_written(tmp_path):
    write_text(tmp_path / ("a" * 255), "1")
    assert names(tmp_path) == ["a" * 255]


KILLED = """
import os, signal, sys
from pathlib import Path
from smyrf.atomic_write import replacing
with replacing(Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@posix
def test_the_next_write_removes_what_a_kill_left(tmp_path):
    write_text(tmp_path / "a.txt", "old")
    foreign = ["a.txt.tmp", "b.tmp", ".smyrf-notes.tmp", "a.txtq3f_xk2d.tmp"]
    for name in foreign:
        (tmp_path / name).write_text("mine")
    subprocess.run([sys.executable, "-c", KILLED, tmp_path / "a.txt"], check=False)
    assert len(names(tmp_path)) == len(foreign) + 2
    assert (tmp_path / "a.txt").read_text() == "old"
    with replacing(tmp_path / "other.txt") as being_written:
        being_written.write_text("other")
        write_text(tmp_path / "a.txt", "new")
        assert being_written.exists()
    assert names(tmp_path) == sorted([*foreign, "a.txt", "other.txt"])
    assert all((tmp_path / name).read_text() == "mine" for name in foreign)


@posix
def test_links_and_folders_with_such_a_name_stay(tmp_path):
    kept, link = (tmp_path / f".smyrf-{i:016x}.tmp" for i in range(2))
    kept.mkdir()
    (tmp_path / "mine").write_text("mine")
    link.symlink_to("mine")
    write_text(tmp_path / "a.txt", "1")
    assert names(tmp_path) == [kept.name, link.name, "a.txt", "mine"]


def test_writers_at_once_do_not_remove_each_others_files(tmp_path):
    def write(i):
        for n in range(50):
            write_text(tmp_path / f"{i % 2}.txt", f"{i} {n}\n" * 100)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert names(tmp_path) == ["0.txt", "1.txt"]
    assert {len(set((tmp_path / name).read_text().splitlines())) for name in names(tmp_path)} == {1}
