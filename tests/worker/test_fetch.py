"""Bundles fetched from a real server that breaks, lies and refuses."""

from __future__ import annotations

import errno
import hashlib
import io
import random
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpcore
import pytest
import yaml
from stores import HOST, Behaviour, Store, signed

from offramp_cli.manifest import load_intent, notes
from offramp_core.errors import DeliveryError
from offramp_core.protocol import FetchProgress
from offramp_worker.bundle.load import load_bundle
from offramp_worker.fetch.download import MAX_ATTEMPTS, Clock, Limits
from offramp_worker.fetch.fetch import fetch
from offramp_worker.fetch.network import GuardedNetwork, refusal
from offramp_worker.fetch.source import Source, read_credentials, source

pytestmark = pytest.mark.slow  # each test has a store of its own

KEY = "/models/digits.tar"


def packed(folder: Path, *, mode: str = "w", inside: str = ".") -> bytes:
    """The bundle as an archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:  # type: ignore[call-overload]
        tar.add(folder, arcname=inside)
    return buffer.getvalue()


@pytest.fixture(scope="session")
def archive(bundle_dir: Path) -> bytes:
    return packed(bundle_dir)


@dataclass
class Ticking:
    """A clock that only pauses move."""

    time: float = 0.0
    pauses: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.time += seconds

    @property
    def clock(self) -> Clock:
        return Clock(now=lambda: self.time, sleep=self.sleep)


def fetched(
    store: Store, tmp_path: Path, *, url: str | None = None, ticking: Ticking | None = None, **options: Any
) -> Path:
    wanted = options.pop("source", None) or Source(url or store.url + KEY)
    with store.client(tmp_path) as client:
        return fetch(
            wanted, tmp_path / "volume" / "bundle", client=client, clock=(ticking or Ticking()).clock, **options
        )


def refused(call: Callable[[], object], reason: str) -> str:
    with pytest.raises(DeliveryError) as error:
        call()
    assert error.value.reason == reason
    assert "; " in str(error.value)
    return str(error.value)


def test_a_fetched_bundle_is_one_that_a_worker_loads(archive: bytes, tmp_path: Path) -> None:
    told: list[FetchProgress] = []
    with Store({KEY: archive}) as store:
        folder = fetched(store, tmp_path, report=told.append)
    assert load_bundle(folder).manifest.name
    assert next(p.phase for p in told if p.done_bytes == len(archive)) == "downloading"
    assert list(dict.fromkeys(p.phase for p in told)) == ["connecting", "downloading", "verifying", "unpacking"]
    assert [f.name for f in folder.parent.iterdir()] == ["bundle"], "nothing of the work is left behind"


@pytest.mark.parametrize(("mode", "inside"), [("w:gz", "."), ("w", "digits-v3")], ids=["gzipped", "in-a-folder"])
def test_gzipped_archives_and_those_with_one_folder_are_taken(
    bundle_dir: Path, tmp_path: Path, mode: str, inside: str
) -> None:
    with Store({KEY: packed(bundle_dir, mode=mode, inside=inside)}) as store:
        assert load_bundle(fetched(store, tmp_path)).manifest.name


def test_a_broken_connection_is_resumed_where_it_broke(archive: bytes, tmp_path: Path) -> None:
    third = len(archive) // 3
    with Store({KEY: archive}, behaviour=Behaviour(breaks=[third, third])) as store:
        fetched(store, tmp_path)
    asked = [(r.headers.get("range"), r.headers.get("if-range")) for r in store.requests]
    assert asked == [(None, None), (f"bytes={third}-", '"v1"'), (f"bytes={2 * third}-", '"v1"')]


@pytest.mark.parametrize("etag", [None, 'W/"v1"'], ids=["no-etag", "weak-etag"])
def test_without_a_strong_etag_a_broken_download_begins_anew(archive: bytes, tmp_path: Path, etag: str | None) -> None:
    with Store({KEY: archive}, behaviour=Behaviour(etag=etag, breaks=[len(archive) // 2])) as store:
        assert load_bundle(fetched(store, tmp_path))
    assert [r.headers.get("range") for r in store.requests] == [None, None]


def test_a_file_that_changed_meanwhile_is_never_mixed_with_the_old_one(
    archive: bytes, bundle_dir: Path, tmp_path: Path
) -> None:
    other = packed(bundle_dir, inside="other")
    with Store({KEY: archive}, behaviour=Behaviour(breaks=[len(archive) // 2])) as store:
        ticking = Ticking()

        def change(seconds: float) -> None:
            store.files[KEY], store.behaviour.etag = other, '"v2"'

        ticking.sleep = change  # type: ignore[method-assign]
        digest = "sha256:" + hashlib.sha256(other).hexdigest()
        assert load_bundle(fetched(store, tmp_path, ticking=ticking, archive_digest=digest))
    assert store.requests[1].headers["if-range"] == '"v1"'


def test_a_server_without_ranges_sends_all_of_it_again(archive: bytes, tmp_path: Path) -> None:
    with Store({KEY: archive}, behaviour=Behaviour(ranges=False, breaks=[len(archive) // 2])) as store:
        assert load_bundle(fetched(store, tmp_path))


def test_another_process_goes_on_with_what_an_earlier_one_left(archive: bytes, tmp_path: Path) -> None:
    half = len(archive) // 2
    with Store({KEY: archive}, behaviour=Behaviour(breaks=[half] + [0] * MAX_ATTEMPTS)) as store:
        said = refused(lambda: fetched(store, tmp_path), "FetchFailed")
        assert f"{MAX_ATTEMPTS} times in a row" in said
        store.behaviour.breaks.clear()
        fetched(store, tmp_path)
    assert store.requests[-1].headers["range"] == f"bytes={half}-"


def test_a_connection_that_breaks_often_but_brings_something_is_not_given_up(archive: bytes, tmp_path: Path) -> None:
    step = len(archive) // (3 * MAX_ATTEMPTS)
    with Store({KEY: archive}, behaviour=Behaviour(breaks=[step] * (2 * MAX_ATTEMPTS))) as store:
        assert load_bundle(fetched(store, tmp_path))


def test_attempts_are_bounded_and_pauses_grow(archive: bytes, tmp_path: Path) -> None:
    ticking = Ticking()
    with Store({KEY: archive}, behaviour=Behaviour(statuses=[503] * 100)) as store:
        said = refused(lambda: fetched(store, tmp_path, ticking=ticking), "FetchFailed")
    assert "503 Service Unavailable" in said
    assert len(store.requests) == MAX_ATTEMPTS
    assert ticking.pauses[-1] > 20 * ticking.pauses[0]


def test_the_time_for_all_attempts_is_bounded(archive: bytes, tmp_path: Path) -> None:
    with Store({KEY: archive}, behaviour=Behaviour(statuses=[503] * 100)) as store:
        said = refused(lambda: fetched(store, tmp_path, limits=Limits(seconds=3)), "FetchFailed")
    assert "did not arrive within 3 s" in said
    assert len(store.requests) < MAX_ATTEMPTS


@pytest.mark.parametrize(
    ("status", "said"), [(403, "403 Forbidden"), (401, "401 Unauthorized"), (404, "404 Not Found")]
)
def test_what_is_refused_is_told_at_once(archive: bytes, tmp_path: Path, status: int, said: str) -> None:
    with Store({KEY: archive}, behaviour=Behaviour(statuses=[status])) as store:
        assert said in refused(lambda: fetched(store, tmp_path), "FetchRefused")
    assert len(store.requests) == 1


def test_a_length_that_is_too_long_ends_in_a_sentence_and_one_that_is_too_short_in_a_broken_bundle(
    archive: bytes, tmp_path: Path
) -> None:
    long, short = tmp_path / "long", tmp_path / "short"
    long.mkdir()
    short.mkdir()
    with Store({KEY: archive}, behaviour=Behaviour(claimed_length=len(archive) + 100, ranges=False)) as store:
        refused(lambda: fetched(store, long), "FetchFailed")
    with Store({KEY: archive}, behaviour=Behaviour(claimed_length=len(archive) // 2)) as store:
        refused(lambda: fetched(store, short), "InvalidBundle")


@pytest.mark.parametrize("chunked", [False, True], ids=["announced", "unannounced"])
def test_an_archive_beyond_the_limit_is_not_fetched(archive: bytes, tmp_path: Path, *, chunked: bool) -> None:
    with Store({KEY: archive}, behaviour=Behaviour(chunked=chunked)) as store:
        refused(lambda: fetched(store, tmp_path, limits=Limits(bytes=len(archive) - 1)), "BundleTooLarge")


def test_a_compressed_body_is_refused_because_its_size_says_nothing(archive: bytes, tmp_path: Path) -> None:
    with Store({KEY: archive}, behaviour=Behaviour(headers={"Content-Encoding": "gzip"})) as store:
        assert "Content-Encoding gzip" in refused(lambda: fetched(store, tmp_path), "FetchRefused")


def test_a_full_disk_is_one_sentence(archive: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    real = Path.open

    def fails(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if path.name == "archive" and "a" in mode:
            raise full
        return real(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", fails)
    with Store({KEY: archive}) as store:
        assert "no disk space left" in refused(lambda: fetched(store, tmp_path), "DiskFull")


def test_the_digest_of_the_archive_is_checked_before_it_is_parsed(archive: bytes, tmp_path: Path) -> None:
    wanted = "sha256:" + hashlib.sha256(archive).hexdigest()
    with Store({KEY: b"no tar at all"}) as store:
        said = refused(lambda: fetched(store, tmp_path, archive_digest=wanted), "DigestMismatch")
        assert wanted in said
        store.files[KEY], store.behaviour.etag = archive, '"v2"'
        assert load_bundle(fetched(store, tmp_path, archive_digest=wanted)), "a wrong archive leaves nothing behind"


def test_a_wrong_archive_is_not_fetched_again_and_again_while_it_lies_there(archive: bytes, tmp_path: Path) -> None:
    """A container that fails is started anew every few minutes, for days."""
    wanted = "sha256:" + "0" * 64
    sent: list[FetchProgress] = []
    with Store({KEY: archive}) as store:
        first = refused(lambda: fetched(store, tmp_path, archive_digest=wanted), "DigestMismatch")
        again = refused(lambda: fetched(store, tmp_path, archive_digest=wanted, report=sent.append), "DigestMismatch")
        assert again == first and [p.phase for p in sent] == ["connecting"]
        assert load_bundle(fetched(store, tmp_path)), "what is asked for has changed"


def test_a_bundle_of_another_model_is_refused(archive: bytes, tmp_path: Path) -> None:
    with Store({KEY: archive}) as store:
        said = refused(lambda: fetched(store, tmp_path, digest="sha256:" + "0" * 64), "DigestMismatch")
    assert "spec.model.digest" in said
    assert not (tmp_path / "volume" / "bundle").exists()


def test_a_damaged_file_of_the_bundle_is_named(bundle_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in bundle_dir.iterdir():
        content = file.read_bytes()
        (copy / file.name).write_bytes(content[:-1] + b"!" if file.name == "records.npz" else content)
    with Store({KEY: packed(copy)}) as store:
        assert "records.npz" in refused(lambda: fetched(store, tmp_path), "InvalidBundle")


def test_what_is_there_already_is_not_fetched_again(archive: bytes, tmp_path: Path) -> None:
    with Store({KEY: archive}) as store:
        fetched(store, tmp_path)
        fetched(store, tmp_path)
    assert len(store.requests) == 1


# --- addresses and redirects -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",
        "::1",
        "fd12::1",
        "::ffff:10.0.0.1",
        "64:ff9b::a00:1",
        "2002:a00:1::",
    ],
)
def test_private_addresses_are_refused_unless_allowed(address: str) -> None:
    assert refusal(address, allow_private=False)
    assert not refusal(address, allow_private=True)


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "fe80::1%eth0", "fd00:ec2::254", "0.0.0.0", "::", "224.0.0.1", "::ffff:169.254.169.254"],
)
def test_link_local_addresses_are_never_connected_to(address: str) -> None:
    assert refusal(address, allow_private=False)
    assert refusal(address, allow_private=True)


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1"])
def test_public_addresses_are_connected_to(address: str) -> None:
    assert not refusal(address, allow_private=False)


def test_a_name_with_a_private_address_is_not_connected_to(archive: bytes, tmp_path: Path) -> None:
    with Store({KEY: archive}) as store, store.client(tmp_path, allow_private=False) as client:
        said = refused(lambda: fetch(Source(store.url + KEY), tmp_path / "b", client=client), "AddressRefused")
    assert HOST in said and "delivery.allowPrivateNetworks" in said
    assert store.requests == []


def test_the_address_that_was_judged_is_the_one_connected_to(archive: bytes) -> None:
    """A name that gives a public address at first and a private one later (rebinding) is looked up once."""
    answers = [["203.0.113.9", "93.184.216.34"], ["127.0.0.1"]]
    connected: list[str] = []

    class Recording(httpcore.SyncBackend):
        def connect_tcp(self, host: str, *args: Any, **kwargs: Any) -> httpcore.NetworkStream:
            connected.append(host)
            raise httpcore.ConnectError("unreachable here")

    network = GuardedNetwork(allow_private=False, resolver=lambda host, port: answers.pop(0))
    network._backend = Recording()
    with pytest.raises(httpcore.ConnectError):
        network.connect_tcp(HOST, 443)
    assert connected == ["93.184.216.34"], "203.0.113.0/24 is reserved for documentation"
    assert len(answers) == 1


@pytest.mark.parametrize("there", ["http://models.example/x", "ftp://models.example/x", "file:///etc/passwd"])
def test_a_redirect_to_another_scheme_is_refused(archive: bytes, tmp_path: Path, there: str) -> None:
    with Store({KEY: archive}, behaviour=Behaviour(statuses=[302], headers={"Location": there})) as store:
        assert "another scheme" in refused(lambda: fetched(store, tmp_path), "FetchRefused")


def test_redirects_are_followed_and_bounded(archive: bytes, tmp_path: Path) -> None:
    with Store({KEY: archive}, behaviour=Behaviour(statuses=[302] * 100, headers={"Location": KEY})) as store:
        assert "redirects more than" in refused(lambda: fetched(store, tmp_path), "FetchRefused")
        store.behaviour.statuses[:] = [307]
        assert load_bundle(fetched(store, tmp_path))


# --- credentials -----------------------------------------------------------------------------------


def secret(folder: Path, **keys: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in keys.items():
        (folder / name.replace("ca_crt", "ca.crt")).write_text(text)
    return folder


def test_credentials_go_to_their_host_and_nowhere_else(archive: bytes, tmp_path: Path) -> None:
    with Store({KEY: archive}, behaviour=Behaviour(authorization="Bearer t0ps3cret")) as store:
        folder = secret(tmp_path / "secret", host=f"{HOST}:{store.port}", bearerToken="t0ps3cret\n")
        wanted = source(store.url + KEY, credentials=folder)
        assert load_bundle(fetched(store, tmp_path, source=wanted))
    assert wanted.auth_for(f"https://{HOST}/other-port") is None
    assert wanted.auth_for(f"https://evil.example:{store.port}/") is None
    assert "t0ps3cret" not in repr(wanted)
    said = refused(lambda: source("https://evil.example/b.tar", credentials=folder), "FetchRefused")
    assert "t0ps3cret" not in said


def test_wrong_credentials_name_the_field_to_look_at(archive: bytes, tmp_path: Path) -> None:
    with Store({KEY: archive}, behaviour=Behaviour(authorization="Basic bm9ib2R5Om5vdGhpbmc=")) as store:
        folder = secret(tmp_path / "secret", host=f"{HOST}:{store.port}", username="somebody", password="hunter2")
        said = refused(
            lambda: fetched(store, tmp_path, source=source(store.url + KEY, credentials=folder)), "FetchRefused"
        )
        assert "spec.model.secretRef" in said and "hunter2" not in said
        secret(folder, username="nobody", password="nothing")
        assert load_bundle(fetched(store, tmp_path, source=source(store.url + KEY, credentials=folder)))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "does not exist or has no key host"),
        ({"bearerToken": "x"}, "no key host"),
        ({"host": "a.example", "username": "x"}, "bearerToken, or username and password"),
    ],
    ids=["absent", "no-host", "half-a-pair"],
)
def test_incomplete_credentials_say_what_is_missing(tmp_path: Path, keys: dict[str, str], said: str) -> None:
    folder = secret(tmp_path / "secret", **keys) if keys else tmp_path / "absent"
    assert said in refused(lambda: source("https://a.example/b.tar", credentials=folder), "FetchRefused")


def test_the_verifier_of_signatures_agrees_with_the_example_that_amazon_published() -> None:
    headers = {
        "host": "examplebucket.s3.amazonaws.com",
        "range": "bytes=0-9",
        "x-amz-date": "20130524T000000Z",
        "x-amz-content-sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "authorization": "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,"
        "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,"
        "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
    }
    keys = {"AKIAIOSFODNN7EXAMPLE": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"}
    assert signed("GET", "/test.txt", headers, keys=keys, region="us-east-1")
    assert not signed("GET", "/other.txt", headers, keys=keys, region="us-east-1")


@pytest.mark.parametrize("key", ["digits.tar", "v1.2/digits (new) +ä=~.tar", "a//b.tar"])
def test_objects_of_an_s3_store_are_fetched_with_signed_requests(archive: bytes, tmp_path: Path, key: str) -> None:
    third = len(archive) // 3
    how = Behaviour(keys={"AKID": "s3cr3t/+"}, region="eu-test-1", breaks=[third])
    with Store({f"/models/{key}": archive}, behaviour=how) as store:
        folder = secret(
            tmp_path / "secret", host=f"{HOST}:{store.port}", AWS_ACCESS_KEY_ID="AKID", AWS_SECRET_ACCESS_KEY="s3cr3t/+"
        )
        wanted = source(f"s3://models/{key}", endpoint=store.url, region="eu-test-1", credentials=folder)
        assert load_bundle(fetched(store, tmp_path, source=wanted))
        assert store.requests[-1].headers["range"] == f"bytes={third}-"
        secret(folder, AWS_SECRET_ACCESS_KEY="wrong")
        wanted = source(f"s3://models/{key}", endpoint=store.url, region="eu-test-1", credentials=folder)
        with store.client(tmp_path) as client:
            refused(lambda: fetch(wanted, tmp_path / "other", client=client), "FetchRefused")


def test_a_bucket_in_another_region_names_the_region(archive: bytes, tmp_path: Path) -> None:
    how = Behaviour(statuses=[301], headers={"x-amz-bucket-region": "eu-west-3"})
    with Store({KEY: archive}, behaviour=how) as store:
        wanted = source("s3://models/digits.tar", endpoint=store.url)
        assert "eu-west-3" in refused(lambda: fetched(store, tmp_path, source=wanted), "FetchRefused")


def test_amazons_own_endpoint_follows_from_the_region() -> None:
    assert source("s3://b/k.tar", region="eu-west-1").url == "https://s3.eu-west-1.amazonaws.com/b/k.tar"


def test_an_unencrypted_store_needs_the_digest_of_the_archive(archive: bytes, tmp_path: Path) -> None:
    with Store({KEY: archive}, tls=False) as store:
        wanted = source("s3://models/digits.tar", endpoint=store.url)
        assert "archiveDigest" in refused(lambda: fetched(store, tmp_path, source=wanted), "FetchRefused")
        digest = "sha256:" + hashlib.sha256(archive).hexdigest()
        assert load_bundle(fetched(store, tmp_path, source=wanted, archive_digest=digest))


def test_the_query_of_a_url_is_in_no_message(archive: bytes, tmp_path: Path) -> None:
    with Store({KEY: archive}, behaviour=Behaviour(statuses=[403])) as store:
        said = refused(lambda: fetched(store, tmp_path, url=f"{store.url}{KEY}?X-Amz-Signature=abc"), "FetchRefused")
    assert "abc" not in said
    assert store.requests[0].path.endswith("?X-Amz-Signature=abc")


def test_keys_survive_a_folder_as_the_kubelet_mounts_it(tmp_path: Path) -> None:
    data = secret(tmp_path / "..data", host="a.example", bearerToken="x", ca_crt="not read here")
    folder = tmp_path / "mount"
    folder.mkdir()
    (folder / "..data").symlink_to(data)
    for file in data.iterdir():
        (folder / file.name).symlink_to(Path("..data") / file.name)
    found = read_credentials(folder)
    assert (found.host, found.texts, found.ca_file) == ("a.example", {"bearerToken": "x"}, folder / "ca.crt")


def test_offramp_up_fetches_a_bundle_into_its_state_folder_once(
    archive: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store({KEY: archive}, behaviour=Behaviour(keys={"AKID": "s3cr3t"})) as store:
        store.ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        for name, value in {
            "SSL_CERT_FILE": str(tmp_path / "ca.pem"),
            "AWS_ACCESS_KEY_ID": "AKID",
            "AWS_SECRET_ACCESS_KEY": "s3cr3t",
        }.items():
            monkeypatch.setenv(name, value)
        model = {
            "uri": "s3://models/digits.tar",
            "endpoint": f"https://localhost:{store.port}",
            "secretRef": {"name": "models"},
        }
        objective = {"latency": {"threshold": "40ms"}, "accuracy": {"maxDisagreement": "0.02"}}
        manifest = {"apiVersion": "earlyexit.dev/v1alpha1", "kind": "EarlyExitService", "metadata": {"name": "digits"}}
        file = tmp_path / "service.yaml"
        file.write_text(yaml.safe_dump({**manifest, "spec": {"model": model, "objective": objective}}))
        assert load_intent(file).spec["model"] == model, "nothing is fetched only to look at a file"
        assert "spec.model.secretRef" in notes(load_intent(file))[0]
        intent = load_intent(file, bundles=tmp_path / "bundles")
        assert load_bundle(Path(intent.spec["model"]["uri"].removeprefix("file://"))).manifest.name
        assert load_intent(file, bundles=tmp_path / "bundles") == intent
    assert len(store.requests) == 1


# --- hostile archives ------------------------------------------------------------------------------


def entry(
    name: str, *, kind: bytes = tarfile.REGTYPE, target: str = "", content: bytes = b"x"
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    info.size = len(content) if kind == tarfile.REGTYPE else 0
    return info, content


def hostile(*entries: tuple[tarfile.TarInfo, bytes], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:  # type: ignore[call-overload]
        for info, content in entries:
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def header_bomb() -> bytes:
    """An extended header that says it is a gigabyte long, gzipped, so that it is small on the wire."""
    import gzip

    info = tarfile.TarInfo("bomb")
    info.type, info.size = tarfile.XHDTYPE, 2**30
    return gzip.compress(info.tobuf() + bytes(64 * 2**20))


HOSTILE = {
    "absolute": hostile(entry("/etc/passwd")),
    "dotdot": hostile(entry("../escaped")),
    "dotdot-inside": hostile(entry("a/../../escaped")),
    "symlink": hostile(entry("link", kind=tarfile.SYMTYPE, target="/etc"), entry("link/passwd")),
    "hardlink": hostile(entry("link", kind=tarfile.LNKTYPE, target="/etc/passwd")),
    "device": hostile(entry("disk", kind=tarfile.BLKTYPE)),
    "character-device": hostile(entry("null", kind=tarfile.CHRTYPE)),
    "fifo": hostile(entry("pipe", kind=tarfile.FIFOTYPE)),
    "backslash": hostile(entry("..\\escaped")),
    "newline": hostile(entry("a\nb")),
    "twice": hostile(entry("a"), entry("a")),
    "file-as-folder": hostile(entry("a"), entry("a/b")),
    "deep": hostile(entry("/".join("abcdefghijk"))),
    "long": hostile(entry("n" * 300)),
    "no-tar": b"<html>sign in</html>" * 100,
    "empty": b"",
    "cut-off": hostile(entry("a", content=bytes(5000)))[:3000],
    "damaged-gzip": hostile(entry("a", content=random.Random(1).randbytes(5000)), mode="w:gz")[:3000],
    "no-manifest": hostile(entry("a"), entry("b")),
    "header-bomb": header_bomb(),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_and_writes_nothing_outside(tmp_path: Path, name: str) -> None:
    with Store({KEY: HOSTILE[name]}) as store:
        said = refused(lambda: fetched(store, tmp_path), "InvalidBundle")
    assert said.startswith("the archive is refused")
    assert sorted(f.name for f in tmp_path.rglob("*")) == [".fetch", "refused.json", "store-ca.pem", "volume"]


def test_an_archive_that_grows_while_it_unpacks_is_stopped(tmp_path: Path) -> None:
    bomb = hostile(entry("zeros", content=bytes(3 * 2**20)), mode="w:gz")
    many = hostile(*(entry(f"f{i}", content=b"") for i in range(50)))
    with Store({KEY: bomb}) as store:
        refused(lambda: fetched(store, tmp_path, limits=Limits(bytes=2**20)), "BundleTooLarge")
        store.files[KEY], store.behaviour.etag = many, '"v2"'
        assert "more than 20 entries" in refused(
            lambda: fetched(store, tmp_path, limits=Limits(files=20)), "InvalidBundle"
        )
