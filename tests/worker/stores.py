"""A real HTTPS server that keeps bundles, and misbehaves as it is told; and one that takes signed requests only, as S3
does."""

from __future__ import annotations

import functools
import hashlib
import hmac
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import httpx
import trustme

from offramp_worker.fetch.network import client

HOST = "models.example"


@dataclass
class Behaviour:
    """How the store answers. ``breaks`` are bytes after which connections are cut, one per request; ``statuses`` come
    first."""

    etag: str | None = '"v1"'
    breaks: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    ranges: bool = True
    claimed_length: int | None = None
    chunked: bool = False
    authorization: str | None = None
    keys: dict[str, str] | None = None
    region: str = "us-east-1"
    hold: threading.Event | None = None  # what the second half waits for


@dataclass(frozen=True)
class Request:
    """A request that arrived."""

    path: str
    headers: dict[str, str]
    sent: int = 0


@functools.cache
def authority() -> tuple[trustme.CA, trustme.LeafCert]:
    authority = trustme.CA()
    return authority, authority.issue_cert(HOST, "localhost")


class Store:
    """Serves ``files`` by path on a free port of the loopback. ``requests`` are those that came."""

    def __init__(self, files: Mapping[str, bytes], *, behaviour: Behaviour | None = None, tls: bool = True) -> None:
        self.files, self.behaviour, self.requests = dict(files), behaviour or Behaviour(), list[Request]()
        self.ca, certificate = authority()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._scheme = "https" if tls else "http"
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            certificate.configure_cert(context)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"{self._scheme}://{HOST}:{self.port}"

    @contextmanager
    def client(self, folder: Path, *, allow_private: bool = True) -> Iterator[httpx.Client]:
        """A client that knows the store's name and trusts its authority."""
        authority = folder / "store-ca.pem"
        self.ca.cert_pem.write_to_path(str(authority))
        with client(allow_private=allow_private, ca_file=authority, resolver=lambda host, port: ["127.0.0.1"]) as found:
            yield found

    def _handler(store) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - the handler's own self is another one
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                store._answer(self)

        return Handler

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        how, path = self.behaviour, urlsplit(handler.path).path
        headers = {name.lower(): value for name, value in handler.headers.items()}
        self.requests.append(Request(handler.path, headers))
        if how.statuses:
            self._refuse(handler, how.statuses.pop(0))
            return
        if how.authorization is not None and headers.get("authorization") != how.authorization:
            self._refuse(handler, 401)
            return
        if how.keys is not None and not signed(
            handler.command, handler.path, headers, keys=how.keys, region=how.region
        ):
            self._refuse(handler, 403)
            return
        content = self.files.get(unquote(path))
        if content is None:
            self._refuse(handler, 404)
            return
        first = self._first(headers)
        body = content[first:]
        handler.send_response(206 if first else 200)
        if first:
            handler.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        if how.etag is not None:
            handler.send_header("ETag", how.etag)
        if how.chunked:
            handler.send_header("Transfer-Encoding", "chunked")
        else:
            handler.send_header("Content-Length", str(how.claimed_length or len(body)))
        for name, value in how.headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        self._send(handler, body)

    def _first(self, headers: Mapping[str, str]) -> int:
        fresh = headers.get("if-range", self.behaviour.etag) == self.behaviour.etag
        asked = headers.get("range", "")
        return int(asked.removeprefix("bytes=").rstrip("-")) if asked and fresh and self.behaviour.ranges else 0

    def _send(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        how = self.behaviour
        cut = how.breaks.pop(0) if how.breaks else None
        part = body if cut is None else body[:cut]
        if how.hold is not None:
            handler.wfile.write(part[: len(part) // 2])
            handler.wfile.flush()
            how.hold.wait(60)
            part = part[len(part) // 2 :]
        handler.wfile.write(b"%x\r\n%b\r\n" % (len(part), part) if how.chunked and part else part)
        if cut is None and how.chunked:
            handler.wfile.write(b"0\r\n\r\n")
        handler.wfile.flush()
        if cut is not None or how.claimed_length:
            handler.close_connection = True

    def _refuse(self, handler: BaseHTTPRequestHandler, status: int) -> None:
        handler.send_response(status)
        for name, value in self.behaviour.headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", "0")
        handler.end_headers()


def signed(method: str, target: str, headers: Mapping[str, str], *, keys: Mapping[str, str], region: str) -> bool:
    """Whether a request without body carries a right Signature Version 4 of one of ``keys`` (id to secret).

    Written from Amazon's description ("Authenticating Requests: Using the Authorization Header"), not from the library
    under test; it is itself tested on the example that Amazon published there.
    """
    scheme, _, rest = headers.get("authorization", "").partition(" ")
    fields = dict(part.strip().partition("=")[::2] for part in rest.split(","))
    key_id, _, scope = fields.get("Credential", "").partition("/")
    if scheme != "AWS4-HMAC-SHA256" or key_id not in keys or scope.split("/")[1:] != [region, "s3", "aws4_request"]:
        return False
    names = fields["SignedHeaders"].split(";")
    if not {"host", "x-amz-date", "x-amz-content-sha256"} <= set(names) or headers["x-amz-content-sha256"] != (
        hashlib.sha256(b"").hexdigest()
    ):
        return False
    path, _, query = target.partition("?")
    canonical = [
        method,
        quote(unquote(path), safe="/-_.~"),
        "&".join(sorted(query.split("&"))),
        *(f"{name}:{' '.join(headers[name].split())}" for name in names),
        "",
        fields["SignedHeaders"],
        headers["x-amz-content-sha256"],
    ]
    digest = hashlib.sha256("\n".join(canonical).encode()).hexdigest()
    key = f"AWS4{keys[key_id]}".encode()
    for part in scope.split("/"):
        key = _hmac(key, part)
    text = f"AWS4-HMAC-SHA256\n{headers['x-amz-date']}\n{scope}\n{digest}"
    return hmac.compare_digest(_hmac(key, text).hex(), fields["Signature"])


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()
