"""Groups of commands of which one need not be named."""

from __future__ import annotations

from typing import Any

import typer.core


class RunByDefault(typer.core.TyperGroup):
    """A group that runs its command "run" unless the first argument is the name of another."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = ["run", *args]
        return super().parse_args(ctx, args)
