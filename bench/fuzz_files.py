"""``python -m bench.fuzz files``: damaged and hostile files of every format that is read, thousands of them. Writes
build/bench/fuzz-files.json.

Every case is one file, or a whole bundle, changed by :mod:`bench.fuzz_mutations`, and read as the product reads it, in
a process of its own with limits of time and memory, in a folder of its own. Right are: one of our own errors, in one
line; or answers that are the model's, as ONNX Runtime gives them for the same file. Wrong are: a process that dies,
does not end or runs out of memory; any other exception; another answer; code of the file's that ran; a program or
connection that was started; a file that was written, or read outside of the case's folder.

A case is named by its seed and number: ``--seed 3 --only 17`` runs it again, and ``--keep`` leaves its files in
build/bench/fuzz-files.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import fuzz_mutations as mutations

ROOT = Path(__file__).parents[1]
CPU_SECONDS = 60  # of a case; conversions take a few
SECONDS = 300.0  # by the clock, for what waits and does not compute; the machine may be busy
LONGEST_CHILD = 65_536  # bytes of what a case tells
GIBIBYTE = 2**30
MEMORY = 3 * GIBIBYTE  # of address space, beyond what the libraries take
LONGEST_MESSAGE = 4_000
ROWS = np.random.default_rng(5).normal(size=(24, 4)).astype(np.float32)
READABLE = (
    "/proc/",
    "/sys/",
    "/dev/",
    "/usr/",
    "/lib",
    "/etc/",
    "/opt/",
)  # the libraries' own; /etc/passwd is looked for in answers
STARTED = frozenset(
    {
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "os.fork",
        "subprocess.Popen",
        "socket.connect",
        "ctypes.dlopen",
    }
)
CHANGED = frozenset(
    {
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.mkdir",
        "os.symlink",
        "os.link",
        "os.chmod",
        "os.truncate",
        "shutil.rmtree",
    }
)


@dataclass(frozen=True, slots=True)
class Kind:
    """How a case is made in a folder, of the seeds, and how it is read: what its answers should be like is part of
    ``read``."""

    make: Callable[[random.Random, Path, Path], None]
    read: Callable[[Path], str]
    weight: int = 1


# --- seeds ------------------------------------------------------------------------------------------------------------


def make_seeds(folder: Path) -> None:
    """Valid files of every format, small ones; made in a process of its own, so that children are forked from one
    without threads."""
    sys.path.insert(0, str(ROOT / "tests" / "worker"))
    import bundles
    import hostile
    import prepared
    import test_hostile_models as models
    from PIL import Image
    from safetensors.numpy import save_file

    (folder / "checkpoint").mkdir()
    bundles.write_wide_bundle(folder / "bundle")
    (folder / "m.pt2").write_bytes(hostile.program_archive())
    import torch
    from onnx import helper, numpy_helper

    state = {name: value.detach().numpy() for name, value in hostile.state().items()}
    nodes = [
        helper.make_node("Gemm", ["x", "0.weight", "0.bias"], ["h"], transB=1),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Gemm", ["r", "2.weight", "2.bias"], ["z"], transB=1),
        helper.make_node("Add", ["z", "w"], ["y"]),
    ]
    branch = models.branch(numpy_helper.from_array(np.zeros(3, np.float32), "inner"))
    nodes.insert(0, helper.make_node("If", ["yes"], ["w"], then_branch=branch, else_branch=branch))
    tensors = [numpy_helper.from_array(value, name) for name, value in state.items()]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, ["batch", 4])],
        [helper.make_tensor_value_info("y", 1, ["batch", 3])],
        [*tensors, numpy_helper.from_array(np.array(True), "yes")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    weights = {
        name: np.ascontiguousarray(value.numpy()) for name, value in prepared.trained_model().state_dict().items()
    }
    save_file(weights, folder / "checkpoint" / "tiny.safetensors")
    np.savez(folder / "data.npz", x=ROWS)
    np.savez(folder / "images.npz", x=prepared.images(20, seed=4)[0])
    from test_prepare_data import tokenizer_file

    tokenizer_file(folder)
    Image.fromarray((np.arange(300) % 255).astype(np.uint8).reshape(10, 10, 3)).save(folder / "image.png")
    torch.manual_seed(0)


# --- kinds ------------------------------------------------------------------------------------------------------------


def _bundle(seeds: Path, case: Path) -> Path:
    shutil.copytree(seeds / "bundle", case / "bundle")
    return case / "bundle"


def _fit_manifest(folder: Path) -> None:
    """Let the manifest's hashes and digests be those of the files, so that what is behind them is reached."""
    import msgspec

    from offramp_core.bundle import Manifest, ramp_set_digest

    document = json.loads((folder / "manifest.json").read_bytes())
    for name in document["files"]:
        if (folder / name).is_file():  # not a pipe or a device, which would be read for ever
            document["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    document["backbone_digest"] = "sha256:" + document["files"]["backbone.onnx"]
    manifest = msgspec.convert(document, type=Manifest)
    document["ramp_set_digest"] = ramp_set_digest(manifest.ramps, manifest.files, manifest.precisions)
    (folder / "manifest.json").write_text(json.dumps(document))


def _of_member(name: str, mutate: mutations.Mutate) -> Callable[[random.Random, Path, Path], None]:
    def make(rng: random.Random, seeds: Path, case: Path) -> None:
        folder = _bundle(seeds, case)
        (folder / name).write_bytes(mutate(rng, (folder / name).read_bytes()))
        if name != "manifest.json":
            _fit_manifest(folder)

    return make


def _manifest_that_fits(rng: random.Random, seeds: Path, case: Path) -> None:
    """A changed manifest whose digests are right as far as it can be read."""
    folder = _bundle(seeds, case)
    (folder / "manifest.json").write_bytes(mutations.json_of(rng, (folder / "manifest.json").read_bytes()))
    try:
        _fit_manifest(folder)
    except Exception:  # it is no manifest any more, which is a case as well
        return


def _whole_bundle(rng: random.Random, seeds: Path, case: Path) -> None:
    """Files of a bundle removed, exchanged for each other, for links or folders, or damaged without telling the
    manifest."""
    folder = _bundle(seeds, case)
    files = sorted(folder.iterdir())
    for _ in range(rng.choice((1, 1, 2))):
        file, other = rng.choice(files), rng.choice(files)
        match rng.randrange(6):
            case 0:
                file.unlink(missing_ok=True)
            case 1 if other.is_file():
                content = other.read_bytes()
                file.unlink(missing_ok=True)
                file.write_bytes(content)
            case 2:
                file.unlink(missing_ok=True)
                file.symlink_to(rng.choice(("/etc/passwd", f"../{mutations.CANARY}", "/dev/zero", file.name)))
            case 3 if file.is_file() and not file.is_symlink():
                file.write_bytes(mutations.bytes_of(rng, file.read_bytes()))
            case 4:
                file.unlink(missing_ok=True)
                os.mkfifo(file) if rng.random() < 0.3 else file.mkdir()
                files.remove(file)
            case _:
                (folder / rng.choice(("extra", "backbone.int4.onnx", "manifest.json.bak"))).write_bytes(b"x")
    if rng.random() < 0.5:
        try:
            _fit_manifest(folder)
        except Exception:  # as above
            return


def _archive(rng: random.Random, seeds: Path, case: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=rng.choice(("w", "w:gz"))) as tar:
        tar.add(seeds / "bundle", "bundle")
        if rng.random() < 0.3:
            entry = tarfile.TarInfo(rng.choice(("../x", "/tmp/x", "bundle/../../x", "bundle/link")))
            entry.type = rng.choice((tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE))
            entry.linkname = "/etc/passwd"
            tar.addfile(entry)
    (case / "bundle.tar").write_bytes(mutations.bytes_of(rng, buffer.getvalue()))


def _file(name: str, mutate: mutations.Mutate, *others: str) -> Callable[[random.Random, Path, Path], None]:
    def make(rng: random.Random, seeds: Path, case: Path) -> None:
        for other in others:
            shutil.copyfile(seeds / other, case / Path(other).name)
        (case / Path(name).name).write_bytes(mutate(rng, (seeds / name).read_bytes()))

    return make


def _texts(rng: random.Random, seeds: Path, case: Path) -> None:
    shutil.copyfile(seeds / "tokenizer.json", case / "tokenizer.json")
    lines = [{"text": "a good film", "label": 1}, "good", {"text": "a", "text_pair": "b"}]
    raw = "\n".join(json.dumps(line) for line in lines).encode()
    mutate = mutations.bytes_of if rng.random() < 0.5 else _lines_of
    (case / "rows.jsonl").write_bytes(mutate(rng, raw))


def _lines_of(rng: random.Random, raw: bytes) -> bytes:
    lines = raw.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = mutations.json_of(rng, b"[%s]" % lines[at])[1:-1]
    return b"\n".join(lines)


def _image(rng: random.Random, seeds: Path, case: Path) -> None:
    (case / "images").mkdir()
    (case / "images" / "a.png").write_bytes((seeds / "image.png").read_bytes())
    raw = bytearray((seeds / "image.png").read_bytes())
    if rng.random() < 0.3:
        raw[16:24] = rng.choice((b"\x00\x01\x00\x00" * 2, b"\x7f\xff\xff\xff" * 2, bytes(8)))
    (case / "images" / f"b{rng.choice(('.png', '.jpg', '.webp', '.bmp'))}").write_bytes(
        mutations.bytes_of(rng, bytes(raw))
    )


def _serve(folder: Path) -> str:
    """A bundle that loads must answer as its own backbone does, as the probe says, and under a plan with all of its
    exits."""
    import onnxruntime as ort

    from offramp_worker.bundle.load import check_files, load_bundle
    from offramp_worker.engine.execution.sessions import Sessions

    check_files(folder)
    bundle = load_bundle(folder)
    sessions = Sessions(bundle, threads=1)
    said = sessions.exact(bundle.probe_x)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    own = ort.InferenceSession((folder / "backbone.onnx").read_bytes(), options, providers=["CPUExecutionProvider"])
    (wanted,) = own.run(None, {bundle.manifest.inputs[0].name: bundle.probe_x})
    _must_agree(said, wanted)
    for precision in bundle.backbones:
        active = [
            j for j, column in enumerate(bundle.columns) if column.precision == precision and column.head != "final"
        ]
        sessions.stages(active[:1], precision)
    return "served"


def _read_bundle(case: Path) -> str:
    return _serve(case / "bundle")


def _read_archive(case: Path) -> str:
    from offramp_worker.fetch.download import DownloadLimits
    from offramp_worker.fetch.unpack import unpack

    return _serve(unpack(case / "bundle.tar", case / "unpacked", limits=DownloadLimits(bytes=2**28, files=100)))


def _read_program(case: Path) -> str:
    from offramp_worker.prepare.source.sources import load_backbone

    backbone = load_backbone(str(case / "m.pt2"), ROWS)
    return _answered(backbone)


def _read_onnx(case: Path) -> str:
    import onnxruntime as ort

    from offramp_worker.prepare.source.sources import load_backbone

    backbone = load_backbone(str(case / "m.onnx"), ROWS)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    own = ort.InferenceSession((case / "m.onnx").read_bytes(), options, providers=["CPUExecutionProvider"])
    batch = own.get_inputs()[0].shape[0]
    rows = ROWS[: batch if isinstance(batch, int) else 1]
    _must_agree(_run(backbone, rows), own.run(None, {backbone.input.name: rows})[-1])
    return "served"


def _read_checkpoint(case: Path) -> str:
    from offramp_core.npz import read_npz
    from offramp_worker.prepare.source.sources import load_backbone

    with (case / "images.npz").open("rb") as file:
        x = read_npz(file)["x"]
    uri = f"family:resnet?weights={case / 'tiny.safetensors'}&blocks=1&width=8&channels=1&classes=4"
    return _answered(load_backbone(uri, x), x)


def _answered(backbone: Any, x: Any = ROWS) -> str:
    logits = _run(backbone, x)
    if logits.shape != (len(x), backbone.n_classes) or not np.isfinite(logits[:16]).all():
        raise AssertionError(f"answers {logits.shape} of {backbone.n_classes} classes")
    return "served"


def _run(backbone: Any, x: Any) -> Any:
    from offramp_worker.devices import open_session

    return open_session(backbone.model, threads=1).run(None, {backbone.input.name: x})[0]


def _must_agree(said: Any, wanted: Any) -> None:
    if said.shape != wanted.shape or not np.allclose(
        said, wanted, rtol=2e-3, atol=2e-3 * max(1.0, float(np.abs(wanted).max()))
    ):
        raise AssertionError("its answers are not the model's own")


def _read_data(case: Path) -> str:
    from offramp_worker.prepare.source.data import load_inputs

    load_inputs(str(case / "data.npz"))
    return "read"


def _read_images(case: Path) -> str:
    from offramp_worker.prepare.source.data import load_inputs

    load_inputs(str(case / "images"))
    return "read"


def _read_texts(case: Path) -> str:
    from offramp_worker.prepare.source.data import load_inputs
    from offramp_worker.preprocess.texts import load_tokenizer

    reader = load_tokenizer(case / "tokenizer.json", most=32)
    if not (case / "rows.jsonl").exists():
        reader.encode(["a good film", ("a", "film"), "a" * 3_000 + "!", ""])
        return "read"
    load_inputs(str(case / "rows.jsonl"), texts=reader)
    return "read"


def _read_records(case: Path) -> str:
    from offramp_cli.npz import read_npz
    from offramp_core.records import records_from_arrays

    records_from_arrays(read_npz(case / "records.npz"))
    return "read"


KINDS = {
    "manifest": Kind(_of_member("manifest.json", mutations.json_of), _read_bundle, 2),
    "manifest with right digests": Kind(_manifest_that_fits, _read_bundle, 4),
    "backbone": Kind(_of_member("backbone.onnx", mutations.onnx_of), _read_bundle, 6),
    "int8 backbone": Kind(_of_member("backbone.int8.onnx", mutations.onnx_of), _read_bundle, 2),
    "model at the input": Kind(_of_member("ramp-in.small.onnx", mutations.onnx_of), _read_bundle, 2),
    "ramps": Kind(_of_member("ramps.safetensors", mutations.safetensors_of), _read_bundle, 3),
    "records": Kind(_of_member("records.npz", mutations.npz_of), _read_bundle, 3),
    "probe": Kind(_of_member("probe.npz", mutations.npz_of), _read_bundle, 3),
    "profile": Kind(_of_member("profile.json", mutations.json_of), _read_bundle, 3),
    "whole bundle": Kind(_whole_bundle, _read_bundle, 3),
    "archive of a bundle": Kind(_archive, _read_archive, 3),
    "torch.export": Kind(_file("m.pt2", mutations.program_of), _read_program, 8),
    "ONNX": Kind(_file("m.onnx", mutations.onnx_of), _read_onnx, 8),
    "safetensors": Kind(
        _file("checkpoint/tiny.safetensors", mutations.safetensors_of, "images.npz"), _read_checkpoint, 4
    ),
    "inputs": Kind(_file("data.npz", mutations.npz_of), _read_data, 3),
    "tokenizer": Kind(_file("tokenizer.json", mutations.json_of), _read_texts, 4),
    "texts": Kind(_texts, _read_texts, 2),
    "images": Kind(_image, _read_images, 2),
    "records for replay": Kind(_file("bundle/records.npz", mutations.npz_of), _read_records, 2),
}


# --- cases ------------------------------------------------------------------------------------------------------------


def kind_of(seed: int, number: int) -> str:
    """The kind of a case, in proportion to the weights."""
    rng = random.Random(f"kind {seed} {number}")
    return rng.choices(list(KINDS), [kind.weight for kind in KINDS.values()])[0]


def run_case(seed: int, number: int, seeds: Path, case: Path) -> dict[str, str]:
    """Make a case in folder ``case`` and read it, in this process, watched."""
    kind = KINDS[kind_of(seed, number)]
    rng = random.Random(f"case {seed} {number}")
    _limit()
    try:
        kind.make(rng, seeds, case)
    except (
        TypeError,
        ValueError,
        OverflowError,
    ) as error:  # the mutation does not exist, as a number that no protobuf holds
        return {"outcome": "not made", "detail": f"{type(error).__name__}: {error}"}
    (case / mutations.CANARY).write_bytes(ROWS[:4].tobytes())
    before = _files(case)
    os.chdir(case)
    watch = Watch(case, seeds)
    sys.addaudithook(watch)
    watch.on = True
    told = _told(kind.read, case)
    watch.on = False
    if watch.seen:
        return {"outcome": "wrong", "detail": f"did {watch.seen[0]}; {told}"}
    new = {name for name in _files(case) - before if not name.startswith("unpacked")}
    return {"outcome": "wrong", "detail": f"wrote {sorted(new)[:3]}; {told}"} if new else told


def _told(read: Callable[[Path], str], case: Path) -> dict[str, str]:
    from offramp_core.errors import OfframpError

    try:
        return {"outcome": read(case), "detail": ""}
    except OfframpError as error:
        message = str(error)
        if "\n" in message.strip() or len(message) > LONGEST_MESSAGE:
            return {"outcome": "wrong", "detail": f"an error of {len(message)} characters: {message[:300]!r}"}
        return {"outcome": "refused", "detail": f"{type(error).__name__}: {message[:300]}"}
    except BaseException as error:  # whatever else there is, it has no name of ours
        where = traceback.format_tb(error.__traceback__)[-1].strip().splitlines()[0]
        return {"outcome": "wrong", "detail": f"{type(error).__name__}: {str(error)[:300]} at {where}"}


class Watch:
    """Audits what this process does while a file is read."""

    def __init__(self, case: Path, seeds: Path) -> None:
        self.on = False
        self.seen: list[str] = []
        self._own = (str(case), sys.prefix, sys.base_prefix, str(ROOT), str(ROOT.resolve()), *READABLE)
        self._temporary = tempfile.gettempdir()
        self._seeds = str(seeds)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            self._opened(*arguments[:3])
        elif (event in STARTED and not _is_library(event, arguments)) or (
            event in CHANGED and self._outside(arguments)
        ):
            self.seen.append(f"{event}{arguments!r}"[:200])

    def _outside(self, arguments: tuple[Any, ...]) -> bool:
        return not str(arguments[0]).startswith((self._own[0], self._temporary))

    def _opened(self, path: Any, mode: Any, flags: Any) -> None:
        if isinstance(path, int) or path is None:
            return
        name = os.path.normpath(Path.cwd() / os.fsdecode(path))
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        inside = name.startswith(self._own[0])
        temporary = name.startswith(self._temporary) and not name.startswith(self._seeds)
        allowed = (
            inside or temporary or name == os.devnull if writes else inside or temporary or name.startswith(self._own)
        )
        if not allowed or Path(name).name in (mutations.CANARY, mutations.MARKER, "passwd"):
            self.seen.append(f"open({name!r}, {mode!r}, {flags!r})")


def _is_library(event: str, arguments: tuple[Any, ...]) -> bool:
    """A library of the installation that is loaded when it is first needed."""
    return event == "ctypes.dlopen" and (
        arguments[0] is None or str(arguments[0]).startswith(("lib", sys.prefix, "/usr", "/lib"))
    )


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (GIBIBYTE, GIBIBYTE))


