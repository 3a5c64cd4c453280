"""The command `smyrf`, also as ``python -m smyrf``, which is how ``torchrun`` and ``accelerate launch`` start it."""

from __future__ import annotations

import typer

from smyrf.experiments.biggan import cli as biggan
from smyrf.experiments.biggan import cli_inspect  # noqa: F401, registers its commands on `inspect.app`
from smyrf.experiments.nlp import cli as finetune
from smyrf.tools.cli import bench, compare, demo, inspect, report, tune
from smyrf.tools.cli.system_errors import Commands

app = typer.Typer(
    cls=Commands,
    help="Attention in O(N log N) for models that already exist.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench.app, name="bench")
app.command()(tune.tune)
app.command()(compare.compare)
app.add_typer(finetune.app, name="finetune")
app.add_typer(biggan.app, name="biggan")
app.add_typer(inspect.app, name="inspect")
app.command()(report.report)
app.command()(demo.demo)


@app.callback()
def _root() -> None:
    """Attention in O(N log N) for models that already exist."""


def main() -> None:
    """The entry point."""
    app()


if __name__ == "__main__":
    main()
