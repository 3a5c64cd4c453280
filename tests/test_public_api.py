"""Public names are documented, with examples that run."""

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import smyrf
from smyrf.backends import BACKENDS

NAMES = [module.name for module in pkgutil.walk_packages(smyrf.__path__, "smyrf.")]
# Without a compiler there is no extension, and what calls it cannot be imported.
NATIVE = "smyrf._native" if "native" in BACKENDS else ("smyrf._native", "smyrf.backends.native.")
MODULES = ["smyrf", *(name for name in NAMES if not name.startswith(NATIVE))]
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
