"""The signed plan of a service, in a ConfigMap that its workers mount."""

from __future__ import annotations

import logging

import msgspec

from offramp_core.control.objects import Service
from offramp_core.protocol import PlanDocument, SignedDocument
from offramp_operator.kube import manifests, pods
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import KubeClient, Lane
from offramp_operator.kube.kinds import CONFIG_MAP, Object, name_of, namespace_of
from offramp_operator.kube.platform.children import Children, check_owner, on_version_of
from offramp_operator.shell.log import log_event
from offramp_operator.shell.platform import ConflictError


class PlanStore:
    """Reads and replaces plans, each on the epoch that was seen."""

    def __init__(self, client: KubeClient, cache: ObjectCache, children: Children) -> None:
        self._client = client
        self._cache = cache
        self._children = children

    def published(self, service: Service) -> PlanDocument | None:
        """The document in force."""
        return _document(self._stored(service))

    async def publish(
        self, service: Service, document: PlanDocument, signed: SignedDocument, *, previous_epoch: int
    ) -> None:
        """Store the document only on the ConfigMap that holds ``previous_epoch`` (0: none is stored).

        Raises
        ------
        NameTakenError
            The ConfigMap's name belongs to somebody else.
        """
        stored = self._stored(service)
        if stored is None:
            await self._find_hidden_plan(service)
        published = _document(stored)
        epoch = published.epoch if published is not None else 0
        if epoch != previous_epoch:
            raise ConflictError(f"epoch {epoch} is published, not {previous_epoch}")
        text = msgspec.json.encode(signed).decode()
        body = manifests.plan_config_map(service, document=text, epoch=document.epoch)
        if stored is None:
            self._cache.put(CONFIG_MAP, await self._client.create(CONFIG_MAP, body, lane=Lane.PLANS))
        else:
            await self._children.swap(CONFIG_MAP, on_version_of(stored, body), lane=Lane.PLANS)

    def _stored(self, service: Service) -> Object | None:
        obj = self._cache.get(CONFIG_MAP, service.namespace, manifests.plan_name(service.name))
        return obj if obj is not None and pods.controls(service.uid, obj) else None

    async def _find_hidden_plan(self, service: Service) -> None:
        """Watches see only what carries our label: before a plan is created, make sure that none hides from them."""
        name = manifests.plan_name(service.name)
        live = await self._client.get(CONFIG_MAP, service.namespace, name, lane=Lane.PLANS)
        if live is None:
            return
        check_owner(live, service.uid, CONFIG_MAP)
        body = manifests.plan_config_map(service, document="", epoch=0) | {"data": live.get("data") or {}}
        self._cache.put(CONFIG_MAP, await self._client.apply(CONFIG_MAP, on_version_of(live, body), lane=Lane.PLANS))
        raise ConflictError(f"ConfigMap {service.namespace}/{name_of(live)} had lost its labels")


def _document(config_map: Object | None) -> PlanDocument | None:
    """The document a ConfigMap carries; None where it carries none that can be read, so that it is published anew."""
    if config_map is None:
        return None
    text = (config_map.get("data") or {}).get(manifests.PLAN_KEY, "")
    try:
        signed = msgspec.json.decode(text, type=SignedDocument)
        return msgspec.json.decode(signed.payload, type=PlanDocument)
    except msgspec.MsgspecError as error:
        log_event(
            "plan-unreadable",
            f"ConfigMap {namespace_of(config_map)}/{name_of(config_map)}: {error}",
            level=logging.WARNING,
        )
        return None
