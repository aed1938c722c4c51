"""The operator's key: what it signs, whom it trusts, and that it never shows."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from offramp_core.errors import InvalidArgumentError
from offramp_core.protocol import ArmPlan, PlanDocument, SignedDocument
from offramp_operator.shell.signing import SigningKey
from offramp_operator.shell.wire import decode, encode

SEED = bytes(range(32))
DOCUMENT = PlanDocument(
    service="digits",
    service_uid="u-1",
    epoch=3,
    stable=ArmPlan({"ramps": [{"id": "r00", "threshold": "0.25"}]}, 0.02),
    canary=None,
    weight_percent=0,
    salt="ü/1",
    accuracy_budget=0.02,
    slow_seconds={"4": 0.0125},
)


def test_a_signature_is_good_over_the_exact_payload_that_decodes_to_the_document() -> None:
    key = SigningKey(SEED)
    signed = decode(encode(key.sign(DOCUMENT)), SignedDocument)
    public = Ed25519PublicKey.from_public_bytes(base64.b64decode(key.public_key))
    public.verify(base64.b64decode(signed.signature), signed.payload.encode())
    assert decode(signed.payload, PlanDocument) == DOCUMENT
    with pytest.raises(InvalidSignature):
        public.verify(base64.b64decode(signed.signature), signed.payload.replace('"epoch":3', '"epoch":4').encode())
    with pytest.raises(InvalidSignature):
        other = SigningKey(secrets.token_bytes(32)).sign(DOCUMENT)
        public.verify(base64.b64decode(other.signature), signed.payload.encode())


def test_the_payload_is_canonical_so_that_signing_again_gives_the_same_bytes() -> None:
    signed = SigningKey(SEED).sign(DOCUMENT)
    assert signed == SigningKey(SEED).sign(replace(DOCUMENT))
    assert signed.payload == json.dumps(
        json.loads(signed.payload), sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )


def test_tokens_differ_by_service_and_by_key_and_workers_learn_only_their_hash() -> None:
    key = SigningKey(SEED)
    token = key.admin_token("u-1")
    assert token == SigningKey(SEED).admin_token("u-1")
    assert len({token, key.admin_token("u-2"), SigningKey(secrets.token_bytes(32)).admin_token("u-1")}) == 3
    identity = key.identity("u-1")
    assert identity.token_sha256 == hashlib.sha256(token.encode()).hexdigest()
    assert len(base64.b64decode(identity.public_key)) == 32


def test_the_secret_shows_in_no_representation() -> None:
    key = SigningKey(SEED)
    shown = repr(key) + str(key) + f"{key!r}"
    for secret in (SEED.hex(), repr(SEED), base64.b64encode(SEED).decode(), key.admin_token("u-1")):
        assert secret not in shown


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_seed_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(InvalidArgumentError, match="32 bytes"):
        SigningKey(bytes(length))


def test_a_key_file_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "key"
    first = SigningKey.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SigningKey.load_or_create(path).public_key == first.public_key


def test_a_key_file_that_others_may_read_or_that_holds_no_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    SigningKey.load_or_create(path)
    path.chmod(0o640)
    with pytest.raises(InvalidArgumentError, match="chmod 600"):
        SigningKey.load_or_create(path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(InvalidArgumentError, match="no signing key"):
        SigningKey.load_or_create(path)
