"""Every rule of WorkerPool and of sharing, on a real API server, which also takes a pool's workers."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import yaml

from offramp_cli.daytwo.lint import lint_text
from offramp_core.control.shared_pool import parse_shared_pool
from offramp_core.control.spec import parse_spec
from offramp_core.errors import InvalidSpecError
from offramp_operator.kube.manifests import OperatorPods, WorkerSettings
from offramp_operator.kube.shared.manifests import deployment, disruption_budget, network_policy
from offramp_operator.kube.shared.pool import SharedPool
from offramp_operator.shell.platform import WorkerIdentity

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a first run builds the API server


class Rule(NamedTuple):
    """A value at ``path`` that is taken, one that is refused, and part of the sentence; ``...`` stands for absence."""

    path: str
    good: Any
    bad: Any
    sentence: str


LIMIT = {"resources": {"limits": {"memory": "2Gi"}}}
RULES = [
    Rule("metadata.name", "small-models", "Small", "metadata.name"),
    Rule("metadata.name", "p" * 40, "p" * 41, "metadata.name must have at most 40 characters"),
    Rule("spec.memory", "512Mi", "1.5Gi", "memory must be a whole number from 1 on"),
    Rule("spec.memory", "512Mi", ..., "spec.memory: Required value"),
    Rule("spec.bundles", {"claimName": "models"}, {}, "spec.bundles.claimName: Required value"),
    Rule("spec.bundles.claimName", "models", "Models", "claimName must be the name of a PersistentVolumeClaim"),
    Rule("spec.minWorkers", 1, 0, "should be greater than or equal to 1"),
    Rule("spec.maxWorkers", 64, 65, "should be less than or equal to 64"),
    Rule("spec.worker", LIMIT, {"resources": {"limits": {"memory": "1Gi"}}}, "memory must be below the memory limit"),
    Rule("spec.worker", {"className": "gpu"}, {"className": "GPU"}, "className must be the name of a WorkerClass"),
    Rule("spec.worker", {}, {"hostNetwork": True}, 'unknown field "spec.worker.hostNetwork"'),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.path)
def test_every_rule_takes_what_is_right_and_says_what_is_wrong(api: Any, manifests: Any, rule: Rule) -> None:
    sound = manifests.worker_pool()
    good, bad = (manifests.changed(sound, rule.path, value) for value in (rule.good, rule.bad))
    answer = api.create(good)
    assert answer.status_code == 201, answer.json()["message"]
    refused = api.create(bad)
    assert refused.status_code in (400, 422) and rule.sentence in refused.json()["message"], refused.json()["message"]
    assert lint_text(yaml.safe_dump(good), "good.yaml")[0] == []
    assert [mistake.field for mistake in lint_text(yaml.safe_dump(bad), "bad.yaml")[0]]


def test_fewer_at_most_than_at_least_are_refused(api: Any, manifests: Any) -> None:
    refused = api.create(manifests.worker_pool(minWorkers=3, maxWorkers=2))
    assert "minWorkers must not exceed maxWorkers" in refused.json()["message"]
    with pytest.raises(InvalidSpecError, match=r"spec\.maxWorkers"):
        parse_shared_pool({"memory": "1Gi", "bundles": {"claimName": "a"}, "minWorkers": 3, "maxWorkers": 2})


SHARED = {"sharing": {"pool": "shared"}, "model": {"uri": "pvc://bundles/digits"}}
OF_SERVICES = [
    ({"worker": {"image": "x"}}, "with sharing it has none"),
    ({"pools": [{"name": "a", "replicas": 1}]}, "with sharing it has none"),
    ({"autoscaling": {"maxReplicas": 2, "targetInFlight": 4}}, "with sharing it has none"),
    ({"updatePolicy": {"type": "Recreate"}}, "need workers of the service's own"),
    ({"updatePolicy": {"sideBySide": {}}}, "need workers of the service's own"),
    ({"route": {"parentRefs": [{"name": "public"}]}}, "with sharing it has none"),
    ({"model": {"uri": "oci://offramp/digits:1"}}, "model.uri must be pvc://CLAIM/PATH with sharing"),
    ({"ramps": {"store": {"claimName": "a"}}}, "ramps.store needs workers of the service's own"),
    ({"sharing": {"pool": "A"}}, "pool must be the name of a WorkerPool"),
    ({"sharing": {}}, "spec.sharing.pool: Required value"),
    ({"sharing": {"pool": "shared", "unloadAfterSeconds": 9}}, "greater than or equal to 10"),
    ({"sharing": {"pool": "shared", "unloadAfterSeconds": 604801}}, "less than or equal to 604800"),
    ({"sharing": {"pool": "shared", "unloadAfterSeconds": "1m"}}, 'must be of type integer: "string"'),
]


@pytest.mark.parametrize(("spec", "sentence"), OF_SERVICES, ids=lambda value: value if isinstance(value, str) else "")
def test_what_makes_no_sense_with_sharing_is_refused_by_api_server_and_parser(
    api: Any, manifests: Any, spec: dict[str, Any], sentence: str
) -> None:
    bad = manifests.service(**{**SHARED, **spec})
    refused = api.create(bad)
    assert refused.status_code == 422 and sentence in refused.json()["message"], refused.json()["message"]
    with pytest.raises(InvalidSpecError):
        parse_spec(bad["spec"])


def test_sharing_is_for_good(api: Any, manifests: Any) -> None:
    shared, alone = manifests.service("digits", **SHARED), manifests.service("faces")
    assert api.create(shared, keep=True).status_code == 201
    assert api.create(alone, keep=True).status_code == 201
    for manifest, change in (
        (shared, {"sharing": {"pool": "another"}}),
        (shared, {"sharing": None}),
        (alone, SHARED),
    ):
        refused = api.merge(manifest, {"spec": change})
        assert refused.status_code == 422 and "sharing cannot be added, changed or removed" in refused.json()["message"]
    for change in (
        {"replicas": 2},
        {"sharing": {"unloadAfterSeconds": 600}},
        {"sharing": {"unloadAfterSeconds": None}},
    ):
        assert api.merge(shared, {"spec": change}).status_code == 200
    for manifest in (shared, alone):
        name = manifest["metadata"]["name"]
        api.request("DELETE", f"/apis/earlyexit.dev/v1alpha1/namespaces/default/earlyexitservices/{name}")


def test_a_pools_workers_and_what_stands_beside_them_are_taken(api: Any, manifests: Any) -> None:
    worker = {
        "image": "offramp/worker:2",
        "resources": {"limits": {"cpu": "2", "memory": "4Gi"}},
        "nodeSelector": {"zone": "a"},
        "env": [{"name": "A", "value": "b"}],
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
    }
    obj = api.create(manifests.worker_pool(worker=worker)).json()
    obj["metadata"]["uid"] = "0d0d0d0d-0000-0000-0000-000000000000"
    pool, settings = (
        SharedPool.of(obj),
        WorkerSettings("offramp/worker:1", admin_from=OperatorPods("system", {"a": "b"})),
    )
    made = deployment(pool, WorkerIdentity("key", "f" * 64), settings, replicas=2)
    for child in (made, disruption_budget(pool), network_policy(pool, settings)):
        answer = api.create(child)
        assert answer.status_code == 201, answer.json()["message"]
    pod = made["spec"]["template"]["spec"]
    [container] = pod["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert env["OFFRAMP_POOL_UID"] == pool.uid and env["OFFRAMP_MODELS_BYTES"] == str(2**30) and env["A"] == "b"
    assert not {"OFFRAMP_BUNDLE", "OFFRAMP_SERVICE_UID", "OFFRAMP_PLAN_FILE", "OFFRAMP_MODEL_DIGEST"} & set(env)
    assert container["image"] == "offramp/worker:2"
    assert {volume["name"] for volume in pod["volumes"]} == {"bundle", "state", "tmp"}
    assert pod["topologySpreadConstraints"][0]["labelSelector"] == made["spec"]["selector"]
