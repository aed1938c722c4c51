"""HEAD and OPTIONS for every path of an application, as HTTP asks for (RFC 9110, sections 9.3.2 and 9.3.7)."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.routing import Match, Route

from offramp_worker.http.bodies import App, Receive, Scope, Send, send_bytes


def with_methods(app: FastAPI) -> App:
    """The application, asked for HEAD as for GET (the server sends no body) and telling with OPTIONS what a path
    takes."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        method = scope.get("method")
        if method == "HEAD":
            scope = {**scope, "method": "GET"}
        elif method == "OPTIONS" and (allowed := _allowed(app, scope)):
            await send_bytes(send, 204, b"", [(b"allow", ", ".join(allowed).encode())])
            return
        await app(scope, receive, send)

    return call


def _allowed(app: FastAPI, scope: Scope) -> list[str]:
    """Methods of a path; none where it is unknown."""
    routes = [r for r in app.routes if isinstance(r, Route) and r.matches(scope)[0] != Match.NONE]
    methods = {method for route in routes for method in route.methods or ()}
    if not methods:
        return []
    return sorted(methods | {"OPTIONS"} | ({"HEAD"} if "GET" in methods else set()))
