"""Images are packed from folders: same input, same bytes; big layers once; nothing half-written."""

import hashlib
import importlib.util
import io
import json
import os
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest


def load_module() -> ModuleType:
    path = Path(__file__).parents[2] / "cluster" / "oci_image.py"
    spec = importlib.util.spec_from_file_location("oci_image", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["oci_image"] = module
    spec.loader.exec_module(module)
    return module


oci = load_module()


@pytest.fixture
def cache(tmp_path):
    return oci.LayerCache(tmp_path / "cache")


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "main.py").write_text("print('hello')\n")
    (folder / "link").symlink_to("package/main.py")
    return folder


def build(output, *layers, cache, name="localhost/app:1", **config):
    return oci.build_image(name=name, layers=layers, config=oci.ImageConfig(**config), output=output, cache=cache)


def read_archive(path):
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


def layer_members(path):
    """Return the members of the first layer of an archive by name."""
    files = read_archive(path)

    def blob(digest):
        return files["blobs/" + digest.replace(":", "/")]

    manifest = json.loads(blob(json.loads(files["index.json"])["manifests"][0]["digest"]))
    with tarfile.open(fileobj=io.BytesIO(blob(manifest["layers"][0]["digest"]))) as tar:
        return {member.name: member for member in tar}


def test_the_same_content_gives_the_same_bytes_whatever_its_times_and_umask(tmp_path, source, cache):
    build(tmp_path / "one.tar", oci.Layer(source=source), cache=cache)
    os.utime(source / "package" / "main.py", (1, 1))
    (source / "package" / "main.py").chmod(0o600)
    build(tmp_path / "two.tar", oci.Layer(source=source), cache=cache)
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()


def test_every_blob_is_named_by_its_content(tmp_path, source, cache):
    build(tmp_path / "app.tar", oci.Layer(source=source), cache=cache)
    blobs = {name: data for name, data in read_archive(tmp_path / "app.tar").items() if name.startswith("blobs/")}
    assert len(blobs) == 3
    assert all(name == f"blobs/sha256/{hashlib.sha256(data).hexdigest()}" for name, data in blobs.items())


def test_a_layer_can_be_put_under_a_folder_of_the_image(tmp_path, source, cache):
    build(tmp_path / "app.tar", oci.Layer(source=source, target="/opt/app"), cache=cache)
    members = layer_members(tmp_path / "app.tar")
    assert list(members) == ["opt", "opt/app", "opt/app/link", "opt/app/package", "opt/app/package/main.py"]
    assert members["opt/app/link"].linkname == "package/main.py"
    assert {(member.uid, member.gid) for member in members.values()} == {(0, 0)}


def test_what_the_owner_may_run_a_pod_of_another_user_may_run(tmp_path, source, cache):
    (source / "tool").write_text("#!/bin/sh\n")
    (source / "tool").chmod(0o700)
    (source / "secretive").write_text("x")
    (source / "secretive").chmod(0o600)
    build(tmp_path / "app.tar", oci.Layer(source=source), cache=cache)
    members = layer_members(tmp_path / "app.tar")
    assert oct(members["tool"].mode) == oct(0o755)
    assert oct(members["secretive"].mode) == oct(0o644)


def test_the_configuration_says_what_runs_and_as_whom(tmp_path, source, cache):
    build(
        tmp_path / "app.tar",
        oci.Layer(source=source),
        cache=cache,
        entrypoint=("python3", "-m", "app"),
        env={"A": "b=c"},
        user="65532:65532",
        working_dir="/app",
        ports=("8080/tcp",),
    )
    configs = [json.loads(data) for data in read_archive(tmp_path / "app.tar").values() if data.startswith(b'{"arch')]
    assert len(configs) == 1
    config = configs[0]["config"]
    assert config["Entrypoint"] == ["python3", "-m", "app"]
    assert "A=b=c" in config["Env"]
    assert (config["User"], config["WorkingDir"], config["ExposedPorts"]) == ("65532:65532", "/app", {"8080/tcp": {}})


@pytest.fixture
def big(tmp_path, monkeypatch):
    monkeypatch.setattr(oci, "CACHE_FROM_BYTES", 1000)
    folder = tmp_path / "big"
    folder.mkdir()
    (folder / "weights").write_bytes(b"a" * 5000)
    return folder


