"""The only worker goes before its successor comes: what is promised whatever the successor does, and who brings the old
one back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fleet import with_endpoint, worker_of  # type: ignore[import-not-found]
from hypothesis import given
from hypothesis import strategies as st

from offramp_core.control.objects import Service, ServiceStatus, UpdateStatus
from offramp_core.control.snapshot import Worker
from offramp_core.control.spec import UpdatePolicy, parse_spec
from offramp_core.control.workers.recreate import recreated, recreates
from offramp_core.control.workers.update import Update, UpdateView, brought_back, strategy_in_force
from offramp_core.errors import InvalidSpecError

NOW = 1_000_000.0
DEADLINE = 60.0
POLICY = UpdatePolicy("Recreate", recreate_deadline_seconds=DEADLINE)
SPEC: dict[str, Any] = {
    "model": {"uri": "oci://offramp/digits:1"},
    "objective": {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.01"}},
    "updatePolicy": {"type": "Recreate"},
}
OLD = worker_of("old", "old", ready=True, current=False, template="one")
GOING = with_endpoint(OLD, ready=False, ending=True)
NEW = worker_of("new", "new", ready=False, template="two")
SERVED = UpdateStatus(serving="one")
TRIED = UpdateStatus("Recreate", None, "one", "two", tried_at=NOW, silent_at=NOW)


def step(*workers: Worker, before: UpdateStatus = SERVED, asked: str = "two", now: float = NOW) -> Update:
    view = UpdateView(before, POLICY, workers, 1, 0.5, now, watched_since=NOW - 1000, asked=asked)
    assert recreates(view)
    found = recreated(view)
    assert recreated(replace(view, before=found.status)) == found, "deciding again changes nothing"
    return found


def test_nothing_is_said_while_the_only_worker_is_what_the_spec_asks_for() -> None:
    assert step(with_endpoint(NEW, ready=True), before=UpdateStatus()) == Update(UpdateStatus(serving="two"))


def test_a_worker_that_is_gone_for_a_while_is_no_update() -> None:
    assert step(before=SERVED, asked="one") == Update(SERVED)
    assert step(before=UpdateStatus()) == Update()


def test_while_the_old_one_goes_it_says_that_nobody_answers_and_since_when() -> None:
    begun = step(OLD)
    assert (begun.reason, begun.status.asked, begun.status.serving) == ("Recreating", "two", "one")
    assert "no request is answered" in begun.message
    silent = step(GOING, NEW, before=begun.status)
    assert silent.status.silent_at == NOW and "no request is answered since" in silent.message
    assert step(NEW, before=silent.status, now=NOW + 5).message == silent.message, "no write with every second"


def test_the_end_says_for_how_long_nobody_answered() -> None:
    done = step(with_endpoint(NEW, ready=True), before=TRIED, now=NOW + 42.4)
    assert done == Update(UpdateStatus(serving="two", silent_seconds=42.0))


@pytest.mark.parametrize(
    ("trouble", "after", "given_up"),
    [
        pytest.param(
            {"failure": "digest differs", "failure_reason": "InvalidBundle"}, 1, True, id="its bundle is at fault"
        ),
        pytest.param(
            {"failure": "it ends", "failure_reason": "CrashLoopBackOff", "restarts": 2}, 1, True, id="it crashes"
        ),
        pytest.param(
            {"failure": "it ended", "failure_reason": "CrashLoopBackOff", "restarts": 1}, 1, False, id="it crashed once"
        ),
        pytest.param(
            {"failure": "no answer", "failure_reason": "ImagePullBackOff"}, 1, False, id="the registry is down"
        ),
        pytest.param(
            {"failure": "no answer", "failure_reason": "ImagePullBackOff"}, DEADLINE, True, id="the registry stays down"
        ),
        pytest.param(
            {"failure": "no GPU", "failure_reason": "Unschedulable", "no_room": True},
            1,
            False,
            id="the old one has the GPU still",
        ),
        pytest.param({}, DEADLINE - 1, False, id="it starts"),
        pytest.param({}, DEADLINE, True, id="it never starts"),
    ],
)
def test_the_old_one_is_brought_back_where_waiting_is_of_no_use(
    trouble: dict[str, Any], after: float, given_up: bool
) -> None:
    found = step(with_endpoint(NEW, **trouble), before=TRIED, now=NOW + after)
    assert (found.status.strategy == "Return") is given_up
    assert found.reason == ("RecreateFailed" if given_up else "Recreating")
    assert found.held is given_up and trouble.get("failure", "") in found.message


class TestBroughtBack:
    FAILED = replace(TRIED, strategy="Return", tried_at=None, failure="new: digest differs")

    def test_it_stays_until_the_spec_asks_for_something_else(self) -> None:
        held = step(OLD, before=self.FAILED, now=NOW + 90)
        assert (held.status.silent_at, held.status.silent_seconds) == (None, 90.0)
        assert "digest differs" in held.message and "for about 90 s" in held.message
        again = step(OLD, before=held.status, asked="three", now=NOW + 500)
        assert (again.reason, again.status.asked, again.status.serving) == ("Recreating", "three", "one")
        assert again.status.silent_seconds == 0.0

    def test_asking_for_what_serves_ends_it_at_once(self) -> None:
        back = step(with_endpoint(OLD, current=True), before=self.FAILED, asked="one", now=NOW + 5)
        assert back == Update(UpdateStatus(serving="one", silent_seconds=5.0))

    def test_what_never_served_is_not_brought_back(self) -> None:
        broken = with_endpoint(NEW, failure="digest differs", failure_reason="InvalidBundle")
        first = replace(TRIED, serving="")
        assert step(broken, before=first, now=NOW + 2 * DEADLINE).status == first

    def test_two_workers_scaled_up_meanwhile_stay_brought_back(self) -> None:
        view = UpdateView(self.FAILED, POLICY, (OLD, with_endpoint(OLD, name="b")), 2, 0.5, NOW, NOW, asked="two")
        assert recreates(view) and recreated(view).reason == "RecreateFailed"

    def test_the_platform_brings_back_exactly_what_the_status_names(self) -> None:
        def service(status: UpdateStatus, **policy: Any) -> Service:
            spec = parse_spec({**SPEC, "updatePolicy": {"type": "Recreate", **policy}})
            return Service("default", "digits", "uid", 2, spec, ServiceStatus(update=status))

        assert brought_back(service(self.FAILED), "two") == "one"
        assert brought_back(service(self.FAILED), "three") == ""
        assert brought_back(service(TRIED), "two") == ""
        assert brought_back(service(self.FAILED, type="Auto"), "two") == "", "the user has said otherwise since"
        assert strategy_in_force(service(SERVED), 1) == strategy_in_force(service(SERVED), 3) == "Replace"


def test_two_workers_or_more_are_replaced_one_after_the_other_as_ever() -> None:
    view = UpdateView(UpdateStatus(), POLICY, (OLD, with_endpoint(OLD, name="b")), 2, 0.5, NOW, NOW, asked="two")
    assert not recreates(view)


def test_it_cannot_be_combined_with_a_trial_beside_the_other() -> None:
    with pytest.raises(InvalidSpecError, match="sideBySide"):
        parse_spec({**SPEC, "updatePolicy": {"type": "Recreate", "sideBySide": {}}})
    with pytest.raises(InvalidSpecError, match="recreateDeadline"):
        parse_spec({**SPEC, "updatePolicy": {"type": "Recreate", "recreateDeadline": "0s"}})


# --- whatever happens ------------------------------------------------------------------------------

FATES = ("good", "broken", "silent")


@given(
    edits=st.lists(st.tuples(st.integers(1, 90), st.sampled_from(FATES)), max_size=5),
    takeovers=st.sets(st.integers(0, 400), max_size=5),
)
def test_what_served_last_serves_again_or_what_is_asked_for_does(
    edits: list[tuple[int, str]], takeovers: set[int]
) -> None:
    """A machine with room for one, edits at any moment, operators that forget everything but the status."""
    fates, asked, running, since = {"0": "good"}, "0", "0", -100
    status, served, watched = UpdateStatus(), "", 0
    due = [sum(gap for gap, _ in edits[: i + 1]) for i in range(len(edits))]
    for second in range(600):
        if second in due:
            asked = str(due.index(second) + 1)
            fates[asked] = edits[due.index(second)][1]
        if second in takeovers:
            watched = second
        wanted = status.serving if status.strategy == "Return" and status.asked == asked else asked
        if running != wanted:
            running, since = wanted, second
        age, fate = second - since, fates[running]
        failure = {"failure": "x", "failure_reason": "InvalidBundle"} if fate == "broken" and age > 5 else {}
        ready = fate == "good" and age > 5
        worker = worker_of(running, f"{running}/{since}", ready, current=running == asked, template=running, **failure)
        served = running if ready else served
        view = UpdateView(status, POLICY, (worker,), 1, 0.5, NOW + second, watched_since=NOW + watched, asked=asked)
        status = recreated(view).status
    expected = asked if fates[asked] == "good" else served
    assert running == expected and fates[running] == "good"
