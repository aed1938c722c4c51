"""The operator's key. Plans are signed with it, and the token that opens a worker's admin port is derived from it.

A worker knows only the public key and the token's hash, so whoever reads a worker's environment can neither
sign a plan nor pull another worker.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from offramp_core.errors import InvalidArgumentError
from offramp_core.plan import canonical_json
from offramp_core.protocol import ModelList, PlanDocument, SignedDocument
from offramp_operator.shell.platform import WorkerIdentity

SEED_BYTES = 32
_TOKEN_DOMAIN = b"offramp/v1/admin-token\0"  # keeps this use of the seed apart from every other


class SigningKey:
    """An Ed25519 key made from 32 secret bytes. Its representation never shows them."""

    __slots__ = ("_private", "_public", "_seed")

    def __init__(self, seed: bytes) -> None:
        if len(seed) != SEED_BYTES:
            raise InvalidArgumentError(f"a signing key's seed has {SEED_BYTES} bytes; got {len(seed)}")
        self._seed = bytes(seed)
        self._private = Ed25519PrivateKey.from_private_bytes(self._seed)
        self._public = base64.b64encode(self._private.public_key().public_bytes_raw()).decode()

    @classmethod
    def load_or_create(cls, path: Path) -> SigningKey:
        """The key kept in a file that only its owner may read; made on first use.

        Raises
        ------
        InvalidArgumentError
            The file holds no key, or others may read it.
        """
        try:
            return cls._load(path)
        except FileNotFoundError:
            seed = secrets.token_bytes(SEED_BYTES)
            # Nobody but its owner could read the new file at any moment.
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(base64.b64encode(seed) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            return cls(seed)

    @classmethod
    def _load(cls, path: Path) -> SigningKey:
        if path.stat().st_mode & 0o077:
            raise InvalidArgumentError(
                f"{path} is readable by others; run `chmod 600 {path}` or delete it for a new key"
            )
        try:
            return cls(base64.b64decode(path.read_bytes().strip(), validate=True))
        except ValueError as error:
            raise InvalidArgumentError(f"{path} holds no signing key ({error}); delete it for a new one") from error

    @property
    def public_key(self) -> str:
        """The raw public key (32 bytes) as base64."""
        return self._public

    def sign(self, document: PlanDocument | ModelList) -> SignedDocument:
        """The document's canonical JSON and its signature; the same document always gives the same bytes."""
        payload = canonical_json(msgspec.to_builtins(document))
        return SignedDocument(payload.decode(), base64.b64encode(self._private.sign(payload)).decode())

    def admin_token(self, service_uid: str) -> str:
        """Bearer token of the admin ports of one service's workers: 64 hex digits."""
        return hmac.new(self._seed, _TOKEN_DOMAIN + service_uid.encode(), hashlib.sha256).hexdigest()

    def identity(self, service_uid: str) -> WorkerIdentity:
        """What the service's workers are given to recognise this operator."""
        token_sha256 = hashlib.sha256(self.admin_token(service_uid).encode()).hexdigest()
        return WorkerIdentity(public_key=self.public_key, token_sha256=token_sha256)

    def __repr__(self) -> str:
        return f"SigningKey(public_key={self.public_key!r})"
