"""What is kept of an object: enough to decide on, little enough for thousands of services.

An object as the API server sends it is mostly bookkeeping (``managedFields`` alone is a third) and, for children, a
spec that is only ever compared. Kept are the identifying metadata, the statuses that decisions read, and of children
the spec as compact JSON bytes.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from offramp_operator.kube.kinds import (
    CONFIG,
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    HTTP_ROUTE,
    JOB,
    NETWORK_POLICY,
    NETWORK_SERVICE,
    POD,
    REPLICA_SET,
    ROLLOUT,
    SERVICE,
    WORKER_CLASS,
    WORKER_POOL,
    Kind,
    Object,
    made,
)
from offramp_operator.kube.manifests import CONTAINER

Item = TypeVar("Item")
_OWNER = ("kind", "name", "uid", "controller")
_COMPARED = frozenset({DEPLOYMENT, NETWORK_SERVICE, DISRUPTION_BUDGET, NETWORK_POLICY, HTTP_ROUTE})
_WHOLE = frozenset({SERVICE, CONFIG, ROLLOUT, WORKER_CLASS, WORKER_POOL})
# An annotation that tools write with a whole copy of the object.
_COPY = "kubectl.kubernetes.io/last-applied-configuration"

CONTENT = "content"
"""Where the compact JSON of a child's spec is kept: bytes."""


def trim(kind: Kind, obj: Object) -> Object:
    """The part of an object that is kept; an object that was trimmed already is returned as it is."""
    if CONTENT in obj or kind not in _KEPT:
        return obj
    kept: Object = {name: obj[name] for name in ("apiVersion", "kind") if name in obj}
    kept["metadata"] = _metadata(obj["metadata"])
    if kind in _WHOLE:
        kept |= {name: obj[name] for name in ("spec", "status") if name in obj}
        return kept
    if kind is CONFIG_MAP:
        kept["data"] = obj.get("data")
    elif kind in _COMPARED and "spec" in obj:
        kept[CONTENT] = msgspec.json.encode(obj["spec"])
    if kind is DEPLOYMENT and "replicas" in (obj.get("spec") or {}):
        kept["spec"] = {"replicas": obj["spec"]["replicas"]}
    if kind is POD and (spec := _pod_spec(obj.get("spec") or {})):
        kept["spec"] = spec
    if kind in (DEPLOYMENT, POD, JOB, HTTP_ROUTE) and "status" in obj:
        kept["status"] = obj["status"]
    return kept


def content(obj: Object) -> bytes:
    """The compact JSON of a child's spec, trimmed or not."""
    return bytes(obj[CONTENT]) if CONTENT in obj else msgspec.json.encode(obj.get("spec"))


def _pod_spec(spec: Object) -> Object:
    """What tells why a pod does not run: its node, its claims, its images and its limit of memory (see
    :mod:`failures`)."""
    kept: Object = {name: spec[name] for name in ("schedulingGates", "nodeName", "resourceClaims") if name in spec}
    images = [
        {"image": {"reference": v["image"].get("reference", "")}} for v in spec.get("volumes") or () if v.get("image")
    ]
    if images:
        kept["volumes"] = images
    if containers := spec.get("containers"):
        # A proxy that others inject may stand before the worker.
        own = next((container for container in containers if container.get("name") == CONTAINER), containers[0])
        kept["containers"] = [{name: own[name] for name in ("image", "resources") if name in own}]
    return kept


_KEPT = frozenset({*_WHOLE, *_COMPARED, CONFIG_MAP, POD, REPLICA_SET, JOB})


def _metadata(metadata: Object) -> Object:
    kept = {name: metadata[name] for name in _Metadata.__struct_fields__ if name in metadata}
    if "ownerReferences" in kept:
        kept["ownerReferences"] = [{name: r[name] for name in _OWNER if name in r} for r in kept["ownerReferences"]]
    if _COPY in (kept.get("annotations") or ()):
        kept["annotations"] = {key: text for key, text in kept["annotations"].items() if key != _COPY}
    return kept


