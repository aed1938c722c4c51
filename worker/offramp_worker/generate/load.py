"""Load a bundle for generation and trust none of it: sizes, digests, names, types and shapes before memory is taken.
Nothing is executed.

A bundle holds no graph: the worker builds it from the sizes in the manifest
(:mod:`offramp_worker.generate.llama.graph`), so no file of it can name another file or an operator. Errors name the
file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from offramp_core.bundle import MANIFEST_FILE
from offramp_core.errors import InvalidBundleError
from offramp_worker.bundle.load import plain_file
from offramp_worker.bundle.task import GENERATE, MAX_MANIFEST_BYTES, declared_task
from offramp_worker.documents import MAX_CAUSE, parse_document
from offramp_worker.generate.llama.architecture import common_shapes, variant_shapes
from offramp_worker.generate.llama.bank import computes_alike
from offramp_worker.generate.llama.decoder import Cache, Decoder
from offramp_worker.generate.llama.engine import LlamaEngine
from offramp_worker.generate.llama.manifest import (
    COMMON_FILE,
    PROBE_FILE,
    PROFILE_FILE,
    FileEntry,
    GenerationManifest,
    GenerationProfile,
    VariantEntry,
    manifest_fault,
    weight_bytes,
)
from offramp_worker.generate.seam import REFERENCE, Loaded
from offramp_worker.generate.tokenizer import CONFIG_FILE, TOKENIZER_FILE, BundleTokenizer, load_tokenizer
from offramp_worker.logs import log_event
from offramp_worker.memory import WORTH_BYTES, return_memory, use_large_pages

Manifest = TypeVar("Manifest")
Profile = TypeVar("Profile")
Tensors = dict[str, npt.NDArray[Any]]
Shapes = Mapping[str, tuple[Any, tuple[int, ...]]]
TYPES: dict[Any, str] = {np.float32: "F32", np.uint8: "U8", np.int64: "I64"}
MOST_BYTES = {TOKENIZER_FILE: 256 * 2**20, CONFIG_FILE: 2**20, PROFILE_FILE: 2**20}
MAX_PROBE_TOKENS = 64
# Of the logits' own spread; kernels of few bits differ from CPU to CPU.
REFERENCE_TOLERANCE, ROUNDED_TOLERANCE = 0.01, 0.2


def load_generation(folder: Path, *, threads: int, cache_bytes: int, to_serve: bool = True) -> Loaded:
    """See :class:`offramp_worker.generate.seam.Loader`. What is loaded ``to_serve`` is moved into large pages."""
    manifest = read_manifest(folder)
    check_content(folder, manifest.files)
    profile = read_profile(folder / PROFILE_FILE, GenerationProfile)
    tokenizer = _tokenizer(folder, manifest)
    common = {name: (np.float32, shape) for name, shape in common_shapes(manifest.architecture).items()}
    shared = read_tensors(folder / COMMON_FILE, common)
    probe = _Probe(folder, manifest)
    decoders = {}
    for variant in manifest.variants:
        decoders[variant.name] = open_decoder(folder, manifest, variant, shared, threads=threads)
        probe.check(variant.name, decoders[variant.name])
    engine = LlamaEngine(
        manifest.bundle(profile),
        decoders,
        cache_bytes=cache_bytes,
        check=lambda: probe.check(REFERENCE, decoders[REFERENCE]),
        together=[name for name, decoder in decoders.items() if computes_alike(decoder)],
    )
    if to_serve and sum(weight_bytes(manifest.architecture, v) for v in manifest.variants) >= WORTH_BYTES:
        return_memory()  # else it would be moved too
        log_event("large-pages", bytes=use_large_pages())
    return Loaded(engine.bundle, engine, tokenizer)


def read_manifest(folder: Path) -> GenerationManifest:
    """The manifest, once it makes sense in itself.

    Raises
    ------
    InvalidBundleError
        It is missing, no manifest, or names the field that is wrong.
    """
    raw = manifest_bytes(folder)
    if (task := declared_task(folder)) != GENERATE:
        raise InvalidBundleError(f"{MANIFEST_FILE}: task is {task!r}; a bundle for generation says {GENERATE!r}")
    return parse_manifest(raw, GenerationManifest, fault=manifest_fault)


def manifest_bytes(folder: Path) -> bytes:
    """The manifest of a bundle that nobody trusts yet, whatever it says.

    Raises
    ------
    InvalidBundleError
        It is missing, no regular file or too large.
    """
    try:
        file = plain_file(folder / MANIFEST_FILE)
        if (size := file.stat().st_size) > MAX_MANIFEST_BYTES:
            raise InvalidBundleError(f"{MANIFEST_FILE}: has {size} bytes; at most {MAX_MANIFEST_BYTES} are read")
        return file.read_bytes()
    except OSError as error:
        raise InvalidBundleError(
            f"{MANIFEST_FILE}: cannot be read ({error.strerror}); is {folder} a bundle?"
        ) from error


def parse_manifest(raw: bytes, kind: type[Manifest], *, fault: Callable[[Manifest], str]) -> Manifest:
    """A manifest of a ``kind``, in which ``fault`` finds nothing wrong.

    Raises
    ------
    InvalidBundleError
        Names the field that is wrong.
    """
    try:
        manifest = parse_document(raw, kind)
    except ValueError as error:
        raise InvalidBundleError(f"{MANIFEST_FILE}: {error}") from error
    if wrong := fault(manifest):
        raise InvalidBundleError(f"{MANIFEST_FILE}: {wrong}")
    return manifest


def check_content(folder: Path, files: Mapping[str, FileEntry], *, most_bytes: Mapping[str, int] = MOST_BYTES) -> None:
    """Every listed file is a regular one of the size and SHA-256 that the manifest says. ``most_bytes`` has by name how
    many are read at most.

    Raises
    ------
    InvalidBundleError
        Names the file.
    """
    for name, entry in files.items():
        try:
            file = plain_file(folder / name)
            size = file.stat().st_size
            if size > most_bytes.get(name, entry.size) or size != entry.size:
                raise InvalidBundleError(
                    f"{name}: has {size} bytes; {MANIFEST_FILE} says {entry.size}, and at most "
                    f"{most_bytes.get(name, entry.size)} are read"
                )
            found = file_entry(file)
        except OSError as error:
            raise InvalidBundleError(
                f"{name}: cannot be read ({error.strerror}); the bundle in {folder} is incomplete"
            ) from error
        if found != entry:
            raise InvalidBundleError(
                f"{name}: its SHA-256 is not the one in {MANIFEST_FILE}; the bundle is damaged or tampered with"
            )


def file_entry(file: Path) -> FileEntry:
    """What a manifest says of a file."""
    with file.open("rb") as stream:
        return FileEntry(file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())


def read_profile(file: Path, kind: type[Profile]) -> Profile:
    """What was measured when the bundle was made.

    Raises
    ------
    InvalidBundleError
        It is no profile.
    """
    try:
        return parse_document(file.read_bytes(), kind)
    except (OSError, ValueError) as error:
        raise InvalidBundleError(f"{file.name}: {error}") from error


def read_tensors(file: Path, wanted: Shapes) -> Tensors:
    """The tensors of a file, exactly those that are wanted. Types and shapes are compared before memory is taken.

    Raises
    ------
    InvalidBundleError
        Names the file and the tensor.
    """
    try:
        with safe_open(file, framework="np") as content:
            if odd := sorted(set(content.keys()) ^ wanted.keys()):
                what = "lacks" if odd[0] in wanted else "has an unknown tensor"
                raise InvalidBundleError(
                    f"{file.name}: {what} {odd[0][:MAX_CAUSE]!r}; {MANIFEST_FILE} calls for {len(wanted)}"
                )
            for name, (kind, shape) in wanted.items():
                part = content.get_slice(name)
                found = part.get_dtype(), tuple(part.get_shape())
                if found != (TYPES[kind], shape):
                    raise InvalidBundleError(
                        f"{file.name}: {name} is {found[0]} {list(found[1])}; {MANIFEST_FILE} calls for {TYPES[kind]} "
                        f"{list(shape)}"
                    )
            return {name: content.get_tensor(name) for name in wanted}
    except (OSError, SafetensorError) as error:
        raise InvalidBundleError(f"{file.name}: cannot be read ({str(error)[:MAX_CAUSE]})") from error


def open_decoder(
    folder: Path, manifest: GenerationManifest, variant: VariantEntry, shared: Tensors, *, threads: int
) -> Decoder:
    """A variant, ready to run.

    Raises
    ------
    InvalidBundleError
        Its file does not fit, or the runtime refuses it.
    """
    wanted = variant_shapes(manifest.architecture, variant.bits, variant.head_bits)
    weights = shared | read_tensors(folder / variant.file, wanted)
    try:
        return Decoder(
            manifest.architecture, bits=variant.bits, head_bits=variant.head_bits, weights=weights, threads=threads
        )
    except Exception as error:  # the runtime raises bare ones
        raise InvalidBundleError(f"{variant.file}: the runtime refuses it: {str(error)[:MAX_CAUSE]}") from error


def _tokenizer(folder: Path, manifest: GenerationManifest) -> BundleTokenizer:
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocabulary > manifest.architecture.vocabulary:
        raise InvalidBundleError(
            f"{TOKENIZER_FILE}: has {tokenizer.vocabulary} tokens; the model knows {manifest.architecture.vocabulary}"
        )
    return tokenizer


class _Probe:
    """Tokens whose logits are known. A decoder that answers otherwise has other weights, or kernels that cannot be
    relied on."""

    def __init__(self, folder: Path, manifest: GenerationManifest) -> None:
        a = manifest.architecture
        tokens = _probe_tokens(folder / PROBE_FILE)
        wanted = {f"logits.{v.name}": (np.float32, (a.vocabulary,)) for v in manifest.variants}
        self._content = read_tensors(folder / PROBE_FILE, {"tokens": (np.int64, (tokens,)), **wanted})
        self._tokens = [int(t) for t in self._content["tokens"]]
        if any(not 0 <= t < a.vocabulary for t in self._tokens) or tokens > a.context_length:
            raise InvalidBundleError(f"{PROBE_FILE}: tokens are outside of the vocabulary or the context")
        if not all(np.isfinite(self._content[name]).all() for name in wanted):
            raise InvalidBundleError(f"{PROBE_FILE}: a logit is no finite number")

    def check(self, variant: str, decoder: Decoder) -> None:
        """Raises :class:`InvalidBundleError` unless it answers as it did when the bundle was made."""
        n = len(self._tokens)
        logits = decoder.run(Cache.of(decoder.architecture, n), self._tokens, start=0, rows=[n - 1])[0]
        known = self._content[f"logits.{variant}"]
        off = float(np.sqrt(np.mean((logits - known) ** 2)))
        most = (REFERENCE_TOLERANCE if variant == REFERENCE else ROUNDED_TOLERANCE) * float(known.std())
        if not off <= most:
            raise InvalidBundleError(
                f"{PROBE_FILE}: {variant} answers with logits that are {off:.3g} away from those known; at most "
                f"{most:.3g} is rounding"
            )


def _probe_tokens(file: Path) -> int:
    try:
        with safe_open(file, framework="np") as content:
            shape = content.get_slice("tokens").get_shape() if "tokens" in content.keys() else []  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InvalidBundleError(f"{PROBE_FILE}: cannot be read ({str(error)[:MAX_CAUSE]})") from error
    if len(shape) != 1 or not 1 <= shape[0] <= MAX_PROBE_TOKENS:
        raise InvalidBundleError(f"{PROBE_FILE}: tokens has the shape {list(shape)}; 1 to {MAX_PROBE_TOKENS} are read")
    return int(shape[0])
