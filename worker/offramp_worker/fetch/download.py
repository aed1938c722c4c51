"""One file over HTTP, in as many connections as it takes: a broken one is resumed where it broke.

A part is only added to when the server proves by a strong ETag that it still has the same file (If-Range, RFC 9110
section 13.1.5, and the ETag of what it sends then); else it begins anew. What has arrived stays on disk, so a restarted
process goes on as well.
"""

from __future__ import annotations

import errno
import json
import random
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urljoin, urlsplit

import httpcore
import httpx

from offramp_core.errors import DeliveryError
from offramp_core.reasons import Reason
from offramp_worker.fetch.source import Source, shown

CHUNK_BYTES = 1024 * 1024
MAX_ATTEMPTS = 8  # in a row that brought nothing new
MAX_REDIRECTS = 5
FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 30.0
RETRIED = (408, 425, 429, 500, 502, 503, 504)
CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
BROKEN = (
    httpx.TransportError,
    httpcore.TimeoutException,
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.UnsupportedProtocol,
    ConnectionError,
    TimeoutError,
)

Tell = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True)
class DownloadLimits:
    """``seconds`` are for all of it; ``bytes`` bound the archive, and once more what it unpacks to."""

    bytes: int = 16 * 2**30
    files: int = 10_000
    seconds: float = 3600.0


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds that never jump, and a pause. Tests give their own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class _BrokenError(Exception):
    """This attempt failed and another one may not. ``wait`` is what the server asked for, in seconds."""

    def __init__(self, message: str, *, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


class Download:
    """Fetches ``source`` into ``part``, from where an earlier attempt (of this process or another one) left off.

    Parameters
    ----------
    client : httpx.Client
        See :func:`offramp_worker.fetch.network.client`.
    part : Path
        The file. What is known of it stands beside it, in ``<name>.json``.
    tell : callable
        Called with (bytes so far, bytes in all or None) as they come.
    deadline : float
        When to give up, on ``clock``.
    refused : mapping
        By ETag, what was wrong with a file that an earlier attempt fetched: the same one is not fetched again to find
        that out.
    """

    def __init__(
        self,
        client: httpx.Client,
        source: Source,
        part: Path,
        *,
        limits: DownloadLimits,
        deadline: float,
        tell: Tell = lambda _done, _total: None,
        clock: Clock = Clock(),
        refused: Mapping[str, DeliveryError] = MappingProxyType({}),
    ) -> None:
        self._known_bad = refused
        self._client, self._source, self._part = client, source, part
        self._limits, self._deadline, self._tell, self._clock = limits, deadline, tell, clock
        self._notes = part.with_name(part.name + ".json")

    def run(self) -> None:
        """Come back when the file is complete.

        Raises
        ------
        DeliveryError
            It cannot be had, is too large, or the disk is full.
        """
        failed = 0
        while True:
            before = self._size()
            try:
                return self._attempt()
            except _BrokenError as error:
                failed = 1 if self._size() > before else failed + 1
                pause = min(MAX_PAUSE_SECONDS, max(error.wait, FIRST_PAUSE_SECONDS * 2.0 ** (failed - 1)))
                pause *= random.uniform(0.8, 1.2)  # noqa: S311 - so that pods which broke together do not come back together
                if failed >= MAX_ATTEMPTS:
                    raise self._failed(f"{error}, {failed} times in a row") from error
                if self._clock.now() + pause >= self._deadline:
                    raise self._too_late(str(error)) from error
                self._clock.sleep(pause)
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                raise disk_full(f"{_mib(self._size())} of {self._source.name}") from error

    @property
    def etag(self) -> str:
        """The strong ETag of what is on disk; empty where the server gave none."""
        return self._resumable()

    # --- one attempt -------------------------------------------------------------------------------

    def _attempt(self) -> None:
        etag = self._resumable()
        have = self._size() if etag else 0
        headers = {"Accept-Encoding": "identity", "User-Agent": "offramp-worker"}
        if have:
            headers |= {"Range": f"bytes={have}-", "If-Range": etag}
        url = self._source.url
        for _ in range(MAX_REDIRECTS + 1):
            try:
                with self._client.stream("GET", url, headers=headers, auth=self._source.auth_for(url)) as answer:
                    if not answer.is_redirect or "location" not in answer.headers:
                        return self._take(answer, have)
                    url = self._redirected(url, answer.headers["location"])
            except BROKEN as error:
                raise _BrokenError(f"{shown(url)}: {_error_text(error)}") from error
        raise self._refused(f"{self._source.name} redirects more than {MAX_REDIRECTS} times")

    def _take(self, answer: httpx.Response, have: int) -> None:
        status = answer.status_code
        if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            self._forget()
            raise _BrokenError(f"{self._source.name} has changed or lost its end")
        if status in RETRIED:
            after = answer.headers.get("retry-after", "")
            raise _BrokenError(
                f"{self._source.name} answered {_status(status)}", wait=float(after) if after.isdigit() else 0
            )
        if status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
            raise self._refusal_of(answer)
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise self._refused(
                f"{self._source.name} is sent with Content-Encoding {answer.headers['content-encoding']}"
            )
        total = self._resume(answer, have) if status == HTTPStatus.PARTIAL_CONTENT else self._begin(answer)
        if total is not None:
            self._check_room(total)
        self._write(answer, total)
        if total is not None and self._size() != total:
            raise _BrokenError(f"{self._source.name} ended after {self._size()} of {total} bytes")

    def _resume(self, answer: httpx.Response, have: int) -> int | None:
        match = CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
        if match is None or int(match[1]) != have or not have:
            self._forget()
            raise _BrokenError(f"{self._source.name} sent another range than the one asked for")
        if answer.headers.get("etag") != self._resumable():  # some stores take a Range and ignore its If-Range
            self._forget()
            raise _BrokenError(f"{self._source.name} has changed meanwhile")
        return None if match[3] == "*" else int(match[3])

    def _begin(self, answer: httpx.Response) -> int | None:
        """The server sends all of it: what was there is of no use."""
        self._forget()
        etag = answer.headers.get("etag", "")
        if etag in self._known_bad:
            raise self._known_bad[etag]
        if etag.startswith('"'):
            self._notes.write_text(json.dumps({"url": self._source.name, "etag": etag}))
        length = answer.headers.get("content-length", "")
        return int(length) if length.isdigit() else None

    def _write(self, answer: httpx.Response, total: int | None) -> None:
        done = self._size()
        with self._part.open("ab") as file:
            for chunk in answer.iter_raw():
                done += len(chunk)
                if done > self._limits.bytes:
                    raise too_large(f"{self._source.name} is larger than", self._limits.bytes)
                file.write(chunk)
                self._tell(done, total)
                if self._clock.now() >= self._deadline:
                    file.flush()
                    raise self._too_late(f"{_mib(done)} of {_mib(total) if total else 'an unknown size'} had arrived")

    # --- what is on disk ---------------------------------------------------------------------------

    def _size(self) -> int:
        try:
            return self._part.stat().st_size
        except FileNotFoundError:
            return 0

    def _resumable(self) -> str:
        """The ETag of what is on disk; empty where it cannot be added to."""
        try:
            notes = json.loads(self._notes.read_text())
        except (OSError, ValueError):
            return ""
        same = isinstance(notes, dict) and notes.get("url") == self._source.name
        return str(notes.get("etag", "")) if same else ""

    def _forget(self) -> None:
        self._notes.unlink(missing_ok=True)
        self._part.unlink(missing_ok=True)

    def _check_room(self, total: int) -> None:
        if total > self._limits.bytes:
            raise too_large(f"{self._source.name} has {_mib(total)}, more than", self._limits.bytes)
        if total - self._size() > shutil.disk_usage(self._part.parent).free:
            raise disk_full(f"the {_mib(total)} of {self._source.name}")

    # --- what is reported ------------------------------------------------------------------------------

    def _redirected(self, url: str, location: str) -> str:
        there = urljoin(url, location)
        if urlsplit(there).scheme != urlsplit(url).scheme:
            raise self._refused(f"{shown(url)} redirects to {shown(there)}, which is another scheme")
        return there

    def _refusal_of(self, answer: httpx.Response) -> DeliveryError:
        status, region = answer.status_code, answer.headers.get("x-amz-bucket-region", "")
        cause = f"{self._source.name} answered {_status(status)}"
        if self._source.region is not None and region not in ("", self._source.region):
            return DeliveryError(
                Reason.FETCH_REFUSED, f"{cause}: the bucket is in {region[:40]}", "set spec.model.region to it"
            )
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return DeliveryError(
                Reason.FETCH_REFUSED,
                cause,
                "check that spec.model.secretRef names credentials which may read it, and that it exists",
            )
        return self._refused(cause)

    def _refused(self, cause: str) -> DeliveryError:
        return DeliveryError(Reason.FETCH_REFUSED, cause, "correct spec.model.uri, or put the bundle there")

    def _failed(self, cause: str) -> DeliveryError:
        return DeliveryError(
            Reason.FETCH_FAILED,
            cause,
            "it is tried again; check the server, the name and the network of the worker's node",
        )

    def _too_late(self, cause: str) -> DeliveryError:
        return DeliveryError(
            Reason.FETCH_FAILED,
            f"{self._source.name} did not arrive within {self._limits.seconds:g} s ({cause})",
            "it goes on from there; raise the chart's delivery.timeout if the network is slow",
        )


def too_large(cause: str, limit: int) -> DeliveryError:
    """What is larger than the administrator allows."""
    return DeliveryError(
        Reason.BUNDLE_TOO_LARGE,
        f"{cause} the {_mib(limit)} allowed",
        "raise the chart's delivery.sizeLimit or make the bundle smaller",
    )


def disk_full(what: str) -> DeliveryError:
    """No space is left where the bundle is written."""
    return DeliveryError(
        Reason.DISK_FULL,
        f"the node has no disk space left for {what}",
        "free disk space there or add a node; it is tried again",
    )


def _status(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def _error_text(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:200]


def _mib(n: int) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"
