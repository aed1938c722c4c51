"""A worker holds two ramp sets of one model: the bundle's own and one from the store, each with records of its own."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bundles
import msgspec
import numpy as np
import pytest
import safetensors.numpy
from desks import Service
from processes import WorkerProcess, document, eventually, plan_for, sign

from offramp_core.errors import InvalidBundleError, PlanRefusedError
from offramp_core.plan import Plan
from offramp_core.protocol import Refusal, SignedDocument
from offramp_worker.bundle.load import Bundle
from offramp_worker.bundle.ramp_sets import input_digest, load_ramp_set, set_folder, write_ramp_set
from offramp_worker.engine.execution.ramp_sets import PlanPostponedError
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.plans.apply import PATIENCE_SECONDS
from offramp_worker.plans.poll import PlanFile

FORGED = "sha256:" + "0" * 64


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "ramp-sets"


def other_heads(bundle: Bundle, *, seed: int = 5) -> bytes:
    """The bundle's ramps with other weights."""
    rng = np.random.default_rng(seed)
    tensors = dict(safetensors.numpy.load((bundle.path / "ramps.safetensors").read_bytes()))
    for name, value in tensors.items():
        if not name.endswith("/quantiles"):
            tensors[name] = rng.normal(0.0, 0.5, size=value.shape).astype(np.float32)
    return safetensors.numpy.save(tensors)


def new_set(store: Path, bundle: Bundle, *, seed: int = 5, trained_on: Any = ()) -> str:
    return write_ramp_set(
        store, other_heads(bundle, seed=seed), np.array(trained_on, dtype=np.uint64), bundle=bundle
    ).digest


@pytest.fixture
def service(bundle_dir: Path, bundle: Bundle, sessions: Sessions, store: Path) -> Service:
    return Service(bundle_dir, bundle, sessions, ramp_set_store=store)


def of_set(plan: Plan, digest: str) -> Plan:
    return Plan(plan.backbone_digest, digest, plan.ramps, plan.precision, plan.execution)


def own(service: Service) -> str:
    return service.engine.sets.own_digest


def uncertainty(service: Service, digest: str) -> Any:
    held = next(held for held in service.engine.sets.held if held.digest == digest)
    return np.frombuffer(base64.b64decode(held.ring.read(0).uncertainty), "<f4").reshape(-1, len(held.bundle.columns))


def test_a_set_from_the_store_is_the_bundle_with_other_heads(bundle: Bundle, store: Path) -> None:
    digest = new_set(store, bundle, trained_on=[7, 3, 7])
    loaded = load_ramp_set(store, digest, bundle)
    assert loaded.digest == digest != bundle.manifest.ramp_set_digest
    assert loaded.bundle.columns == bundle.columns
    assert loaded.bundle.profile == bundle.profile
    assert loaded.has_seen(np.array([3, 4, 7], dtype=np.uint64)).tolist() == [True, False, True]
    assert [path.name for path in store.iterdir()] == [digest.removeprefix("sha256:")], "nothing half written is left"


def _cut(folder: Path) -> None:
    file = folder / "ramps.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def _other_weights(folder: Path) -> None:
    file = folder / "ramps.safetensors"
    tensors = dict(safetensors.numpy.load(file.read_bytes()))
    tensors = {name: value if name.endswith("quantiles") else value + 1 for name, value in tensors.items()}
    file.write_bytes(safetensors.numpy.save(tensors))


def _fewer_inputs(folder: Path) -> None:
    np.save(folder / "trained-on.npy", np.array([1], dtype=np.uint64))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_cut, "ramps.safetensors"),
        (_other_weights, "damaged, or made for another bundle"),
        (_fewer_inputs, "trained-on.npy"),
        (lambda folder: (folder / "set.json").unlink(), "set.json"),
    ],
)
def test_a_damaged_set_is_refused_with_the_file_s_name(
    bundle: Bundle, store: Path, harm: Callable[[Path], None], said: str
) -> None:
    digest = new_set(store, bundle, trained_on=[1, 2])
    harm(set_folder(store, digest))
    with pytest.raises(InvalidBundleError, match=said):
        load_ramp_set(store, digest, bundle)


def test_a_digest_that_is_none_never_becomes_a_path(bundle: Bundle, store: Path) -> None:
    with pytest.raises(InvalidBundleError, match="64 hex digits"):
        load_ramp_set(store, "sha256:../../etc", bundle)