@dataclass
class Child:
    """A process that runs one case."""

    number: int
    pid: int
    pipe: int
    folder: Path
    ends: float


def start(seed: int, number: int, seeds: Path, work: Path) -> Child:
    """Fork a process for a case. This process has no threads: it imported the libraries and ran nothing."""
    folder = work / f"case-{number}"
    folder.mkdir()
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        with Path(os.devnull).open("w", encoding="ascii") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        try:
            told = run_case(seed, number, seeds, folder)
        except BaseException as error:
            told = {"outcome": "broken", "detail": "".join(traceback.format_exception(error))[-600:]}
        os.write(writes, json.dumps(told).encode()[:60_000])
        os._exit(0)
    os.close(writes)
    return Child(number, pid, reads, folder, time.monotonic() + SECONDS)


def finished(child: Child) -> dict[str, str] | None:
    """What came of a case; None while it runs."""
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    if pid == 0 and time.monotonic() < child.ends:
        return None
    if pid == 0:
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        return {"outcome": "wrong", "detail": f"did not end within {SECONDS:.0f} s"}
    raw = os.read(child.pipe, LONGEST_CHILD)
    if os.WIFSIGNALED(status) or not raw:
        how = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"status {status}"
        why = f"computed for {CPU_SECONDS} s" if how in ("SIGXCPU", "SIGKILL") else "the process died"
        return {"outcome": "wrong", "detail": f"{why} ({how})"}
    told: dict[str, str] = json.loads(raw)
    return told


