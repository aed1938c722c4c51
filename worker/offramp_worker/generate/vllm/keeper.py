"""The parent of one process of vLLM's: ends it, and all that it started, when the worker is gone.

Run as a program with the number of a pipe, to which it writes its child's process group, and vLLM's command line. Its
standard input is a pipe whose other end the worker holds and never writes to: it ends with the worker, however that
ends. A worker that was killed leaves the folder of its sockets behind, in which this runs: the last keeper removes it.
SIGINT and SIGTERM do not end it, for the worker drains then. Needs nothing but Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

PR_SET_PDEATHSIG = 1
ENDING = (signal.SIGINT, signal.SIGTERM)
PATIENCE_SECONDS = 10.0  # between asking it to end and ending it


def main() -> int:
    """Start, and wait; vLLM's exit code."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    tells, command, worker = int(sys.argv[1]), sys.argv[2:], os.getppid()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_with_parent)  # noqa: PLW1509 - one thread yet
    os.write(tells, str(child.pid).encode())
    os.close(tells)

    def end() -> None:
        # Nothing is ever written there; not buffered, as this thread is never joined.
        while os.read(sys.stdin.fileno(), 1):
            pass
        _signal(child.pid, signal.SIGTERM)
        try:
            child.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            _signal(child.pid, signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()
    code = child.wait()
    _signal(child.pid, signal.SIGKILL)  # what it started and left behind
    if os.getppid() != worker:
        _remove(Path.cwd())
    return code if code >= 0 else 128 - code


def _with_parent() -> None:
    """In the child: end when this keeper is killed, and by signals. It has one thread yet, so forking is safe."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _remove(folder: Path) -> None:
    """Its sockets, and the folder itself if they were all that was in it."""
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            if file.is_socket():
                file.unlink(missing_ok=True)
        folder.rmdir()


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main())
