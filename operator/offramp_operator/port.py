"""The operator's HTTP port: health for the kubelet, metrics for Prometheus.

It runs on the loop that does the work, so a loop that is stuck cannot claim to be well.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from offramp_operator.metrics import Metrics

Check = Callable[[], str]
"""Says what is wrong in one sentence; empty when all is well."""

Targets = Callable[[], Sequence[Mapping[str, Any]]]
"""What Prometheus should scrape besides, in the form of its HTTP service discovery."""


async def serve_health(
    *, port: int, alive: Check, ready: Check, metrics: Metrics, host: str | None = None, targets: Targets | None = None
) -> web.AppRunner:
    """Answer ``/healthz``, ``/readyz`` and ``/metrics`` until the returned runner is cleaned up; on every address where
    ``host`` is None.

    With ``targets`` there is ``/targets`` as well: where no cluster tells Prometheus of the workers, it can ask here.
    """
    app = web.Application()
    app.router.add_get("/healthz", _checked(alive))
    app.router.add_get("/readyz", _checked(ready))

    async def show_metrics(_: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    app.router.add_get("/metrics", show_metrics)
    if targets is not None:

        async def show_targets(_: web.Request) -> web.Response:
            return web.json_response(targets())

        app.router.add_get("/targets", show_targets)
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner


def _checked(check: Check) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(_: web.Request) -> web.StreamResponse:
        problem = check()
        return web.Response(text=problem or "ok", status=503 if problem else 200)

    return answer
