"""Examples in a command's help."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

Command = TypeVar("Command", bound=Callable[..., None])


def with_examples(*lines: str) -> Callable[[Command], Command]:
    """Put these command lines at the end of the command's help."""

    def add(command: Command) -> Command:
        listed = "\n\n".join(f"  {line}" for line in lines)
        command.__doc__ = f"{inspect.cleandoc(command.__doc__ or '')}\n\nExamples:\n\n{listed}\n"
        return command

    return add
