"""What pages say, without a browser: every state, HTML against JSON against the commands, hostile text, who may ask."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from boards import seen  # type: ignore[import-not-found]
from fleet import changed  # type: ignore[import-not-found]
from served import serving  # type: ignore[import-not-found]
from states import STATES  # type: ignore[import-not-found]

from offramp_core.control.objects import ObservedFigures, PoolPlanStatus, PoolStatus
from offramp_core.control.snapshot import Event
from offramp_core.control.spec import parse_spec
from offramp_operator.explain.why import why_data
from offramp_operator.shell.platform import ServiceKey
from offramp_operator.web.guard import host_allowed
from offramp_operator.web.relay import Standby, standing_by

Show = Callable[..., str]
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


def get(site: Any, path: str, **headers: str) -> httpx.Response:
    return httpx.get(site.url + path, headers=headers, timeout=30, trust_env=False)


def text_of(html: str) -> str:
    """What a reader without a browser would see of a document."""
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


@pytest.mark.parametrize("state", STATES)
def test_every_state_has_a_page_and_the_same_as_json(site: Any, show: Show, state: str) -> None:
    path = show(state)
    page, data = get(site, path), get(site, f"/api/v1{path}").json()
    shown = text_of(page.text)
    assert page.status_code == 200
    for fact in (
        data["row"]["verdict"],
        *data["serving"],
        *data["tuning"],
        *data["pin"],
        *data["wrong"],
        *data["coolingDown"],
    ):
        assert " ".join(fact.split()) in shown
    for rollout in [*data["history"], *([data["rollout"]] if data["rollout"] else [])]:
        for gate in rollout["gates"]:
            assert gate["reading"]["seen"] in shown and gate["reading"]["meaning"] in shown
    for condition in data["conditions"]:
        assert condition["message"] in shown
    for network in data["networks"]:
        for ramp in network["ramps"]:
            assert ramp["id"] in shown


@pytest.mark.parametrize("state", ["progressing", "rolled_back", "pin_rejected", "recommended"])
def test_the_page_says_why_in_the_words_of_the_command(site: Any, show: Show, state: str) -> None:
    path = show(state)
    view = site.call(lambda: site.board.view(ServiceKey("default", state.replace("_", "-"))))
    shown = text_of(get(site, path).text)
    said = why_data(view.family, view.family.newest, site.now[0])
    for rollout in view.family.rollouts:
        said = why_data(view.family, rollout, site.now[0])
        assert said["serving"] in shown
        assert all(gate["meaning"] in shown for gate in said["rollout"]["gates"])
        assert rollout.status.message in shown
    assert all(sentence in shown for sentence in said["tuning"] + said["pin"] + said["wrong"])


def test_the_overview_has_the_worst_first(site: Any, show: Show) -> None:
    for state in ("promoted_once", "progressing", "starting"):
        show(state)
    site.call(
        lambda: site.board.failed(ServiceKey("a", "unreadable"), ValueError("spec.model.uri is wrong"), site.now[0])
    )
    data = get(site, "/api/v1/services").json()
    assert [row["name"] for row in data["rows"]] == ["unreadable", "starting", "progressing", "promoted-once"]
    assert (data["degraded"], data["progressing"], data["healthy"]) == (1, 1, 2)
    shown = text_of(get(site, "/").text)
    assert "spec.model.uri is wrong" in shown
    assert shown.index("unreadable") < shown.index("starting") < shown.index("promoted-once")


def test_a_service_that_was_never_understood_has_a_page_that_says_so(site: Any) -> None:
    site.call(lambda: site.board.failed(ServiceKey("a", "broken"), ValueError("spec.replicas is -1"), 5.0))
    assert "spec.replicas is -1" in text_of(get(site, "/services/a/broken").text)
    assert get(site, "/api/v1/services/a/broken").json()["wrong"] == ["the last pass failed: spec.replicas is -1"]


@pytest.mark.slow
def test_services_are_found_by_their_name_and_shown_in_pages(site: Any, states: Any) -> None:
    watched = states["disabled"]
    for number in range(120):
        site.call(lambda number=number: watched.settle(site.board, name=f"service-{number:03}"))
    first = get(site, "/").text
    assert first.count('<li class="service ') == 50 and "Page 1 of 3" in first
    assert "Page 3 of 3" in get(site, "/?page=99").text
    assert "Page 1 of 3" in get(site, "/?page=x").text
    found = get(site, "/api/v1/services?q=SERVICE-11").json()
    assert found["found"] == 10 and found["total"] == 120 and found["query"] == "SERVICE-11"
    assert "No service has" in get(site, "/?q=nothing").text


def test_pools_have_a_table_with_the_plan_above_it(site: Any, states: Any) -> None:
    snapshot, decision, now = states["disabled"].passes[-1]
    pools = [{"name": name, "costPerHour": "1", "maxWorkers": 3} for name in ("one", "two")]
    spec = parse_spec(
        {k: v for k, v in states["disabled"].fleet.manifest.items() if k != "replicas"} | {"pools": pools}
    )
    status = replace(
        decision.status,
        pools=(PoolStatus("one", 2, 2, 50.0, planned=2), PoolStatus("two", 1, message="no node has its label")),
        pool_plan=PoolPlanStatus(demand=90.0, answered=100.0, cost_per_hour=2.0, reason="the cheapest"),
    )
    shown = seen(changed(snapshot, service=replace(snapshot.service, spec=spec)), replace(decision, status=status), now)
    site.call(lambda: site.board.passed(ServiceKey("default", "sim"), shown))
    text = text_of(get(site, "/services/default/sim").text)
    assert "workers planned: one 2, two 0; 2 an hour, for 90 requests/s: the cheapest" in text
    assert "one 2 of 2 ready 2 50 1 2 for 2 an hour chosen two 0 of 1 ready 0 1 no node has its label" in text
    found = get(site, "/api/v1/services/default/sim").json()
    assert [pool["why"] for pool in found["pools"]] == ["chosen", "no node has its label"]


def test_an_empty_board_says_what_to_do(site: Any) -> None:
    assert "kubectl apply" in get(site, "/").text


@pytest.mark.parametrize(
    "path", ["/services/default/none", "/nowhere", "/services/default", "/static/../server.py", "/static/none.css"]
)
def test_what_is_not_there_is_said_with_a_way_on(site: Any, show: Show, path: str) -> None:
    show("disabled")
    answer = get(site, path)
    assert answer.status_code == 404
    assert 'href="/"' in answer.text
    if path.endswith("/none"):
        assert "default/disabled" in answer.text
        assert "default/disabled" in get(site, f"/api/v1{path}").json()["error"]


def test_hostile_text_in_objects_is_shown_as_text(site: Any, states: Any) -> None:
    watched = states["rolled_back"]
    snapshot, decision, now = watched.passes[-1]
    service = snapshot.service
    rollouts = tuple(
        replace(
            r,
            name=f"{r.name}{HOSTILE}",
            status=replace(
                r.status,
                message=HOSTILE,
                reason=HOSTILE,
                gates=tuple(replace(g, name=HOSTILE, message=HOSTILE) for g in r.status.gates),
            ),
        )
        for r in snapshot.gathered.rollouts
    )
    status = replace(
        decision.status,
        message=HOSTILE,
        observed=ObservedFigures(p95=HOSTILE, agreement=HOSTILE, exit_rate=HOSTILE, savings=HOSTILE),
        tuning=replace(decision.status.tuning, message=HOSTILE),
        conditions=tuple(replace(c, message=HOSTILE, reason=HOSTILE) for c in decision.status.conditions),
    )
    workers = tuple(
        replace(w, endpoint=replace(w.endpoint, name=HOSTILE, failure=HOSTILE), state=replace(w.state, message=HOSTILE))
        for w in snapshot.workers
    )
    hostile = seen(
        changed(snapshot, service=service, rollouts=rollouts, workers=workers),
        replace(decision, status=status, rollout_statuses={}, events=(Event(HOSTILE, HOSTILE),)),
        now,
        name=HOSTILE,
    )
    key = ServiceKey("default", HOSTILE)
    site.call(lambda: site.board.passed(key, hostile))
    site.now[0] = now
    for path in ("/", f"/services/default/{_quoted(HOSTILE)}", f"/?q={_quoted(HOSTILE)}", f"/{_quoted(HOSTILE)}"):
        html = get(site, path).text
        assert "<script>alert" not in html and "<img" not in html
        assert "&lt;script&gt;alert(1)" in html
    assert get(site, f"/api/v1/services/default/{_quoted(HOSTILE)}").json()["row"]["name"] == HOSTILE


def _quoted(text: str) -> str:
    return quote(text, safe="")


# --- who may ask -------------------------------------------------------------------------------------


def test_every_answer_forbids_foreign_content(site: Any, show: Show) -> None:
    path = show("progressing")
    for asked in ("/", path, "/nowhere", "/static/live.js", "/api/v1/services"):
        headers = get(site, asked).headers
        assert (
            "default-src 'none'" in headers["content-security-policy"]
            and "unsafe" not in headers["content-security-policy"]
        )
        assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
        assert "access-control-allow-origin" not in headers
    assert not re.search(r"<script(?! src)|\son[a-z]+=|\sstyle=", get(site, path).text)


def test_only_reading_is_possible(site: Any) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert httpx.request(method, site.url, timeout=30, trust_env=False).status_code == 405


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:80", True),
        ("[::1]:8082", True),
        ("10.1.2.3", True),
        ("localhost:1", True),
        ("LOCALHOST", True),
        ("offramp-web.system.svc:8082", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("", False),
        ("[::1", False),
    ],
)
def test_names_that_others_could_make_resolve_here_are_refused(host: str, allowed: bool) -> None:
    assert host_allowed(host, {"offramp-web.system.svc"}) is allowed


def test_a_rebound_name_reads_nothing(site: Any, show: Show) -> None:
    show("progressing")
    for path in ("/", "/api/v1/services", "/live"):
        answer = get(site, path, Host="evil.example")
        assert answer.status_code == 421 and "progressing" not in answer.text


# --- standbys ----------------------------------------------------------------------------------------


def test_a_standby_says_who_leads_and_the_command_that_reaches_it() -> None:
    command = "kubectl -n system port-forward pod/offramp-1 9000"
    with serving(page={"standby": lambda: standing_by("offramp-1", "", namespace="system", port=9000)}) as standby:
        answer = get(standby, "/")
        assert answer.status_code == 503 and f"<pre><code>{command}</code></pre>" in answer.text
        assert get(standby, "/api/v1/services").json()["error"].endswith(command)


def test_a_standby_of_nobody_says_to_ask_again() -> None:
    assert standing_by("", "", namespace="system", port=9000) == Standby("Nobody leads yet; ask again in some seconds.")


def test_a_standby_that_reaches_the_leader_answers_for_it(site: Any, show: Show) -> None:
    path = show("progressing")
    with serving(page={"standby": lambda: Standby("the leader leads", site.url)}) as standby:
        assert get(standby, f"/api/v1{path}").json() == get(site, f"/api/v1{path}").json()
        assert get(standby, "/nowhere").status_code == 404
        with httpx.stream("GET", f"{standby.url}{path}/live", timeout=30, trust_env=False) as stream:
            lines = stream.iter_lines()
            assert next(line for line in lines if line.startswith("data:"))
    with serving(page={"standby": lambda: Standby("offramp-1 leads", "http://127.0.0.1:9")}) as alone:
        answer = get(alone, "/")
        assert answer.status_code == 503 and "offramp-1 leads" in answer.text


def test_two_standbys_that_take_each_other_for_the_leader_do_not_ask_in_circles() -> None:
    urls: list[str] = [""]
    with serving(page={"standby": lambda: Standby("nobody knows", urls[0])}) as standby:
        urls[0] = standby.url
        assert get(standby, "/").status_code == 503


def test_json_is_finite_and_camel_case(site: Any, show: Show) -> None:
    path = show("rolled_back")
    text = get(site, f"/api/v1{path}").text

    def refuse(name: str) -> None:
        raise AssertionError(name)

    def keys(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value) | {k for v in value.values() for k in keys(v)}
        return {k for v in value for k in keys(v)} if isinstance(value, list) else set()

    assert not [k for k in keys(json.loads(text, parse_constant=refuse)) if "_" in k]
