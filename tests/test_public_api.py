"""What a user can reach is documented, with examples that run."""

import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import smyrf
from smyrf.backends import BACKENDS

NAMES = [module.name for module in pkgutil.walk_packages(smyrf.__path__, "smyrf.")]
if "native" not in BACKENDS:  # where the package was installed without a compiler
    NAMES.remove("smyrf.backends.native.attend")
MODULES = ["smyrf", *(name for name in NAMES if name != "smyrf._native")]
PUBLIC = {f"smyrf.{name}": getattr(smyrf, name) for name in smyrf.__all__ if not inspect.ismodule(getattr(smyrf, name))}
PUBLIC |= {f"smyrf.nn.{name}": getattr(smyrf.nn, name) for name in smyrf.nn.__all__}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example(name):
    tests = doctest.DocTestFinder(recurse=False).find(PUBLIC[name], name)
    assert tests, f"{name} has no docstring"
    assert tests[0].examples, f"{name} has no example"


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] == "smyrf":
            raise
        pytest.skip(f"{name} needs {error.name}")
    assert module.__doc__


def test_importing_smyrf_imports_nothing_optional():
    optional = ("transformers", "diffusers", "matplotlib", "typer", "rich")
    code = f"import sys, smyrf; print([m for m in {optional} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


README = Path(__file__).parent.parent / "README.md"


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL))
def test_the_readmes_examples_run(code):
    if "transformers import" in code:
        pytest.importorskip("transformers")
    exec(compile(code, str(README), "exec"), {})


def test_the_readmes_links_lead_somewhere():
    links = re.findall(r"\]\((?!http)([^)#]+)", README.read_text())
    assert links
    assert all((README.parent / link).exists() for link in links)
