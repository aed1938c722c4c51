"""Which pods a service should have now: what its spec asks for, or those that stay until the service's turn comes."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from offramp_core.control.objects import ModelSource, Service
from offramp_core.control.snapshot import Turn
from offramp_core.control.workers.update import brought_back
from offramp_core.control.workers.versions import split_in_force
from offramp_core.errors import InvalidSpecError
from offramp_operator.kube import manifests, pods
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.kinds import CLASS_LABEL, DEPLOYMENT, SERVICE, TEMPLATE_ANNOTATION, Object
from offramp_operator.kube.platform.memory import Memory
from offramp_operator.kube.trim import content
from offramp_operator.kube.turns import TurnKeeper, administrators_image, member
from offramp_operator.shell.platform import ServiceKey


class Templates:
    """Digests of pods, by what the spec and the administrator ask for."""

    def __init__(self, cache: ObjectCache, workers: manifests.WorkerSettings, turns: TurnKeeper) -> None:
        self._cache = cache
        self._workers = workers
        self._turns = turns

    def wanted(self, service: Service, memory: Memory, *, trial: bool) -> str | None:
        """Digest of the pods that the main Deployment, or that of the trial, should have now: those it has, while the
        service's class cannot be used."""
        if memory.class_trouble is not None:
            return self._deployed(service, trial=trial)
        if not trial and memory.kept is not None:
            return memory.kept
        return self._with_image(memory.image, service, memory, trial=trial)

    def settings(self, memory: Memory) -> manifests.WorkerSettings:
        """What the administrator decided, with the image that the service's turn has come for."""
        return self._settings(memory, memory.image or self._asked(memory))

    def _settings(self, memory: Memory, image: str) -> manifests.WorkerSettings:
        account = memory.worker_class.service_account if memory.worker_class is not None else ""
        return replace(self._workers, image=image, service_account=account)

    def _asked(self, memory: Memory) -> str:
        """The image that the administrator asks for: that of the service's class, where it has one."""
        return (memory.worker_class.image if memory.worker_class is not None else "") or self._workers.image

    def turn(self, key: ServiceKey, service: Service, memory: Memory) -> Turn | None:
        """Why the workers stay as they are, where they are not what the administrator asks for. Decides what they are
        to be until then.

        What differs although the user's spec has been served before is the administrator's change. While a spec is
        still to be served, its pods are made with the image that the others have.
        """
        live, asked = self._cache.get(DEPLOYMENT, service.namespace, service.name), self._asked(memory)
        memory.image, memory.kept = asked, None
        if live is None or not pods.controls(service.uid, live) or memory.class_trouble is not None:
            return None
        deployed = msgspec.json.decode(content(live))
        mark = template_mark(deployed)
        image = administrators_image(service, deployed) if _class_of(deployed) == service.spec.class_name else None
        wanted = self._with_image(asked, service, memory, trial=False)
        served = service.status.settled_generation == service.generation
        given_up = bool(wanted and brought_back(service, wanted))
        waits = wanted is not None and mark != wanted and not given_up and (served or image not in (None, asked))
        self._turns.note(key, member(service, live, waits=waits, counts=served and (image == asked or given_up)))
        if not waits or self._turns.may_go(key, services=len(self._cache.names(SERVICE))):
            return None
        memory.image, memory.kept = image or asked, mark if served else None
        return self._turns.reason_to_wait()

    def _deployed(self, service: Service, *, trial: bool) -> str | None:
        name = manifests.trial_name(service.name) if trial else service.name
        live = self._cache.get(DEPLOYMENT, service.namespace, name)
        return None if live is None else template_mark(msgspec.json.decode(content(live)))

    def _with_image(self, image: str, service: Service, memory: Memory, *, trial: bool) -> str | None:
        if not trial:
            service = split_in_force(service, 0, scaled=False).main
        made_of = service.generation, ModelSource.of(service.spec), memory.class_mark
        known = memory.templates.get((trial, image))
        if known is None or known[0] != made_of:
            try:
                settings = self._settings(memory, image)
                known = made_of, manifests.template_digest(service, settings, trial=trial)
            except InvalidSpecError:
                known = made_of, None
            memory.templates[trial, image] = known
        return known[1]


def template_mark(spec: Object) -> str | None:
    """The digest that a spec's pods carry."""
    notes = ((spec.get("template") or {}).get("metadata") or {}).get("annotations") or {}
    return notes.get(TEMPLATE_ANNOTATION)


def _class_of(spec: Object) -> str:
    """The WorkerClass that a spec's pods were made of."""
    marks = ((spec.get("template") or {}).get("metadata") or {}).get("labels") or {}
    return str(marks.get(CLASS_LABEL, ""))
