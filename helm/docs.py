#!/usr/bin/env python3
"""Write what follows from the chart: its schema of values, the table of values in its README, and
``manifests/install.yaml``.

Usage: ``helm/docs.py [--check] [--helm PATH]``. With ``--check`` nothing is written and the exit status is 1 when a
file is stale.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "helm" / "offramp"
SCHEMA_SOURCE = ROOT / "helm" / "values.schema.yaml"
BEGIN, END = "<!-- values: written by helm/docs.py -->", "<!-- /values -->"
INSTALL_NAMESPACE = "offramp-system"
# A Helm that was built without version flags takes the cluster to be an old one.
KUBE_VERSION = "1.34.0"
# A file that everybody installs must not carry one key for all, so the Secret is named and made by hand.
INSTALL_VALUES = ("signingKey.existingSecret=offramp-signing-key",)
INSTALL_HEADER = f"""\
# Offramp without Helm, for the whole cluster; written by helm/docs.py from helm/offramp, so edit the chart instead.
# It needs a namespace and a signing key of your own first:
#   kubectl create namespace {INSTALL_NAMESPACE}
#   head -c 32 /dev/urandom >signing-key
#   kubectl -n {INSTALL_NAMESPACE} create secret generic offramp-signing-key --from-file=signing-key
# The images are in no public registry. Build and push them (docs/upgrade.md), then name yours:
#   sed 's#\\(image\\|value\\): offramp/#\\1: registry.example.com/offramp/#' install.yaml | kubectl apply --server-side -f -
"""


@dataclass(frozen=True, slots=True)
class Documented:
    """One value of the chart: its dotted path, its default as JSON, and the comment above it."""

    path: str
    default: str
    text: str


def documented_values(source: str) -> list[Documented]:
    """Every value of ``values.yaml`` with a ``# --`` comment above its key.

    Raises
    ------
    ValueError
        A leaf has no such comment; the message names it.
    """
    values, found, comment = yaml.safe_load(source), [], list[str]()
    parents: list[tuple[int, str]] = []
    for line in source.splitlines():
        if match := re.match(r"^\s*# (--)?\s?(.*)$", line):
            comment = [match[2]] if match[1] else [*comment, match[2]] if comment else []
        elif match := re.match(r"^( *)([A-Za-z]+):", line):
            indent = len(match[1])
            parents = [(i, name) for i, name in parents if i < indent] + [(indent, match[2])]
            if comment:
                path = [name for _, name in parents]
                found.append(Documented(".".join(path), json.dumps(_at(values, path)), " ".join(comment)))
            comment = []
        else:
            comment = []
    _require_all(values, {item.path for item in found})
    return found


def _at(values: Any, path: list[str]) -> Any:
    for name in path:
        values = values[name]
    return values


def _require_all(values: dict[str, Any], documented: set[str], prefix: str = "") -> None:
    for name, value in values.items():
        path = f"{prefix}{name}"
        if path in documented:
            continue
        if not isinstance(value, dict) or not value:
            raise ValueError(f"values.yaml: {path} has no comment that starts with '# --' above it")
        _require_all(value, documented, f"{path}.")


def values_table(items: list[Documented]) -> str:
    """The values as a Markdown table."""
    rows = [f"| `{item.path}` | `{item.default}` | {item.text.replace('|', chr(92) + '|')} |" for item in items]
    return "\n".join(["| value | default | meaning |", "|---|---|---|", *rows])


def schema() -> str:
    """``values.schema.json``: the source with every object closed, every value required, and the comments as
    descriptions."""
    values_source = (CHART / "values.yaml").read_text()
    document = yaml.safe_load(SCHEMA_SOURCE.read_text())
    for node in (document, *document["definitions"].values()):
        _close(node)
    _require_values(document, yaml.safe_load(values_source))
    for item in documented_values(values_source):
        node = document
        for name in item.path.split("."):
            node = _resolved(document, node)["properties"].setdefault(name, {})
        if "$ref" not in node and "description" not in node:
            node["description"] = item.text
    return json.dumps(document, indent=2) + "\n"


def _close(node: dict[str, Any]) -> None:
    """Only where properties are listed by ``properties``: the branches of a condition must stay open."""
    if "properties" in node:
        node["additionalProperties"] = False
    for child in (*node.get("properties", {}).values(), *(v for k, v in node.items() if k == "items")):
        _close(child)


def _require_values(node: dict[str, Any], values: dict[str, Any]) -> None:
    if "properties" not in node or not values:
        return
    node["required"] = [name for name in values if name in node["properties"]]
    for name in node["required"]:
        if isinstance(values[name], dict):
            _require_values(node["properties"][name], values[name])


def _resolved(document: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    reference = node.get("$ref")
    found: dict[str, Any] = document["definitions"][reference.rsplit("/", 1)[1]] if reference else node
    return found


def readme() -> str:
    """The chart's README with a fresh table."""
    text = (CHART / "README.md").read_text()
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    table = values_table(documented_values((CHART / "values.yaml").read_text()))
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def install_manifest(helm: str) -> str:
    """The chart rendered with its defaults."""
    flags = [part for value in INSTALL_VALUES for part in ("--set", value)]
    command = [
        helm,
        "template",
        "offramp",
        str(CHART),
        "--namespace",
        INSTALL_NAMESPACE,
        "--kube-version",
        KUBE_VERSION,
        *flags,
    ]
    rendered = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # Who made the objects is not Helm here, and the keep annotation means nothing without it.
    documents = [_without_helm(document) for document in yaml.safe_load_all(rendered) if document]
    return INSTALL_HEADER + "---\n" + "---\n".join(_dump(document) for document in documents)


def _without_helm(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_helm(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {
        key: _without_helm(value)
        for key, value in node.items()
        if key not in ("helm.sh/chart", "helm.sh/resource-policy")
    }
    if kept.get("app.kubernetes.io/managed-by") == "Helm":
        del kept["app.kubernetes.io/managed-by"]
    if kept.get("annotations") == {}:
        del kept["annotations"]
    return kept


def _dump(document: Any) -> str:
    return yaml.safe_dump(document, sort_keys=False, width=140)


def outputs(helm: str) -> Iterator[tuple[Path, str]]:
    """Every generated file and what it should say, each made when it is asked for: Helm renders by the schema that is
    there."""
    yield CHART / "values.schema.json", schema()
    yield CHART / "README.md", readme()
    yield ROOT / "manifests" / "install.yaml", install_manifest(helm)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is stale")
    parser.add_argument("--helm", default="helm", help="helm binary (default: the one in PATH)")
    arguments = parser.parse_args()
    for path, text in outputs(arguments.helm):
        name = path.relative_to(ROOT)
        if path.exists() and path.read_text() == text:
            continue
        if arguments.check:
            print(f"{name} is stale; run helm/docs.py", file=sys.stderr)
            return 1
        path.write_text(text)
        print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
