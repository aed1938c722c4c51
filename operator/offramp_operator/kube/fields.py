"""Who owns which field of an object: ``managedFields`` of server-side apply. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from offramp_operator.kube.kinds import FIELD_MANAGER, Object


def adopted(entries: Sequence[Object]) -> list[Object] | None:
    """``managedFields`` in which the operator owns by apply what it owns by create; None where nothing has to
    change."""
    own = [e for e in entries if e.get("manager") == FIELD_MANAGER and not e.get("subresource")]
    if not any(entry.get("operation") == "Update" for entry in own):
        return None
    fields: Object = {}
    for entry in own:
        fields = _joined(fields, entry.get("fieldsV1") or {})
    return [*(entry for entry in entries if entry not in own), own[0] | {"operation": "Apply", "fieldsV1": fields}]


def _joined(one: Object, other: Object) -> Object:
    return one | {name: _joined(one.get(name) or {}, below) for name, below in other.items()}
