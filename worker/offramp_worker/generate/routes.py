"""By which route a request is computed: the plan of its arm says which variants are asked, the worker which draft helps
the reference.

A draft is verified by the model, so it loses nothing and needs no proof; it is no part of a plan.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from offramp_core.errors import InvalidArgumentError
from offramp_core.generation.columns import VariantStep, steps_of
from offramp_core.generation.drafts import Context, Drafts, load_class
from offramp_core.generation.levels import Setting
from offramp_core.precision import EXACT
from offramp_core.protocol import Arm, RampInfo
from offramp_worker.engine.arms.arms import Active, Runtime
from offramp_worker.engine.arms.leases import Arms
from offramp_worker.generate.seam import REFERENCE, DecodingRoute, GenerationBundle
from offramp_worker.logs import log_event

_ROUTE = re.compile(r"(?P<variant>[a-z0-9.-]+)(\+(?P<draft>[a-z0-9./-]+):(?P<tokens>[0-9]{1,2}))?")

DRAFT_TOKENS = (3, 6)  # where the bundle does not say what is worth a trial


@dataclass(frozen=True, slots=True)
class Assigned:
    """How one request is computed, and for which arm it counts."""

    #: The variants that are asked in turn.
    steps: tuple[VariantStep, ...]
    #: How the reference is computed: with which draft.
    reference: DecodingRoute
    active: Active
    runtime: Runtime
    #: Whether it is one of the arm's requests; one that asked for the reference is not.
    counted: bool = True
    #: Whether it could have been held back from the stable plan.
    compared: bool = False
    #: The plan's lossy parts are not used because the request samples.
    lossy_off: bool = False
    #: The reference answers because a variant of the plan is away: a failure of the arm, and no evidence for it.
    away: bool = False
    #: What the draft was chosen for; None where nobody chose.
    context: Context | None = None

    def route(self, step: int) -> DecodingRoute:
        """How a step is computed."""
        variant = self.steps[step].variant
        return self.reference if variant == REFERENCE else DecodingRoute(variant)

    @property
    def held_back(self) -> bool:
        return self.runtime is self.active.holdback

    @property
    def lossless(self) -> bool:
        """Whether the reply is the reference's answer, ties apart."""
        return all(step.variant == REFERENCE for step in self.steps)

    @property
    def is_reference(self) -> bool:
        """Whether the reply *is* the reference's answer: there is nothing to compare."""
        return self.lossless and self.reference.is_reference

    @property
    def config(self) -> str:
        return self.runtime.config

    @property
    def arm(self) -> Arm:
        return self.runtime.counter.arm

    @property
    def epoch(self) -> int:
        return self.runtime.counter.epoch


