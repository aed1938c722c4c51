#!/usr/bin/env python3
"""Pack folders and tar files as an OCI image, without a container engine.

The same input gives the same bytes: entries are sorted, times, owners and
access are normalised, and nothing depends on the machine or the hour. Large
layers are kept in a cache by their digest, so that a heavy base (Python,
PyTorch) is packed once and later images cost only what changed.

Commands::

    oci_image.py build --name localhost/app:1 --layer base/ --layer src/=/app \
        --entrypoint python3 --entrypoint -m --entrypoint app --output app.tar
    oci_image.py names app.tar
    oci_image.py stream app.tar --without known-digests.txt > rest.tar

An output that ends in ``.tar`` is an OCI archive; any other is an OCI layout
folder, whose layers are hard links into the cache where that is possible.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import platform
import shutil
import stat
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, cast

# Not zero: zip, and so Python's own packaging, refuses years before 1980.
FIXED_MTIME_S = 315_532_800
CACHE_FROM_BYTES = 16 * 1024 * 1024
CHUNK_BYTES = 1024 * 1024
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MEDIA_INDEX = "application/vnd.oci.image.index.v1+json"
MEDIA_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
MEDIA_CONFIG = "application/vnd.oci.image.config.v1+json"
MEDIA_LAYER = "application/vnd.oci.image.layer.v1.tar"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


class ImageError(Exception):
    """The input cannot be packed, or a file is not an OCI image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer: a folder's content put under ``target``, all of it root's, or a tar file taken as it is."""

    source: Path
    target: str = "/"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """What a container of the image runs, and as whom. Ports are like ``8080/tcp``."""

    entrypoint: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    working_dir: str = ""
    ports: tuple[str, ...] = ()

    def as_oci(self) -> dict[str, Any]:
        """Return the ``config`` object of the OCI image configuration; empty values are left out."""
        env = {"PATH": DEFAULT_PATH, **self.env}
        values: dict[str, Any] = {
            "Entrypoint": list(self.entrypoint),
            "Env": [f"{key}={value}" for key, value in env.items()],
            "User": self.user,
            "WorkingDir": self.working_dir,
            "ExposedPorts": {port: {} for port in self.ports},
        }
        return {key: value for key, value in values.items() if value}


@dataclass(frozen=True, slots=True)
class Blob:
    """A file of known content: ``digest`` is ``sha256:...`` of the bytes at ``path``."""

    digest: str
    size_bytes: int
    path: Path

    def descriptor(self, media_type: str, **more: object) -> dict[str, Any]:
        return {"mediaType": media_type, "digest": self.digest, "size": self.size_bytes, **more}


# ---------------------------------------------------------------- layers


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    path: Path | None  # None: a parent folder that only the layer's target asks for
    status: os.stat_result | None


def _entries(layer: Layer) -> Iterator[_Entry]:
    """Yield what a folder layer holds, parents first and names sorted."""
    prefix = PurePosixPath(layer.target.strip("/"))
    for parent in [*reversed(prefix.parents), prefix][1:]:
        yield _Entry(str(parent), None, None)
    yield from _walk(layer.source, "" if str(prefix) == "." else f"{prefix}/")


def _walk(folder: Path, prefix: str) -> Iterator[_Entry]:
    with os.scandir(folder) as found:
        children = sorted(found, key=lambda entry: entry.name)
    for child in children:
        status = child.stat(follow_symlinks=False)
        if stat.S_ISSOCK(status.st_mode):
            continue  # a left-over of a running program; no archive can hold one
        yield _Entry(prefix + child.name, Path(child.path), status)
        if stat.S_ISDIR(status.st_mode):
            yield from _walk(Path(child.path), f"{prefix}{child.name}/")


def _readable_by_all(mode: int) -> int:
    """Give group and others what the owner may read and execute.

    Pods run as users that own nothing in the image, and the packer's umask
    must not decide whether they can start.
    """
    owner = (mode >> 6) & 0o5
    return stat.S_IMODE(mode) | owner << 3 | owner


def _tar_info(entry: _Entry) -> tarfile.TarInfo:
    info = tarfile.TarInfo(entry.name)
    info.mtime = FIXED_MTIME_S
    if entry.path is None or entry.status is None:
        info.type, info.mode = tarfile.DIRTYPE, 0o755
        return info
    mode = entry.status.st_mode
    info.mode = _readable_by_all(mode)
    if stat.S_ISDIR(mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(mode):
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, os.readlink(entry.path), 0o777
    elif stat.S_ISREG(mode):
        # A file with several links is written each time: whether two names share
        # an inode is an accident of the machine, not content.
        info.size = entry.status.st_size
    else:
        raise ImageError(f"{entry.path} is a device or a pipe; an image layer cannot hold it. Remove it first")
    return info


class _HashingWriter(io.RawIOBase):
    def __init__(self, target: BinaryIO) -> None:
        self._target = target
        self.hash = hashlib.sha256()
        self.size_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.hash.update(data)
        self.size_bytes += len(data)
        return self._target.write(data)


def write_layer(layer: Layer, target: Path) -> Blob:
    """Write a folder layer as a tar file at ``target``.

    Raises
    ------
    ImageError
        The folder holds a device or pipe, or a file changed while it was read.
    """
    with target.open("wb") as file:
        writer = _HashingWriter(file)
        with tarfile.open(fileobj=cast(IO[bytes], writer), mode="w|", format=tarfile.PAX_FORMAT) as tar:
            for entry in _entries(layer):
                info = _tar_info(entry)
                if not info.isreg():
                    tar.addfile(info)
                    continue
                with cast(Path, entry.path).open("rb") as content:
                    try:
                        tar.addfile(info, content)
                    except OSError as error:
                        raise ImageError(f"{entry.path} changed while it was packed: {error}") from error
    return Blob(f"sha256:{writer.hash.hexdigest()}", writer.size_bytes, target)


def _hash_file(path: Path) -> Blob:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return Blob(f"sha256:{digest.hexdigest()}", size, path)


def _fingerprint(layer: Layer) -> tuple[str, int]:
    """Return a hash of all that a layer's bytes can depend on, from metadata alone, and its size in bytes.

    The change time cannot be set by a program, so a file that was written to
    always changes the fingerprint, even if its size and mtime were put back.
    """
    digest, size = hashlib.sha256(), 0
    digest.update(repr((FIXED_MTIME_S, layer.source.is_dir(), layer.target)).encode())
    entries = _entries(layer) if layer.source.is_dir() else [_Entry("", layer.source, layer.source.stat())]
    for entry in entries:
        status = entry.status
        if status is None:
            continue
        times = (status.st_mtime_ns, status.st_ctime_ns)
        place = (status.st_dev, status.st_ino)
        digest.update(
            repr((entry.name, status.st_mode, status.st_size, times, place)).encode("utf-8", "surrogateescape")
        )
        size += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return digest.hexdigest(), size


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Packed layers by digest, and which folder state each one came from.

    Layers smaller than ``CACHE_FROM_BYTES`` are packed anew each time: that
    is quicker than it is worth keeping every edit of a source folder.
    """

    root: Path

    def layer(self, layer: Layer, scratch: Path) -> Blob:
        """Return the layer's blob, packed into ``scratch`` or taken from the cache."""
        fingerprint, size = _fingerprint(layer)
        if size < CACHE_FROM_BYTES:
            return self._pack(layer, scratch)
        record = self.root / "layers" / f"{fingerprint}.json"
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
            known = json.loads(record.read_text())
            blob = Blob(known["digest"], known["size"], self._blob_path(known["digest"]))
            if blob.path.stat().st_size == blob.size_bytes:
                return blob
        return self._keep(self._pack(layer, scratch), record, is_copy=layer.source.is_dir())

    def _pack(self, layer: Layer, scratch: Path) -> Blob:
        if not layer.source.is_dir():
            return _hash_file(layer.source)
        descriptor, name = tempfile.mkstemp(dir=scratch)
        os.close(descriptor)
        return write_layer(layer, Path(name))

    def _keep(self, blob: Blob, record: Path, *, is_copy: bool) -> Blob:
        path = self._blob_path(blob.digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        record.parent.mkdir(parents=True, exist_ok=True)
        if is_copy:
            _place(blob.path, path)
            blob.path.unlink()
        else:
            shutil.copyfile(blob.path, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
        _write_whole(record, json.dumps({"digest": blob.digest, "size": blob.size_bytes}).encode())
        return Blob(blob.digest, blob.size_bytes, path)

    def _blob_path(self, digest: str) -> Path:
        return self.root / "blobs" / digest.removeprefix("sha256:")


def _write_whole(path: Path, data: bytes) -> None:
    """Write so that a reader, or an interruption, never sees half a file."""
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    os.replace(name, path)


def _place(source: Path, target: Path) -> None:
    """Make ``target`` hold the bytes of ``source``, by a hard link where the file system allows one."""
    descriptor, name = tempfile.mkstemp(dir=target.parent)
    os.close(descriptor)
    os.unlink(name)
    try:
        os.link(source, name)
    except OSError:
        shutil.copyfile(source, name)
    os.chmod(name, 0o444)  # one file under several names: an edit through any of them would spoil the others
    os.replace(name, target)


# ---------------------------------------------------------------- images


def build_image(
    *, name: str, layers: Iterable[Layer], config: ImageConfig, output: Path, cache: LayerCache | None = None
) -> str:
    """Write an image and return the digest of its manifest.

    Parameters
    ----------
    name : str
        Full reference that a pod will use, with a tag: ``localhost/app:1``.
    layers : iterable of Layer
        From the bottom up; later layers cover earlier ones.
    config : ImageConfig
        What a container runs.
    output : Path
        ``*.tar`` gives an OCI archive, anything else an OCI layout folder. It
        is replaced whole; a failure leaves the old one.
    cache : LayerCache, optional
        Where large layers are kept; default: a folder of :func:`default_cache`.

    Raises
    ------
    ImageError
        The name has no tag or digest-like parts, a source is missing, or a
        layer cannot be packed.
    """
    repository, _, tag = name.rpartition(":")
    if not repository or not tag or "/" in tag or "@" in name:
        raise ImageError(f"name is {name!r}; it must be REPOSITORY:TAG, such as localhost/app:1")
    cache = cache or default_cache()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as folder:
        scratch = Path(folder)
        blobs, manifest = _compose(layers, config, cache, scratch)
        index = _json_bytes(_index(name, tag, manifest))
        unfinished = scratch / "image"
        if output.suffix == ".tar":
            with unfinished.open("wb") as file:
                _write_archive(file, index, blobs)
            os.chmod(unfinished, 0o644)
            unfinished.replace(output)
        else:
            _write_layout(unfinished, index, blobs)
            if output.exists():
                os.rename(output, scratch / "old")
            os.rename(unfinished, output)
    return manifest.digest


def _compose(layers: Iterable[Layer], config: ImageConfig, cache: LayerCache, scratch: Path) -> tuple[list[Blob], Blob]:
    packed = []
    for layer in layers:
        if not layer.source.exists():
            raise ImageError(f"layer {layer.source} does not exist")
        packed.append(cache.layer(layer, scratch))
    system = {"architecture": _architecture(), "os": "linux"}
    # Layers are plain tar files, so a layer's digest is also its "diff id".
    root = {"type": "layers", "diff_ids": [blob.digest for blob in packed]}
    configuration = _json_blob({**system, "config": config.as_oci(), "rootfs": root}, scratch)
    manifest = _json_blob(
        {
            "schemaVersion": 2,
            "mediaType": MEDIA_MANIFEST,
            "config": configuration.descriptor(MEDIA_CONFIG),
            "layers": [blob.descriptor(MEDIA_LAYER) for blob in packed],
        },
        scratch,
    )
    unique = {blob.digest: blob for blob in [*packed, configuration, manifest]}
    return list(unique.values()), manifest


def _index(name: str, tag: str, manifest: Blob) -> dict[str, Any]:
    annotations = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": tag}
    platform_ = {"architecture": _architecture(), "os": "linux"}
    entry = manifest.descriptor(MEDIA_MANIFEST, platform=platform_, annotations=annotations)
    return {"schemaVersion": 2, "mediaType": MEDIA_INDEX, "manifests": [entry]}


def _architecture() -> str:
    machine = platform.machine()
    return ARCHITECTURES.get(machine, machine)


def _json_bytes(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _json_blob(value: object, scratch: Path) -> Blob:
    data = _json_bytes(value)
    digest = hashlib.sha256(data).hexdigest()
    path = scratch / digest
    path.write_bytes(data)
    return Blob(f"sha256:{digest}", len(data), path)


LAYOUT_FILE = b'{"imageLayoutVersion":"1.0.0"}'


def _write_layout(folder: Path, index: bytes, blobs: Iterable[Blob]) -> None:
    (folder / "blobs" / "sha256").mkdir(parents=True)
    (folder / "oci-layout").write_bytes(LAYOUT_FILE)
    (folder / "index.json").write_bytes(index)
    for blob in blobs:
        _place(blob.path, folder / "blobs" / blob.digest.replace(":", "/"))


def _write_archive(file: IO[bytes], index: bytes, blobs: Iterable[Blob]) -> None:
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for name, data in (("oci-layout", LAYOUT_FILE), ("index.json", index)):
            _add_member(tar, name, io.BytesIO(data), len(data))
        for blob in sorted(blobs, key=lambda blob: blob.digest):
            with blob.path.open("rb") as content:
                _add_member(tar, f"blobs/{blob.digest.replace(':', '/')}", content, blob.size_bytes)


def _add_member(tar: tarfile.TarFile, name: str, content: IO[bytes], size_bytes: int) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = size_bytes, FIXED_MTIME_S, 0o644
    tar.addfile(info, content)


def default_cache() -> LayerCache:
    """Return the cache that every clone of this user shares."""
    base = os.environ.get("OFFRAMP_CACHE")
    if not base:
        base = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "offramp")
    return LayerCache(Path(base) / "oci")


# ---------------------------------------------------------------- reading


@contextlib.contextmanager
def _opened(image: Path) -> Iterator[list[tuple[str, int, Any]]]:
    """Yield (name, size in bytes, opener) of each file of an archive or layout folder."""
    if image.is_dir():
        files = sorted(path for path in image.rglob("*") if path.is_file())
        yield [(str(path.relative_to(image)), path.stat().st_size, lambda path=path: path.open("rb")) for path in files]
        return
    try:
        with tarfile.open(image, "r:") as tar:
            members = [member for member in tar.getmembers() if member.isreg()]
            yield [(member.name, member.size, lambda member=member: tar.extractfile(member)) for member in members]
    except tarfile.TarError as error:
        raise ImageError(f"{image} is not an uncompressed tar archive: {error}") from error


def image_names(image: Path) -> list[str]:
    """Return the references that an image will be known by once it is loaded."""
    with _opened(image) as files:
        for name, _, open_ in files:
            if name == "index.json":
                with open_() as file:
                    entries = json.load(file)["manifests"]
                return [entry.get("annotations", {}).get("io.containerd.image.name", "") for entry in entries]
    raise ImageError(f"{image} has no index.json; it is not an OCI image")


def stream_archive(image: Path, target: IO[bytes], *, without: frozenset[str] = frozenset()) -> None:
    """Write an image as an OCI archive that lacks the blobs whose digests are in ``without``."""
    with _opened(image) as files, tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for name, size_bytes, open_ in files:
            if name.startswith("blobs/") and name.removeprefix("blobs/").replace("/", ":") in without:
                continue
            with open_() as content:
                _add_member(tar, name, content, size_bytes)


# ---------------------------------------------------------------- command line


def _layer_argument(text: str) -> Layer:
    source, _, target = text.partition("=")
    return Layer(source=Path(source), target=target or "/")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="oci_image.py", description="Pack folders as an OCI image, without a container engine."
    )
    commands = parser.add_subparsers(dest="subcommand", required=True)

    build = commands.add_parser("build", help="write an image and print its digest")
    build.add_argument("--name", required=True, help="reference with a tag, such as localhost/app:1")
    build.add_argument("--output", required=True, type=Path, help="FILE.tar (archive) or FOLDER (OCI layout)")
    build.add_argument(
        "--layer",
        required=True,
        action="append",
        type=_layer_argument,
        metavar="PATH[=/TARGET]",
        help="a folder (its content goes under TARGET, default /) or a tar file; repeat, lowest first",
    )
    build.add_argument("--entrypoint", action="append", default=[], metavar="WORD", help="repeat for each word")
    build.add_argument("--user", default="", metavar="UID[:GID]", help="numeric, so that runAsNonRoot can be checked")

    names = commands.add_parser("names", help="print the references an image carries")
    names.add_argument("image", type=Path)

    stream = commands.add_parser("stream", help="write an image as an archive to standard output")
    stream.add_argument("image", type=Path)
    stream.add_argument("--without", type=Path, metavar="FILE", help="digests to leave out, one a line")
    return parser


def _build(options: argparse.Namespace) -> None:
    config = ImageConfig(entrypoint=tuple(options.entrypoint), user=options.user)
    print(build_image(name=options.name, layers=options.layer, config=config, output=options.output))


def main() -> int:
    """Run one command; 0 when it worked, 1 with a sentence on standard error when it did not."""
    options = _parser().parse_args()
    try:
        if options.subcommand == "build":
            _build(options)
        elif options.subcommand == "names":
            print("\n".join(image_names(options.image)))
        else:
            without = frozenset(options.without.read_text().split()) if options.without else frozenset()
            stream_archive(options.image, sys.stdout.buffer, without=without)
    except (ImageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