# --- from the wire ---------------------------------------------------------------------------------


class _Metadata(msgspec.Struct, omit_defaults=True):
    """Metadata without ``managedFields``: what is not named here is skipped while parsing, at no cost in memory."""

    name: str
    uid: str
    resourceVersion: str  # noqa: N815 - Kubernetes' own names
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    generation: int | msgspec.UnsetType = msgspec.UNSET
    creationTimestamp: str | msgspec.UnsetType = msgspec.UNSET  # noqa: N815
    deletionTimestamp: str | msgspec.UnsetType = msgspec.UNSET  # noqa: N815
    ownerReferences: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET  # noqa: N815
    labels: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    annotations: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class _Item(msgspec.Struct, omit_defaults=True):
    metadata: _Metadata
    spec: Any = msgspec.UNSET
    status: Any = msgspec.UNSET
    data: Any = msgspec.UNSET


class _Volume(msgspec.Struct, omit_defaults=True):
    image: dict[str, str] | None = None


class _Container(msgspec.Struct, omit_defaults=True):
    name: str = ""
    image: str = ""
    resources: Any = msgspec.UNSET


class _BriefSpec(msgspec.Struct, omit_defaults=True):
    schedulingGates: Any = msgspec.UNSET  # noqa: N815
    nodeName: str | msgspec.UnsetType = msgspec.UNSET  # noqa: N815
    resourceClaims: Any = msgspec.UNSET  # noqa: N815
    volumes: list[_Volume] | msgspec.UnsetType = msgspec.UNSET
    containers: list[_Container] | msgspec.UnsetType = msgspec.UNSET


class _Brief(msgspec.Struct, omit_defaults=True):
    """Of the specs of pods and ReplicaSets hardly anything is parsed."""

    metadata: _Metadata
    spec: _BriefSpec | msgspec.UnsetType = msgspec.UNSET
    status: Any = msgspec.UNSET


class _PageMetadata(msgspec.Struct):
    resourceVersion: str  # noqa: N815
    token: str = msgspec.field(name="continue", default="")


class _Page(msgspec.Struct, Generic[Item]):
    metadata: _PageMetadata
    items: list[Item] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Bookmark(msgspec.Struct):
    metadata: _PageMetadata


_BRIEF = frozenset({POD, REPLICA_SET})
_PAGE, _BRIEF_PAGE = msgspec.json.Decoder(_Page[_Item]), msgspec.json.Decoder(_Page[_Brief])
_ITEM, _BRIEF_ITEM, _EVENT = msgspec.json.Decoder(_Item), msgspec.json.Decoder(_Brief), msgspec.json.Decoder(_Event)


def read_page(kind: Kind, body: bytes) -> tuple[list[Object], int, str]:
    """A page of a list: its objects, trimmed, the resource version of the list, and the token of the next page or an
    empty text.

    Raises
    ------
    msgspec.DecodeError
        The body is no list.
    """
    page = (_BRIEF_PAGE if kind in _BRIEF else _PAGE).decode(body)
    items = [_object(kind, item) for item in page.items or ()]
    return items, int(page.metadata.resourceVersion or 0), page.metadata.token


def read_event(kind: Kind, line: bytes) -> tuple[str, Object]:
    """A line of a watch: its type and its object; trimmed, unless it is an ERROR's Status.

    Raises
    ------
    msgspec.DecodeError
        The line is no event.
    """
    event = _EVENT.decode(line)
    if event.type == "ERROR":
        return event.type, msgspec.json.decode(event.object)
    if event.type == "BOOKMARK":
        bookmark = msgspec.json.decode(event.object, type=_Bookmark)
        return event.type, {"metadata": {"resourceVersion": bookmark.metadata.resourceVersion}}
    item = (_BRIEF_ITEM if kind in _BRIEF else _ITEM).decode(event.object)
    return event.type, _object(kind, item)


def _object(kind: Kind, item: msgspec.Struct) -> Object:
    return trim(kind, made(kind, **msgspec.to_builtins(item)))
