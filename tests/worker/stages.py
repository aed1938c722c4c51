"""Stages that do something else before they run: wait, fail, turn a clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from offramp_worker.engine.execution.execute import Runnable


class _StageBehind:
    def __init__(self, first: Callable[[], object], stage: Runnable) -> None:
        self._first, self._stage = first, stage
        self.ramps, self.reads_input = stage.ramps, stage.reads_input
        self.pads = stage.pads

    def run(self, *args: Any) -> Any:
        self._first()
        return self._stage.run(*args)


def behind(first: Callable[[], object], stage: Runnable) -> Runnable:
    """``stage``, with ``first`` called before each run."""
    return cast(Runnable, _StageBehind(first, stage))


def broken(stage: Runnable, *, why: str = "kernel exploded") -> Runnable:
    """``stage`` as one that fails."""

    def explode() -> None:
        raise RuntimeError(why)

    return behind(explode, stage)