class Dispatch:
    """Assigns requests. Used by the thread that admits them."""

    def __init__(
        self,
        arms: Arms,
        columns: Sequence[RampInfo],
        *,
        reference: DecodingRoute | None = None,
        drafts: Drafts | None = None,
        lossy_sampling: bool = False,
        available: Callable[[str], bool] = lambda _: True,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """``reference`` is how the reference is computed; None leaves its draft to ``drafts``. ``lossy_sampling`` lets
        lossy parts serve requests with a temperature. While a variant is not ``available`` the reference answers in its
        place."""
        self.arms, self._columns = arms, tuple(columns)
        self._reference, self._drafts = reference, drafts or Drafts(())
        self._lossy_sampling, self._available, self._draw = lossy_sampling, available, draw
        self._number = 0
        self._distrusted: deque[str] = deque()

    def assign(
        self, *, request_class: str, greedy: bool, never_exit: bool, running: int = 0, ahead: int = 0
    ) -> Assigned:
        """How the next request is computed, beside ``running`` others; ``ahead`` of it are computed or wait.

        Lossless parts keep the distribution of samples; lossy ones do not, and are off for them unless the worker was
        told otherwise. Such a request still counts for the arm that was drawn; where a variant is away, as its
        failure.
        """
        while self._distrusted:
            self._drop(self._distrusted.popleft())
        active, number = self.arms.active, self._number
        if never_exit:
            return Assigned((VariantStep(REFERENCE),), DecodingRoute(), active, active.off, counted=False)
        self._number += 1
        runtime, compared = self.arms.drawn(active, number), False
        if active.holdback is not None and runtime is not active.off:
            runtime, compared = self.arms.held_back(active, runtime, number)
        steps = steps_of(runtime.plan, self._columns)
        lossy = any(step.variant != REFERENCE for step in steps)
        lossy_off = lossy and not greedy and not self._lossy_sampling
        off = lossy_off or (lossy and request_class in runtime.stopped)
        away = lossy and not off and bool(self._away(steps))
        if off or away:
            steps = (VariantStep(REFERENCE),)
        reference, context = self._reference or DecodingRoute(), None
        if self._reference is None and steps[-1].variant == REFERENCE:
            context = Context(request_class, load_class(running + 1), not greedy)
            if len(steps) == 1:
                setting = self._drafts.choose(context, draw=self._draw(), ahead=ahead)
            else:  # what it takes is not learned, so it is no trial
                setting = self._drafts.serves(context)
            reference = DecodingRoute(REFERENCE, setting.draft, setting.tokens)
        return Assigned(
            steps, reference, active, runtime, compared=compared, lossy_off=lossy_off, away=away, context=context
        )

    def _away(self, steps: Sequence[VariantStep]) -> list[str]:
        return [step.variant for step in steps if step.variant != REFERENCE and not self._available(step.variant)]

    def learn(self, assigned: Assigned, *, seconds: float, tokens: int, beside: int) -> None:
        """The engine was busy so many seconds to write an answer of so many tokens, as one of ``beside`` side by
        side."""
        if assigned.context is not None and len(assigned.steps) == 1:
            setting = Setting(assigned.reference.draft, assigned.reference.draft_tokens)
            self._drafts.observe(assigned.context, setting, seconds=seconds, tokens=tokens, beside=beside)

    def failed(self, answers: Sequence[Assigned]) -> None:
        """Computing these failed in one turn: once for each draft, for one fault of the runtime hits all of them."""
        learned = [a for a in answers if a.context is not None and len(a.steps) == 1]
        for draft, assigned in {a.reference.draft: a for a in learned}.items():
            setting = Setting(draft, assigned.reference.draft_tokens)
            if assigned.context is not None and self._drafts.fail(assigned.context, setting):
                log_event("draft-off", level="error", draft=draft, reason="answers with it failed, one after another")

    def distrust(self, draft: str) -> None:
        """This draft has changed an answer; from the next request on it proposes nothing. From any thread."""
        self._distrusted.append(draft)

    def _drop(self, draft: str) -> None:
        self._drafts.drop(draft)
        if self._reference is not None and self._reference.draft == draft:
            self._reference = DecodingRoute()

    def describe(self) -> str:
        """Which drafts serve now, and which variants of plans are away, for people."""
        active = self.arms.active
        plans = [runtime.plan for runtime in (active.stable, active.canary) if runtime is not None]
        gone = dict.fromkeys(name for plan in plans for name in self._away(steps_of(plan, self._columns)))
        notes = [f"{name} is away: the reference answers in its place" for name in gone]
        serving = [f"{context} {setting}" for context, setting in self._drafts.serving().items() if setting.draft]
        return "; ".join([*notes, f"drafts: {', '.join(serving[-5:])}"] if serving else notes)


def parse_route(text: str, bundle: GenerationBundle) -> DecodingRoute:
    """``fp32``, ``int4``, ``fp32+ngram:4`` (variant, draft, draft tokens).

    Raises
    ------
    InvalidArgumentError
        It is written in another way, or names what the bundle does not have.
    """
    match = _ROUTE.fullmatch(text)
    if match is None:
        raise InvalidArgumentError(
            f"the route is {text!r}; write VARIANT or VARIANT+DRAFT:TOKENS, such as fp32+ngram:4"
        )
    route = DecodingRoute(match["variant"], match["draft"] or "", int(match["tokens"] or 0))
    check_route(route, bundle)
    return route


def check_route(route: DecodingRoute, bundle: GenerationBundle) -> None:
    """Raises :class:`InvalidArgumentError` where the bundle does not have what the route names."""
    if bundle.variant(route.variant) is None:
        raise InvalidArgumentError(f"the route names variant {route.variant!r}; there are {_names(bundle.variants)}")
    if not route.draft:
        return
    draft = bundle.draft(route.draft)
    if draft is None:
        raise InvalidArgumentError(
            f"the route names draft {route.draft!r}; there are {_names(bundle.drafts) or 'none'}"
        )
    if draft.variants and route.variant not in draft.variants:
        raise InvalidArgumentError(
            f"draft {draft.id!r} is verified by {', '.join(draft.variants)}, not by {route.variant!r}"
        )
    if not route.draft_tokens:
        raise InvalidArgumentError(f"the route proposes 0 tokens of draft {draft.id!r}; it must be at least 1")


def draft_settings(bundle: GenerationBundle) -> tuple[Setting, ...]:
    """What may be tried for the reference."""
    usable = [draft for draft in bundle.drafts if not draft.variants or REFERENCE in draft.variants]
    return tuple(Setting(d.id, n) for d in usable for n in d.draft_tokens or DRAFT_TOKENS)


def draft_ratios(bundle: GenerationBundle) -> dict[Setting, float]:
    """What the bundle's maker measured of them."""
    return {Setting(draft, tokens): ratio for (draft, tokens), ratio in bundle.draft_ratios.items()}


def text_of(route: DecodingRoute) -> str:
    """As :func:`parse_route` reads it."""
    return route.variant + (f"+{route.draft}:{route.draft_tokens}" if route.draft else "")


def routes_of(assigned: Assigned) -> str:
    """The routes of all steps, as replies and series name them: ``int4`` or ``int4>fp32+ngram:4``."""
    return ">".join(text_of(assigned.route(i)) for i in range(len(assigned.steps)))


def own_active(active: Active, route: DecodingRoute) -> Active:
    """What serves without a control plane: the variant of ``route`` in the place of the reference."""
    if route.variant == EXACT:
        return active
    plan = replace(active.off.plan, precision=route.variant)
    return replace(active, off=replace(active.off, plan=plan))


def _names(specs: object) -> str:
    return ", ".join(getattr(s, "name", None) or s.id for s in specs)  # type: ignore[attr-defined]
