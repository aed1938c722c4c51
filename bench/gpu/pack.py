"""``make bench-gpu-pack``: what ``make bench-gpu`` needs beside this repository, in one file of at most 64 MiB.

    uv run --no-project --with zstandard==0.25.0 bench/gpu/pack.py [--python 3.12] [--arch 90] [--out build/gpu-pack]

For a machine that has a GPU, its driver and a Python with PyTorch for CUDA 13 (whose libraries ONNX Runtime uses), but
no network. The file holds the worker's own packages at the versions of ``requirements.lock`` and ONNX Runtime's CUDA
package. That one is 280 MB: kernels for six generations of GPUs, most of which are attention with caches and mixtures
of experts of language models. Kept are those for ``--arch`` that other models use; the rest is zeros, which take no
room in an archive and keep the library's layout as its loader knows it.
"""

from __future__ import annotations

import argparse
import io
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements.lock"
CUDA_LOCK = ROOT / "images/cuda.txt"
PACKED = "packages.tar.xz"
MOST_BYTES = 64 * 2**20
# Of the worker and of its tests, what an image with PyTorch, transformers and pytest does not bring along.
PACKAGES = (
    "annotated-doc",
    "annotated-types",
    "cffi",
    "cryptography",
    "fastapi",
    "httptools",
    "httpx-auth",
    "msgspec",
    "opentelemetry-api",
    "orjson",
    "pycparser",
    "pydantic",
    "pydantic-core",
    "starlette",
    "typing-inspection",
    "uvicorn",
)
LIBRARY = "onnxruntime/capi/libonnxruntime_providers_cuda.so"
UNUSED = (
    "onnxruntime/capi/libonnxruntime_providers_tensorrt.so",
    "onnxruntime/tools/",
    "onnxruntime/transformers/models/",
)
OF_LANGUAGE_MODELS = re.compile(rb"flash_fwd|[Mm]oe|MOE|GroupProblemShape|fpA_intB|3llm")
TEXT_SECTION = re.compile(rb"\.text\.([A-Za-z0-9_]+)")

# A fat binary (the CUDA toolkit's fatbinary_section.h has its outer header): magic, version, header size, size; then
# entries, whose header has at 0 the kind, at 4 its size, at 8 the size of what follows, at 16 that size compressed, at
# 28 the architecture and at 56 the size uncompressed.
MAGIC, OUTER, ENTRY = struct.pack("<I", 0xBA55ED50), struct.Struct("<IHHQ"), struct.Struct("<HHIQIIHHI")
UNCOMPRESSED_AT, VERSION = 56, 1


@dataclass(frozen=True, slots=True)
class Code:
    """One architecture's code of one source file within a library: where its bytes lie, and how they are compressed."""

    arch: int
    begin: int
    size: int
    compressed: int
    uncompressed: int


def codes(library: bytes) -> Iterator[Code]:
    """All code for GPUs in a library."""
    at = library.find(MAGIC)
    while at >= 0:
        _, version, header, size = OUTER.unpack_from(library, at)
        end = at + header + size
        if version != VERSION or header != OUTER.size or end > len(library):
            at = library.find(MAGIC, at + len(MAGIC))
            continue
        entry = at + header
        while entry < end:
            _, _, own, length, compressed, _, _, _, arch = ENTRY.unpack_from(library, entry)
            (uncompressed,) = struct.unpack_from("<Q", library, entry + UNCOMPRESSED_AT)
            yield Code(arch, entry + own, length, compressed, uncompressed)
            entry += own + length
        at = library.find(MAGIC, end)


def without_other_code(library: bytes, *, arch: int) -> bytes:
    """The library with zeros in place of code for other architectures, and of what only language models run."""
    import zstandard

    kept = bytearray(library)
    for code in codes(library):
        if code.arch == arch:
            packed = library[code.begin : code.begin + (code.compressed or code.size)]
            plain = zstandard.ZstdDecompressor().decompress(packed, max_output_size=code.uncompressed + 64)
            kernels = set(TEXT_SECTION.findall(plain))
            if not kernels or not all(OF_LANGUAGE_MODELS.search(name) for name in kernels):
                continue
        kept[code.begin : code.begin + code.size] = bytes(code.size)
    return bytes(kept)


def locked(lock: str, names: tuple[str, ...]) -> str:
    """The lines of a lock file about these packages, with their hashes."""
    blocks = re.split(r"\n(?=\S)", lock)
    wanted = {name.replace("-", "_") for name in names}
    found = {b.split("==")[0].replace("-", "_").lower(): b for b in blocks if "==" in b.split("\n")[0]}
    if missing := wanted - found.keys():
        raise SystemExit(f"{LOCK.name} has no {', '.join(sorted(missing))}")
    return "\n".join(found[name] for name in sorted(wanted)) + "\n"


def fetch(requirements: str, folder: Path, *, python: str) -> list[Path]:
    """The wheels for that version of Python, checked against their hashes."""
    file = folder / "requirements.txt"
    file.write_text(requirements)
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 26, 24, 17, 12, 5)] + ["manylinux2014_x86_64"]
    command = [str(ROOT / ".venv/bin/python"), "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--require-hashes", "--python-version", python]
    command += [part for platform in platforms for part in ("--platform", platform)]
    subprocess.run([*command, "--implementation", "cp", "-d", str(folder), "-r", str(file)], check=True)
    return sorted(folder.glob("*.whl"))


def pack(out: Path, *, python: str, arch: int) -> Path:
    """Write the file; raise SystemExit where it is too large."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, tarfile.open(out / PACKED, "w:xz", preset=9) as archive:
        requirements = locked(LOCK.read_text(), PACKAGES) + locked(CUDA_LOCK.read_text(), ("onnxruntime-gpu",))
        for wheel in fetch(requirements, Path(folder), python=python):
            with zipfile.ZipFile(wheel) as content:
                for name in sorted(content.namelist()):
                    if name.endswith("/") or name.startswith(UNUSED):
                        continue
                    data = content.read(name)
                    _add(archive, name, without_other_code(data, arch=arch) if name == LIBRARY else data)
    size = (out / PACKED).stat().st_size
    if size > MOST_BYTES:
        raise SystemExit(f"{out / PACKED} has {size / 2**20:.1f} MiB, more than {MOST_BYTES / 2**20:.0f}")
    print(f"{out / PACKED}: {size / 2**20:.1f} MiB for Python {python} and sm_{arch}")
    return out / PACKED


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o644
    archive.addfile(entry, io.BytesIO(data))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="pack what make bench-gpu needs on a machine without a network")
    parser.add_argument("--python", default="3.12", help="of that machine, such as 3.12")
    parser.add_argument("--arch", type=int, default=90, help="its GPU's compute capability: 80 A100, 89 L4, 90 H100")
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu-pack")
    options = parser.parse_args(arguments)
    pack(options.out, python=options.python, arch=options.arch)


if __name__ == "__main__":
    main(sys.argv[1:])
