"""A worker whose device can be made sick: every run of every session fails while the file ``SICK_WHILE`` exists."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnxruntime as ort

ILLEGAL = "CUDA failure 700: an illegal memory access was encountered"


def main() -> None:
    """The worker's own entry point, with less patience."""
    from offramp_worker import main as entry
    from offramp_worker.engine import vitals

    sick = Path(os.environ["SICK_WHILE"])

    def failing(method: str) -> None:
        run = getattr(ort.InferenceSession, method)

        def run_unless_sick(*args: Any) -> Any:
            if sick.exists():
                raise RuntimeError(ILLEGAL)
            return run(*args)

        setattr(ort.InferenceSession, method, run_unless_sick)

    failing("run")
    failing("run_with_iobinding")
    vitals.FIRST_PAUSE_SECONDS, vitals.GIVE_UP_SECONDS = 0.5, 1.0
    entry.RELOAD_SECONDS = 0.5
    entry.main()


if __name__ == "__main__":
    main()
