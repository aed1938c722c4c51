"""What a service says of its bundle while it comes, and which digest it holds on to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fleet import BACKBONE, SimWorker, with_endpoint, worker_of

from offramp_core.control.decide import decide
from offramp_core.control.objects import ModelStatus, Service, ServiceStatus
from offramp_core.control.snapshot import Gathered, Observed, Snapshot, Worker
from offramp_core.control.spec import ServiceSpec, parse_spec
from offramp_core.control.workers.delivery import MODELS_KEPT, fetching, proven_models
from offramp_core.protocol import FetchPhase, FetchProgress, WorkerState

URI, OTHER = "https://models.example/digits.tar", "sha256:" + "c" * 64
GIB = 2**30


def spec(uri: str = URI, **model: str) -> ServiceSpec:
    objective = {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}}
    return parse_spec({"model": {"uri": uri, **model}, "objective": objective})


def serving(digest: str = BACKBONE, **fields: Any) -> Worker:
    return with_endpoint(SimWorker("w-0", seed=1, backbone=digest).view(), **fields)


def fetcher(phase: FetchPhase, done: int = 0, total: int | None = None) -> Worker:
    progress = FetchProgress(phase, done, total)
    state = WorkerState("w-1", "boot", "uid", "", False, "", "", (), {}, fetching=progress)
    return worker_of("w-1", ready=False, state=state)


def conditions(*workers: Worker, status: ServiceStatus | None = None) -> dict[str, tuple[str, str, str]]:
    service = Service("default", "digits", "uid", 1, spec(), status or ServiceStatus())
    told = decide(Snapshot(Gathered(service), Observed(workers)), 1_700_000_000.0).status.conditions
    return {c.type: (c.status, c.reason, c.message) for c in told}


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        (fetcher("connecting"), "connecting to where the bundle is"),
        (fetcher("downloading", 12 * GIB // 10, 34 * GIB // 10), "downloading the bundle, 1.2 GiB of 3.4 GiB (35 %)"),
        (fetcher("downloading", 123_456_789), "downloading the bundle, 114.4 MiB so far"),
        (fetcher("downloading", 0, 0), "downloading the bundle, 0 B so far"),
        (fetcher("verifying", 5, 5), "verifying the bundle"),
        (fetcher("unpacking", 5), "unpacking the bundle"),
    ],
    ids=["connecting", "share", "unknown-size", "empty", "verifying", "unpacking"],
)
def test_progress_is_told_in_the_conditions(worker: Worker, said: str) -> None:
    told = conditions(worker)
    assert told["Ready"] == ("False", "FetchingBundle", f"w-1: {said}")
    assert told["WorkersAvailable"][1] == "FetchingBundle" and said in told["WorkersAvailable"][2]
    assert said in told["Reconciling"][2]


def test_a_download_writes_the_status_a_few_times_only() -> None:
    total = 7 * GIB
    said = {fetching([fetcher("downloading", done, total)]) for done in range(0, total + 1, total // 1000)}
    assert len(said) <= 21
    unknown = {fetching([fetcher("downloading", done)]) for done in range(0, GIB, GIB // 5000)}
    assert len(unknown) <= 7 * 90


def test_a_failure_is_told_before_progress_and_what_serves_stays_ready() -> None:
    failed = with_endpoint(
        fetcher("connecting"), failure="a.example answered 404; correct it", failure_reason="FetchRefused"
    )
    assert conditions(failed)["Ready"][1] == "FetchRefused"
    told = conditions(serving(current=False), failed)
    assert told["Ready"][:2] == ("True", "Serving")
    assert "a.example answered 404" in told["Reconciling"][2]


@pytest.mark.parametrize("reason", ["AddressRefused", "BundleTooLarge", "DigestMismatch"])
def test_what_waiting_will_not_mend_is_stalled(reason: str) -> None:
    failed = with_endpoint(fetcher("connecting"), failure="it is refused; change it", failure_reason=reason)
    assert conditions(failed)["Stalled"][:2] == ("True", reason)


def test_the_first_ready_worker_proves_the_bundle_and_its_digest_stands() -> None:
    models = proven_models((), spec(), [serving()])
    assert models == (ModelStatus(URI, BACKBONE),)
    assert proven_models(models, spec(), [serving(OTHER)]) == models, "what lies there now does not change it"
    assert proven_models((), spec(), [serving(ready=False)]) == ()
    assert proven_models((), spec(), [serving(current=False)]) == (), "an old worker serves an older uri"
    assert proven_models((), spec("file:///b"), [serving()]) == ()


def test_a_digest_of_the_spec_replaces_the_proven_one() -> None:
    before = (ModelStatus(URI, BACKBONE),)
    assert proven_models(before, spec(digest=OTHER), [serving()]) == before, "not before a worker serves it"
    assert proven_models(before, spec(digest=OTHER), [serving(OTHER)]) == (ModelStatus(URI, OTHER),)


def test_a_few_earlier_uris_are_remembered_with_what_they_were() -> None:
    models: tuple[ModelStatus, ...] = ()
    for i in range(MODELS_KEPT + 2):
        models = proven_models(models, spec(f"{URI}?v={i}"), [serving(f"sha256:{i:064d}")])
    assert [m.uri for m in models] == [f"{URI}?v={i}" for i in reversed(range(2, MODELS_KEPT + 2))]


def test_the_digest_is_in_the_status_of_the_first_pass_that_sees_a_ready_worker() -> None:
    service = Service("default", "digits", "uid", 1, spec())
    status = decide(Snapshot(Gathered(service), Observed((serving(),))), 1_700_000_000.0).status
    assert status.models == (ModelStatus(URI, BACKBONE),)
    again = replace(service, status=status)
    assert again.proven_digest == BACKBONE
    assert (
        decide(Snapshot(Gathered(again), Observed((serving(OTHER),))), 1_700_000_001.0).status.models == status.models
    )