def test_stable_and_canary_run_on_two_sets_and_audits_make_records_for_both(
    service: Service, bundle: Bundle, store: Path
) -> None:
    digest = new_set(store, bundle)
    plan = service.plan()
    service.run(plan, canary=of_set(plan, digest), weight=50, audit_rate=1.0, holdback_share=0.0)
    assert service.engine.sets.digests == (own(service), digest)
    tickets = service.serve(40)
    x = bundles.inputs(40, seed=1)
    heads = {
        "stable": Sessions(bundle, threads=1),
        "canary": Sessions(load_ramp_set(store, digest, bundle).bundle, threads=1),
    }
    column = [c.id for c in bundle.columns].index("r00-grid")
    for i, ticket in enumerate(tickets):
        said = heads[ticket.arms[0]].tapped(x[i : i + 1])
        wanted = said.prediction[0, column] if ticket.exits[0] == "r00-grid" else said.logits[0].argmax()
        assert ticket.labels[0] == wanted
    assert {ticket.arms[0] for ticket in tickets} == {"stable", "canary"}
    eventually(lambda: len(uncertainty(service, digest)) == 40, what="records of both sets")
    for arm, name in (("stable", own(service)), ("canary", digest)):
        np.testing.assert_allclose(uncertainty(service, name), heads[arm].tapped(x).uncertainty, atol=2e-6)


def test_while_a_set_is_not_there_what_serves_goes_on(service: Service, bundle: Bundle) -> None:
    plan = service.plan()
    service.run(plan, holdback_share=0.0)
    with pytest.raises(PlanPostponedError, match="store has no such set") as refused:
        service.run(plan, canary=of_set(plan, FORGED), weight=50, audit_rate=1.0)
    assert refused.value.reason == "RampSetNotHeld"
    assert service.engine.sets.digests == (own(service),)
    assert service.serve(3)[-1].exits == ["r00-grid"]


def test_without_a_store_a_foreign_set_is_a_digest_mismatch(
    bundle_dir: Path, bundle: Bundle, sessions: Sessions
) -> None:
    bare = Service(bundle_dir, bundle, sessions)
    with pytest.raises(PlanRefusedError, match="no ramp-set store") as refused:
        bare.run(of_set(bare.plan(), FORGED))
    assert refused.value.reason == "DigestMismatch"


def test_a_third_set_is_refused(service: Service, bundle: Bundle, store: Path) -> None:
    sets = tuple(new_set(store, bundle, seed=seed) for seed in (5, 6))
    with pytest.raises(PlanRefusedError) as refused:
        service.run(service.plan(), ramp_sets=sets)
    assert refused.value.reason == "TooManyRampSets"


def test_a_set_is_dropped_when_nothing_names_it_and_its_records_never_repeat_a_number(
    service: Service, bundle: Bundle, store: Path
) -> None:
    digest = new_set(store, bundle)
    off = service.plan({})
    service.run(off, ramp_sets=(digest,), audit_rate=1.0)
    assert service.engine.sets.digests == (digest,), "the bundle's own is let go as well"
    service.serve(5)
    last = service.engine.ring.next
    assert last == 5
    service.run(off, audit_rate=1.0)
    assert service.engine.sets.digests == (own(service),)
    service.run(off, ramp_sets=(own(service), digest), audit_rate=1.0)
    service.serve(2, seed=2)
    again = next(held for held in service.engine.sets.held if held.digest == digest).ring.read(0)
    assert (again.first, again.next) == (last, last + 2)


def test_an_input_that_trained_a_set_makes_no_record_for_it(service: Service, bundle: Bundle, store: Path) -> None:
    x, spec = bundles.inputs(8, seed=3), bundle.manifest.inputs[0]
    digest = new_set(store, bundle, trained_on=[input_digest(row, spec) for row in x[:5]])
    service.run(service.plan({}), ramp_sets=(own(service), digest), audit_rate=1.0)
    service.serve(8, seed=3)
    assert len(uncertainty(service, own(service))) == 8
    assert len(uncertainty(service, digest)) == 3


# --- a store that shows a set late -------------------------------------------------------------------


