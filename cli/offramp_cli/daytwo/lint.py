"""``lint``: manifests checked without a cluster, by the CRDs' own schemas and rules, and the parser that the operator
uses."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml

from offramp_cli.daytwo.rules import broken_rules, defaulted, is_subdomain
from offramp_cli.daytwo.session import CANNOT, NO, formatted
from offramp_cli.documents import Document, constructed, documents
from offramp_core.control.spec import check_name, parse_spec
from offramp_core.errors import InvalidArgumentError, InvalidSpecError
from offramp_core.plan import Plan
from offramp_operator.shell.manifests import (
    API_VERSION,
    CONFIG_KIND,
    GROUP,
    ROLLOUT_KIND,
    SERVICE_KIND,
    WORKER_CLASS_KIND,
    WORKER_POOL_KIND,
)

KINDS = (SERVICE_KIND, CONFIG_KIND, ROLLOUT_KIND, WORKER_CLASS_KIND, WORKER_POOL_KIND)
_SHOWN_CHARACTERS = 60
_TEXT, _ANYTHING = {"type": ["string", "null"]}, {"x-kubernetes-preserve-unknown-fields": True}
_TEXTS = {"type": ["object", "null"], "additionalProperties": {"type": "string"}}
# What every object says of itself; the rest of it is the API server's.
_METADATA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": _TEXT,
        "generateName": _TEXT,
        "labels": _TEXTS,
        "annotations": _TEXTS,
        "namespace": {"type": ["string", "null"], "maxLength": 63, "pattern": "^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$"},
        **dict.fromkeys(
            (
                "creationTimestamp",
                "deletionGracePeriodSeconds",
                "deletionTimestamp",
                "finalizers",
                "generation",
                "managedFields",
                "ownerReferences",
                "resourceVersion",
                "selfLink",
                "uid",
            ),
            _ANYTHING,
        ),
    },
}


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake. ``line`` is where the field stands, or the nearest thing around it that is there."""

    file: str
    line: int
    name: str
    field: str
    message: str
    #: What is taken all the same, and should be changed before the next release.
    warning: bool = False


def lint(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", help="YAML or JSON files, each with one or more documents; - is stdin.", allow_dash=True
        ),
    ],
    *,
    output: Annotated[
        Literal["json", "yaml"] | None, typer.Option("--output", "-o", help="json or yaml for machines.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Same as -o json.")] = False,
) -> None:
    """Check manifests without a cluster: every mistake with its line, field, value and what to do.

    Documents of other kinds are skipped and counted. Exit code 0: no mistake. 1: mistakes. 3: a file cannot be read.

    Examples:

      offramp lint service.yaml manifests/*.yaml

      helm template . | offramp lint - -o json
    """
    mistakes: list[Mistake] = []
    checked = skipped = 0
    for file in files:
        text = _read(file)
        found, ours, others = lint_text(text, "stdin" if str(file) == "-" else str(file))
        mistakes += found
        checked, skipped = checked + ours, skipped + others
    machine = "json" if json_output else output
    if machine is not None:
        report = {"checked": checked, "skipped": skipped, "mistakes": [asdict(m) for m in mistakes]}
        print(formatted(report, machine), end="")
    else:
        print("\n".join(lint_lines(mistakes, checked, skipped)))
    raise typer.Exit(NO if any(not m.warning for m in mistakes) else 0)


def lint_lines(mistakes: Sequence[Mistake], checked: int, skipped: int) -> list[str]:
    """``file:line: name: field: message``, and a sum."""
    lines = [
        f"{m.file}:{m.line}: {m.name + ': ' if m.name else ''}{'warning: ' if m.warning else ''}{m.field}: {m.message}"
        for m in mistakes
    ]
    wrong = sum(not m.warning for m in mistakes)
    others = f", {skipped} of other kinds skipped" if skipped else ""
    objects = f"{checked} object{'' if checked == 1 else 's'}"
    return [*lines, f"{objects} checked{others}: {f'{wrong} wrong' if wrong else 'no mistake'}"]


