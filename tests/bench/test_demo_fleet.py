"""The day of ``make demo-fleet`` without a cluster: rates, what the largest variant alone costs, promises, picture."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from bench.demo.fleet import manifest_of
from bench.demo.fleet_day import (
    Day,
    Sample,
    as_json,
    broken,
    closing_table,
    cost_per_hour,
    day_shape,
    draw,
    largest_only,
    rate_at,
    summary_of,
    windows_of,
)
from bench.load import OpenLoop, Reply, Traffic
from rich.console import Console

from offramp_core.control.objects import PoolStatus
from offramp_core.control.spec import parse_spec

PRICES = {"small": 1.0, "large": 2.0}


def reply(at: float, **what: Any) -> Reply:
    return Reply(at, what.pop("seconds", 0.01), **{"ok": True, "agrees": True, "exit": "r0", **what})


def day(**other: Any) -> Day:
    one = Day(
        began=100.0,
        seconds=20.0,
        budget=0.02,
        objective_seconds=0.5,
        prices=PRICES,
        replies=[reply(100.0 + i / 10) for i in range(200)],
        samples=[
            Sample(100.0, {"small": 1}, audited=10, disagreed=1),
            Sample(110.0, {"small": 1, "large": 1}, audited=210, disagreed=3),
        ],
        planned=[{"small": 0, "large": 1}, {"small": 0, "large": 2}],
    )
    return replace(one, **other)


def test_an_hour_of_the_day_asks_what_its_median_minute_does() -> None:
    counts = np.full(86_400, 5)
    counts[3600:7200] = 10
    counts[3600:3660] = 1000  # a burst
    shape = day_shape(counts)
    assert shape[0] == 5.0 and shape[1] == 10.0
    rates = [rate_at(shape, share, peak=80.0) for share in np.linspace(0, 1, 200)]
    assert max(rates) == pytest.approx(80.0, rel=0.05) and min(rates) == pytest.approx(40.0)
    assert rates[0] == pytest.approx(rates[-1]), "the day goes on as it began"


def test_the_largest_variant_alone_has_the_workers_that_the_planner_would_have_for_it() -> None:
    known = [
        PoolStatus("small", worker_rate=10.0, batch_size=1, batch_seconds=0.05),
        PoolStatus("large", worker_rate=30.0, batch_size=1, batch_seconds=0.02),
    ]
    sent = [i / 25 for i in range(250)] + [10 + i / 50 for i in range(500)]
    windows = windows_of(sent, began=0.0, seconds=20.0)
    assert [w.rate for w in windows] == [25.0, 50.0]
    planned = largest_only(parse_spec(manifest_of("image")["spec"]), known, windows)
    assert planned == [{"small": 0, "large": 1}, {"small": 0, "large": 2}]


def test_a_worker_costs_while_it_is_there() -> None:
    assert cost_per_hour(day()) == pytest.approx((10 * 1.0 + 10 * 3.0) / 20)


def test_a_day_that_kept_its_promises_has_a_table_and_a_picture(tmp_path: Path) -> None:
    late, refused = reply(105.0, seconds=0.6), reply(106.0, ok=False, agrees=False, error="HTTP 429: b'...'")
    one = day(replies=[*day().replies, late, refused])
    summary = summary_of(one)
    assert (summary["late"], summary["refused"], summary["lost"]) == (1, 1, 0)
    assert (summary["audited"], summary["disagreed"]) == (200, 2)
    assert summary["cost_ratio"] == pytest.approx(2 / 3, abs=1e-4) and not broken(summary)
    console = Console(width=120, record=True, quiet=True)
    console.print(closing_table(summary))
    assert draw(one, tmp_path / "day.png", title="a day").stat().st_size > 10_000
    assert len(json.loads(json.dumps(as_json(one)))["samples"]) == 2


@pytest.mark.parametrize(
    ("other", "told"),
    [
        pytest.param({"replies": [reply(101.0, ok=False, error="reset")]}, "1 requests were lost", id="lost"),
        pytest.param({"replies": [reply(101.0, agrees=False)]}, "100.00% of the answers differ", id="differs"),
        pytest.param({"budget": 0.005}, "1.00% of the audits disagree", id="audits"),
        pytest.param({"planned": [{"small": 1}]}, "cost 200% of the largest variant only", id="cost"),
        pytest.param({"samples": [Sample(100.0, {"small": 1})]}, "never changed", id="nothing changed"),
    ],
)
def test_a_promise_that_was_not_kept_is_told(other: dict[str, Any], told: str) -> None:
    assert any(told in problem for problem in broken(summary_of(day(**other))))


def test_load_that_makes_new_connections_loses_no_request_between_them() -> None:
    async def play() -> tuple[list[Reply], int]:
        peers = set[Any]()

        async def answer(request: web.Request) -> web.Response:
            peers.add(request.transport and request.transport.get_extra_info("peername"))
            await request.read()
            return web.json_response({"outputs": [{"name": "label", "data": [0]}]})

        app = web.Application()
        app.router.add_post("/v2/models/m/infer", answer)
        async with TestServer(app) as server:
            traffic = Traffic(np.zeros((4, 3), np.float32), np.zeros(4, np.int64))
            load = OpenLoop([str(server.make_url("")).rstrip("/")], "m", traffic, 200.0, connection_seconds=0.1)
            sending = asyncio.create_task(load.run())
            await asyncio.sleep(0.5)
            load.stop()
            await sending
        return load.replies, len(peers)

    replies, connections = asyncio.run(play())
    assert replies and all(one.ok and one.agrees for one in replies) and connections > 3