def fuzz(
    numbers: list[int], *, seed: int, jobs: int, keep: Path | None, only_kind: str | None = None
) -> dict[str, Any]:
    """Run the cases of these numbers."""
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAYON_NUM_THREADS": "1",
        "RUST_BACKTRACE": "0",
        "ORT_DISABLE_TELEMETRY": "1",
    }
    begun = time.monotonic()
    tally: dict[str, Counter[str]] = {name: Counter() for name in KINDS}
    errors: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    longest = 0.0
    with tempfile.TemporaryDirectory(prefix="offramp-fuzz-") as folder:
        seeds, work = Path(folder) / "seeds", Path(folder) / "work"
        seeds.mkdir()
        work.mkdir()
        maker = multiprocessing.get_context("spawn").Process(target=make_seeds, args=(seeds,))
        maker.start()
        maker.join()
        if maker.exitcode:
            raise RuntimeError("the seeds could not be made")
        _read_seeds(seeds, work)
        waiting = [n for n in numbers if only_kind is None or kind_of(seed, n) == only_kind]
        running: list[Child] = []
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(start(seed, waiting.pop(0), seeds, work))
            for child in list(running):
                told = finished(child)
                if told is None:
                    continue
                running.remove(child)
                os.close(child.pipe)
                kind = kind_of(seed, child.number)
                longest = max(longest, SECONDS - (child.ends - time.monotonic()))
                tally[kind][told["outcome"]] += 1
                errors[told["detail"].partition(":")[0]] += told["outcome"] == "refused"
                if told["outcome"] in ("wrong", "broken"):
                    wrong.append({"case": child.number, "kind": kind, **told})
                    print(f"seed {seed} case {child.number} ({kind}): {told['detail']}", file=sys.stderr, flush=True)
                if keep is not None:
                    shutil.copytree(child.folder, keep / child.folder.name, symlinks=True, dirs_exist_ok=True)
                shutil.rmtree(child.folder, ignore_errors=True)
            time.sleep(0.002)
    return {
        "seed": seed,
        "cases": sum(sum(counts.values()) for counts in tally.values()),
        "seconds": round(time.monotonic() - begun, 1),
        "longest_seconds": round(longest, 1),
        "kinds": {name: dict(counts) for name, counts in tally.items() if counts},
        "errors": dict(errors.most_common()),
        "wrong": wrong,
    }


