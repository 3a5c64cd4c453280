"""Fixtures of the tests of the tools."""

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner


@pytest.fixture(scope="session")
def shown():
    """What a terminal of some width shows of a table or of lines, as text."""

    def show(*found, width=80):
        console = Console(width=width, record=True, file=io.StringIO())
        for one in found:
            console.print(one)
        return console.export_text()

    return show


@pytest.fixture
def console():
    """A console that nobody sees."""
    return Console(file=io.StringIO())


@pytest.fixture(scope="session")
def refused():
    """Run a command, which must end with exit code 2 and one sentence that has some words in it."""
    from smyrf.__main__ import app

    def run(arguments, words):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2, result.output
        assert words in result.stderr.replace("\n", " ")
        assert result.stderr.startswith("error: ")
        assert "Traceback" not in result.output

    return run
