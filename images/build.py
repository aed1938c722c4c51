"""Build the images of Offramp as OCI images, without a container engine.

An image of the operator or of the worker has three layers, from what changes least to what changes most: Debian with
Python, the pinned dependencies of that part, and the project's own code. Each is kept by what it is made of, so an edit
of the code rebuilds the last layer only, which takes a second. A worker for NVIDIA's GPUs has one layer more, between
the worker's dependencies and its code: ONNX Runtime with the CUDA provider, and the libraries that it loads. A bundle
image has one layer, the files of an exit bundle; pods mount it as an image volume.

Commands::

    build.py operator NAME:TAG [--output PATH]
    build.py worker NAME:TAG [--cuda] [--output PATH]
    build.py bundle DIR NAME:TAG [--output PATH]
    build.py stage operator|worker|cuda DIR      what the Containerfile puts together in its own way

The output is an OCI layout folder (``build/images/...``), or an archive when it ends in ``.tar``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "cluster"))

from oci_image import ImageConfig, ImageError, Layer, build_image, default_cache  # noqa: E402

PYTHON_VERSION = (3, 11)  # of the base layer; compiled files fit no other
PLATFORM = f"{os.uname().machine}-manylinux_2_28"
PREFIX = "opt/offramp"
NOBODY = "65532:65532"
PINNED = ("--require-hashes", "--no-deps", "--only-binary", ":all:")
CUDA_LOCK = ROOT / "images" / "cuda.txt"
REQUIRED_CUDA = "cuda>=13.0"  # of the node's driver
# Of NVIDIA's packages, what is for building programs, and libraries that ONNX Runtime's CUDA provider does not load.
NOT_LOADED = ("include", "*.a", "libcufftw.so*", "libnvblas.so*")


@dataclass(frozen=True, slots=True)
class Part:
    """One of the two programs.

    ``packages`` are folders of the project, ``without`` names below them that the image does not need. ``unused`` are
    distributions that the extra asks for and this program never imports, ``extras`` more of the project's extras.
    """

    name: str
    packages: tuple[str, ...]
    module: str
    ports: tuple[str, ...]
    without: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()


PARTS = {
    "operator": Part(
        "operator", ("core/offramp_core", "operator/offramp_operator"), "offramp_operator.main", ("8080/tcp",)
    ),
    # Of `prepare` it has what trains heads on captured inputs, without PyTorch; nothing of it needs SciPy.
    "worker": Part(
        "worker",
        ("core/offramp_core", "worker/offramp_worker"),
        "offramp_worker.main",
        ("8080/tcp", "8081/tcp"),
        without=tuple(
            f"offramp_worker/prepare/{name}"
            for name in (
                "families",
                "generation",
                "picture.py",
                "heads/distillation.py",
                "variants/distilling.py",
                "variants/twin.py",
            )
        ),
        unused=("scipy",),
        extras=("tracing",),
    ),
}


class BuildError(Exception):
    """The image cannot be built; the message says what to do."""


# --- dependencies ----------------------------------------------------------------------------------


def requirements(part: Part) -> str:
    """The blocks of ``requirements.lock`` that this part needs: pinned and hashed, and nothing else.

    Which ones these are is resolved anew from the part's extra, with the lock as the only versions allowed.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (part.name, *part.extras)
    wanted = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    with tempfile.NamedTemporaryFile("w", suffix=".in") as file:
        file.write("\n".join(line for line in wanted if _name(line) not in part.unused))
        file.flush()
        resolved = _uv(
            "compile", file.name, "--constraint", str(ROOT / "requirements.lock"), "--no-annotate", "--no-header"
        )
    names = {_name(line) for line in resolved.splitlines() if line} - set(part.unused)
    whole = (ROOT / "requirements.lock").read_text()
    return "".join(block for block in lock_blocks(whole) if _name(block) in names)


def lock_blocks(text: str) -> list[str]:
    """The pins of a lock file, each with the lines of its hashes."""
    return [
        block for block in re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE) if re.match(r"[A-Za-z0-9]", block)
    ]


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", match[0]).lower() if match else ""


