"""Plans of a model that generates, signed as the operator signs them, on a worker that serves a real small model."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stories
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from generation import GenerationServer, with_settings
from processes import KEY, SERVICE_UID, document, eventually, sign

from offramp_core.control.rollouts.ledger import impossible
from offramp_core.errors import PlanRefusedError
from offramp_core.generation.losses import AnswerLosses, Output
from offramp_core.plan import Plan
from offramp_core.protocol import ArmCounts, WorkerState
from offramp_core.records import Records, records_from_arrays
from offramp_worker.settings import Settings

pytestmark = pytest.mark.slow

LOSSY = "int4"
PROMPTS = (
    "Once upon a time",
    "Tom had a big dog",
    "Lily went to the park",
    "The cat sat",
    "One day a boy",
    "Ben saw a bird",
)
MANY = [f"{prompt} {name}" for prompt in PROMPTS for name in ("and Tim", "and Sue", "with mom", "in the sun")]


class Service:
    """A worker with a control plane's key, and what the tests ask of it."""

    def __init__(self, server: GenerationServer) -> None:
        self.server = server

    @property
    def state(self) -> WorkerState:
        return self.server.worker.state()

    def plan(self, precision: str = "fp32", **thresholds: str) -> Plan:
        state = self.state
        return Plan.from_mapping(
            {
                "backboneDigest": state.backbone_digest,
                "rampSetDigest": state.ramp_set_digest,
                "ramps": [{"id": k, "threshold": v} for k, v in thresholds.items()],
                "precision": precision,
            }
        )

    def run(self, stable: Plan, **fields: Any) -> None:
        assert self.server.worker.plans is not None
        self.server.worker.renew_lease()
        fields = {"accuracy_budget": 0.99, "epoch": self.state.epoch + 1, **fields}
        self.server.worker.plans.deliver(sign(document(stable, **fields)))

    def ask(self, *prompts: str, **fields: Any) -> list[dict[str, Any]]:
        """Replies, one after the other; each is counted when this returns."""
        replies = []
        for prompt in prompts:
            reply = self.server.complete(prompt, max_tokens=20, **fields)
            assert reply.status_code == 200, reply.text
            replies.append(reply.json())
        self.server.until_idle()
        return replies

    def audited(self) -> None:
        assert self.server.worker.desk is not None
        desk = self.server.worker.desk
        eventually(lambda: desk.audits_owed == 0, what="all audits", deadline=60)

    def counts(self, arm: str) -> ArmCounts:
        told = self.server.worker.observations(after=0, now=0.0)
        epoch = self.state.epoch
        return next(c for c in (*told.counts, *told.held_back) if c.arm == arm and c.epoch == epoch)

    def records(self) -> Records:
        """All records as the control plane reads them."""
        block = self.server.worker.observations(after=0, now=0.0).records
        n, state = block.next - block.first, self.state

        def column(text: str, kind: str, *shape: int) -> Any:
            return np.frombuffer(base64.b64decode(text), kind).reshape(n, *shape)

        arrays = {
            "uncertainty": column(block.uncertainty, "<f4", len(state.ramps)),
            "loss": column(block.loss, "<f4", len(state.ramps)),
            "final_loss": column(block.final_loss, "<f4"),
            "draw": column(block.draw, "<f4"),
            "audit_rate": column(block.audit_rate, "<f4"),
            "ramp_id": np.array([c.id for c in state.ramps]),
            "ramp_precision": np.array([c.precision for c in state.ramps]),
        }
        return records_from_arrays(arrays | {name: np.asarray(a) for name, a in state.costs.items()})


def settings(tmp_path: Path) -> Settings:
    public = KEY.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    return Settings(
        bundle=Path(),
        host="127.0.0.1",
        port=0,
        uid="w",
        service_uid=SERVICE_UID,
        public_key=public,
        token_sha256="0" * 64,
        state_dir=tmp_path,
    )


def serving(tmp_path: Path, engine: stories.StoriesEngine | None = None, **fields: Any) -> GenerationServer:
    fields = {"output": Output.TOKEN_F1, "route": "fp32", **fields}  # no drafts, unless a test is about them
    engine = engine or stories.StoriesEngine()
    return GenerationServer(engine=engine, generation=with_settings(**fields), settings=settings(tmp_path))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with serving(tmp_path) as server:
        yield Service(server)


def answers(text: str, *, lossy: bool) -> str:
    return _answer(text, LOSSY if lossy else "fp32")


@lru_cache(maxsize=256)
def _answer(text: str, variant: str) -> str:
    return stories.greedy(text, n=20, variant=variant)[1]