def lint_text(text: str, file: str) -> tuple[list[Mistake], int, int]:
    """Mistakes in one file's text, and how many objects were of our kinds and how many of others."""
    try:
        documents = list(_documents(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        return [Mistake(file, mark.line + 1 if mark is not None else 1, "", "manifest", f"not YAML: {reason}")], 0, 0
    ours = [d for d in documents if not isinstance(d.value, Mapping) or _is_ours(d.value)]
    return [m for d in ours for m in _mistakes(d, file)], len(ours), len(documents) - len(ours)


def _is_ours(value: Mapping[str, Any]) -> bool:
    """By either mark, so that a slip in one of them is found."""
    return (
        str(value.get("apiVersion", "")).startswith(f"{GROUP}/")
        or value.get("kind") in KINDS
        or not isinstance(value.get("kind"), str)
    )


# --- one object ------------------------------------------------------------------------------------


def _mistakes(document: Document, file: str) -> list[Mistake]:
    value = document.value
    if not isinstance(value, Mapping):
        return [Mistake(file, _line(document.node, ()), "", "manifest", f"must be an object; got {_shown(value)}")]
    metadata = value.get("metadata")
    name = str(metadata.get("name", "")) if isinstance(metadata, Mapping) else ""
    # The parser knows nothing that the CRDs do not say; it is asked last, in case they ever differ.
    found = list(_head(value)) or _schema_and_rule_mistakes(value) or list(_parser_mistakes(value))
    seen: dict[str, Mistake] = {}
    for field, message in found:
        # A field may break several rules; the first says enough.
        seen.setdefault(field, Mistake(file, _line(document.node, _steps(field)), name, field, message))
    return list(seen.values()) or [
        Mistake(file, _line(document.node, _steps(field)), name, field, message, warning=True)
        for field, message in _deprecations(value)
    ]


def _deprecations(value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Fields of a sound object that change nothing any more, or that the next release will not read."""
    if value["kind"] == SERVICE_KIND:
        for deprecation in parse_spec(value.get("spec")).deprecated:
            yield tuple(deprecation.split(" ", 1))  # type: ignore[misc]


def _head(value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What must be right before a schema can be chosen."""
    if value.get("kind") not in KINDS:
        yield "kind", f"must be one of {', '.join(KINDS)}; got {_shown(value.get('kind'))}"
    if value.get("apiVersion") != API_VERSION:
        yield "apiVersion", f"must be {API_VERSION}; got {_shown(value.get('apiVersion'))}"
    metadata = value.get("metadata")
    if not isinstance(metadata, Mapping) or not (metadata.get("name") or metadata.get("generateName")):
        yield "metadata.name", "is missing; every object needs a name"


def _parser_mistakes(value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What the operator itself would refuse; the parser stops at its first."""
    try:
        if value["kind"] == SERVICE_KIND:
            parse_spec(value.get("spec"))
            check_name(value["metadata"].get("name"))
        elif value["kind"] == CONFIG_KIND and isinstance(value.get("spec"), Mapping):
            Plan.from_mapping(dict(value["spec"]))
    except InvalidSpecError as error:
        yield error.field, str(error).removeprefix(f"{error.field}: ")
    except InvalidArgumentError as error:
        yield "spec", str(error)


def _schema_and_rule_mistakes(value: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the API server would say: of malformed fields by the schema, of the others by the rules over them."""
    from jsonschema import Draft202012Validator

    schema = _crd_schema(str(value["kind"]))
    complete = defaulted(schema, value)
    errors = list(Draft202012Validator(_schema(str(value["kind"]))).iter_errors(complete))
    complete = {**complete, "metadata": _named(value["metadata"])}
    broken = broken_rules(schema, complete, spare=[tuple(error.absolute_path) for error in errors])
    # Rules about the name can only stand at the object itself.
    violations = (
        (_field(path) if path else "metadata.name", f"{message}{_given(complete, path)}") for path, message in broken
    )
    return [*map(_schema_mistake, errors), *violations, *_name_mistakes(value["metadata"])]


def _name_mistakes(metadata: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What the API server asks of every name; rules of a kind that ask for more stand before it."""
    name = metadata.get("name")
    if isinstance(name, str) and name and not is_subdomain(name):
        yield "metadata.name", f"must have lower-case letters, digits, '-' and '.'; got {_shown(name)}"


def _named(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The part of metadata that rules may look at. A generated name ends in five characters of the API server's."""
    return {"name": metadata.get("name") or f"{metadata.get('generateName', '')}00000"}


def _given(value: Any, path: Sequence[str | int]) -> str:
    for step in path:
        value = value[step]
    return "" if isinstance(value, Mapping | list) else f"; got {_shown(value)}"


def _schema_mistake(error: Any) -> tuple[str, str]:
    """Field and message of a schema's complaint, in the words of the rest of Offramp."""
    path, rule, wanted = list(error.absolute_path), error.validator, error.validator_value
    if rule == "required":
        missing = next(name for name in wanted if name not in error.instance)
        return _field([*path, missing]), "is missing and required"
    if rule == "additionalProperties":
        known = sorted(error.schema.get("properties", ()))
        unknown = sorted(set(error.instance) - set(known))
        return _field([*path, unknown[0]]), f"unknown field; known are {', '.join(known)}"
    return _field(path), f"{_rule(rule, wanted)}; got {_shown(error.instance)}{_hint(rule, wanted, error.instance)}"


def _rule(rule: str, wanted: Any) -> str:
    if rule == "type" and isinstance(wanted, list):
        wanted = wanted[0]  # or null
    words = {
        "enum": lambda: f"must be one of {', '.join(map(str, wanted))}",
        "type": lambda: (
            f"must be {'a list' if wanted == 'array' else f'an {wanted}' if wanted[0] in 'aeiou' else f'a {wanted}'}"
        ),
        "minimum": lambda: f"must be at least {wanted}",
        "maximum": lambda: f"must be at most {wanted}",
        "maxLength": lambda: f"must have at most {wanted} characters",
        "minLength": lambda: f"must have at least {wanted} characters",
        "maxItems": lambda: f"must have at most {wanted} entries",
        "minItems": lambda: f"must have at least {wanted} entries",
        "pattern": lambda: f"must match {wanted}",
    }
    return words[rule]() if rule in words else f"breaks the rule {rule}: {wanted}"


def _hint(rule: str, wanted: Any, value: Any) -> str:
    """The commonest slip: YAML takes an unquoted decimal for a number."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f'; quote it: "{value}"' if rule == "type" and wanted == "string" and number else ""


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


# --- schemas ---------------------------------------------------------------------------------------


@functools.cache
def _schema(kind: str) -> dict[str, Any]:
    """The CRD's schema of a kind, closed as the API server closes it."""
    schema = _crd_schema(kind)
    return dict(_closed({**schema, "properties": {**schema["properties"], "metadata": _METADATA}}))


@functools.cache
def _crd_schema(kind: str) -> dict[str, Any]:
    """The CRD's schema of a kind as it stands there."""
    for text in _crds():
        crd = yaml.safe_load(text)
        if crd["spec"]["names"]["kind"] == kind:
            return dict(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    raise AssertionError(f"no CRD for {kind}")


def _crds() -> Iterable[str]:
    """The CRDs as installed with the package, or as they lie in the repository."""
    packaged = resources.files("offramp_cli") / "crds"
    folder: Any = packaged if packaged.is_dir() else Path(__file__).resolve().parents[3] / "crds"
    return [file.read_text(encoding="utf-8") for file in folder.iterdir() if file.name.endswith(".yaml")]


def _closed(schema: Any) -> Any:
    """Unknown fields are refused wherever the schema lists the known ones, as with strict field validation."""
    if not isinstance(schema, Mapping):
        return schema
    closed = {
        key: value
        for key, value in schema.items()
        if not key.startswith("x-kubernetes-") and key not in ("default", "format")
    }
    if "properties" in closed:
        closed["properties"] = {name: _closed(each) for name, each in closed["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in closed:
            closed["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if key in closed:
            closed[key] = _closed(closed[key])
    return closed


# --- files -----------------------------------------------------------------------------------------


def _read(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        print(f"error: {file} cannot be read: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
        raise typer.Exit(CANNOT) from error


def _documents(text: str) -> Iterator[Document]:
    """Objects and their nodes; a List gives its items."""
    for document in documents(text):
        items = _child(document.node, "items")
        if (
            isinstance(document.value, Mapping)
            and str(document.value.get("kind", "")).endswith("List")
            and isinstance(items, yaml.SequenceNode)
        ):
            yield from (Document(constructed(item), item) for item in items.value)
        else:
            yield document


def _child(node: yaml.Node, step: str | int) -> yaml.Node | None:
    if isinstance(node, yaml.MappingNode):
        return next((value for key, value in node.value if key.value == step), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        found: yaml.Node = node.value[step]
        return found
    return None


def _line(node: yaml.Node, steps: Sequence[str | int]) -> int:
    """The line of a field; of the deepest thing on the way that exists where it is missing."""
    line = node.start_mark.line
    for step in steps:
        if isinstance(node, yaml.MappingNode):
            key = next((key for key, _ in node.value if key.value == step), None)
            line = key.start_mark.line if key is not None else line
        child = _child(node, step)
        if child is None:
            break
        node = child
        if isinstance(step, int):
            line = node.start_mark.line
    return int(line) + 1


def _field(path: Sequence[str | int]) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")
    return text or "manifest"


def _steps(field: str) -> list[str | int]:
    """``spec.rollout.steps[1].weight`` → its parts."""
    steps: list[str | int] = []
    for part in field.split("."):
        name, *indices = part.split("[")
        steps += [name, *(int(index.rstrip("]")) for index in indices if index.rstrip("]").isdigit())]
    return steps
