"""Bundles that `offramp up` fetches, by the code that a cluster's workers fetch theirs with."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from dataclasses import replace
from pathlib import Path

from offramp_core.bundle import MANIFEST_FILE
from offramp_core.control.spec import ServiceSpec
from offramp_core.plan import canonical_json
from offramp_core.protocol import FetchProgress
from offramp_operator.shell.log import log_event

AWS_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
LOG_EVERY_SECONDS = 10.0


def fetched_bundle(spec: ServiceSpec, bundles: Path) -> Path:
    """The folder of a bundle at ``https://`` or ``s3://``, fetched on first use; below ``bundles``, one per URI and
    digests.

    Credentials for S3 are Amazon's usual variables. Any address may be connected to: it is the user's own machine.

    Raises
    ------
    DeliveryError
        It cannot be had; the message says why and what to do.
    """
    wanted = [spec.model_uri, spec.model_endpoint, spec.model_region, spec.model_digest, spec.archive_digest]
    folder = bundles / hashlib.sha256(canonical_json(wanted)).hexdigest()[:16]
    if (folder / MANIFEST_FILE).is_file():
        return folder
    # The serving stack is the optional part `worker`; `up` starts workers from it anyway.
    from offramp_worker.fetch.fetch import fetch
    from offramp_worker.fetch.network import client
    from offramp_worker.fetch.source import Credentials, authority, source

    found = source(spec.model_uri, endpoint=spec.model_endpoint, region=spec.model_region)
    keys = {name: os.environ[name] for name in AWS_VARIABLES if os.environ.get(name)}
    if keys and spec.model_uri.startswith("s3://"):
        found = replace(found, credentials=Credentials(authority(found.url), keys))
    bundles.mkdir(parents=True, exist_ok=True, mode=0o700)
    with client(allow_private=True) as connection:
        return fetch(
            found,
            folder,
            client=connection,
            digest=spec.model_digest,
            archive_digest=spec.archive_digest,
            report=_Telling(found.name),
        )


class _Telling:
    """An event per phase, and now and then one in between."""

    def __init__(self, name: str) -> None:
        self._name, self._phase, self._logged_at = name, "", 0.0

    def __call__(self, progress: FetchProgress) -> None:
        now = time.monotonic()
        if progress.phase == self._phase and now - self._logged_at < LOG_EVERY_SECONDS:
            return
        self._phase, self._logged_at = progress.phase, now
        of = f" of {progress.total_bytes}" if progress.total_bytes else ""
        amount = f", {progress.done_bytes}{of} bytes" if progress.done_bytes else ""
        log_event("fetching", f"{self._name}: {progress.phase}{amount}", level=logging.INFO)
