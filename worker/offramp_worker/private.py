"""Opening files of this worker alone, in a folder where somebody may have laid something else."""

from __future__ import annotations

import os
import stat


def open_private(path: str, flags: int) -> int:
    """A file descriptor, as ``open(..., opener=open_private)`` wants it: no link is followed, and nothing but a regular
    file is opened or waited for.

    Raises
    ------
    OSError
        Also where something else than a file lies there.
    """
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path} is no regular file")
    return file
