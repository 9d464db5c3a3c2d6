"""What a person sees of a long run: a bar on a terminal, plain lines elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_LINE_SECONDS = 15.0
"""Without a terminal: at least so long between two lines."""


class ProgressReport:
    """Shows step, loss, tokens/s, acceptance length and remaining time; silent where `shown` is False."""

    def __init__(self, title: str, total_steps: int, done_steps: int, shown: bool) -> None:
        self.console = Console(stderr=True)
        self.shown = shown
        self.title = title
        self.total_steps = total_steps
        self._first_step = done_steps
        self._started = self._last_line = time.monotonic()
        self._bar: Progress | None = None
        if shown and self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[figures]}"), console=self.console)
            self._task = self._bar.add_task(title, total=total_steps, completed=done_steps, figures="")

    def __enter__(self) -> "ProgressReport":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, step: int, figures: str) -> None:
        """Report that `step` steps are done; `figures` is one short line."""
        if not self.shown:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures=figures)
            return
        now = time.monotonic()
        if step == self.total_steps or now - self._last_line >= PLAIN_LINE_SECONDS:
            self._last_line = now
            remaining = (now - self._started) / max(1, step - self._first_step) * (self.total_steps - step)
            line = f"{self.title} {step}/{self.total_steps}  {figures}  ETA {remaining:.0f} s"
            self.console.print(line, highlight=False, soft_wrap=True)
