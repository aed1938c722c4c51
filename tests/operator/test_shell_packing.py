"""What a canary over many workers writes: every count comes back, in a fraction of the bytes."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import replace
from typing import Any

import pytest
from bench.fleet.weight import managed, rollout_status, schema_of, service_status, size

from offramp_core.control.codec import to_json
from offramp_core.control.objects import ArmTally, BothArms, Ledger, Measured, RolloutStatus, ServiceStatus
from offramp_core.errors import InvalidArgumentError
from offramp_core.protocol import PlanCounts
from offramp_operator.shell.manifests import same_status, status_from_manifest, status_json
from offramp_operator.shell.packing import MOST_BYTES, PACKED_FROM, packed, unpacked


def status(workers: int) -> RolloutStatus:
    tally = ArmTally(900, 90, 80, 3, 100, 95, 7, 1)
    boots = [f"boot-{i:04d}" for i in range(workers)]
    live = {boot: BothArms(replace(tally, requests=900 + i), tally) for i, boot in enumerate(boots)}
    ledger = Ledger(3, live, BothArms(tally, ArmTally()), ("bad",), due={boots[0]: 4}, due_since_at=5.0, overdue=2)
    return RolloutStatus("Progressing", step=1, weight=25, ledger=ledger, restarts=dict.fromkeys(boots, 2))


@pytest.mark.parametrize("workers", [1, PACKED_FROM - 1, PACKED_FROM, 2000])
def test_every_count_comes_back(workers: int) -> None:
    told = status(workers)
    manifest = {"status": json.loads(json.dumps(status_json(told)))}
    assert status_from_manifest(RolloutStatus, manifest) == told
    assert same_status(manifest, told)
    assert not same_status(manifest, replace(told, restarts={**told.restarts, "boot-0000": 3}))


def test_the_counts_of_a_few_workers_stay_readable() -> None:
    assert len(status_json(status(PACKED_FROM - 1))["ledger"]["live"]) == PACKED_FROM - 1
    assert set(status_json(status(PACKED_FROM))["ledger"]) & {"live", "due", "packed"} == {"packed"}


def test_a_step_over_a_thousand_workers_writes_a_quarter_of_what_it_wrote() -> None:
    """In bytes, with what the API server notes beside them: counts and names here are as random as real ones."""
    schema = schema_of("ramprollouts")
    now = rollout_status(1000)
    before = unpacked(now)
    weight = {name: size(each) + size(managed(each, schema)) for name, each in (("now", now), ("before", before))}
    assert weight["before"] > 700_000
    assert weight["now"] < weight["before"] / 4


def measured(workers: int) -> ServiceStatus:
    live = {f"boot-{i:04d}": PlanCounts("plan", 0.02, 900 + i, {"r00": 7}) for i in range(workers)}
    base = {boot: replace(counts, requests=5) for boot, counts in live.items()}
    return ServiceStatus(message="serves", measured=Measured("plan", requests=12, live=live, base=base))


@pytest.mark.parametrize("workers", [1, PACKED_FROM - 1, PACKED_FROM, 2000])
def test_what_a_services_workers_have_counted_comes_back(workers: int) -> None:
    written = json.loads(json.dumps(status_json(measured(workers))))
    assert ("packed" in written["measured"]) is (workers >= PACKED_FROM) is ("live" not in written["measured"])
    assert written["measured"]["requests"] == 12, "what people read stays readable"
    assert status_from_manifest(ServiceStatus, {"status": written}) == measured(workers)


def test_a_thousand_workers_leave_less_than_half_of_their_bytes_in_a_services_status() -> None:
    now = service_status(1000, 0)
    assert size(now) < size(unpacked(now)) / 2


def test_a_services_packed_counts_bring_no_other_fields_with_them() -> None:
    text = base64.b64encode(zlib.compress(b'{"measured":{},"status":{"message":"mine"}}')).decode()
    with pytest.raises(InvalidArgumentError, match=r"status\.measured\.packed"):
        unpacked({"measured": {"packed": text}})


def test_what_an_earlier_release_wrote_is_read_and_written_packed() -> None:
    told = status(300)
    plain = {"status": {"phase": told.phase, **to_json(told)}}
    assert "packed" not in plain["status"]["ledger"]
    assert status_from_manifest(RolloutStatus, plain) == told
    assert same_status(plain, told), "reading it anew is no reason to write"


def test_packing_leaves_its_argument_alone_and_repeats_itself() -> None:
    plain = to_json(status(300))
    before = json.dumps(plain)
    assert packed(plain) == packed(plain) and json.dumps(plain) == before
    assert unpacked(packed(plain)) == plain


def bomb() -> str:
    """More than is unpacked, in few bytes."""
    return text_of(b'{"ledger":{},"status":{"a":"' + b"0" * MOST_BYTES + b'"}}')


def text_of(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode()


@pytest.mark.parametrize(
    "content",
    [
        b'{"ledger":' + b"[" * 2000 + b"]" * 2000 + b',"status":{}}',
        b'{"ledger":{"live":{"a":' + b"[" * 2000 + b"]" * 2000 + b'}},"status":{}}',
        b'{"ledger":{"live":[' + b"[]," * 2**20 + b'[]]},"status":{}}',
        b'{"ledger":{"live":{},"epoch":9},"status":{}}',
        b'{"ledger":{"live":{},"packed":"again"},"status":{}}',
    ],
    ids=["deep", "deep within", "a long list", "a field that is not packed", "packed again"],
)
def test_packed_content_that_is_no_counts_is_refused_in_few_words(content: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match=r"status\.ledger\.packed") as refused:
        status_from_manifest(RolloutStatus, {"status": {"ledger": {"packed": text_of(content)}}})
    assert len(str(refused.value)) < 300


def test_a_long_value_of_another_type_is_named_in_few_words() -> None:
    content = b'{"ledger":{"live":{"boot":{"stable":"' + b"x" * 2**20 + b'"}}},"status":{}}'
    with pytest.raises(InvalidArgumentError, match=r"live\.boot\.stable is 'x") as refused:
        status_from_manifest(RolloutStatus, {"status": {"ledger": {"packed": text_of(content)}}})
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no base64!",
        base64.b64encode(b"no zlib").decode(),
        base64.b64encode(zlib.compress(b"[1]")).decode(),
        base64.b64encode(zlib.compress(b'{"ledger":{}}')).decode(),
        bomb,
        7,
        None,
    ],
    ids=["empty", "not base64", "not compressed", "a list", "a part missing", "a bomb", "a number", "nothing"],
)
def test_what_somebody_else_wrote_there_is_refused_by_the_fields_name(text: Any) -> None:
    text = text() if callable(text) else text
    with pytest.raises(InvalidArgumentError, match=r"status\.ledger\.packed"):
        unpacked({"ledger": {"packed": text}})


def test_a_packed_text_that_was_cut_is_refused() -> None:
    text = packed(to_json(status(300)))["ledger"]["packed"]
    with pytest.raises(InvalidArgumentError, match=r"status\.ledger\.packed"):
        unpacked({"ledger": {"packed": text[: len(text) // 8 * 4]}})
