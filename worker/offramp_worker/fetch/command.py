"""``offramp-worker fetch URI``: what a pod runs before its worker. While it fetches, its admin port tells how far it
has come.

The admin port is the worker's own, behind the same token: an operator that pulls the pod sees a worker that is not
ready and fetches its bundle. Why it ended is written, as ``REASON: cause; next step``, to where the kubelet looks for a
container's last words.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from offramp_core.errors import DeliveryError, InvalidArgumentError
from offramp_core.protocol import FetchProgress
from offramp_worker.fetch.download import DownloadLimits
from offramp_worker.fetch.fetch import fetch
from offramp_worker.fetch.network import client
from offramp_worker.fetch.source import shown, source
from offramp_worker.http.admin import admin_app
from offramp_worker.http.budget import ByteBudget
from offramp_worker.logs import log_event, route_library_logs
from offramp_worker.main import listen_admin
from offramp_worker.settings import Settings, settings_from_env
from offramp_worker.worker import InferenceWorker

LOG_SECONDS = 10.0
DEFAULT = DownloadLimits()


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit code is 0 when the bundle is there, 1 when it is not, 2 for settings that cannot
    work."""
    route_library_logs()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the first process of a container ends by no default
    options = _parser().parse_args(arguments)
    try:
        settings = settings_from_env({**os.environ, "OFFRAMP_BUNDLE": str(options.to)})
        worker = InferenceWorker(settings, deliver=lambda _: None)
        telling = _Telling(worker)
        with _AdminPort(worker, settings):
            _fetch(options, settings, telling)
    except InvalidArgumentError as error:
        log_event("settings-refused", level="error", reason=str(error))
        return 2
    except DeliveryError as error:
        log_event("fetch-failed", level="error", reason=error.reason, message=str(error))
        _last_words(options.last_words, f"{error.reason}: {error}")
        return 1
    log_event("fetched", source=shown(options.uri), to=str(options.to))
    return 0


def _fetch(options: argparse.Namespace, settings: Settings, telling: _Telling) -> None:
    wanted = source(options.uri, endpoint=options.endpoint, region=options.region, credentials=options.credentials)
    ca_file = wanted.credentials.ca_file if wanted.credentials is not None else None
    with client(allow_private=options.allow_private_networks, ca_file=ca_file) as connection:
        fetch(
            wanted,
            options.to,
            client=connection,
            digest=settings.model_digest,
            archive_digest=options.archive_digest,
            limits=DownloadLimits(bytes=options.max_bytes, files=options.max_files, seconds=options.seconds),
            report=telling,
        )


class _Telling:
    """Passes progress on to the admin port, and to the log now and then."""

    def __init__(self, worker: InferenceWorker) -> None:
        self._worker, self._logged_at = worker, 0.0

    def __call__(self, progress: FetchProgress) -> None:
        before, self._worker.fetching = self._worker.fetching, progress
        now = time.monotonic()
        if before is None or before.phase != progress.phase or now - self._logged_at >= LOG_SECONDS:
            self._logged_at = now
            log_event("fetching", phase=progress.phase, bytes=progress.done_bytes, total=progress.total_bytes)


class _AdminPort:
    """The admin port on a thread of its own, if the pod has a control plane."""

    def __init__(self, worker: InferenceWorker, settings: Settings) -> None:
        self._worker, self._settings = worker, settings
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="admin", daemon=True)

    def __enter__(self) -> None:
        if self._settings.has_control_plane:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    async def _serve(self) -> None:
        try:
            budget = ByteBudget(self._settings.max_bodies_bytes)
            server = await listen_admin(admin_app(self._worker), self._settings, budget)
        except InvalidArgumentError as error:
            log_event("progress-untold", level="warning", reason=str(error))  # the bundle matters more
            return
        await asyncio.to_thread(self._stop.wait)
        await server.close()


def _last_words(file: Path | None, text: str) -> None:
    if file is None:
        return
    try:
        file.write_text(text[:2000], encoding="utf-8")
    except OSError as error:
        log_event("last-words-lost", level="warning", reason=str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="offramp-worker fetch",
        description="Fetch an exit bundle, verify it and unpack it to a folder.",
        epilog="OFFRAMP_MODEL_DIGEST is the backbone digest that it must have; the variables of the admin port are "
        "those of the worker.",
    )
    parser.add_argument("uri", metavar="URI", help="https://HOST/PATH or s3://BUCKET/KEY of a tar or tar.gz")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder that the bundle becomes")
    parser.add_argument("--archive-digest", metavar="DIGEST", help="sha256:… that the archive must have")
    parser.add_argument("--endpoint", metavar="URL", help="of an S3-compatible store (default: Amazon's)")
    parser.add_argument("--region", help="of the bucket (default: us-east-1)")
    parser.add_argument("--credentials", type=Path, metavar="DIR", help="folder with the files of a Secret")
    parser.add_argument(
        "--allow-private-networks", action="store_true", help="connect to private and loopback addresses too"
    )
    parser.add_argument(
        "--max-bytes", type=int, default=DEFAULT.bytes, metavar="N", help="of the archive, and of what it holds"
    )
    parser.add_argument("--max-files", type=int, default=DEFAULT.files, metavar="N")
    parser.add_argument("--seconds", type=float, default=DEFAULT.seconds, metavar="S", help="for all of it")
    parser.add_argument("--last-words", type=Path, metavar="FILE", help="where to write why it failed")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