def test_a_big_layer_is_packed_once(tmp_path, big, cache, monkeypatch):
    first = build(tmp_path / "one.tar", oci.Layer(source=big), cache=cache)

    def refuse(*_):
        raise AssertionError("packed again")

    monkeypatch.setattr(oci, "write_layer", refuse)
    assert build(tmp_path / "two.tar", oci.Layer(source=big), cache=cache) == first
    with pytest.raises(AssertionError, match="packed again"):
        build(tmp_path / "three.tar", oci.Layer(source=big, target="/elsewhere"), cache=cache)


def test_a_change_that_keeps_size_and_time_is_seen(tmp_path, big, cache):
    before = (big / "weights").stat()
    first = build(tmp_path / "one.tar", oci.Layer(source=big), cache=cache)
    (big / "weights").write_bytes(b"b" * 5000)
    os.utime(big / "weights", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert build(tmp_path / "two.tar", oci.Layer(source=big), cache=cache) != first


def test_a_damaged_cache_entry_is_made_anew(tmp_path, big, cache):
    first = build(tmp_path / "one.tar", oci.Layer(source=big), cache=cache)
    for blob in (cache.root / "blobs").iterdir():
        blob.write_bytes(b"")
    for record in (cache.root / "layers").iterdir():
        record.write_text("{")
    assert build(tmp_path / "two.tar", oci.Layer(source=big), cache=cache) == first
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()


def test_a_tar_file_is_a_layer_as_it_is(tmp_path, source, cache):
    layer = oci.write_layer(oci.Layer(source=source), tmp_path / "layer.tar")
    from_folder = build(tmp_path / "one.tar", oci.Layer(source=source), cache=cache)
    assert build(tmp_path / "two.tar", oci.Layer(source=layer.path), cache=cache) == from_folder


def test_a_layout_folder_holds_the_same_image_as_an_archive(tmp_path, source, cache):
    build(tmp_path / "app.tar", oci.Layer(source=source), cache=cache)
    build(tmp_path / "app", oci.Layer(source=source), cache=cache)
    files = {
        str(path.relative_to(tmp_path / "app")): path.read_bytes()
        for path in (tmp_path / "app").rglob("*")
        if path.is_file()
    }
    assert files == read_archive(tmp_path / "app.tar")
    assert oci.image_names(tmp_path / "app") == oci.image_names(tmp_path / "app.tar") == ["localhost/app:1"]


@pytest.mark.parametrize("output", ["app.tar", "app"])
def test_a_stream_leaves_out_what_the_other_side_has(tmp_path, source, cache, output):
    build(tmp_path / output, oci.Layer(source=source), cache=cache)
    whole, rest = io.BytesIO(), io.BytesIO()
    oci.stream_archive(tmp_path / output, whole)
    whole.seek(0)
    with tarfile.open(fileobj=whole) as tar:
        names = tar.getnames()
    known = next(name for name in names if name.startswith("blobs/"))
    oci.stream_archive(tmp_path / output, rest, without=frozenset({known.removeprefix("blobs/").replace("/", ":")}))
    rest.seek(0)
    with tarfile.open(fileobj=rest) as tar:
        assert sorted(tar.getnames()) == sorted(set(names) - {known})


def test_a_failed_build_leaves_the_old_image_and_no_litter(tmp_path, source, cache):
    out = tmp_path / "out"
    build(out / "app.tar", oci.Layer(source=source), cache=cache)
    old = (out / "app.tar").read_bytes()
    os.mkfifo(source / "pipe")
    with pytest.raises(oci.ImageError, match="pipe"):
        build(out / "app.tar", oci.Layer(source=source), cache=cache)
    assert (out / "app.tar").read_bytes() == old
    assert [path.name for path in out.iterdir()] == ["app.tar"]


@pytest.mark.parametrize("name", ["app", "localhost/app", "localhost:5000/app", "app@sha256:1", ":1"])
def test_a_name_without_a_tag_is_refused(tmp_path, source, cache, name):
    with pytest.raises(oci.ImageError, match="REPOSITORY:TAG"):
        build(tmp_path / "app.tar", oci.Layer(source=source), cache=cache, name=name)


def test_a_file_that_is_no_image_is_refused(tmp_path):
    (tmp_path / "noise.tar").write_bytes(b"noise" * 1000)
    with pytest.raises(oci.ImageError, match=r"noise\.tar"):
        oci.image_names(tmp_path / "noise.tar")