class Late:
    """A service whose store shows a set only once :meth:`show` is called, with its plan file and a clock that a test
    moves."""

    def __init__(self, service: Service, store: Path, folder: Path) -> None:
        self.service, self.now, self._store, self._elsewhere = service, 0.0, store, folder / "elsewhere"
        self.digest = new_set(self._elsewhere, service.engine.bundle)
        service.desk.clock = lambda: self.now
        self.file = folder / "plan.json"
        self._poll = PlanFile(self.file, service.desk, poll_seconds=1.0)

    def show(self) -> None:
        self._store.mkdir(exist_ok=True)
        set_folder(self._elsewhere, self.digest).rename(set_folder(self._store, self.digest))

    def plan(self) -> Plan:
        return of_set(self.service.plan(), self.digest)

    def signed(self, epoch: int, plan: Plan) -> SignedDocument:
        return sign(document(plan, epoch=epoch))

    def publish(self, epoch: int, plan: Plan) -> None:
        self.file.write_bytes(msgspec.json.encode(self.signed(epoch, plan)))

    def look(self, *, seconds_later: float = 0.0) -> int:
        """One look at the file; the epoch in force after it."""
        self.now += seconds_later
        self._poll.poll()
        return self.service.engine.active.epoch

    @property
    def refused(self) -> Refusal | None:
        return self.service.desk.refused


@pytest.fixture
def late(service: Service, store: Path, tmp_path: Path) -> Late:
    return Late(service, store, tmp_path)


def test_a_set_that_the_store_shows_late_is_taken_without_anybody_asking_again(late: Late) -> None:
    late.publish(1, late.plan())
    assert (late.look(), late.look(seconds_later=30), late.refused) == (0, 0, None), "it may still come"
    late.show()
    assert late.look(seconds_later=2) == 1
    assert late.service.serve(3)[-1].exits == ["r00-grid"]


def test_so_is_one_of_a_plan_that_was_poked_and_is_in_no_file_yet(late: Late) -> None:
    with pytest.raises(PlanPostponedError, match="store has no such set"):
        late.service.desk.deliver(late.signed(1, late.plan()))
    late.show()
    assert late.look(seconds_later=2) == 1


def test_a_set_that_does_not_come_is_refused_after_a_minute_and_taken_when_asked_again(late: Late) -> None:
    late.publish(1, late.plan())
    late.look()
    assert late.look(seconds_later=PATIENCE_SECONDS + 1) == 0
    assert late.refused is not None and (late.refused.epoch, late.refused.reason) == (1, "RampSetNotHeld")
    with pytest.raises(PlanRefusedError) as again:
        late.service.desk.deliver(late.signed(1, late.plan()))
    assert not isinstance(again.value, PlanPostponedError), "there is no second minute"
    late.show()
    assert late.look() == 0, "nor does the worker go on by itself"
    late.service.desk.deliver(late.signed(1, late.plan()))
    assert (late.look(), late.refused) == (1, None)


def test_a_damaged_set_is_refused_at_once(late: Late, store: Path) -> None:
    late.show()
    _cut(set_folder(store, late.digest))
    late.publish(1, late.plan())
    late.look()
    assert late.refused is not None and late.refused.reason == "RampSetNotHeld"


def test_a_newer_plan_ends_the_wait_for_the_set_of_an_older_one(late: Late) -> None:
    late.publish(1, late.plan())
    late.look()
    late.service.desk.deliver(late.signed(2, late.service.plan()))
    late.show()
    assert (late.look(seconds_later=2), late.refused) == (2, None)
    assert late.service.engine.sets.digests == (own(late.service),)


def test_an_older_plan_that_the_file_shows_late_does_not(late: Late) -> None:
    with pytest.raises(PlanPostponedError):
        late.service.desk.deliver(late.signed(2, late.plan()))
    late.publish(1, late.service.plan())
    assert late.look() == 1
    late.show()
    assert late.look(seconds_later=2) == 2


@pytest.mark.slow
def test_a_poke_for_a_set_that_is_not_there_yet_is_accepted_and_not_refused(bundle_dir: Path, store: Path) -> None:
    with WorkerProcess(bundle_dir, env={"OFFRAMP_RAMP_SETS": str(store)}) as worker:
        reply = worker.deliver(document(of_set(plan_for(bundle_dir, {"r00-grid": "1"}), FORGED)))
        assert (reply.status_code, reply.json()["reason"]) == (202, "RampSetNotHeld")
        assert worker.state().refused is None
        eventually(lambda: [e["epoch"] for e in worker.events("plan-postponed")] == [1], what="the line in the log")
