"""From a URI to a verified bundle in a folder: download, check, unpack, check, and one rename at the end."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from offramp_core.bundle import MANIFEST_FILE
from offramp_core.errors import OR_ANOTHER_MODEL, DeliveryError, InvalidBundleError
from offramp_core.protocol import FetchPhase, FetchProgress
from offramp_core.reasons import Reason
from offramp_worker.bundle.load import check_files
from offramp_worker.bundle.task import GENERATE, declared_engine, declared_task
from offramp_worker.fetch.download import Clock, Download, DownloadLimits
from offramp_worker.fetch.source import Source
from offramp_worker.fetch.unpack import unpack

REFUSED = "refused.json"
WORK = ".fetch"  # beside the bundle, so that the rename stays on one file system

Report = Callable[[FetchProgress], None]


def fetch(
    source: Source,
    to: Path,
    *,
    client: httpx.Client,
    digest: str | None = None,
    archive_digest: str | None = None,
    limits: DownloadLimits = DownloadLimits(),  # noqa: B008 - frozen
    report: Report = lambda _: None,
    clock: Clock = Clock(),  # noqa: B008 - frozen
) -> Path:
    """Bring the bundle to ``to``, which is there as a whole or not at all. A bundle that is there already is left
    alone.

    Parameters
    ----------
    digest : str, optional
        The backbone digest (``sha256:`` and 64 hex digits) that the bundle must have.
    archive_digest : str, optional
        The digest that the archive must have. It is checked before anything of the archive is parsed.

    Raises
    ------
    DeliveryError
        Why not, in one sentence with the next step.
    """
    if (to / MANIFEST_FILE).is_file():
        return to
    _check_encrypted(source, archive_digest)
    work = to.parent / WORK
    work.mkdir(parents=True, exist_ok=True)
    part = work / "archive"
    report(FetchProgress("connecting", 0, None))
    wanted = [source.name, digest, archive_digest, limits.bytes]
    download = Download(
        client,
        source,
        part,
        limits=limits,
        deadline=clock.now() + limits.seconds,
        tell=_teller(report, "downloading"),
        clock=clock,
        refused=_refused_before(work, wanted),
    )
    download.run()
    size = part.stat().st_size
    report(FetchProgress("verifying", size, size))
    try:
        if archive_digest is not None:
            _check_archive(part, archive_digest, source)
        root = _unpacked(part, work / "tree", limits, report)
        _check_bundle(root, digest, source)
    except DeliveryError as error:
        shutil.rmtree(work / "tree", ignore_errors=True)
        if error.reason != Reason.DISK_FULL:
            _refuse(work, wanted, download.etag, error)
        raise
    root.rename(to)
    shutil.rmtree(work, ignore_errors=True)
    return to


def _check_encrypted(source: Source, archive_digest: str | None) -> None:
    if source.url.startswith("http:") and archive_digest is None:
        raise DeliveryError(
            Reason.FETCH_REFUSED,
            f"{source.name} is not encrypted, so anybody on the way could change it",
            "set spec.model.archiveDigest",
        )


def _teller(report: Report, phase: FetchPhase) -> Callable[[int, int | None], None]:
    return lambda done, total: report(FetchProgress(phase, done, total))


def _unpacked(part: Path, tree: Path, limits: DownloadLimits, report: Report) -> Path:
    shutil.rmtree(tree, ignore_errors=True)
    report(FetchProgress("unpacking", 0, None))
    return unpack(part, tree, limits=limits, tell=_teller(report, "unpacking"))


def _refuse(work: Path, wanted: list[Any], etag: str, error: DeliveryError) -> None:
    """Drop an archive that will not come right by itself, and keep what was wrong with it: a container is started again
    and again."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    refusal = {"wanted": wanted, "etag": etag, "error": [error.reason, error.cause, error.remedy]}
    (work / REFUSED).write_text(json.dumps(refusal))


def _refused_before(work: Path, wanted: list[Any]) -> dict[str, DeliveryError]:
    """What an earlier attempt found wrong, by ETag; nothing where something else was asked for then."""
    try:
        noted = json.loads((work / REFUSED).read_text())
        return {noted["etag"]: DeliveryError(*noted["error"])} if noted["etag"] and noted["wanted"] == wanted else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _check_archive(part: Path, expected: str, source: Source) -> None:
    with part.open("rb") as file:
        found = "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise DeliveryError(
            Reason.DIGEST_MISMATCH,
            f"the archive at {source.name} has digest {found}, not {expected}",
            "correct spec.model.archiveDigest, or put the right archive there",
        )


def _checked_digest(root: Path) -> str:
    """The digest of a bundle, once its files are those that it lists."""
    if declared_task(root) != GENERATE:
        return check_files(root).backbone_digest
    if declared_engine(root):
        from offramp_worker.generate.vllm.load import check_vllm

        return check_vllm(root).digest
    from offramp_worker.generate.load import (
        check_content,
        read_manifest,
    )  # with a runtime that no other bundle needs here

    manifest = read_manifest(root)
    check_content(root, manifest.files)
    return manifest.digest


def _check_bundle(root: Path, expected: str | None, source: Source) -> None:
    try:
        found = _checked_digest(root)
    except InvalidBundleError as error:
        raise DeliveryError(
            Reason.INVALID_BUNDLE,
            f"the bundle at {source.name} is broken: {error}",
            "pack what `offramp prepare` wrote once more",
        ) from error
    if expected is not None and found != expected:
        raise DeliveryError(
            Reason.DIGEST_MISMATCH,
            f"the bundle at {source.name} has digest {found}, and the service must serve {expected}",
            f"put that bundle back there, {OR_ANOTHER_MODEL}",
        )
