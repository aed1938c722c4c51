"""Manifests nobody would write, through every door that takes one: `python -m bench.fuzz_manifests --count 1000`.

Valid objects of the three kinds are made from the CRDs' own schemas and changed at random places. What is asked of
each:

- `offramp lint` and a real API server agree on whether it is taken, and lint ends without a traceback;
- of a service that the API server takes, the operator makes its decision and every object of a pass, and brings it to
  the API server: a condition at worst, never an exception;
- `offramp up` reads the file or says which field is wrong.

Texts that are no JSON (anchors, tags, deep nesting, control characters) meet `lint` and `up` alone. The same seed makes
the same manifests. Exit code 1: something was found; each finding is printed with the seed of its manifest, which
`--only` runs again.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import functools
import json
import random
import re
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from kubernetes import config as kubernetes_config

from bench.fleet.api import load_starter
from offramp_cli.daytwo.lint import lint_text
from offramp_cli.documents import Loader
from offramp_cli.manifest import load_intent, notes
from offramp_core.control.objects import Service
from offramp_core.control.snapshot import TrainingOrder
from offramp_core.errors import InvalidSpecError
from offramp_operator.kube import manifests as built
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import KubeClient
from offramp_operator.kube.kinds import SERVICE
from offramp_operator.kube.manifests import OperatorPods, WorkerSettings
from offramp_operator.kube.platform.service_platform import KubePlatform
from offramp_operator.shell.manifests import service_from_manifest
from offramp_operator.shell.observe import Observer
from offramp_operator.shell.platform import ServiceKey, WorkerIdentity
from offramp_operator.shell.reconcile import Reconciler
from offramp_operator.shell.signing import SigningKey

ROOT = Path(__file__).resolve().parents[1]
CPU_SECONDS = 10.0  # for one manifest at one door
SECONDS = 300.0  # by the clock, for what waits and does not compute; the machine may be busy
MOST_BYTES = 6 * 2**30  # of address space
CHILDREN = {
    "apps/v1": ("deployments",),
    "v1": ("services", "configmaps"),
    "policy/v1": ("poddisruptionbudgets",),
    "autoscaling/v2": ("horizontalpodautoscalers",),
    "earlyexit.dev/v1alpha1": ("rampconfigs", "ramprollouts", "earlyexitservices"),
}
Json = Any
Path_ = tuple[str | int, ...]

# --- what is tried -----------------------------------------------------------------------------------

SEEDS: tuple[dict[str, Json], ...] = (
    {
        "kind": "EarlyExitService",
        "metadata": {"name": "digits"},
        "spec": {
            "model": {"uri": "oci://offramp/digits:1", "digest": "sha256:" + "1" * 64},
            "objective": {
                "latency": {"percentile": 95, "threshold": "40ms"},
                "accuracy": {
                    "maxDisagreement": "0.02",
                    "confidence": "0.95",
                    "slices": [{"name": "night", "maxDisagreement": "0.03"}],
                    "classes": [{"class": 3, "maxDisagreement": "0.05"}],
                },
            },
            "ramps": {
                "mode": "Auto",
                "maxOverhead": "0.05",
                "maxActive": 3,
                "holdback": "0.02",
                "training": "LiveTraffic",
                "store": {"claimName": "ramps"},
            },
            "execution": "ComputeSaving",
            "deadlineAnswers": "Always",
            "predictionCache": {"sizeLimit": "64Mi"},
            "feedback": {"maxAnswers": 100},
            "protocols": ["HTTP", "GRPC"],
            "batching": {"policy": "Offramp"},
            "rollout": {
                "promotion": "Manual",
                "stepDeadline": "90s",
                "cooldown": "0s",
                "steps": [{"weight": 5, "pause": "1s"}, {"weight": 50}],
            },
            "updatePolicy": {"type": "Auto", "surgeDeadline": "0s", "sideBySide": {"weight": 20, "pause": "1m"}},
            "route": {"parentRefs": [{"name": "public", "port": 80}], "hostnames": ["a.example.com"]},
            "autoscaling": {"minReplicas": 1, "maxReplicas": 4, "targetInFlight": 8, "noExitFloor": "PreScale"},
            "suspend": False,
            "worker": {
                "image": "a/b:1",
                "resources": {"requests": {"cpu": 1}, "limits": {"memory": "1Gi", "nvidia.com/gpu": 1}},
                "nodeSelector": {"a": "b"},
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
                "env": [{"name": "A", "value": "b"}],
                "labels": {"team": "x"},
                "annotations": {"example.com/a": "b"},
                "topologySpreadConstraints": [
                    {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
                ],
            },
        },
    },
    {
        "kind": "EarlyExitService",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {
                "uri": "https://models.example/digits.tar",
                "archiveDigest": "sha256:" + "2" * 64,
                "secretRef": {"name": "s"},
            },
            "objective": {"latency": {"threshold": "1.5s"}, "accuracy": {"maxDisagreement": "0.01"}},
            "ramps": {
                "mode": "Pinned",
                "pin": {"ramps": [{"id": "r04-grid", "threshold": "0.25"}, {"id": "r08-grid", "threshold": "1.0"}]},
            },
            "updatePolicy": {"type": "Recreate", "recreateDeadline": "5m"},
            "replicas": 1,
        },
    },
    {
        "kind": "EarlyExitService",
        "metadata": {"name": "plain"},
        "spec": {
            "model": {"uri": "s3://models/digits.tar", "endpoint": "https://minio.example:9000", "region": "eu-1"},
            "objective": {
                "latency": {"threshold": "250us"},
                "accuracy": {"maxDisagreement": "0.000001", "everyClass": {"maxDisagreement": "0.1", "count": 5}},
            },
            "replicas": 0,
        },
    },
    {
        "kind": "EarlyExitService",
        "metadata": {"name": "local"},
        "spec": {
            "model": {"uri": "file:///tmp/bundle"},
            "objective": {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}},
            "replicas": 2,
        },
    },
    {
        "kind": "RampConfig",
        "metadata": {"name": "digits-0123456789"},
        "spec": {
            "backboneDigest": "sha256:" + "a" * 64,
            "rampSetDigest": "sha256:" + "b" * 64,
            "ramps": [{"id": "r04-grid", "threshold": "0.25"}],
            "precision": "fp32",
            "execution": "Auto",
        },
    },
    {
        "kind": "RampRollout",
        "metadata": {"name": "digits-1"},
        "spec": {
            "serviceName": "digits",
            "from": "digits-0123456789",
            "to": "digits-abcdef0123",
            "generation": 1,
            "cause": "Tuned",
        },
    },
)
WORDS: tuple[Json, ...] = (
    "",
    " ",
    "a",
    "A",
    "-",
    "a-b",
    "a.b",
    "a/b",
    "..",
    "/../",
    "\x7f",
    "\u202e\u0000",
    "\U0001f600" * 40,
    "ﬀ",
    "０.０２",
    "0.02",
    "0.020",
    ".02",
    "1e-2",
    "+0.02",
    "0.0",
    "0.5",
    "0.6",
    "1.0",
    "1",
    "0",
    "-1",
    "NaN",
    "inf",
    "40ms",
    "40 ms",
    "0ms",
    "0.0s",
    "1.s",
    "999999999h",
    "1h30m",
    "9" * 400 + "s",
    "5m\n",
    "1Gi",
    "0Gi",
    "1Ti",
    "2Ti",
    "1e3",
    "1.5Gi",
    "100m",
    "1n",
    "1E",
    "9" * 40,
    "Ki",
    "sha256:" + "1" * 64,
    "sha256:" + "1" * 64 + "\n",
    "SHA256:" + "1" * 64,
    "oci://a",
    "oci:// a",
    "OCI://a",
    "oci://a\nb",
    "pvc://c/../d",
    "pvc://c/..",
    "pvc://c",
    "pvc://C/d",
    "https://u:p@h/x",
    "https://h/x#y",
    "https://h",
    "s3://b/k",
    "s3://b",
    "file://",
    "file://x y",
    "ftp://x",
    "*.example.com",
    "Auto",
    "Pinned",
    "Recreate",
    "ResultsOnly",
    "kubernetes.io/arch",
    "OFFRAMP_PORT",
    "PATH",
    "1A",
    "true",
    "null",
    "~",
    "yes",
    "0x10",
    "1_000",
    "2026-01-01",
    "x" * 64,
    "x" * 254,
    "x" * 5000,
)
OTHERS: tuple[Json, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    50,
    51,
    100,
    2**31 - 1,
    2**31,
    2**53 + 1,
    2**63 - 1,
    -(2**63),
    2**63,
    1.0,
    1.5,
    0.02,
    -0.0,
    1e308,
    1e-320,
    [],
    {},
    [None],
    [[]],
    [{}],
    {"": {}},
    {"a": None},
)
TEXTS: tuple[str, ...] = (
    "",
    "\x00",
    "\ufeff",
    "---\n---\n",
    "a: [",
    "%YAML 9.9\n---\na: 1",
    "!!python/object/apply:os.system ['true']",
    "&a [*a]",
    "a: &a {b: *a}",
    "? [1]\n: 2",
    "? {a: 1}\n: 2",
    "1: 2",
    "kind: EarlyExitService",
    "kind: 2026-01-01\n",
    "[" * 5000,
    "{a: " * 2000 + "1" + "}" * 2000,
    "- " * 3000 + "1",
    "a: !!binary aGk=",
    "a: .nan",
    "a: 1e999",
    "<<: {kind: EarlyExitService}",
    "<<: 1",
    "a: 12:30:45",
    "a: !!set {b}",
    "\ud800",
    "apiVersion: earlyexit.dev/v1alpha1\nkind: EarlyExitService\nmetadata: {name: 1}\nspec: {? [a] : b}\n",
    "kind: List\nitems: 1",
    "kind: List\nitems: [1, null, {}]",
    "kind: EarlyExitServiceList\nitems: {}",
    "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9))
    + "kind: [*j]\n",
    "apiVersion: earlyexit.dev/v1alpha1\nkind: EarlyExitService\nmetadata: &m {name: a, x: *m}\nspec: {}\n",
    "apiVersion: earlyexit.dev/v1alpha1\nkind: EarlyExitService\nmetadata: {name: a, name: b}\nspec: &s {model: *s, "
    "objective: *s}\n",
    "apiVersion: earlyexit.dev/v1alpha1\nkind: EarlyExitService\nmetadata: {name: a}\nspec: {model: {uri: !!binary "
    "aGk=}, objective: {latency: {threshold: 2026-01-01}, accuracy: {maxDisagreement: .inf}}}\n",
)


@functools.cache
def schemas() -> dict[str, Json]:
    files = [yaml.safe_load(file.read_text()) for file in sorted((ROOT / "crds").glob("*.yaml"))]
    return {crd["spec"]["names"]["kind"]: crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for crd in files}


def made(number: int) -> Json:
    """The manifest of a number: a seed as it is, changed here and there, or grown from its schema."""
    rng = random.Random(number)
    manifest = copy.deepcopy(SEEDS[number % len(SEEDS)])
    manifest |= {"apiVersion": "earlyexit.dev/v1alpha1"}
    manifest["metadata"]["namespace"] = "default"
    if rng.random() < 0.3:
        manifest["spec"] = _pruned(manifest["spec"], rng)
    if rng.random() < 0.4:
        schema = schemas()[manifest["kind"]]["properties"]["spec"]
        name = rng.choice(sorted(schema["properties"]))
        manifest["spec"][name] = _grown(schema["properties"][name], rng)
    for _ in range(rng.choice((0, 0, 1, 1, 1, 2, 3))):
        _change(manifest, rng)
    return manifest


def _pruned(spec: dict[str, Json], rng: random.Random) -> dict[str, Json]:
    """Fewer fields, so that what is left may be valid together."""
    return {name: value for name, value in spec.items() if name in ("model", "objective") or rng.random() < 0.5}


def _grown(schema: Mapping[str, Json], rng: random.Random, depth: int = 0) -> Json:
    """Something of a schema's shape: required fields nearly always, the others now and then, texts from the words."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kind = schema.get("type")
    if kind == "object":
        known = schema.get("properties") or {}
        required = set(schema.get("required") or ())
        chosen = [n for n in known if (n in required and rng.random() < 0.97) or rng.random() < 0.4]
        made = {name: _grown(known[name], rng, depth + 1) for name in chosen}
        more = schema.get("additionalProperties")
        if isinstance(more, Mapping):
            made |= {
                rng.choice(("a", "cpu", "memory", "example.com/x", "kubernetes.io/arch")): _grown(more, rng, depth + 1)
            }
        return made
    if kind == "array":
        return [_grown(schema["items"], rng, depth + 1) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
    numbers: dict[object, tuple[Json, ...]] = {
        "integer": (schema.get("minimum", 0), schema.get("maximum", 9), 1, 3),
        "boolean": (True, False),
        "number": (0.0, 0.5, 1),
    }
    shape = "integer" if schema.get("x-kubernetes-int-or-string") else kind
    return rng.choice(numbers[shape]) if shape in numbers else schema.get("default") or rng.choice(WORDS)


def _places(value: Json, path: Path_ = ()) -> Iterator[Path_]:
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, each in inner:
        yield from _places(each, (*path, step))


def _change(manifest: Json, rng: random.Random) -> None:
    *way, last = rng.choice(list(_places(manifest)))
    parent = functools.reduce(lambda value, step: value[step], way, manifest)
    fate = rng.random()
    if fate < 0.15:
        del parent[last]
    elif fate < 0.6:
        parent[last] = rng.choice(WORDS)
    elif fate < 0.8:
        parent[last] = copy.deepcopy(rng.choice(OTHERS))
    elif fate < 0.86 and isinstance(parent, dict):
        parent[rng.choice(("x", "Spec", "", "a.b", "\u00e9", *parent))] = rng.choice(WORDS)
    elif fate < 0.92 and isinstance(parent, list):
        parent.extend(copy.deepcopy(parent) * rng.choice((1, 20)))
    elif fate < 0.95:
        parent[last] = functools.reduce(lambda inner, _: rng.choice(([inner], {"a": inner})), range(100), 1)
    else:
        parent[last] = str(parent[last]) if not isinstance(parent[last], str) else [parent[last]]


# --- the doors ---------------------------------------------------------------------------------------


@dataclass
class Report:
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    def found(self, number: object, door: str, what: str, manifest: Json = None) -> None:
        shown = json.dumps(manifest, ensure_ascii=True)[:3000] if manifest is not None else ""
        self.findings.append(f"{number} at {door}: {what[-1500:]}\n    {shown}")
        self.counts[f"findings: {door}"] += 1


def at(door: str, number: object, report: Report, work: Callable[[], Any], *refusals: type[Exception]) -> Any:
    """What a door answers. An exception that it does not name is a finding, and so is a long wait."""
    started, computed = time.monotonic(), time.process_time()
    try:
        return work()
    except refusals as refusal:
        return refusal
    except Exception:
        report.found(number, door, traceback.format_exc(limit=-4))
        return None
    finally:
        took, computed = time.monotonic() - started, time.process_time() - computed
        if took > SECONDS or computed > CPU_SECONDS:
            report.found(number, door, f"took {took:.0f} s and computed for {computed:.0f} s")


def read_here(text: str, number: object, folder: Path, report: Report) -> bool | None:
    """The doors that take a text: whether lint has nothing against it."""
    file = folder / "manifest.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    intent = at("up", number, report, lambda: load_intent(file), InvalidSpecError)
    if intent is not None and not isinstance(intent, Exception):
        at("up", number, report, lambda: notes(intent))
        report.counts["read by up"] += 1
    mistakes = at("lint", number, report, lambda: lint_text(text, "f"))
    return None if mistakes is None else all(mistake.warning for mistake in mistakes[0])


def rendered(service: Service) -> list[Json]:
    """Every object that a pass may make of a service, or the sentence that says why there can be none."""
    identity, settings = WorkerIdentity("key", "token"), WorkerSettings("offramp/worker:1", pull_secrets=("s",))
    operator, scaled, side = (
        OperatorPods("system", {"a": "b"}),
        service.spec.autoscaling,
        service.spec.update_policy.side_by_side,
    )
    objects = [
        *(built.deployment(service, identity, settings, replicas=2, trial=trial) for trial in (False, True)),
        built.network_service(service),
        built.version_service(service, trial=True),
        built.disruption_budget(service),
        built.network_policy(service, operator, allow_egress=False),
        built.plan_config_map(service, document="{}", epoch=1),
    ]
    if scaled is not None:
        objects.append(built.autoscaler(service, scaled, fewest=1, frozen=True))
    if service.spec.route is not None:
        weights = built.version_weights(service, share=0 if side is None else side.weight)
        objects.append(built.http_route(service, service.spec.route, weights=weights))
    if service.spec.store_claim is not None:
        objects.append(built.training_job(service, TrainingOrder(1, "sha256:" + "a" * 64, 0.02), settings))
    return objects


class Cluster:
    """An API server with our kinds, and an operator's pass over one service at a time."""

    def __init__(self, api: Any, stack: ExitStack) -> None:
        self.api = api
        client = kubernetes_config.new_client_from_config(str(self.api.kubeconfig))
        self._client = KubeClient(client)
        stack.callback(self._client.close)

    def takes(self, manifest: Json) -> tuple[Json, str]:
        """What the API server would store, or nothing and what it says."""
        named = manifest if isinstance(manifest, dict) else {}
        kind = str(named.get("kind"))
        plural = {
            "EarlyExitService": "earlyexitservices",
            "RampConfig": "rampconfigs",
            "RampRollout": "ramprollouts",
        }.get(kind)
        if plural is None or named.get("apiVersion") != "earlyexit.dev/v1alpha1":
            return None, "another kind"
        metadata = named.get("metadata")
        place = metadata.get("namespace") if isinstance(metadata, dict) else None
        if isinstance(place, str) and re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", place):
            manifest = {**manifest, "metadata": {**metadata, "namespace": "default"}}  # any that exists
        path = f"/apis/earlyexit.dev/v1alpha1/namespaces/default/{plural}"
        params = {"fieldValidation": "Strict", "dryRun": "All"}
        answer = self.api.request("POST", path, manifest, params=params)
        return (answer.json(), "") if answer.status_code == 201 else (None, answer.text[:600])

    async def _pass(self, obj: Json) -> None:
        cache, observer = ObjectCache(), Observer(deadline_seconds=0.5)
        cache.put(SERVICE, obj)
        platform = KubePlatform(self._client, cache, workers=WorkerSettings("offramp/worker:1"), instance="fuzz")
        reconciler = Reconciler(platform, observer, SigningKey(b"k" * 32))
        key = ServiceKey("default", obj["metadata"]["name"])
        try:
            for _ in range(3):
                await reconciler.reconcile(key)
        finally:
            await observer.close()
        live = cache.get(SERVICE, key.namespace, key.name)
        assert live is not None and (live.get("status") or {}).get("conditions"), "no condition says how it stands"

    def reconcile(self, spec: Json) -> None:
        """Passes over a service that has the spec."""
        path = "/apis/earlyexit.dev/v1alpha1/namespaces/default/earlyexitservices"
        stored = {
            "apiVersion": "earlyexit.dev/v1alpha1",
            "kind": "EarlyExitService",
            "metadata": {"name": "fuzzed"},
            "spec": spec,
        }
        answer = self.api.request("POST", path, stored, params={"fieldValidation": "Strict"})
        assert answer.status_code == 201, answer.text
        try:
            asyncio.run(self._pass(answer.json()))
        finally:
            self._clear()

    def _clear(self) -> None:
        for group, plurals in CHILDREN.items():
            for plural in plurals:
                prefix = "/api/v1" if group == "v1" else f"/apis/{group}"
                path = f"{prefix}/namespaces/default/{plural}"
                if plural != "services":
                    self.api.request("DELETE", path)
                    continue
                for item in self.api.request("GET", path).json()["items"]:
                    if item["metadata"]["name"] != "kubernetes":
                        self.api.request("DELETE", f"{path}/{item['metadata']['name']}")


class _Dumper(yaml.SafeDumper):
    """Quotes what a reader would take for a number."""


_Dumper.yaml_implicit_resolvers = Loader.yaml_implicit_resolvers


def one(number: int, cluster: Cluster, folder: Path, report: Report) -> None:
    """One manifest through every door."""
    manifest = made(number)
    text = yaml.dump(manifest, Dumper=_Dumper, allow_unicode=True) if number % 2 else json.dumps(manifest)
    clean = read_here(text, number, folder, report)
    stored, said = cluster.takes(manifest)
    taken = stored is not None
    kind = next((known for known in schemas() if known == manifest.get("kind")), "no kind of ours")
    report.counts[f"{kind}: {'taken' if taken else 'refused'}"] += 1
    if re.search(r"cost(?!PerHour)", said) or (said and '"code":5' in said):
        report.found(number, "API server", said, manifest)
    if clean is not None and clean != taken and lint_text(text, "f")[1]:
        told = lint_text(text, "f")[0]
        report.found(
            number,
            "agreement",
            f"lint says {[(m.field, m.message) for m in told][:3]}, the API server {said or 'takes it'}",
            manifest,
        )
    if taken and manifest["kind"] == "EarlyExitService":
        operator_takes(number, stored, cluster, report)


def operator_takes(number: int, stored: Json, cluster: Cluster, report: Report) -> None:
    """What is stored, through the operator's hands."""
    service = at(
        "parse",
        number,
        report,
        lambda: service_from_manifest({**stored, "metadata": {"uid": "u", **stored["metadata"]}}),
    )
    if isinstance(service, Service):
        at("render", number, report, lambda: json.dumps(rendered(service)), InvalidSpecError)
    if number % 3 == 0 or report.counts["passes"] < 20:
        report.counts["passes"] += 1
        at("pass", number, report, lambda: cluster.reconcile(stored["spec"]))


def _api_server(folder: Path, stack: ExitStack) -> Any:
    starter = load_starter()
    started = starter._start(folder.resolve(), stack)
    starter._install_crds(started)
    return started


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """A door that would fill the memory of the machine fails instead, which is a finding."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def run(count: int, *, start: int = 0, api: Any = None) -> Report:
    """Manifests ``start`` to ``start + count`` and every hostile text; without an ``api`` server it starts one."""
    report = Report()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        cluster = Cluster(api if api is not None else _api_server(folder, stack), stack)
        stack.enter_context(_bounded_memory())
        for number, text in enumerate(TEXTS):
            read_here(text, f"text {number}", folder, report)
        for number in range(start, start + count):
            one(number, cluster, folder, report)
    report.counts["manifests"] = count
    report.counts["texts"] = len(TEXTS)
    return report


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--start", type=int, default=0, help="number of the first manifest")
    arguments = parser.parse_args(given)
    started = time.monotonic()
    report = run(arguments.count, start=arguments.start)
    print("\n".join(report.findings))
    told = ", ".join(f"{what}: {n}" for what, n in sorted(report.counts.items()))
    print(f"{told}; {time.monotonic() - started:.0f} s")
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