def text_of(reply: dict[str, Any]) -> str:
    return str(reply["choices"][0]["text"])


def test_without_a_plan_every_answer_is_the_references_and_the_worker_says_what_it_could_do(service: Service) -> None:
    (reply,) = service.ask(PROMPTS[0])
    assert text_of(reply) == answers(PROMPTS[0], lossy=False)
    state = service.state
    assert [(c.id, c.precision, c.head) for c in state.ramps] == [
        (LOSSY, "", "model"),
        (f"{LOSSY}/final", LOSSY, "final"),
    ]
    assert (state.output, state.epoch, state.ready) == ("TokenF1", 0, True)


def test_records_say_what_each_variant_would_have_lost_whatever_was_served(service: Service) -> None:
    service.run(service.plan(), audit_rate=1.0)
    service.ask(*PROMPTS)
    service.run(service.plan(LOSSY), audit_rate=1.0)
    service.ask(*PROMPTS)
    service.audited()
    records = service.records()
    losses = [AnswerLosses()(answers(p, lossy=True), answers(p, lossy=False))[Output.TOKEN_F1] for p in PROMPTS]
    assert any(losses) and not all(losses), "prompts of both kinds are needed"
    of_lossy = records.at(LOSSY)
    assert of_lossy.final_loss is not None and records.loss is not None
    assert of_lossy.final_loss.tolist() == pytest.approx([*losses, *losses], abs=1e-6)
    assert records.loss[:, 0].tolist() == pytest.approx([*losses, *losses], abs=1e-6)
    assert (records.uncertainty > 0).all() and (records.uncertainty < 1).all()
    assert np.array_equal(records.uncertainty[: len(PROMPTS)], records.uncertainty[len(PROMPTS) :])


def test_a_precisions_plan_answers_everything_and_its_losses_are_counted_as_errors_of_the_same_mean(
    service: Service,
) -> None:
    service.run(service.plan(LOSSY), audit_rate=1.0)
    replies = service.ask(*MANY)
    assert [text_of(r) for r in replies] == [answers(p, lossy=True) for p in MANY]
    assert all(r["offramp"]["route"] == LOSSY and not r["offramp"]["lossless"] for r in replies)
    service.audited()
    counts = service.counts("stable")
    assert (counts.requests, counts.drawn, counts.audited) == (len(MANY), len(MANY), len(MANY))
    assert counts.exits == {"final": len(MANY)}
    mean = float(
        np.mean([AnswerLosses()(answers(p, lossy=True), answers(p, lossy=False))[Output.TOKEN_F1] for p in MANY])
    )
    # Of 24 draws with these probabilities: five standard deviations of the sum at most.
    assert abs(counts.disagreements - mean * len(MANY)) <= 5 * np.sqrt(len(MANY) / 4)
    assert counts.disagreements > 0


def test_of_those_who_go_away_no_more_are_drawn_than_have_asked(service: Service) -> None:
    """Their audits come all the same; a worker that draws more than it was asked is not believed."""
    service.run(service.plan(LOSSY), audit_rate=1.0)
    service.server.engine.step_seconds = 0.02
    stream = service.server.openai.completions.create(
        model="stories", prompt=MANY[0], max_tokens=300, temperature=0, stream=True
    )
    next(stream)
    stream.close()
    service.server.engine.step_seconds = 0.0
    service.server.until_idle()
    service.audited()
    assert service.server.metric("answers_total", route=LOSSY, outcome="cancelled") == 1
    counts = service.counts("stable")
    assert impossible([counts], newest_epoch=None, plans={}) == ""
    assert counts.requests == counts.drawn == 1


def test_escalation_asks_the_reference_where_the_answer_is_unsure(service: Service) -> None:
    service.run(service.plan(), audit_rate=1.0)
    service.ask(*MANY)
    service.audited()
    unsure = service.records().uncertainty[:, 0]
    cut = f"{float(np.median(unsure)):.6f}"
    service.run(service.plan(**{LOSSY: cut}))
    replies = service.ask(*MANY)
    leaves = unsure < float(cut)
    assert leaves.any() and not leaves.all()
    assert [text_of(r) for r in replies] == [answers(p, lossy=bool(left)) for p, left in zip(MANY, leaves, strict=True)]
    assert [r["offramp"]["route"] for r in replies] == [LOSSY if left else "fp32" for left in leaves]
    counts = service.counts("stable")
    assert counts.exits == {LOSSY: int(leaves.sum()), "final": int((~leaves).sum())}
    assert sum(counts.first_token.values()) == len(MANY)
    assert sum(counts.per_token.values()) == (~leaves).sum(), "who was held back until it was sure came at once"


