"""The cache: whatever order things arrive in, it never goes back."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.kinds import AUTOSCALER, HTTP_ROUTE, POD, REPLICA_SET, SERVICE
from offramp_operator.kube.trim import content
from offramp_operator.kube.watch import Feed, Freshness, service_key
from offramp_operator.shell.platform import ServiceKey


def _obj(uid: str, version: int, *, name: str | None = None, owner: str | None = None, **fields: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "uid": uid,
        "name": name or uid,
        "namespace": "default",
        "resourceVersion": str(version),
    }
    if owner:
        metadata["ownerReferences"] = [{"kind": "EarlyExitService", "name": "digits", "uid": owner, "controller": True}]
    return {"metadata": metadata, **fields}


@given(st.permutations([1, 2, 3, 4, 5]))
def test_the_newest_version_wins_in_any_order(versions: list[int]) -> None:
    cache = ObjectCache()
    for version in versions:
        cache.put(POD, _obj("a", version))
    stored = cache.get(POD, "default", "a")
    assert stored is not None and stored["metadata"]["resourceVersion"] == "5"


def test_an_object_with_a_number_beyond_64_bits_is_kept_as_it_is() -> None:
    cache, odd = ObjectCache(), _obj("a", 1, spec={"huge": 2**70, "least": -(2**70), "text": "ü"})
    cache.put(SERVICE, odd)
    assert cache.get(SERVICE, "default", "a") == odd


def test_a_float_that_the_api_server_writes_without_an_exponent_is_kept_beside_a_packed_spec() -> None:
    cache, parents = ObjectCache(), [{"conditions": [{"observedGeneration": 10**20}]}]
    cache.put(HTTP_ROUTE, _obj("a", 1, spec={"hostnames": ["a.example.com"]}, status={"parents": parents}))
    kept = cache.get(HTTP_ROUTE, "default", "a")
    assert kept is not None and kept["status"]["parents"] == parents
    assert content(kept) == b'{"hostnames":["a.example.com"]}'


def test_an_answer_to_an_earlier_write_does_not_bring_a_deleted_object_back() -> None:
    cache = ObjectCache()
    cache.put(POD, _obj("a", 1))
    cache.remove(POD, "a", version=7)
    assert not cache.put(POD, _obj("a", 5))
    assert cache.get(POD, "default", "a") is None


def test_an_object_that_lost_its_label_returns_with_it() -> None:
    """Watches report what ceases to match the selector as deleted; here it was labelled again at version 8."""
    cache = ObjectCache()
    cache.put(POD, _obj("a", 1))
    cache.remove(POD, "a", version=7)
    assert cache.put(POD, _obj("a", 8))


def test_an_object_of_the_same_name_may_follow_before_the_old_one_is_reported_gone() -> None:
    cache = ObjectCache()
    cache.put(POD, _obj("old", 1, name="a"))
    cache.put(POD, _obj("new", 3, name="a"))
    cache.remove(POD, "old", version=2)
    assert cache.get(POD, "default", "a") == _obj("new", 3, name="a")


def test_owned_objects_are_found_and_forgotten() -> None:
    cache = ObjectCache()
    cache.put(POD, _obj("b", 1, owner="s"))
    cache.put(POD, _obj("a", 2, owner="s"))
    cache.put(POD, _obj("c", 3, owner="other"))
    assert [o["metadata"]["uid"] for o in cache.owned(POD, "s")] == ["a", "b"]
    cache.put(POD, _obj("a", 4))  # released by its owner
    assert [o["metadata"]["uid"] for o in cache.owned(POD, "s")] == ["b"]
    assert cache.owned(REPLICA_SET, "s") == []


def test_a_list_removes_what_vanished_unseen_but_not_what_is_newer_than_it() -> None:
    cache = ObjectCache()
    cache.put(POD, _obj("ghost", 3))
    cache.put(POD, _obj("stays", 4))
    cache.put(POD, _obj("newer", 12))  # created after the list was taken
    changed = [obj for obj in (_obj("stays", 4), _obj("unknown", 9)) if cache.put(POD, obj)]
    changed += cache.sweep(POD, {"stays", "unknown"}, version=10)
    assert sorted(o["metadata"]["uid"] for o in changed) == ["ghost", "unknown"]
    assert sorted(o["metadata"]["uid"] for o in cache.all(POD)) == ["newer", "stays", "unknown"]


def test_a_list_of_one_namespace_leaves_the_others_alone() -> None:
    cache = ObjectCache()
    cache.put(POD, _obj("a", 1))
    assert cache.sweep(POD, set(), version=10, namespace="elsewhere") == []
    assert cache.get(POD, "default", "a") is not None


def test_our_own_write_wakes_nobody_when_the_watch_repeats_it() -> None:
    cache = ObjectCache()
    woken: list[ServiceKey] = []
    feed = Feed(cache, woken.append)
    obj = _obj("digits", 5)
    cache.put(SERVICE, {"apiVersion": "earlyexit.dev/v1alpha1", "kind": "EarlyExitService", **obj})
    feed.event(SERVICE, "MODIFIED", obj)
    assert woken == []
    feed.event(SERVICE, "MODIFIED", _obj("digits", 6))
    assert woken == [ServiceKey("default", "digits")]


def test_a_pod_wakes_the_service_its_label_names_and_a_child_that_of_its_owner() -> None:
    pod = _obj("a", 1)
    pod["metadata"]["labels"] = {"earlyexit.dev/service": "digits"}
    assert service_key(pod) == ServiceKey("default", "digits")
    assert service_key(_obj("b", 1, owner="uid")) == ServiceKey("default", "digits")
    assert service_key(_obj("c", 1)) is None


def _autoscaler(version: int, *, target: str, owner: str = "ScaledObject") -> dict[str, Any]:
    made = _obj("hpa", version, owner="x", kind="HorizontalPodAutoscaler")
    made["metadata"]["ownerReferences"][0]["kind"] = owner
    return {**made, "spec": {"scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": target}}}


def test_what_scales_a_deployment_is_found_until_it_scales_another_or_goes() -> None:
    cache = ObjectCache()
    cache.put(AUTOSCALER, _autoscaler(1, target="digits"))
    assert [o["metadata"]["uid"] for o in cache.autoscalers("default", "digits")] == ["hpa"]
    cache.put(AUTOSCALER, _autoscaler(2, target="other"))
    assert cache.autoscalers("default", "digits") == []
    assert len(cache.autoscalers("default", "other")) == 1 and cache.autoscalers("elsewhere", "other") == []
    cache.remove(AUTOSCALER, "hpa")
    assert cache.autoscalers("default", "other") == []


def test_an_autoscaler_wakes_the_service_whose_workers_it_scales_and_nobody_where_there_is_none() -> None:
    """Every autoscaler of the cluster is watched, and each changes every few seconds."""
    cache, woken = ObjectCache(), list[ServiceKey]()
    feed = Feed(cache, woken.append)
    feed.event(AUTOSCALER, "MODIFIED", _autoscaler(1, target="digits"))
    assert woken == []
    cache.put(SERVICE, _obj("service", 2, name="digits", kind="EarlyExitService"))
    feed.event(AUTOSCALER, "MODIFIED", _autoscaler(3, target="digits"))
    feed.event(AUTOSCALER, "MODIFIED", _autoscaler(4, target="other"))
    assert woken == [ServiceKey("default", "digits")]


def test_a_watch_is_late_until_it_delivers_what_a_list_saw() -> None:
    freshness, here = Freshness(), (POD, "default")
    freshness.reached(here, 5)
    freshness.listed(here, 9, 100.0)
    freshness.listed(here, 11, 160.0)
    assert freshness.late_seconds(200.0) == 100.0, "late since the first list that saw more"
    freshness.reached((POD, "elsewhere"), 50)
    freshness.reached(here, 10)
    assert freshness.late_seconds(200.0) == 100.0
    freshness.reached(here, 11)
    assert freshness.late_seconds(200.0) == 0.0
