"""Files of a bundle that are no text, never end, or list each other wrongly: refused by name, soon."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import bundles
import numpy as np
import onnx
import pytest

from offramp_core.errors import InvalidBundleError
from offramp_worker.bundle.load import check_files, load_bundle
from offramp_worker.bundle.ramp_sets import load_ramp_set, write_ramp_set


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return bundles.write_wide_bundle(tmp_path / "bundle")


def no_text(raw: bytes) -> bytes:
    return raw.replace(b'"', b'"\xff', 1)


def without_end(raw: bytes) -> bytes:
    return raw.replace(b"{", b'{"more": ' + b"[" * 100_000, 1)


@pytest.mark.parametrize("name", ["manifest.json", "profile.json"])
@pytest.mark.parametrize("damage", [no_text, without_end], ids=["no UTF-8", "nested"])
def test_a_document_that_is_no_text_or_nested_without_end_is_refused(
    folder: Path, name: str, damage: Callable[[bytes], bytes]
) -> None:
    (folder / name).write_bytes(damage((folder / name).read_bytes()))
    if name != "manifest.json":
        bundles.write_manifest(folder, bundles.WIDE_RAMPS, bundles.WIDE_PRECISIONS)
    with pytest.raises(InvalidBundleError, match=f"^{name}: "):
        load_bundle(folder)


@pytest.mark.parametrize("damage", [no_text, without_end], ids=["no UTF-8", "nested"])
def test_what_a_ramp_set_says_of_itself_is_read_as_carefully(
    folder: Path, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    bundle = load_bundle(folder)
    made = write_ramp_set(
        tmp_path, (folder / "ramps.safetensors").read_bytes(), np.empty(0, dtype=np.uint64), bundle=bundle
    )
    (file,) = tmp_path.glob("*/set.json")
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(InvalidBundleError, match=r"set\.json: "):
        load_ramp_set(tmp_path, made.digest, bundle)


def a_pipe(file: Path) -> None:
    os.mkfifo(file)


def a_device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def a_folder(file: Path) -> None:
    file.mkdir()


@pytest.mark.parametrize("name", ["manifest.json", "backbone.onnx", "probe.npz"])
@pytest.mark.parametrize("put", [a_pipe, a_device, a_folder], ids=lambda put: put.__name__)
def test_a_file_that_never_ends_is_not_read(folder: Path, name: str, put: Callable[[Path], None]) -> None:
    (folder / name).unlink()
    put(folder / name)
    for read in (load_bundle, check_files):
        with pytest.raises(InvalidBundleError, match=f"^{name}: cannot be read"):
            read(folder)


def test_a_manifest_whose_ramps_need_a_file_that_it_does_not_list_is_refused(folder: Path) -> None:
    manifest = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(manifest.replace(f'"ramp-{bundles.SMALL}.onnx"', '"ramp-other.onnx"'))
    (folder / f"ramp-{bundles.SMALL}.onnx").rename(folder / "ramp-other.onnx")
    with pytest.raises(InvalidBundleError, match=rf"^manifest.json: files does not list 'ramp-{bundles.SMALL}\.onnx'"):
        check_files(folder)
    with pytest.raises(InvalidBundleError, match=rf"^ramp-{bundles.SMALL}\.onnx: cannot be read"):
        load_bundle(folder)


def test_names_out_of_a_model_do_not_make_an_error_long(folder: Path) -> None:
    model = onnx.load(folder / "backbone.onnx")
    model.graph.node[1].input[0] = "x" * 100_000
    (folder / "backbone.onnx").write_bytes(model.SerializeToString())
    bundles.write_manifest(folder, bundles.WIDE_RAMPS, bundles.WIDE_PRECISIONS)
    with pytest.raises(InvalidBundleError) as caught:
        load_bundle(folder)
    assert len(str(caught.value)) < 1_000
