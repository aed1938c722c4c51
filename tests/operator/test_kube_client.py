"""How answers of the API server become errors, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from offramp_core.errors import UnavailableError
from offramp_operator.kube import client as client_module
from offramp_operator.kube.client import ApiError, ApiUnavailableError, GoneError, InvalidObjectError, Lane
from offramp_operator.kube.kinds import POD, SERVICE
from offramp_operator.kube.leader import LeaseSettings
from offramp_operator.shell.platform import ConflictError

POD_BODY = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "namespace": "default"}}
SLOW_BODY = {**POD_BODY, "metadata": {"name": "slow", "namespace": "default"}}


class Answering(ThreadingHTTPServer):
    """Gives every request the same answer."""

    daemon_threads = True
    status, body, headers = 200, b"{}", {}  # type: ignore[var-annotated]
    seen: list[tuple[str, str, Any]]
    freed: threading.Event  # until it is set, nothing is answered that writes SLOW_BODY
    stalled = 0


class _Handler(BaseHTTPRequestHandler):
    server: Answering

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"null")
        self.server.seen.append((self.command, self.path, body))
        if body == SLOW_BODY:
            self.server.stalled += 1
            self.server.freed.wait(60)
        self.send_response(self.server.status)
        for name, value in {"Content-Length": str(len(self.server.body)), **self.server.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(self.server.body)

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _answer  # noqa: N815 the names http.server calls

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def server() -> Iterator[Answering]:
    server = Answering(("127.0.0.1", 0), _Handler)
    server.seen, server.freed = [], threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.freed.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, ApiError),
        (403, ApiError),
        (404, GoneError),
        (409, ConflictError),
        (422, InvalidObjectError),
        (429, ApiUnavailableError),
        (500, ApiUnavailableError),
        (502, ApiUnavailableError),
        (503, ApiUnavailableError),
        (504, ApiUnavailableError),
    ],
)
def test_every_refusal_has_its_error_and_carries_the_servers_words(
    server: Answering, tools: Any, status: int, error: type[Exception]
) -> None:
    server.status, server.body = status, json.dumps({"kind": "Status", "message": "the reason why"}).encode()
    with (
        tools.client_at(server.server_address[1]) as client,
        pytest.raises(error, match=r"create pods.*the reason why"),
    ):
        tools.run(client.create(POD, POD_BODY))
    assert len(server.seen) == 1, "retries belong to the work queue"


def test_a_busy_server_is_left_alone_for_as_long_as_it_asks(server: Answering, tools: Any) -> None:
    server.status, server.headers = 429, {"Retry-After": "7"}
    with tools.client_at(server.server_address[1]) as client, pytest.raises(ApiUnavailableError) as caught:
        tools.run(client.create(POD, POD_BODY))
    assert caught.value.retry_after_seconds == 7.0


def test_a_call_that_is_turned_away_for_a_moment_is_made_again_a_few_times(server: Answering, tools: Any) -> None:
    server.status, server.headers = 429, {"Retry-After": "0"}
    with tools.client_at(server.server_address[1]) as client, pytest.raises(ApiUnavailableError):
        tools.run(client.create(POD, POD_BODY))
    assert len(server.seen) == client_module.BUSY_ATTEMPTS

    class Recovering(list[Any]):
        def append(self, request: Any) -> None:
            super().append(request)
            server.status = 429 if len(self) < 3 else 200

    server.seen = Recovering()
    with tools.client_at(server.server_address[1]) as client:
        assert tools.run(client.create(POD, POD_BODY)) == {}
    assert len(server.seen) == 3


def test_an_answer_that_is_no_json_is_an_outage(server: Answering, tools: Any) -> None:
    server.body = b'{"metadata": '
    with tools.client_at(server.server_address[1]) as client, pytest.raises(UnavailableError, match="cut short"):
        tools.run(client.get(POD, "default", "a"))


def test_a_page_of_html_in_front_of_the_server_is_told_as_it_is(server: Answering, tools: Any) -> None:
    server.status, server.body = 502, b"<html>bad gateway</html>"
    with tools.client_at(server.server_address[1]) as client, pytest.raises(UnavailableError, match="bad gateway"):
        tools.run(client.get(POD, "default", "a"))


def test_nobody_listening_is_an_outage(tools: Any) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with tools.client_at(port) as client, pytest.raises(UnavailableError, match="did not answer"):
        tools.run(client.get(POD, "default", "a"))


def test_a_server_that_accepts_and_says_nothing_is_given_up(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "READ_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with (
            tools.client_at(silent.getsockname()[1]) as client,
            pytest.raises(UnavailableError, match="did not answer"),
        ):
            tools.run(client.get(POD, "default", "a"))


def test_a_missing_object_is_none_and_deleting_it_is_fine(server: Answering, tools: Any) -> None:
    server.status = 404
    with tools.client_at(server.server_address[1]) as client:
        assert tools.run(client.get(POD, "default", "a")) is None
        tools.run(
            client.delete(POD, {"metadata": {"name": "a", "namespace": "default", "uid": "u", "resourceVersion": "7"}})
        )
    method, _, body = server.seen[-1]
    assert (method, body["preconditions"]) == ("DELETE", {"uid": "u", "resourceVersion": "7"})


def test_an_apply_names_its_manager_and_asks_for_strict_validation(server: Answering, tools: Any) -> None:
    body = {
        "apiVersion": "earlyexit.dev/v1alpha1",
        "kind": "EarlyExitService",
        "metadata": {"name": "a", "namespace": "n"},
    }
    with tools.client_at(server.server_address[1]) as client:
        tools.run(client.apply(SERVICE, body, subresource="status"))
    ((method, path, sent),) = server.seen
    assert (method, sent) == ("PATCH", body)
    path, _, query = path.partition("?")
    assert path == "/apis/earlyexit.dev/v1alpha1/namespaces/n/earlyexitservices/a/status"
    assert set(query.split("&")) == {
        "fieldManager=offramp-operator",
        "force=true",
        "fieldValidation=Strict",
        "timeout=3s",
    }


def test_no_write_outlasts_the_time_after_which_another_may_lead(server: Answering, tools: Any) -> None:
    """A leader that stops renewing may send its last write when its deadline ends, and another leads when the Lease
    does."""
    lease = LeaseSettings("default", "offramp-leader", "first")
    margin = lease.duration_seconds - lease.renew_deadline_seconds
    assert margin > client_module.WRITE_CONNECT_SECONDS + client_module.WRITE_SECONDS
    assert (
        lease.retry_seconds + client_module.WRITE_CONNECT_SECONDS + client_module.WRITE_SECONDS
        < lease.renew_deadline_seconds
    )
    with (
        tools.client_at(server.server_address[1]) as client,
        pytest.raises(ApiUnavailableError, match="did not answer"),
    ):
        tools.run(asyncio.wait_for(client.create(POD, SLOW_BODY), margin))


def test_each_lane_has_a_way_of_its_own(server: Answering, tools: Any) -> None:
    """Applies that hang take no thread from a plan, a status, or a read of one."""

    async def story() -> None:
        with tools.client_at(server.server_address[1]) as client:
            slow = [asyncio.create_task(client.apply(POD, SLOW_BODY)) for _ in range(40)]
            await tools.eventually(lambda: server.stalled > 0, what="a slow apply")
            for lane in (Lane.PLANS, Lane.STATUSES):
                await client.apply(POD, POD_BODY, lane=lane)
                await client.get(POD, "default", "a", lane=lane)
            answered = [task for task in slow if task.done() and not task.cancelled() and task.exception() is None]
            assert not answered  # on a busy machine they may have run out of time, which is not this test's
            for task in slow:
                task.cancel()
            server.freed.set()

    tools.run(story())