def test_a_stream_that_may_be_asked_again_shows_one_answer_alone(service: Service) -> None:
    service.run(service.plan(**{LOSSY: "0.000001"}))  # nobody is that sure
    stream = service.server.openai.completions.create(
        model="stories", prompt=PROMPTS[1], max_tokens=20, temperature=0, stream=True
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks) == answers(PROMPTS[1], lossy=False)
    assert sum(c.choices[0].finish_reason is not None for c in chunks) == 1


def test_a_canary_gets_its_share_and_is_counted_apart(service: Service) -> None:
    service.run(service.plan(), canary=service.plan(LOSSY), weight=50, audit_rate=1.0)
    replies = service.ask(*MANY)
    arms = [r["offramp"]["arm"] for r in replies]
    assert {"stable", "canary"} == set(arms)
    lossy = [arm == "canary" for arm in arms]
    assert [text_of(r) for r in replies] == [answers(p, lossy=canary) for p, canary in zip(MANY, lossy, strict=True)]
    service.audited()
    canary, stable = service.counts("canary"), service.counts("stable")
    assert (canary.requests, stable.requests) == (sum(lossy), len(MANY) - sum(lossy))
    assert stable.disagreements == 0 and canary.audited == canary.requests
    assert "canary: int4, whole answers" in service.state.message
    assert canary.busy_seconds > 0 and canary.batches == canary.requests and canary.execution_by_length


def test_a_canary_is_taken_back_between_two_requests(service: Service) -> None:
    service.run(service.plan(), canary=service.plan(LOSSY), weight=100)
    assert service.ask(PROMPTS[0])[0]["offramp"]["arm"] == "canary"
    service.run(service.plan())
    assert service.ask(PROMPTS[0])[0]["offramp"]["arm"] == "stable"


def test_the_workers_own_detector_switches_a_plan_off_that_loses_more_than_its_budget(service: Service) -> None:
    service.run(service.plan(LOSSY), audit_rate=1.0, accuracy_budget=0.001, breaker_run_length=50.0)
    worst = sorted(
        MANY, key=lambda p: -AnswerLosses()(answers(p, lossy=True), answers(p, lossy=False))[Output.TOKEN_F1]
    )
    service.ask(*worst)
    service.audited()
    assert service.state.breaker_open and service.server.metric("breaker_open") == 1
    assert service.ask(PROMPTS[0])[0]["offramp"]["route"] == "fp32"


def test_requests_that_sample_get_no_lossy_answer_and_are_told_so(service: Service) -> None:
    service.run(service.plan(LOSSY), audit_rate=1.0)
    (sampled,) = service.ask(PROMPTS[0], temperature=0.8, seed=7)
    assert sampled["offramp"]["route"] == "fp32" and sampled["offramp"]["lossy_off_for_sampling"]
    (greedy,) = service.ask(PROMPTS[0])
    assert greedy["offramp"]["route"] == LOSSY and not greedy["offramp"]["lossy_off_for_sampling"]
    eventually(lambda: service.counts("stable").audited > 0, what="an audit of the greedy one", deadline=60)
    service.audited()
    assert service.counts("stable").audited == 1


def test_a_share_is_held_back_to_be_compared_with(service: Service) -> None:
    service.run(service.plan(LOSSY), holdback_share=0.5, audit_rate=1.0)
    replies = service.ask(*MANY, *MANY)
    service.audited()
    held = service.counts("holdback")
    assert 0 < held.requests < 2 * len(MANY)
    assert held.requests == sum(r["offramp"]["route"] == "fp32" for r in replies)
    (measured,) = service.server.worker.observations(after=0, now=0.0).plans
    assert measured.held_back > 0 and measured.audit_seconds > 0


def test_an_audit_that_fails_counts_against_the_plan_and_leaves_a_record(tmp_path: Path) -> None:
    engine = stories.StoriesEngine()
    with serving(tmp_path, engine) as server:
        service = Service(server)
        service.run(service.plan(LOSSY), audit_rate=1.0, accuracy_budget=0.99)
        starts = engine.start

        def start(prompt: Any, *, max_tokens: int, sampling: Any, route: Any) -> int:
            if route.variant == "fp32":
                raise RuntimeError("the executor is gone")
            return starts(prompt, max_tokens=max_tokens, sampling=sampling, route=route)

        engine.start = start  # type: ignore[method-assign]
        service.ask(PROMPTS[0])
        service.audited()
        counts = service.counts("stable")
        assert (counts.audited, counts.disagreements) == (1, 1)
        records = service.records()
        assert records.loss is not None and records.loss.tolist() == [[1.0]]


