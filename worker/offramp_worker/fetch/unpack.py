"""Unpack an archive from a stranger: regular files and folders below one folder, within limits, and nothing else.

The standard library's ``data_filter`` (PEP 706) rewrites what it can make harmless, and a Python 3.11 of before its
fourth bug-fix release has none. The rules here are stricter: no entry is a link, a device or a name outside, so none
can lead a later one astray.
"""

from __future__ import annotations

import errno
import gzip
import os
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from offramp_core.bundle import MANIFEST_FILE
from offramp_core.errors import DeliveryError
from offramp_core.reasons import Reason
from offramp_worker.fetch.download import CHUNK_BYTES, NO_SPACE, DownloadLimits, disk_full, too_large

GZIP_MAGIC = b"\x1f\x8b"
MAX_DEPTH = 8
MAX_NAME = 512
MAX_READ = 4 * CHUNK_BYTES  # in one piece: more would be a header that asks for all memory
CLASHES = (errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG)
TAR_OVERHEAD = 4096  # of an entry: its header, its padding and a short extended header

Tell = Callable[[int, int | None], None]


def unpack(archive: Path, folder: Path, *, limits: DownloadLimits, tell: Tell = lambda _done, _total: None) -> Path:
    """Unpack a tar, gzipped or not, into ``folder``, which must not exist.

    Returns
    -------
    Path
        Where the bundle's manifest lies: ``folder``, or the only folder in it.

    Raises
    ------
    DeliveryError
        It is no such archive, holds anything but regular files and folders below its root, or exceeds a limit.
    """
    folder.mkdir()
    try:
        with _opened(archive, limits) as raw, tarfile.open(fileobj=raw, mode="r:") as tar:
            _unpack_members(tar, folder, limits=limits, tell=tell)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
        raise _refused(f"it is no tar or tar.gz, or is damaged ({' '.join(str(error).split())[:200]})") from error
    except OSError as error:
        if error.errno in NO_SPACE:
            raise disk_full("the unpacked bundle") from error
        if error.errno in CLASHES:
            raise _refused(f"two of its names clash, or one is too long ({error.strerror})") from error
        raise
    return _root(folder)


class _Bounded:
    """A file that gives at most ``limit`` bytes in all and no huge piece at once, however well it was compressed."""

    def __init__(self, file: IO[bytes], limits: DownloadLimits) -> None:
        self._file, self._limits = file, limits
        self._most = limits.bytes + TAR_OVERHEAD * limits.files

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, n: int = -1) -> bytes:
        if not 0 <= n <= MAX_READ:
            raise _refused("it has a header that is too large")
        got = self._file.read(n)
        self._check(self._file.tell())
        return got

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_SET:
            self._check(position)
        return self._file.seek(position, whence)

    def tell(self) -> int:
        return self._file.tell()

    def _check(self, position: int) -> None:
        if position > self._most:
            raise too_large("the bundle unpacks to more than", self._limits.bytes)


def _opened(archive: Path, limits: DownloadLimits) -> _Bounded:
    with archive.open("rb") as file:
        packed = file.read(2) == GZIP_MAGIC
    if packed:
        return _Bounded(cast(IO[bytes], gzip.GzipFile(archive, "rb")), limits)
    return _Bounded(archive.open("rb"), limits)


def _unpack_members(tar: tarfile.TarFile, folder: Path, *, limits: DownloadLimits, tell: Tell) -> None:
    seen, done = 0, 0
    while (member := tar.next()) is not None:
        tar.members = []  # type: ignore[attr-defined]  # else every header of a hostile archive is kept
        seen += 1
        if seen > limits.files:
            raise _refused(f"it holds more than {limits.files} entries")
        path = folder / _judged(member)
        if member.isdir():
            path.mkdir(parents=True, exist_ok=True)
            continue
        done += member.size
        if done > limits.bytes:
            raise too_large("the bundle unpacks to more than", limits.bytes)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(tar, member, path)
        tell(done, None)


def _judged(member: tarfile.TarInfo) -> PurePosixPath:
    """Where an entry goes, below the folder; raises for one that must not be there."""
    name = member.name
    shown = repr(name[:100])
    if not (member.isdir() or member.type in (tarfile.REGTYPE, tarfile.AREGTYPE)) or member.issparse():
        raise _refused(f"{shown} is neither a regular file nor a folder")
    path = PurePosixPath(name)
    parts = path.parts
    if path.is_absolute() or ".." in parts or "\\" in name or not name.isprintable():
        raise _refused(f"{shown} leads out of the folder, or is no plain name")
    if len(name) > MAX_NAME or len(parts) > MAX_DEPTH:
        raise _refused(f"{shown} is longer than {MAX_NAME} characters or deeper than {MAX_DEPTH} folders")
    return path


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o644)
    inside = tar.extractfile(member)
    assert inside is not None
    left = member.size
    with os.fdopen(descriptor, "wb") as file:
        while chunk := inside.read(min(CHUNK_BYTES, left)):
            file.write(chunk)
            left -= len(chunk)
    if left:
        raise _refused(f"{member.name[:100]!r} is cut off")


def _root(folder: Path) -> Path:
    if (folder / MANIFEST_FILE).is_file():
        return folder
    inside = list(folder.iterdir())
    if len(inside) == 1 and (inside[0] / MANIFEST_FILE).is_file():
        return inside[0]
    raise _refused(f"it holds no {MANIFEST_FILE}, neither at its top nor in its only folder")


def _refused(why: str) -> DeliveryError:
    return DeliveryError(
        Reason.INVALID_BUNDLE,
        f"the archive is refused: {why}",
        "pack the folder that `offramp prepare` wrote with tar -C DIR -cf bundle.tar .",
    )
