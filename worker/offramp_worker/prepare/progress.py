"""Progress on stderr: bars on a terminal, one line per step elsewhere. Results never go through here."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

Advance = Callable[[int], None]


@dataclass(slots=True)
class Reporter:
    """Shows the steps of a long command.

    ``quiet`` shows nothing at all.
    """

    quiet: bool = False

    @contextmanager
    def step(self, name: str, *, total: int) -> Iterator[Advance]:
        """Announce a step of ``total`` units; the value is a function that is told each finished number of them."""
        if self.quiet:
            yield lambda _done: None
            return
        # Not at the top: the worker image trains quietly and has no such library.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(file=sys.stderr)
        if console.is_terminal:
            columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            with Progress(*columns, console=console) as bar:
                task = bar.add_task(name, total=total)
                yield lambda done: bar.advance(task, done)
        else:
            start = time.perf_counter()
            yield lambda _done: None
            console.print(f"{name}: {total} in {time.perf_counter() - start:.1f} s", highlight=False)
