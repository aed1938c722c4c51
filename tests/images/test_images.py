"""The images: what gets in, what stays out, and that it runs without what stayed out."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import pytest

from offramp_worker import cuda_driver

ROOT = Path(__file__).resolve().parents[2]

# Imports every module below a package, with the named distributions absent.
IMPORT_ALL = """
import importlib, pkgutil, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"{{name}} is not in this image")
sys.meta_path.insert(0, Absent())
package = importlib.import_module({package!r})
names = [m.name for m in pkgutil.walk_packages(package.__path__, {package!r} + ".") if not m.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(len(names), package.__file__)
"""


@pytest.fixture(scope="module")
def build() -> ModuleType:
    specification = importlib.util.spec_from_file_location("images_build", ROOT / "images" / "build.py")
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    sys.modules["images_build"] = module
    specification.loader.exec_module(module)
    return module


def import_all(package: str, paths: list[Path], absent: set[str], *flags: str) -> subprocess.CompletedProcess[str]:
    program = f"import sys\nsys.path[:0] = {[str(path) for path in paths]!r}\n" + IMPORT_ALL.format(
        package=package, absent=absent
    )
    return subprocess.run([sys.executable, "-B", *flags, "-c", program], check=False, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "absent"),
    [
        (
            "worker",
            {
                "torch",
                "scipy",
                "rich",
                "matplotlib",
                "onnxscript",
                "sklearn",
                "kubernetes",
                "aiohttp",
                "offramp_operator",
                "offramp_cli",
            },
        ),
        ("operator", {"torch", "onnx", "onnxruntime", "sklearn", "fastapi", "offramp_worker", "offramp_cli"}),
    ],
)
def test_the_code_of_an_image_imports_without_what_it_does_not_contain(
    build: Any, tmp_path: Path, part: str, absent: set[str]
) -> None:
    build.code(build.PARTS[part], tmp_path)
    app = tmp_path / "opt" / "offramp" / "app"
    answer = import_all(f"offramp_{part}", [app], absent)
    assert answer.returncode == 0, answer.stderr
    count, file = answer.stdout.split()
    assert int(count) > 5
    assert file.startswith(str(app)), "the image's code was tested, not the checkout's"


@pytest.mark.slow
def test_the_code_layer_is_compiled_and_of_preparing_has_what_trains_without_pytorch(
    build: Any, tmp_path: Path
) -> None:
    build.code(build.PARTS["worker"], tmp_path)
    app = tmp_path / "opt" / "offramp" / "app"
    modules = [path for path in app.rglob("*.py") if path.stat().st_size]
    assert modules
    prepare = app / "offramp_worker" / "prepare"
    assert (prepare / "captured.py").is_file()
    assert not any(
        (prepare / name).exists() for name in ("families", "generation", "picture.py", "heads/distillation.py")
    )
    for module in modules:
        compiled = module.parent / "__pycache__" / f"{module.stem}.cpython-311.pyc"
        flags = int.from_bytes(compiled.read_bytes()[4:8], "little")
        assert flags == 0b01, (
            f"{compiled}: must be hash-based and unchecked, or a read-only image compiles it at each start"
        )


@pytest.mark.slow
@pytest.mark.parametrize("part", ["operator", "worker"])
def test_the_command_starts_the_function_that_the_project_declares(build: Any, tmp_path: Path, part: str) -> None:
    build.code(build.PARTS[part], tmp_path)
    command = tmp_path / "usr" / "local" / "bin" / f"offramp-{part}"
    assert command.stat().st_mode & 0o111 == 0o111
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"][f"offramp-{part}"]
    assert f"from {declared.split(':')[0]} import {declared.split(':')[1]}" in command.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "without"),
    [("operator", {"onnxruntime", "torch", "fastapi"}), ("worker", {"scipy", "torch", "kubernetes"})],
)
def test_requirements_are_a_slice_of_the_lock(build: Any, part: str, without: set[str]) -> None:
    pins = build.requirements(build.PARTS[part])
    lock = (ROOT / "requirements.lock").read_text()
    names = set(re.findall(r"^([A-Za-z0-9._-]+)==", pins, flags=re.MULTILINE))
    assert {"numpy", "msgspec", "cryptography"} <= names
    assert not names & without
    blocks = re.split(r"^(?=[A-Za-z0-9])", pins, flags=re.MULTILINE)
    for block in filter(None, blocks):
        assert "--hash=sha256:" in block
        assert block in lock


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["operator", "worker"])
def test_an_image_has_every_dependency_it_imports(build: Any, part: str, tmp_path: Path) -> None:
    libraries = build.dependencies(build.PARTS[part])
    build.code(build.PARTS[part], tmp_path)
    # Isolated and without site: nothing of the virtual environment is reachable.
    answer = import_all(f"offramp_{part}", [tmp_path / "opt" / "offramp" / "app", libraries], set(), "-I", "-S")
    assert answer.returncode == 0, answer.stderr


@pytest.mark.slow
def test_the_layer_for_nvidias_gpus_is_pinned_and_is_of_the_release_of_onnx_runtime_that_all_workers_have(
    build: Any,
) -> None:
    """None of its gigabytes is fetched here: the index says which hashes each pin has, and that there is a wheel for
    the image."""
    pins = build.CUDA_LOCK.read_text()
    blocks = build.lock_blocks(pins)
    found = {name: version for block in blocks for name, version in re.findall(r"^([a-z0-9-]+)==(\S+) ", block)}
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", block) for block in blocks)
    assert {name for name in found if not name.startswith("nvidia-")} == {"onnxruntime-gpu"}
    (cpu,) = re.findall(r"^onnxruntime==(\S+) ", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert found["onnxruntime-gpu"] == cpu
    (cuda,) = [name.rpartition("cu")[2] for name in found if name.startswith("nvidia-cudnn-cu")]
    assert build.environment(cuda=True)["NVIDIA_REQUIRE_CUDA"] == f"cuda>={cuda}.0"
    assert int(cuda) in cuda_driver.DRIVERS
    wheels = ("--no-deps", "--only-binary", ":all:", "--generate-hashes", "--no-annotate", "--no-header")
    known = build._uv("compile", str(build.CUDA_LOCK), *wheels)
    assert set(re.findall(r"sha256:[0-9a-f]{64}", pins)) <= set(re.findall(r"sha256:[0-9a-f]{64}", known))
    assert re.findall(r"^\S+==\S+", known, re.MULTILINE) == re.findall(r"^\S+==\S+", pins, re.MULTILINE)


@pytest.mark.slow
def test_the_layer_for_nvidias_gpus_covers_the_workers_libraries_and_stays_below_its_code(
    build: Any, tmp_path: Path
) -> None:
    lowest, library, cuda = (tmp_path / name for name in ("base", "lib", "cuda"))
    for folder in (lowest, library, cuda):
        folder.mkdir()
        (folder / f"{folder.name}.py").write_text("")
    given = {"lowest": lowest, "libraries": {"lib": library, "cuda": cuda}}
    worker, outputs = build.PARTS["worker"], [tmp_path / "1.tar", tmp_path / "2.tar"]
    digests = {build.write_image(worker, "localhost/worker-cuda:1", output, **given) for output in outputs}
    assert len(digests) == 1
    *below, code = _layers_of(outputs[0])
    assert [set(files) for files in below] == [{"base.py"}, {"opt/offramp/lib/lib.py"}, {"opt/offramp/cuda/cuda.py"}]
    assert "opt/offramp/app/offramp_worker/main.py" in code
    assert build.environment(cuda=True)["PYTHONPATH"] == "/opt/offramp/app:/opt/offramp/cuda:/opt/offramp/lib"


def test_of_installed_packages_what_builds_programs_is_left_out(build: Any, tmp_path: Path) -> None:
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("tiny/__init__.py", "tiny/lib/libtiny.so", "tiny/lib/libtiny.a", "tiny/include/tiny.h"):
            archive.writestr(name, "")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    pin = f"tiny @ {wheel.as_uri()} --hash=sha256:"
    build.install(pin + digest, tmp_path / "lib", build.NOT_LOADED)
    names = {path.name for path in (tmp_path / "lib" / "tiny").rglob("*")}
    assert names == {"__init__.py", "__pycache__", "__init__.cpython-311.pyc", "lib", "libtiny.so"}
    with pytest.raises(build.BuildError, match="tiny"):
        build.install(pin + "0" * 64, tmp_path / "other")


def _bundle(folder: Path, **files: bytes) -> Path:
    folder.mkdir()
    named = {name.replace("_", "."): content for name, content in files.items()}
    for name, content in named.items():
        (folder / name).write_bytes(content)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in named.items()}
    (folder / "manifest.json").write_text(json.dumps({"files": digests}))
    return folder


def _layers_of(archive: Path) -> list[dict[str, bytes]]:
    """The files of each layer, from the lowest on."""
    with tarfile.open(archive) as outer:
        index = json.load(outer.extractfile("index.json") or pytest.fail("no index"))
        manifest = json.load(outer.extractfile(_blob(index["manifests"][0])) or pytest.fail("no manifest"))
        return [_files(outer.extractfile(_blob(layer)) or pytest.fail("no layer")) for layer in manifest["layers"]]


def _files(layer: IO[bytes]) -> dict[str, bytes]:
    with tarfile.open(fileobj=layer) as inner:
        return {
            member.name: (inner.extractfile(member) or pytest.fail("not a file")).read()
            for member in inner.getmembers()
            if member.isfile()
        }


def _blob(descriptor: dict[str, Any]) -> str:
    return "blobs/" + str(descriptor["digest"]).replace(":", "/")


def test_a_bundle_image_holds_what_its_manifest_names_and_nothing_else(build: Any, tmp_path: Path) -> None:
    folder = _bundle(tmp_path / "digits", backbone_onnx=b"graph", profile_json=b"{}")
    (folder / "notes.txt").write_text("mine")
    output = tmp_path / "digits.tar"
    digest = build.build_bundle(folder, "localhost/digits:1", output)
    (layer,) = _layers_of(output)
    assert set(layer) == {"manifest.json", "backbone.onnx", "profile.json"}
    assert layer["backbone.onnx"] == b"graph"
    assert build.build_bundle(folder, "localhost/digits:1", tmp_path / "again.tar") == digest


@pytest.mark.parametrize(
    ("manifest", "sentence"),
    [
        (None, "is not an exit bundle"),
        ("[]", "is not an exit bundle"),
        ('{"files": {"missing.onnx": "0"}}', "names 'missing.onnx', which is not a file beside it"),
        ('{"files": {"../secret": "0"}}', "names '../secret', which is not a file beside it"),
    ],
)
def test_what_is_no_bundle_is_refused_with_the_reason(
    build: Any, tmp_path: Path, manifest: str | None, sentence: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret").write_text("x")
    if manifest is not None:
        (folder / "manifest.json").write_text(manifest)
    command = [
        str(ROOT / "images" / "build"),
        "bundle",
        str(folder),
        "localhost/x:1",
        "--output",
        str(tmp_path / "x.tar"),
    ]
    answer = subprocess.run(command, check=False, capture_output=True, text=True)
    assert answer.returncode == 1
    assert sentence in answer.stderr
    assert not (tmp_path / "x.tar").exists()


def _env(lines: list[str]) -> dict[str, str]:
    return dict(line.removeprefix("ENV ").split("=", 1) for line in lines if line.startswith("ENV "))


def test_the_containerfile_says_what_the_build_says(build: Any) -> None:
    lines = (ROOT / "images" / "Containerfile").read_text().splitlines()
    of_all, of_cuda = (
        lines[: lines.index("FROM worker AS worker-cuda")],
        lines[lines.index("FROM worker AS worker-cuda") :],
    )
    assert _env(of_all) == build.environment()
    assert _env(of_all)["ORT_DISABLE_TELEMETRY"] == "1"
    assert _env(of_all) | _env(of_cuda) == build.environment(cuda=True)
    assert "COPY --from=build-cuda /out/cuda /" in of_cuda
    assert f"USER {build.NOBODY}" in lines
    assert all("python:3.11-slim" in line for line in lines if line.startswith("FROM python"))
    for part in build.PARTS.values():
        start = lines.index(f"FROM base AS {part.name}")
        stage = lines[
            start + 1 : next((i for i in range(start + 1, len(lines)) if lines[i].startswith("FROM")), len(lines))
        ]
        assert [line.removeprefix("EXPOSE ") for line in stage if line.startswith("EXPOSE")] == list(part.ports)
        assert f'ENTRYPOINT ["offramp-{part.name}"]' in stage
        assert f"COPY --from=build /out/{part.name} /" in stage
    copied = {
        word for line in lines if line.startswith("COPY ") and "--from" not in line for word in line.split()[1:-1]
    }
    ignored = (ROOT / "images" / "Containerfile.dockerignore").read_text().splitlines()
    assert copied == {line.removeprefix("!") for line in ignored if line.startswith("!")}
