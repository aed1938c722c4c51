"""The definitions only grow (docs/upgrade.md): what an earlier release took, this one takes, and means the same."""

from __future__ import annotations

import copy
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PREVIOUS = sorted((ROOT / "tests" / "api" / "previous").glob("*.tgz"))
Json = dict[str, Any]

# What was taken back all the same, and why nobody loses by it.
ACCEPTED = {
    "earlyexitservices.earlyexit.dev v1alpha1 .spec.replicas: absent meant 1, now None": "the operator takes it for "
    "1; without a default an autoscaler's number is not written over",
    "earlyexitservices.earlyexit.dev v1alpha1 .status.version.toldAt: gone": "the operator's own pace, called "
    "gatesReadAt now: without it the gates of a version on trial are read once more",
}


def definitions(texts: Iterator[str]) -> dict[str, Json]:
    return {crd["metadata"]["name"]: crd["spec"] for crd in map(yaml.safe_load, texts)}


def of_release(chart: Path) -> dict[str, Json]:
    with tarfile.open(chart) as packed:
        files = [packed.extractfile(name) for name in packed.getnames() if "/files/crds/" in name]
        return definitions(file.read().decode() for file in files if file is not None)


def now() -> dict[str, Json]:
    return definitions(path.read_text() for path in (ROOT / "crds").glob("*.yaml"))


def narrowed(old: dict[str, Json], new: dict[str, Json]) -> Iterator[str]:
    """What a manifest of then would meet: one line each."""
    for name, spec in old.items():
        if name not in new:
            yield f"{name}: gone"
            continue
        for what in ("group", "scope", "names"):
            if not _within(spec[what], new[name][what]):
                yield f"{name}: {what} differs"
        served = {version["name"]: version for version in new[name]["versions"] if version["served"]}
        for version in spec["versions"]:
            where = f"{name} {version['name']}"
            if version["name"] not in served:
                yield f"{where}: not served"
                continue
            then, today = (v["schema"]["openAPIV3Schema"] for v in (version, served[version["name"]]))
            yield from (f"{where} {line}" for line in _schema(then, today, ""))


def _within(then: Any, today: Any) -> bool:
    """Names may be added: a short name, a category."""
    if isinstance(then, dict):
        return all(_within(value, today.get(key)) for key, value in then.items())
    return set(then) <= set(today) if isinstance(then, list) else bool(then == today)


def _schema(then: Json, today: Json, path: str) -> Iterator[str]:
    widened = then.get("type") == "integer" and today.get(
        "x-kubernetes-int-or-string"
    )  # takes every integer, and texts
    if then.get("type") != today.get("type") and not widened:
        yield f"{path}: {then.get('type')} became {today.get('type')}"
    if "enum" in today and (lost := set(then.get("enum", ["anything"])) - set(today["enum"])):
        yield f"{path}: no longer takes {', '.join(sorted(map(str, lost)))}"
    if "default" in then and then["default"] != today.get("default"):
        yield f"{path}: absent meant {then['default']!r}, now {today.get('default')!r}"
    for name in sorted(set(today.get("required", ())) - set(then.get("required", ()))):
        if "default" not in today["properties"][name]:
            yield f"{path}.{name}: newly required"
    for name, schema in then.get("properties", {}).items():
        if name in today.get("properties", {}):
            yield from _schema(schema, today["properties"][name], f"{path}.{name}")
        else:
            yield f"{path}.{name}: gone"
    for inner, suffix in (("items", "[]"), ("additionalProperties", ".*")):
        if isinstance(then.get(inner), dict):
            yield from _schema(then[inner], today.get(inner) or {}, path + suffix)


@pytest.mark.parametrize("chart", PREVIOUS, ids=lambda chart: chart.stem)
def test_the_definitions_only_grow(chart: Path) -> None:
    assert [line for line in narrowed(of_release(chart), now()) if line not in ACCEPTED] == []


@pytest.mark.slow
def test_no_exception_is_out_of_date() -> None:
    found = {line for chart in PREVIOUS for line in narrowed(of_release(chart), now())}
    assert set(ACCEPTED) - found == set()


def test_what_would_break_a_manifest_is_seen() -> None:
    old, new = now(), copy.deepcopy(now())
    name = "earlyexitservices.earlyexit.dev"
    (version,) = new[name]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["properties"]["suspend"]
    spec["required"].append("replicas")
    spec["properties"]["execution"]["enum"].remove("ComputeSaving")
    spec["properties"]["replicas"]["type"] = "string"
    del spec["properties"]["ramps"]["properties"]["mode"]["default"]
    assert sorted(narrowed(old, new)) == sorted(
        f"{name} v1alpha1 .spec{line}"
        for line in (
            ".suspend: gone",
            ".replicas: newly required",
            ".execution: no longer takes ComputeSaving",
            ".replicas: integer became string",
            ".ramps.mode: absent meant 'Auto', now None",
        )
    )