def test_documents_that_do_not_fit_are_refused_and_the_worker_serves_on(service: Service) -> None:
    service.run(service.plan(LOSSY))
    other = Plan.from_mapping(service.plan().to_mapping() | {"rampSetDigest": "sha256:" + "0" * 64})
    for wrong, reason in ((other, "DigestMismatch"), (service.plan(nobody="0.5"), "UnknownRamp")):
        with pytest.raises(PlanRefusedError) as error:
            service.run(wrong)
        assert error.value.reason == reason
    with pytest.raises(PlanRefusedError, match="class/3"):
        service.run(service.plan(LOSSY), slices=("class/3",))
    assert service.ask(PROMPTS[0])[0]["offramp"]["route"] == LOSSY


def test_what_an_answer_is_judged_by_names_the_records_so_that_no_certificate_stands_for_another(
    tmp_path: Path,
) -> None:
    digests = []
    for output in (Output.TOKEN_F1, Output.EXACT_ANSWER):
        with serving(tmp_path / output, output=output) as server:
            digests.append(server.worker.state().ramp_set_digest)
    assert digests[0] != digests[1]


def test_a_worker_that_died_in_a_canary_says_so_when_it_comes_back(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        service = Service(server)
        service.run(service.plan(), canary=service.plan(LOSSY), weight=100)
        server.worker.marker.enter(1)  # as a process leaves it that is killed in a step
    with serving(tmp_path) as server:
        assert server.worker.state().crashed_epoch == 1


def test_classes_whose_slice_is_stopped_get_the_reference(service: Service) -> None:
    service.run(service.plan(LOSSY), slices=("code", "chat"), stopped_slices=("code",))
    routes = [service.ask(PROMPTS[0], parameters={"class": name})[0]["offramp"]["route"] for name in ("code", "chat")]
    assert routes == ["fp32", LOSSY]


def test_a_draft_that_pays_comes_to_serve_by_itself_and_one_that_changes_an_answer_is_dropped(tmp_path: Path) -> None:
    engine = stories.StoriesEngine()
    step = engine.step

    def timed(sequences: Any, *, prompt_tokens: int) -> Any:
        """What a step takes is said and not measured: as long as one token takes, however many come of it."""
        return [replace(p, seconds=0.01) for p in step(sequences, prompt_tokens=prompt_tokens)]

    def foresees(s: stories.Growing) -> list[int]:
        """A draft that knows what the model will say."""
        room = min(s.route.draft_tokens, s.most - len(s.answer) - 1) if s.route.draft else 0
        return told[len(s.answer) : len(s.answer) + max(0, room)]

    told = stories.greedy(PROMPTS[0], n=20)[0]
    engine._proposed = foresees  # type: ignore[method-assign]
    engine.step = timed  # type: ignore[method-assign]
    with serving(tmp_path, engine, route="") as server:
        service = Service(server)
        service.run(service.plan(), audit_rate=1.0)
        again = PROMPTS[0]
        for _ in range(80):  # each setting is tried four times on half of them, first
            service.ask(again, parameters={"class": "chat"})
        replies = service.ask(*[again] * 8, parameters={"class": "chat"})
        assert sum(r["offramp"]["route"].startswith("fp32+ngram") for r in replies) >= 6
        assert all(r["offramp"]["lossless"] for r in replies)
        assert "drafts: chat at 1 ngram" in service.state.message
        service.audited()
        assert service.counts("stable").disagreements == 0
        server.worker.accounts.distrust("ngram")
        assert {r["offramp"]["route"] for r in service.ask(*[again] * 4)} == {"fp32"}


def test_a_bundle_of_the_reference_alone_is_audited_for_equality_and_has_nothing_to_record(tmp_path: Path) -> None:
    engine = stories.StoriesEngine()
    engine.bundle = replace(engine.bundle, variants=engine.bundle.variants[:1])
    with serving(tmp_path, engine, route="fp32+ngram:3") as server:
        service = Service(server)
        service.run(service.plan(), audit_rate=1.0)
        service.ask(*PROMPTS[:2])
        service.audited()
        counts = service.counts("stable")
        assert (counts.audited, counts.disagreements) == (2, 0)
        assert service.state.ramps == () and server.worker.observations(after=0, now=0.0).records.next == 0
