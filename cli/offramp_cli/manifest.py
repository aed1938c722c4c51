"""Read an ``EarlyExitService`` from a YAML file, with complaints that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from offramp_cli.documents import documents
from offramp_cli.fetched import fetched_bundle
from offramp_core.control.spec import check_name, parse_spec
from offramp_core.errors import InvalidSpecError
from offramp_operator.local.platform import Intent
from offramp_operator.local.template import bundle_path, check_local, ignored_fields, worker_env
from offramp_operator.shell.manifests import API_VERSION, SERVICE_KIND


def load_intent(path: Path, *, bundles: Path | None = None) -> Intent:
    """The one service a file declares; a relative ``file://`` URI counts from the file's folder.

    A bundle at ``https://`` or ``s3://`` is fetched to a folder below ``bundles``; without that its URI stays as it is.

    Raises
    ------
    InvalidSpecError
        The file is not one valid EarlyExitService that this machine can serve; the message starts with the field.
    DeliveryError
        The bundle cannot be fetched.
    OSError
        The file cannot be read.
    """
    manifest = _one_document(path)
    _expect(manifest, "apiVersion", API_VERSION)
    _expect(manifest, "kind", SERVICE_KIND)
    metadata = manifest.get("metadata")
    if not isinstance(metadata, Mapping):
        raise InvalidSpecError("metadata", f"must be an object with a name; got {metadata!r}")
    unknown = sorted(set(manifest) - {"apiVersion", "kind", "metadata", "spec", "status"})
    if unknown:
        raise InvalidSpecError(str(unknown[0]), "unknown field; a manifest has apiVersion, kind, metadata and spec")
    namespace = metadata.get("namespace", "default")
    if not isinstance(namespace, str) or not namespace:
        raise InvalidSpecError("metadata.namespace", f"must be a name; got {namespace!r}")
    return Intent(namespace, check_name(metadata.get("name")), _checked_spec(manifest.get("spec"), path, bundles))


def notes(intent: Intent) -> tuple[str, ...]:
    """What the manifest says that has no meaning on one machine."""
    fields = [f"spec.worker.{name}" for name in ignored_fields(intent.spec.get("worker", {}))]
    if "secretRef" in intent.spec["model"]:
        fields.append(
            "spec.model.secretRef (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are taken from the environment)"
        )
    return (f"{', '.join(fields)}: only a cluster uses this; ignored here",) if fields else ()


def _one_document(path: Path) -> Mapping[str, Any]:
    try:
        found = [document.value for document in documents(path.read_text(encoding="utf-8"))]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" in line {where.line + 1}" if where is not None else ""
        reason = " ".join(str(getattr(error, "problem", None) or error).split())
        raise InvalidSpecError("manifest", f"not YAML{line}: {reason}") from error
    if len(found) != 1 or not isinstance(found[0], Mapping):
        raise InvalidSpecError("manifest", f"must hold exactly one {SERVICE_KIND}; found {len(found)} documents")
    return found[0]


def _checked_spec(spec: Any, path: Path, bundles: Path | None) -> Mapping[str, Any]:
    parsed = parse_spec(spec)
    worker_env(parsed.worker)
    check_local(parsed)
    if not parsed.is_fetched:
        bundle = bundle_path(parsed.model_uri, base=path.resolve().parent)
    elif bundles is not None:
        bundle = fetched_bundle(parsed, bundles.resolve())
    else:
        return dict(spec)
    digest = {"digest": parsed.model_digest} if parsed.model_digest is not None else {}
    return {**spec, "model": {"uri": f"file://{bundle}", **digest}}


def _expect(manifest: Mapping[str, Any], field: str, value: str) -> None:
    if manifest.get(field) != value:
        raise InvalidSpecError(field, f"must be {value}; got {manifest.get(field)!r}")
