"""Who may ask, and what a browser may do with the answer.

The page has no login: on one machine it is for who sits there, in a cluster for who may forward a port or reach the
Service. What must be kept out is a foreign web page that a reader's browser has open at the same time. It cannot read
answers of another origin, unless it makes its own name resolve to our address (DNS rebinding); the Host header then
still tells its name, so only known names are answered.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action "
        "'self'; "
        "base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


def host_allowed(host: str, names: Collection[str]) -> bool:
    """Whether a Host header is an address, ``localhost`` or one of ``names``: none of them can be made to resolve to us
    by others."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name in names
    return True


def guard(names: Collection[str]) -> Middleware:
    """Refuse other methods and other hosts; put ``HEADERS`` on every answer."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method not in ("GET", "HEAD"):
            raise web.HTTPMethodNotAllowed(
                request.method, ("GET", "HEAD"), headers=HEADERS, text="this page is read-only"
            )
        if not host_allowed(request.headers.get("Host", ""), names):
            text = "this name is not served here; ask by address, or let the administrator add it to OFFRAMP_WEB_HOSTS"
            raise web.HTTPMisdirectedRequest(headers=HEADERS, text=text)
        return await handler(request)

    return middleware


async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
    """For ``on_response_prepare``, so that streams and errors have them as well."""
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
