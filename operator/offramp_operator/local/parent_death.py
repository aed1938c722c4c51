"""Run a command that gets SIGTERM when its parent dies: ``python parent_death.py PARENT_PID COMMAND...``.

The request to the kernel must be made by the child itself, and doing so between fork and exec is not safe in
a program with threads; hence this tiny program, which makes it and then becomes the command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def command(*argv: str) -> tuple[str, ...]:
    """``argv`` as a process that ends with this one."""
    return (sys.executable, "-S", "-E", __file__, str(os.getpid()), *argv)


def main(argv: list[str]) -> None:
    """Ask for the signal, make sure that the parent has not died before, and become the command."""
    parent, command = int(argv[1]), argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the parent is gone")
    os.execvp(command[0], command)  # noqa: S606 - becoming the command is the point


if __name__ == "__main__":
    main(sys.argv)
