"""Which commit a result records."""

import subprocess

import pytest

from smyrf.tuning.machine import commit_of

OURS, OTHER = '[project]\nname = "smyrf"\n', '[project]\nname = "other"\n'


def git(folder, *words):
    author = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *author, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Commits a project that has the package in some folder; gives the package and the commit."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    def make(pyproject, below, tracked=True, at=""):
        package = tmp_path / at / below
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (tmp_path / at / "pyproject.toml").write_text(pyproject)
        git(tmp_path, "init", "-q")
        git(tmp_path, "add", "." if tracked else "*.toml")
        git(tmp_path, "commit", "-q", "-m", "one")
        return package, git(tmp_path, "rev-parse", "--short=12", "HEAD")

    return make


def test_the_commit_of_our_own_tree_is_recorded_with_a_sign_for_changes(tree):
    package, sha = tree(OURS, "src/smyrf")
    assert commit_of(package) == sha
    (package / "__init__.py").write_text("1")
    assert commit_of(package) == f"{sha}+"


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize(
    ("pyproject", "below", "at"),
    [
        (OTHER, ".venv/lib/python3.11/site-packages/smyrf", ""),
        (OURS, ".venv/lib/python3.11/site-packages/smyrf", ""),
        (OTHER, "src/smyrf", ""),
        (OURS, "src/smyrf", "vendor/smyrf"),
    ],
)
def test_a_package_inside_another_project_has_no_commit(tree, pyproject, below, at, tracked):
    assert commit_of(tree(pyproject, below, tracked, at)[0]) is None


def test_a_folder_of_ours_that_is_not_tracked_has_no_commit(tree, tmp_path):
    assert commit_of(tree(OURS, "src/smyrf", tracked=False)[0]) is None
    assert commit_of(tmp_path / "none") is None


def test_the_tree_is_that_of_the_package_whatever_a_git_hook_sets(tree, tmp_path, monkeypatch):
    package, sha = tree(OURS, "src/smyrf")
    (tmp_path / "other").mkdir()
    git(tmp_path / "other", "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "other"))
    assert commit_of(package) == sha
