"""The bill of materials says what the images hold, and always the same."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def make(folder: Path) -> dict[str, bytes]:
    command = [sys.executable, ROOT / "images" / "sbom.py", "--output", folder]
    answer = subprocess.run(command, check=False, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_it_lists_what_is_pinned_with_its_hashes_and_is_reproducible(tmp_path: Path) -> None:
    first, second = make(tmp_path / "a"), make(tmp_path / "b")
    assert first == second
    assert set(first) == {"operator.cdx.json", "worker.cdx.json", "worker-cuda.cdx.json"}
    lock = (ROOT / "requirements.lock").read_text() + (ROOT / "images" / "cuda.txt").read_text()
    pins = {f"{name}@{version}" for name, version in re.findall(r"^([a-z0-9.-]+)==([^\s;\\]+)", lock, re.MULTILINE)}
    for content in first.values():
        document = json.loads(content)
        assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
        assert "timestamp" not in document["metadata"]
        purls = [item["purl"] for item in document["components"]]
        assert purls == sorted(set(purls))
        python = [item for item in document["components"] if item["purl"].startswith("pkg:pypi/")]
        names = [item["purl"].removeprefix("pkg:pypi/") for item in python]
        assert set(names) <= pins and len(names) > 10
        for item in python:
            hashes = [reference["hashes"][0]["content"] for reference in item["externalReferences"]]
            assert hashes and all(f"sha256:{content}" in lock for content in hashes)
        assert document["dependencies"][0]["dependsOn"] == [item["bom-ref"] for item in document["components"]]


def test_it_lists_the_debian_packages_below_and_python_itself(tmp_path: Path) -> None:
    base = Path(
        subprocess.run([ROOT / "cluster" / "base-image"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    )
    interpreter = next((base / "usr" / "bin").glob("python3.*")).name
    libraries = {path.name.split(".so")[0] for path in (base / "usr" / "lib").glob("*-linux-gnu/*.so.*")}
    assert {"libc", "libssl", "libstdc++", "libsqlite3"} <= libraries
    for content in make(tmp_path).values():
        debian = {
            item["name"]: item for item in json.loads(content)["components"] if item["purl"].startswith("pkg:deb/")
        }
        assert {interpreter, "libc6", "libssl3", "libstdc++6", "libsqlite3-0", "ca-certificates"} <= set(debian)
        for item in debian.values():
            assert re.fullmatch(r"pkg:deb/debian/[^@]+@[^@?]+\?arch=\w+&distro=debian-\d+", item["purl"]), item["purl"]
            assert re.fullmatch("[0-9a-f]{64}", item["hashes"][0]["content"])


def test_each_image_has_its_own(tmp_path: Path) -> None:
    listed = {
        name: {item["name"] for item in json.loads(content)["components"]} for name, content in make(tmp_path).items()
    }
    assert "kubernetes" in listed["operator.cdx.json"] and "kubernetes" not in listed["worker.cdx.json"]
    assert {"onnxruntime-gpu", "nvidia-cublas"} <= listed["worker-cuda.cdx.json"] - listed["worker.cdx.json"]
    assert listed["worker.cdx.json"] < listed["worker-cuda.cdx.json"]
    assert "onnxruntime" in listed["worker.cdx.json"] and "onnxruntime" not in listed["operator.cdx.json"]
