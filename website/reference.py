"""Pages about the kinds, from ``crds/*.yaml``: every field with its type, default, limits, rules and meaning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
CRDS = ROOT / "crds"
SCOPES = {"Namespaced": "namespaced", "Cluster": "of the whole cluster"}
GENERATED = "<!-- Generated from {source} by scripts/gen.d/docs; edit that instead. -->\n"
INTRODUCTIONS = {
    "EarlyExitService": """\
The only kind that you write. It names a model and what you allow: a latency objective and an accuracy budget. The operator
writes its `status` and nothing else.

```yaml
apiVersion: earlyexit.dev/v1alpha1
kind: EarlyExitService
metadata: {name: digits}
spec:
  model: {uri: oci://registry.example.com/digits-bundle:1}
  objective:
    latency: {threshold: 40ms}
    accuracy: {maxDisagreement: "0.01"}
```

`offramp lint FILE` checks a manifest without a cluster. What conditions and reasons mean: [Conditions and reasons](conditions.md).""",
    "RampConfig": """\
One [plan](../concepts/ramps.md#a-plan), written by the operator. Its name is its service's and a hash of its content, so the
same plan found twice is one object. The spec never changes; what is known of the plan is in `status`.

`offramp get` shows it under its service, `offramp diff A B` puts two side by side, `offramp verify` checks its certificates
again.""",
    "RampRollout": """\
One attempt to go from one plan to another, with its evidence, written by the operator. People may change two fields:
`spec.paused` and `spec.decision`, which is what `offramp pause`, `resume`, `promote`, `abort` and `approve` do.

`offramp why` explains one in words, `offramp history` lists them.""",
    "WorkerPool": """\
Workers that hold the bundles of several services of a namespace. A service asks for them with `spec.sharing.pool`; the operator decides which worker
holds what, and tells it in the status ([how to](../how-to/share.md#in-a-cluster)).

```yaml
apiVersion: earlyexit.dev/v1alpha1
kind: WorkerPool
metadata: {name: small-models}
spec:
  memory: 2Gi
  bundles: {claimName: bundles}
  minWorkers: 1
  maxWorkers: 4
  worker:
    resources: {requests: {cpu: "2", memory: 3Gi}, limits: {memory: 3Gi}}
```""",
    "WorkerClass": """\
What the administrator gives to workers, under a name that services ask for in `spec.worker.className`: image, devices, places, identity.
It belongs to the whole cluster, and the operator writes nothing to it.

```yaml
apiVersion: earlyexit.dev/v1alpha1
kind: WorkerClass
metadata: {name: gpu}
spec:
  image: registry.example.com/offramp/worker-cuda:0.2.0
  runtimeClassName: nvidia
  resources: {limits: {nvidia.com/gpu: "1"}}
  nodeSelector: {accelerator: l4}
  tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
```

Maps and lists of class and service add up; a field that both have must say the same (`WorkerClassContradicted`). While a class is missing, workers
that serve go on as they are (`WorkerClassNotFound`). A change of a class goes [from service to service](../upgrade.md) as a new worker image does.""",
}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a schema. ``path`` is dotted; ``[]`` stands for the elements of a list."""

    path: str
    schema: dict[str, Any]
    required: bool

    @property
    def type(self) -> str:
        """What it holds, in a word or two."""
        schema = self.schema
        if schema.get("x-kubernetes-int-or-string"):
            return "quantity"
        if schema.get("type") == "array":
            return f"list of {Field('', schema.get('items', {}), required=False).type}s"
        if "additionalProperties" in schema:
            return f"map of {Field('', schema['additionalProperties'], required=False).type}s"
        return {"date-time": "time"}.get(schema.get("format", ""), str(schema.get("type", "anything")))

    @property
    def limits(self) -> list[str]:
        """What is allowed besides the type."""
        schema = self.schema
        found = ["required"] if self.required else []
        if "default" in schema and schema["default"] != {}:
            found.append(f"default `{_literal(schema['default'])}`")
        if "enum" in schema:
            found.append("one of " + ", ".join(f"`{value}`" if value else "empty" for value in schema["enum"]))
        if "minimum" in schema or "maximum" in schema:
            found.append(_between(schema.get("minimum"), schema.get("maximum")))
        if schema.get("type") == "array" and "maxItems" in schema:
            least = schema.get("minItems", 0)
            found.append(
                f"{least} to {schema['maxItems']} of them" if least else f"at most {schema['maxItems']} of them"
            )
        if "maxProperties" in schema:
            found.append(f"at most {schema['maxProperties']} of them")
        if schema.get("x-kubernetes-preserve-unknown-fields"):
            found.append("further fields are kept")
        return found

    @property
    def rules(self) -> list[str]:
        """What the API server says when a rule is broken."""
        return [rule["message"] for rule in self.schema.get("x-kubernetes-validations", ())]


def _literal(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=200).strip().removesuffix("...").strip()
    return f'"{value}"' if isinstance(value, str) and text.startswith("'") else text


def _between(low: Any, high: Any) -> str:
    if high is None:
        return f"from {low}"
    return f"{low} to {high}" if low is not None else f"at most {high}"


def fields(schema: dict[str, Any], path: str = "") -> Iterator[Field]:
    """Every field below a schema, parents first, in the order of the file."""
    required = set(schema.get("required", ()))
    for name, child in schema.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        yield Field(here, child, name in required)
        yield from fields(child, here)
        if child.get("type") == "array":
            yield from fields(child.get("items", {}), f"{here}[]")


def page(crd: dict[str, Any], source: str) -> str:
    """The reference of one kind, as Markdown."""
    names, version = crd["spec"]["names"], crd["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    parts = [
        GENERATED.format(source=source),
        f"# {names['kind']}\n",
        INTRODUCTIONS[names["kind"]] + "\n",
        f"`{crd['spec']['group']}/{version['name']}`, {SCOPES[crd['spec']['scope']]}; short name "
        f"`{names['shortNames'][0]}`.\n",
        *_object_rules(schema),
        "## Columns of `kubectl get`\n",
        *_columns(version["additionalPrinterColumns"]),
    ]
    top = {name: child for name, child in schema["properties"].items() if name in ("spec", "status")}
    groups: dict[str, list[Field]] = {}
    for field in fields({"properties": top, "required": schema.get("required", ())}):
        parent = field.path.rpartition(".")[0]
        groups.setdefault(parent, []).append(field)
    by_path = {field.path: field for members in groups.values() for field in members}
    for parent, members in groups.items():
        if parent:
            parts += _group(parent, by_path[parent.removesuffix("[]")], members)
    return "\n".join(parts)


def _object_rules(schema: dict[str, Any]) -> list[str]:
    rules = Field("", schema, required=False).rules
    return ["Rules of the whole object:\n", *(f"- {rule}" for rule in rules), ""] if rules else []


def _columns(columns: list[dict[str, Any]]) -> list[str]:
    rows = [
        f"| {c['name'].upper()} | `{c['jsonPath']}` | "
        f"{c.get('description', '')}{' (with `-o wide`)' if c.get('priority') else ''} |"
        for c in columns
    ]
    return ["| column | shows | |", "|---|---|---|", *rows, ""]


def _group(parent: str, owner: Field, members: list[Field]) -> list[str]:
    item = owner.schema.get("items", {}) if parent.endswith("[]") else {}
    told = item.get("description") or owner.schema.get("description", "")
    rules = [*owner.rules, *Field("", item, required=False).rules]
    lines = (
        [f"## `{parent}` {{ #{parent} }}\n"] if parent in ("spec", "status") else [f"### `{parent}` {{ #{parent} }}\n"]
    )
    lines += [f"{told}\n"] if told else []
    lines += [*(f"- {rule}" for rule in rules), ""] if rules else []
    lines += ["| field | type | meaning |", "|---|---|---|"]
    return [*lines, *(_row(member) for member in members), ""]


def _row(field: Field) -> str:
    name = field.path.rpartition(".")[2]
    nested = field.schema.get("properties") or field.schema.get("items", {}).get("properties")
    anchor = f"{field.path}[]" if field.schema.get("type") == "array" else field.path
    link = f"[`{name}`](#{anchor})" if nested else f"`{name}`{{ #{field.path} }}"
    rules = [] if nested else [*field.rules, *Field("", field.schema.get("items", {}), required=False).rules]
    meaning = " ".join([field.schema.get("description", ""), *(f"*{rule}.*" for rule in rules)]).strip()
    limits = "<br>".join([field.type, *field.limits])
    return f"| {link} | {_cell(limits)} | {_cell(meaning)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def outputs() -> dict[str, str]:
    """Pages below ``docs`` and what they should say."""
    found = {}
    for path in sorted(CRDS.glob("*.yaml")):
        crd = yaml.safe_load(path.read_text(encoding="utf-8"))
        found[f"reference/{crd['spec']['names']['singular']}.md"] = page(crd, f"crds/{path.name}")
    return found
