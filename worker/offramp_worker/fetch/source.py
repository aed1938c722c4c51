"""Where a bundle comes from, and with which credentials.

Credentials are a folder of small files, as a mounted Secret is. Its file ``host`` says to whom they may be shown, so a
service that names somebody else's Secret cannot send it to a host of its own.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit

import httpx
from httpx_auth import AWS4Auth

from offramp_core.errors import DeliveryError
from offramp_core.reasons import Reason

DEFAULT_REGION = "us-east-1"
MAX_CREDENTIAL_BYTES = 64 * 1024
CA_FILE = "ca.crt"
DEFAULT_PORTS = {"https": 443, "http": 80}
CREDENTIALS = "the Secret that spec.model.secretRef names"


@dataclass(frozen=True, slots=True)
class Credentials:
    """``host`` is the one that may see them, with its port unless it is the scheme's own. None of the rest is ever
    printed."""

    host: str
    texts: dict[str, str] = field(repr=False)
    ca_file: Path | None = None

    def auth(self, *, s3_region: str | None) -> httpx.Auth | None:
        """How a request is authenticated; ``s3_region`` None is plain HTTP.

        Raises
        ------
        DeliveryError
            One half of a pair is missing.
        """
        texts = self.texts
        if s3_region is not None:
            if not (texts.get("AWS_ACCESS_KEY_ID") and texts.get("AWS_SECRET_ACCESS_KEY")):
                raise _incomplete("AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
            token = {"security_token": t} if (t := texts.get("AWS_SESSION_TOKEN")) else {}
            return AWS4Auth(texts["AWS_ACCESS_KEY_ID"], texts["AWS_SECRET_ACCESS_KEY"], s3_region, "s3", **token)
        if bearer := texts.get("bearerToken"):
            return _Bearer(bearer)
        if "username" in texts and "password" in texts:
            return httpx.BasicAuth(texts["username"], texts["password"])
        if self.ca_file is None:
            raise _incomplete("bearerToken, or username and password, or ca.crt")
        return None


class _Bearer(httpx.Auth):
    def __init__(self, token: str) -> None:
        self._header = f"Bearer {token}"

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["Authorization"] = self._header
        yield request


@dataclass(frozen=True, slots=True)
class Source:
    """One archive to fetch. ``region`` is None for plain HTTP."""

    url: str
    region: str | None = None
    credentials: Credentials | None = None

    @property
    def name(self) -> str:
        """The URL for people: without its query, which may hold a signature."""
        return shown(self.url)

    def auth_for(self, url: str) -> httpx.Auth | None:
        """What a request to ``url`` is signed with: nothing, unless it goes to the host of the credentials."""
        if self.credentials is None or authority(url) != self.credentials.host:
            return None
        return self.credentials.auth(s3_region=self.region)


def source(
    uri: str, *, endpoint: str | None = None, region: str | None = None, credentials: Path | None = None
) -> Source:
    """What a URI means.

    Parameters
    ----------
    uri : str
        ``https://HOST/PATH`` or ``s3://BUCKET/KEY``.
    endpoint, region : str, optional
        Of the S3-compatible store; Amazon's in us-east-1 without them. Buckets are addressed by path, which all stores
        know.
    credentials : Path, optional
        Folder with the files of a Secret.

    Raises
    ------
    DeliveryError
        The URI is neither, or the credentials are incomplete or for another host.
    """
    held = None if credentials is None else read_credentials(credentials)
    scheme, _, rest = uri.partition("://")
    if scheme == "https" and rest:
        found = Source(uri, credentials=held)
    elif scheme == "s3" and "/" in rest.strip("/"):
        region = region or DEFAULT_REGION
        base = (endpoint or f"https://s3.{region}.amazonaws.com").rstrip("/")
        bucket, _, key = rest.partition("/")
        found = Source(f"{base}/{bucket}/{quote(key, safe='/-_.~')}", region=region, credentials=held)
    else:
        raise DeliveryError(
            Reason.FETCH_REFUSED,
            f"{shown(uri)} cannot be fetched",
            "write https://HOST/PATH or s3://BUCKET/KEY in spec.model.uri",
        )
    if held is not None:
        if authority(found.url) != held.host:
            raise DeliveryError(
                Reason.FETCH_REFUSED,
                f"the credentials are for {held.host}, and {found.name} is at {authority(found.url)}",
                f"correct spec.model.uri, or the key host of {CREDENTIALS}",
            )
        held.auth(s3_region=found.region)
    return found


def read_credentials(folder: Path) -> Credentials:
    """The files of a mounted Secret. Raises :class:`DeliveryError` where there is none, or it says not for which host
    it is."""
    texts: dict[str, str] = {}
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.name.startswith(".") or not file.is_file() or file.name == CA_FILE:
            continue
        if file.stat().st_size > MAX_CREDENTIAL_BYTES:
            raise DeliveryError(
                Reason.FETCH_REFUSED,
                f"key {file.name} of {CREDENTIALS} is larger than {MAX_CREDENTIAL_BYTES} bytes",
                "correct it",
            )
        texts[file.name] = file.read_text(encoding="utf-8").strip()
    host = texts.pop("host", "").lower()
    if not host:
        raise DeliveryError(
            Reason.FETCH_REFUSED,
            f"{CREDENTIALS} does not exist or has no key host",
            "create it with the key host, the host that its credentials are for, and delete the waiting pod",
        )
    ca_file = folder / CA_FILE
    return Credentials(host, texts, ca_file if ca_file.is_file() else None)


def authority(url: str) -> str:
    """Host and port, the port left out where it is the scheme's own."""
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    host = f"[{host}]" if ":" in host else host
    return host if parts.port in (None, DEFAULT_PORTS.get(parts.scheme)) else f"{host}:{parts.port}"


def shown(url: str) -> str:
    """A URL without query, fragment and user, for messages."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _incomplete(keys: str) -> DeliveryError:
    return DeliveryError(
        Reason.FETCH_REFUSED, f"{CREDENTIALS} lacks {keys}", "add what is missing and delete the waiting pod"
    )
