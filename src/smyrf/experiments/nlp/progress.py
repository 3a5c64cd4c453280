"""Progress of training and evaluation, with the remaining time."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback

# Between lines of a log, if the output is not a terminal.
SECONDS_BETWEEN_LINES = 30.0


class ShowProgress(TrainerCallback):  # type: ignore[misc]
    """Show a bar on a terminal, or print a line now and then in a log.

    Args:
        title: name of the run.
    """

    def __init__(self, console: Console, title: str) -> None:
        self.console, self.title, self.doing = console, title, "train"
        self._bar: Progress | None = None
        self._task: Any = None
        self._began = self._said = time.monotonic()
        self._done = self._first = 0

    def begin(self, doing: str, total: int, done: int = 0) -> None:
        """Start a bar of `total` steps, of which `done` are complete."""
        self.end()
        self.doing, self._began, self._done, self._first = doing, time.monotonic(), done, done
        self._said, self._total = self._began, total
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            left = (TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
            self._bar = Progress(*columns, *left, console=self.console, transient=True)
            self._task = self._bar.add_task(escape(f"{self.title}: {doing}"), total=total, completed=done, note="")
            self._bar.start()

    def step(self, done: int, note: str = "") -> None:
        """Show the number of completed steps."""
        self._done = done
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=note)
            return
        now = time.monotonic()
        if now - self._said >= SECONDS_BETWEEN_LINES and done > self._first:
            self._said = now
            left = (now - self._began) / (done - self._first) * (self._total - done)
            line = f"{self.title}: {self.doing} {done} of {self._total}, {round(left)} s left{', ' * bool(note)}{note}"
            self.console.print(escape(line), highlight=False, soft_wrap=True)

    def end(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begin("train", state.max_steps, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        losses = [one["loss"] for one in state.log_history if "loss" in one]
        self.step(state.global_step, f"loss {losses[-1]:.3f}" if losses else "")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step(self._done + 1)