def _uv(command: str, *arguments: str) -> str:
    uv = shutil.which("uv") or str(ROOT / ".venv" / "bin" / "uv")
    version = ".".join(map(str, PYTHON_VERSION))
    options = ["--quiet", "--python-version", version, "--python-platform", PLATFORM]
    try:
        answer = subprocess.run([uv, "pip", command, *options, *arguments], check=False, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise BuildError("uv is missing; run `make setup`") from error
    if answer.returncode != 0:
        raise BuildError(f"uv pip {command} failed: {answer.stderr.strip()}")
    return answer.stdout


def dependencies(part: Part) -> Path:
    """A folder with the part's dependencies installed and compiled."""
    return installed(part.name, requirements(part))


def cuda_libraries() -> Path:
    """A folder with what a worker on an NVIDIA GPU has beside its dependencies: ``images/cuda.txt``, without what
    nothing loads."""
    return installed("cuda", CUDA_LOCK.read_text(), NOT_LOADED)


def installed(name: str, pins: str, unwanted: Sequence[str] = ()) -> Path:
    """A folder with pinned distributions, made once per content of their pins."""
    key = hashlib.sha256(
        json.dumps(
            [pins, unwanted, PLATFORM, PYTHON_VERSION, inspect.getsource(install), inspect.getsource(compile_folder)]
        ).encode()
    ).hexdigest()[:16]
    folder = default_cache().root.parent / "images" / f"{name}-{key}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
            made = Path(scratch) / "lib"
            install(pins, made, unwanted)
            with contextlib.suppress(OSError):  # somebody else was quicker
                made.rename(folder)
    return folder


def install(pins: str, target: Path, unwanted: Sequence[str] = ()) -> None:
    """Install pinned wheels into a folder, without files and folders of ``unwanted`` names."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(pins)
        file.flush()
        _uv("install", *PINNED, "--link-mode", "copy", "--target", str(target), "--requirement", file.name)
    # Commands of the dependencies point at the interpreter of the machine that built the image.
    shutil.rmtree(target / "bin", ignore_errors=True)
    (target / ".lock").unlink(missing_ok=True)
    for pattern in unwanted:
        for path in [*target.rglob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    compile_folder(target)


def compile_folder(folder: Path) -> None:
    """Compile every module. Unchecked, because an image has one time for all files and is never edited.

    In a process of its own: which strings of a compiled file are references hangs on what else its process knows.
    """
    if sys.version_info[:2] != PYTHON_VERSION:
        raise BuildError(
            f"run this with Python {'.'.join(map(str, PYTHON_VERSION))}, the version in the image; this is "
            f"{sys.version.split()[0]}"
        )
    options = ["-qq", "--invalidation-mode", "unchecked-hash", "-s", str(folder), "-p", f"/{PREFIX}"]
    command = [sys.executable, "-S", "-m", "compileall", *options, str(folder)]
    subprocess.run(command, check=False, env={"PYTHONHASHSEED": "0"})  # templates that are no modules do not compile


# --- code ------------------------------------------------------------------------------------------


def code(part: Part, target: Path) -> None:
    """Put the project's own code and the command that starts it under ``target``, which becomes ``/``."""
    library = target / PREFIX / "app"
    unwanted = {ROOT / package.split("/")[0] / path for package in part.packages for path in part.without}

    def ignored(folder: str, names: list[str]) -> Iterable[str]:
        return [name for name in names if name == "__pycache__" or Path(folder) / name in unwanted]

    for package in part.packages:
        shutil.copytree(ROOT / package, library / Path(package).name, ignore=ignored)
    compile_folder(library)
    command = target / "usr" / "local" / "bin" / f"offramp-{part.name}"
    command.parent.mkdir(parents=True)
    command.write_text(f"#!/usr/bin/env python3\nimport sys\n\nfrom {part.module} import main\n\nsys.exit(main())\n")
    command.chmod(0o755)


def environment(*, cuda: bool = False) -> dict[str, str]:
    """What every process of an image needs, on an NVIDIA GPU with ``cuda``.

    Nothing is ever written: the root file system is read-only, and everything is compiled already. Nothing is reported
    either: ONNX Runtime's wheels for Linux send usage data, names and hashes of models included, unless they are told
    not to. NVIDIA's container runtime reads what of the driver it shall hand over, and where it shall refuse to start;
    which devices a container gets is for the device plugin to say, and not for the image.
    """
    own = {
        "ORT_DISABLE_TELEMETRY": "1",
        "PYTHONPATH": f"/{PREFIX}/app:/{PREFIX}/lib",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if not cuda:
        return own
    return own | {
        "PYTHONPATH": f"/{PREFIX}/app:/{PREFIX}/cuda:/{PREFIX}/lib",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        "NVIDIA_REQUIRE_CUDA": REQUIRED_CUDA,
    }


# --- images ----------------------------------------------------------------------------------------


def base() -> Path:
    """The lowest layer: Debian with Python, made once by ``cluster/base-image``."""
    answer = subprocess.run([ROOT / "cluster" / "base-image"], check=False, stdout=subprocess.PIPE, text=True)
    if answer.returncode != 0:
        raise BuildError("cluster/base-image failed; its message stands above")
    return Path(answer.stdout.strip().splitlines()[-1])


def build_part(part: Part, name: str, output: Path, *, cuda: bool = False) -> str:
    """Write the image of a program; the digest of its manifest."""
    with timed("base layer"):
        lowest = base()
    with timed("dependencies"):
        libraries = {"lib": dependencies(part)} | ({"cuda": cuda_libraries()} if cuda else {})
    with timed("image"):
        digest = write_image(part, name, output, lowest=lowest, libraries=libraries)
    for place, folder in libraries.items():
        say_size(f"/{PREFIX}/{place}", folder)
    return digest


def write_image(part: Part, name: str, output: Path, *, lowest: Path, libraries: Mapping[str, Path]) -> str:
    """Put the layers of a program together: what it stands on, its ``libraries`` by their place, and its code."""
    with tempfile.TemporaryDirectory() as scratch:
        code(part, Path(scratch))
        layers = [
            Layer(source=lowest),
            *(Layer(source=folder, target=f"/{PREFIX}/{place}") for place, folder in libraries.items()),
            Layer(source=Path(scratch)),
        ]
        config = ImageConfig(
            entrypoint=(f"offramp-{part.name}",),
            env=environment(cuda="cuda" in libraries),
            user=NOBODY,
            working_dir="/",
            ports=part.ports,
        )
        return build_image(name=name, layers=layers, config=config, output=output)


def build_bundle(folder: Path, name: str, output: Path) -> str:
    """Write a bundle as an image; only the files its manifest names get in."""
    try:
        files = json.loads((folder / "manifest.json").read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BuildError(f"{folder} is not an exit bundle ({error}); `offramp prepare` makes one") from error
    with tempfile.TemporaryDirectory() as scratch, timed("bundle"):
        for file in ["manifest.json", *files]:
            if "/" in file or not (folder / file).is_file():
                raise BuildError(f"{folder}/manifest.json names {file!r}, which is not a file beside it")
            shutil.copyfile(folder / file, Path(scratch) / file)
        return build_image(name=name, layers=[Layer(source=Path(scratch))], config=ImageConfig(), output=output)


def stage(what: str, target: Path) -> None:
    """Dependencies and code of a part in one tree, or what ``cuda`` adds, for the Containerfile."""
    if what == "cuda":
        install(CUDA_LOCK.read_text(), target / PREFIX / "cuda", NOT_LOADED)
        return
    install(requirements(PARTS[what]), target / PREFIX / "lib")
    code(PARTS[what], target)


# --- command line ----------------------------------------------------------------------------------


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    print(f"{time.monotonic() - start:7.1f} s  {what}", file=sys.stderr)


def size_bytes(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    return (
        path.stat().st_size
        if path.is_file()
        else sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
    )


def say_size(what: str, path: Path) -> None:
    print(f"{size_bytes(path) / 1e6:7.1f} MB {what}", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="images/build", description=(__doc__ or "").splitlines()[0])
    commands = result.add_subparsers(dest="what", required=True)
    for part in PARTS:
        command = commands.add_parser(part, help=f"the image of the {part}")
        command.add_argument("name", metavar="NAME:TAG")
        command.add_argument("--output", type=Path, help=f"folder, or archive FILE.tar (default: build/images/{part})")
        if part == "worker":
            command.add_argument("--cuda", action="store_true", help="for NVIDIA's GPUs: 2.5 GB more")
    bundle = commands.add_parser("bundle", help="an exit bundle, to be mounted as an image volume")
    bundle.add_argument("folder", type=Path, metavar="DIR", help="what `offramp prepare` wrote")
    bundle.add_argument("name", metavar="NAME:TAG")
    bundle.add_argument("--output", type=Path, help="folder, or archive FILE.tar (default: build/images/bundle-DIR)")
    staged = commands.add_parser("stage", help="files of an image without its base, for images/Containerfile")
    staged.add_argument("part", choices=[*PARTS, "cuda"])
    staged.add_argument("folder", type=Path, metavar="DIR")
    return result


def main() -> int:
    options = parser().parse_args()
    try:
        if options.what == "stage":
            stage(options.part, options.folder)
            return 0
        cuda = getattr(options, "cuda", False)
        program = f"{options.what}-cuda" if cuda else options.what
        default = program if options.what in PARTS else f"bundle-{options.folder.resolve().name}"
        output = options.output or ROOT / "build" / "images" / default
        if options.what == "bundle":
            digest = build_bundle(options.folder, options.name, output)
        else:
            digest = build_part(PARTS[options.what], options.name, output, cuda=cuda)
    except (BuildError, ImageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    say_size(f"{options.name} {digest}", output)
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
