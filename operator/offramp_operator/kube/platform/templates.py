"""Which pods a service should have now: what its spec asks for, or those that stay until the service's turn comes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from offramp_core.control.objects import ModelSource, Service
from offramp_core.control.snapshot import Trouble
from offramp_core.control.workers.update import brought_back
from offramp_core.control.workers.versions import split_in_force
from offramp_core.errors import InvalidSpecError
from offramp_operator.kube import manifests, pods
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.kinds import CLASS_LABEL, DEPLOYMENT, SERVICE, TEMPLATE_ANNOTATION, Object
from offramp_operator.kube.platform.memory import Memory
from offramp_operator.kube.pools import in_pools
from offramp_operator.kube.shared.members import mark_of
from offramp_operator.kube.trim import content
from offramp_operator.kube.turns import TurnKeeper, administrators_image, member
from offramp_operator.kube.worker_class import settings_for
from offramp_operator.shell.platform import ServiceKey


@dataclass(frozen=True, slots=True)
class _Stand:
    """One Deployment: digest of its pods, the image in them that the administrator chose, and whether they are to
    become something else."""

    pool: str
    live: Object
    mark: str | None
    image: str | None
    waits: bool
    given_up: bool


class Templates:
    """Digests of pods, by what the spec and the administrator ask for."""

    def __init__(self, cache: ObjectCache, workers: manifests.WorkerSettings, turns: TurnKeeper) -> None:
        self._cache = cache
        self._workers = workers
        self._turns = turns

    def wanted(self, service: Service, memory: Memory, *, trial: bool) -> str | None:
        """Digest of the pods that the main Deployment, or that of the trial, should have now: those it has, while the
        service's class cannot be used."""
        if service.spec.shared_pool:
            return mark_of(service)
        if memory.class_trouble is not None:
            return self._deployed(service, trial=trial)
        kept = memory.kept.get(service.spec.in_pool)
        if not trial and kept is not None:
            return kept
        return self._with_image(memory.image, service, memory, trial=trial)

    def settings(self, memory: Memory) -> manifests.WorkerSettings:
        """What the administrator decided, with the image that the service's turn has come for."""
        return self._settings(memory, memory.image or self._asked(memory))

    def _settings(self, memory: Memory, image: str) -> manifests.WorkerSettings:
        return replace(settings_for(memory.worker_class, self._workers), image=image)

    def _asked(self, memory: Memory) -> str:
        """The image that the administrator asks for: that of the service's class, where it has one."""
        return settings_for(memory.worker_class, self._workers).image

    def turn(self, key: ServiceKey, service: Service, memory: Memory) -> Trouble | None:
        """Why the workers stay as they are, where they are not what the administrator asks for. Decides what they are
        to be until then.

        What differs although the user's spec has been served before is the administrator's change. While a spec is
        still to be served, its pods are made with the image that the others have.
        """
        asked = self._asked(memory)
        memory.image, memory.kept = asked, {}
        served = service.status.settled_generation == service.generation
        stands = [stand for made in in_pools(service) if (stand := self._stand(made, memory, served=served))]
        if not stands:
            return None
        theirs = [stand for stand in stands if stand.image is not None] or stands  # a pool may have the user's image
        waits = all(stand.waits for stand in theirs)  # once one pool has it, the others follow
        image = theirs[0].image
        counts = served and all(stand.image == asked or stand.given_up for stand in theirs)
        self._turns.note(key, member(service, [stand.live for stand in stands], waits=waits, counts=counts))
        if not waits or self._turns.may_go(key, services=len(self._cache.names(SERVICE))):
            return None
        memory.image = image or asked
        memory.kept = {stand.pool: stand.mark for stand in stands} if served else {}
        return self._turns.reason_to_wait()

    def _stand(self, made: Service, memory: Memory, *, served: bool) -> _Stand | None:
        """How a Deployment stands to what the administrator asks for; None where there is none to speak of."""
        live = self._cache.get(DEPLOYMENT, made.namespace, manifests.workers_name(made))
        if live is None or not pods.controls(made.uid, live) or memory.class_trouble is not None:
            return None
        asked, deployed = self._asked(memory), msgspec.json.decode(content(live))
        mark = template_mark(deployed)
        image = administrators_image(made, deployed) if _class_of(deployed) == made.spec.class_name else None
        wanted = self._with_image(asked, made, memory, trial=False)
        given_up = bool(wanted and brought_back(made, wanted))
        differs = wanted is not None and mark != wanted and not given_up
        waits = differs and (served or image not in (None, asked))
        return _Stand(made.spec.in_pool, live, mark, image, waits=waits, given_up=given_up)

    def _deployed(self, service: Service, *, trial: bool) -> str | None:
        name = manifests.workers_name(service, trial=trial)
        live = self._cache.get(DEPLOYMENT, service.namespace, name)
        return None if live is None else template_mark(msgspec.json.decode(content(live)))

    def _with_image(self, image: str, service: Service, memory: Memory, *, trial: bool) -> str | None:
        if not trial:
            service = split_in_force(service, 0, scaled=False).main
        made_of = service.generation, ModelSource.of(service.spec), memory.class_mark
        key = (trial, service.spec.in_pool, image)
        known = memory.templates.get(key)
        if known is None or known[0] != made_of:
            try:
                settings = self._settings(memory, image)
                known = made_of, manifests.template_digest(service, settings, trial=trial)
            except InvalidSpecError:
                known = made_of, None
            memory.templates[key] = known
        return known[1]


def template_mark(spec: Object) -> str | None:
    """The digest that a spec's pods carry."""
    notes = ((spec.get("template") or {}).get("metadata") or {}).get("annotations") or {}
    return notes.get(TEMPLATE_ANNOTATION)


def changes_pods(live: Object, body: Object) -> bool:
    """Whether applying ``body`` to a Deployment replaces its pods."""
    return template_mark(msgspec.json.decode(content(live))) != template_mark(body["spec"])


def _class_of(spec: Object) -> str:
    """The WorkerClass that a spec's pods were made of."""
    marks = ((spec.get("template") or {}).get("metadata") or {}).get("labels") or {}
    return str(marks.get(CLASS_LABEL, ""))