def _read_seeds(seeds: Path, work: Path) -> None:
    """Read a valid file of the dear kinds once, so that no child has to import and prepare what reading them takes.

    With one thread for everything no library starts one, so that what is forked from this process is whole.
    """
    import PIL.Image
    import torch
    import tqdm

    torch.set_num_threads(1)
    tqdm.tqdm.monitor_interval = 0  # its thread
    PIL.Image.preinit()
    for kind in ("backbone", "torch.export", "ONNX", "safetensors", "inputs", "tokenizer"):
        folder = work / f"valid-{kind}"
        folder.mkdir()
        shutil.copytree(seeds, folder, dirs_exist_ok=True)
        shutil.copytree(seeds / "checkpoint", folder, dirs_exist_ok=True)
        KINDS[kind].read(folder)
        shutil.rmtree(folder)
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise RuntimeError(f"{threads} threads run, and children would be forked without them")


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 1 when a case went wrong."""
    parser = argparse.ArgumentParser(prog="bench.fuzz files", description="damaged and hostile files of every format")
    parser.add_argument("--count", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", type=int, help="the number of one case")
    parser.add_argument("--kind", choices=KINDS, help="cases of one kind alone")
    parser.add_argument("--keep", action="store_true", help="leave the files of the cases in build/bench/fuzz-files")
    parser.add_argument("--out", type=Path, default=Path("build/bench/fuzz-files.json"))
    options = parser.parse_args(arguments)
    numbers = list(range(options.count)) if options.only is None else [options.only]
    keep = Path("build/bench/fuzz-files").absolute() if options.keep else None
    out = options.out.absolute()
    result = fuzz(numbers, seed=options.seed, jobs=options.jobs, keep=keep, only_kind=options.kind)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        json.dumps(
            {name: result[name] for name in ("cases", "seconds", "longest_seconds", "kinds", "errors")}, indent=1
        )
    )
    print(f"{len(result['wrong'])} of {result['cases']} went wrong")
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
