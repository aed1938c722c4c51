"""Images and texts as clients send them: a worker's answers are those of the model behind the steps that its bundle
declares, at every door, and what is no image or text is refused by its place."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import inputs
import msgspec
import numpy as np
import prepared
import pytest
import sent
import texts
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from onnx import TensorProto
from PIL import Image
from processes import WorkerProcess, document, eventually, manifest_of, plan_for
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from offramp_core.bundle import ImageSteps, Preprocess, TensorSpec, TextSteps, backbone_digest
from offramp_core.errors import InvalidArgumentError, InvalidBundleError
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.devices import open_session
from offramp_worker.prepare.pipeline import PrepareRequest, prepare_bundle
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.refresh import refresh_bundle
from offramp_worker.prepare.source.halves import in_single_precision
from offramp_worker.prepare.source.preprocessing import Scaling, load_preprocessor
from offramp_worker.prepare.source.sources import Backbone
from offramp_worker.preprocess import encoded as steps
from offramp_worker.preprocess.images import MAX_PIXELS, Budget, decoded
from offramp_worker.settings import Settings
from offramp_worker.worker import most_rows

KINDS = ("image", "text")
STEPS = ImageSteps(resize=(20,), crop=(16, 16))


def strings_of(kind: str, n: int, *, seed: int) -> list[bytes]:
    return sent.images(n, seed=seed) if kind == "image" else [s.encode() for s in sent.sentences(n, seed=seed)]


def write_data(folder: Path, kind: str, strings: list[bytes]) -> str:
    if kind == "text":
        (folder / "data.jsonl").write_text("\n".join(json.dumps(s.decode()) for s in strings))
        return str(folder / "data.jsonl")
    (folder / "images").mkdir()
    for i, content in enumerate(strings):
        (folder / "images" / f"{i:05}.{'png' if i % 2 == 0 else 'jpg'}").write_bytes(content)
    return str(folder / "images")


@dataclass(frozen=True)
class Served:
    """A worker, and everything about it."""

    kind: str
    bundle: Bundle
    process: WorkerProcess
    model: str
    epochs: Iterator[int]

    def strings(self, n: int, *, seed: int) -> list[bytes]:
        return strings_of(self.kind, n, seed=seed)

    def outputs(self, strings: list[bytes]) -> np.ndarray:
        """What the model as it was given says, behind steps worked out apart from the code under test."""
        if self.kind == "image":
            import torch

            with torch.inference_mode():
                return prepared.trained_model()(torch.from_numpy(np.stack(list(map(sent.pixels, strings))))).numpy()
        session = open_session(self.bundle.backbone, threads=1)
        rows = [np.array([[int(word[1:]) for word in s.decode().split()]]) for s in strings]
        return np.concatenate([session.run(None, {session.get_inputs()[0].name: row})[0] for row in rows])

    def deliver(self, *, audit_rate: float) -> int:
        """A plan that lets some rows leave; its epoch."""
        ids, epoch = [ramp.id for ramp in self.bundle.ramps], next(self.epochs)
        plan = plan_for(self.bundle.path, {ids[0]: "0.3", ids[-1]: "0.5"})
        self.process.deliver(document(plan, epoch=epoch, audit_rate=audit_rate)).raise_for_status()
        return epoch

    def json(self, strings: list[bytes | str], *, shape: list[int] | None = None, **fields: Any) -> Any:
        data = [self.text(s) if isinstance(s, bytes) else s for s in strings]
        tensor = {
            "name": self.kind,
            "datatype": "BYTES",
            "shape": [len(data)] if shape is None else shape,
            "data": data,
        }
        return self.process.public.post("/v2/models/tiny/infer", json={"inputs": [tensor], **fields})

    def text(self, string: bytes) -> str:
        return base64.b64encode(string).decode() if self.kind == "image" else string.decode()

    def binary(self, body: bytes, n: int, *, size: Any = None, **fields: Any) -> Any:
        parameters = {"binary_data_size": len(body) if size is None else size}
        tensor = {"name": self.kind, "datatype": "BYTES", "shape": [n], "parameters": parameters}
        header = json.dumps({"inputs": [tensor], **fields}).encode()
        headers = {"Inference-Header-Content-Length": str(len(header))}
        return self.process.public.post("/v2/models/tiny/infer", content=header + body, headers=headers)

    def grpc(self) -> triton.InferenceServerClient:
        return triton.InferenceServerClient(f"127.0.0.1:{self.process.port('grpc')}")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Bundles by kind and their models, each prepared once."""

    @cache
    def make(kind: str) -> tuple[Bundle, str]:
        folder = tmp_path_factory.mktemp(kind)
        model = sent.save_image_model(folder) if kind == "image" else sent.save_text_model(folder)
        request = PrepareRequest(
            model,
            write_data(folder, kind, strings_of(kind, 800, seed=3)),
            folder / "bundle",
            name="tiny",
            head_share=0.3,
            profile_seconds=0.3,
            compile_limit=0,
            precision="exact",
            encoded=True,
        )
        prepare_bundle(request, Reporter(io.StringIO()))
        return load_bundle(folder / "bundle"), model

    return make


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, made: Any) -> Iterator[Served]:
    bundle, model = made(request.param)
    env = {"OFFRAMP_GRPC_PORT": "0", "OFFRAMP_CACHE_BYTES": "1000000"}
    with WorkerProcess(bundle.path, env=env) as process:
        yield Served(request.param, bundle, process, model, count(1))


@pytest.mark.slow
class TestServed:
    def test_metadata_tells_of_strings_on_both_ports(self, served: Served) -> None:
        told = {"name": served.kind, "datatype": "BYTES", "shape": [-1]}
        assert served.process.public.get("/v2/models/tiny").json()["inputs"] == [told]
        with served.grpc() as grpc:
            (tensor,) = grpc.get_model_metadata("tiny").inputs
        assert {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)} == told

    def test_rows_are_answered_and_audited_as_the_model_answers_them(self, served: Served) -> None:
        strings, epoch = served.strings(200, seed=9), served.deliver(audit_rate=1.0)
        said, exits = [], []
        for start in range(0, len(strings), 40):
            reply = served.json(strings[start : start + 40])
            said.append(logits(reply))
            exits += reply.json()["parameters"]["exit"].split(",")
        answers, left = np.concatenate(said), np.array([name != "final" for name in exits])
        expected = served.outputs(strings)
        assert 0 < left.mean() < 1
        np.testing.assert_allclose(answers[~left], expected[~left], rtol=1e-3, atol=1e-3)

        def audited() -> Any:
            (counts,) = [c for c in served.process.observations().counts if c.epoch == epoch and c.arm == "stable"]
            return counts if counts.audited == len(strings) else None

        wrong = int((answers.argmax(axis=1) != expected.argmax(axis=1)).sum())
        assert eventually(audited, what="audits").disagreements == wrong

    def test_every_door_gives_the_same_answer(self, served: Served) -> None:
        strings, never = served.strings(3, seed=11), {"parameters": {"exit": "never"}}
        body = sent.serialized(strings)
        answers = [
            logits(served.json(strings, **never)),
            logits(served.json([[served.text(s)] for s in strings], shape=[3, 1], **never)),
            logits(served.binary(body, 3, **never)),
            over_grpc(served, strings),
            over_grpc(served, strings, raw=body),
        ]
        for answer in answers:
            np.testing.assert_allclose(answer, served.outputs(strings), rtol=1e-3, atol=1e-3)

    def test_tritonclient_sends_strings_on_both_ports(self, served: Served) -> None:
        strings = np.array(served.strings(2, seed=12), dtype=np.object_)
        for module, port in ((triton, "grpc"), (triton_http, "public")):
            value = module.InferInput(served.kind, [2], "BYTES")
            value.set_data_from_numpy(strings)
            with module.InferenceServerClient(f"127.0.0.1:{served.process.port(port)}") as client:
                answer = client.infer("tiny", [value], parameters={"exit": "never"}).as_numpy("logits")
            np.testing.assert_allclose(answer, served.outputs(list(strings)), rtol=1e-3, atol=1e-3)

    def test_a_large_request_is_read_and_one_of_too_many_pieces_refused(self, served: Served) -> None:
        served.deliver(audit_rate=0.0)
        many = served.strings(40, seed=14) * 25
        assert len(logits(served.json(many))) == 1000
        reply = served.process.public.post("/v2/models/tiny/infer", content=b'{"inputs": [' + b"1," * 200_000)
        assert reply.status_code == 400
        assert "bytes of JSON in more than 20000 pieces; send binary data" in reply.json()["error"]

    def test_what_was_seen_is_answered_from_the_cache(self, served: Served) -> None:
        served.deliver(audit_rate=0.0)
        strings = served.strings(1, seed=13)
        first, second = served.json(strings), served.binary(sent.serialized(strings), 1)
        assert "cached" not in first.json()["parameters"]
        assert second.json()["parameters"]["cached"] is True

    def test_the_form_of_a_request_is_refused_by_its_field(self, served: Served) -> None:
        strings = served.strings(2, seed=15)
        body, pairs = sent.serialized(strings), "" if served.kind == "image" else ", or [n, 2] of pairs"
        cases = [
            (
                served.json(strings, shape=[2, 3]),
                f"inputs[0].shape: is [2, 3]; '{served.kind}' takes [n], [n, 1]{pairs}",
            ),
            (served.json(strings, shape=[]), "inputs[0].shape: is []; "),
            (served.json(strings, shape=[3]), "inputs[0].data: does not match inputs[0].shape [3] at depth 0"),
            (served.json([1, 2]), "inputs[0].data: has a value of type whole number; it holds strings"),
            (served.json([*strings, None]), "inputs[0].data: has a value of type null"),
            (served.binary(body[:-1], 2), "inputs[0]: ends within string 1 of 2"),
            (served.binary(body + b"x", 2), "inputs[0]: has 1 bytes behind its 2 strings"),
            (served.binary(struct.pack("<I", 2**32 - 1) + b"x", 1), "inputs[0]: ends within string 0 of 1"),
            (served.binary(b"\0", 1), "inputs[0]: ends within string 0 of 1"),
            (served.binary(body, 2, size=3), "inputs[0].parameters.binary_data_size: is 3; "),
        ]
        for reply, error in cases:
            assert reply.status_code == 400, reply.text
            assert reply.json()["error"].startswith(error)

    def test_a_string_that_is_none_of_its_kind_is_refused_by_its_place(self, served: Served) -> None:
        good, bad = served.strings(1, seed=16)[0], b"\xff\xfe"
        error = "is no JPEG or PNG" if served.kind == "image" else "is no UTF-8: invalid start byte at byte 0"
        reply = served.binary(sent.serialized([good, bad]), 2)
        assert (reply.status_code, reply.json()["error"]) == (400, f"inputs[0][1]: {error}")
        for raw, field in (
            (None, "inputs[0].contents.bytes_contents"),
            (sent.serialized([good, bad]), "raw_input_contents[0]"),
        ):
            with pytest.raises(InferenceServerException) as refused:
                over_grpc(served, [good, bad], raw=raw)
            assert str(refused.value.message()) == f"{field}[1]: {error}"
        if served.kind == "image":
            reply = served.json([good, "no base64!"])
            assert reply.status_code == 400
            assert reply.json()["error"].startswith(
                "inputs[0].data[1]: is no base64, which an image in JSON is written in"
            )

    def test_hostile_strings_are_refused_in_bounded_memory(self, served: Served) -> None:
        refused = []
        served.binary(sent.serialized(served.strings(2, seed=17)), 2)
        before = resident(served.process)
        hostile = BOMBS if served.kind == "image" else [b"w1 " * 100_000, b"a" * 300_000]
        for content in hostile:
            reply = served.binary(sent.serialized([content]), 1)
            refused.append((reply.status_code, reply.json()["error"].partition(":")[0]))
        assert refused == [(400, "inputs[0][0]")] * len(hostile)
        if served.kind == "image":  # the largest that are taken, in the forms that need most memory
            for mode, form in (("RGBA", "PNG"), ("CMYK", "JPEG")):
                assert len(logits(served.binary(sent.serialized([largest(mode, form)]), 1))) == 1
        assert resident(served.process, most=True) - before < 240 * 2**20
        assert len(logits(served.json(served.strings(2, seed=18)))) == 2


def resident(process: WorkerProcess, *, most: bool = False) -> int:
    """Bytes of memory that a worker has, or had at most."""
    lines = Path(f"/proc/{process.process.pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM" if most else "VmRSS")).split()[1])


def logits(reply: Any) -> np.ndarray:
    assert reply.status_code == 200, reply.text
    found = next(o for o in reply.json()["outputs"] if o["name"] == "logits")
    return np.array(found["data"]).reshape(found["shape"])


def over_grpc(served: Served, strings: list[bytes], *, raw: bytes | None = None) -> np.ndarray:
    request = service_pb2.ModelInferRequest(model_name="tiny")
    request.parameters["exit"].string_param = "never"
    tensor = request.inputs.add(name=served.kind, datatype="BYTES", shape=[len(strings)])
    if raw is None:
        tensor.contents.bytes_contents.extend(strings)
    else:
        request.raw_input_contents.append(raw)
    with served.grpc() as grpc:
        try:
            reply = grpc._client_stub.ModelInfer(request)
        except triton.grpc.RpcError as error:
            raise InferenceServerException(error.details()) from error
    output = reply.outputs[0]
    if raw is None:
        return np.array(output.contents.fp32_contents).reshape(list(output.shape))
    return np.frombuffer(reply.raw_output_contents[0], "<f4").reshape(list(output.shape))


def saved(form: str, array: np.ndarray, **options: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(array).save(out, form, **options)
    return out.getvalue()


def bomb(width: int, height: int, *, chunks: bytes = b"") -> bytes:
    """A PNG that says how large it is, and has next to nothing."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(bytes(1_000_000), 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + head + chunks + data


def largest(mode: str, form: str) -> bytes:
    out = io.BytesIO()
    Image.new(mode, (4_000, 4_000)).save(out, form, **({"progressive": True} if form == "JPEG" else {}))
    return out.getvalue()


def animation() -> bytes:
    out, frames = io.BytesIO(), [Image.fromarray(np.full((20, 20), v, np.uint8)) for v in (1, 99)]
    frames[0].save(out, "PNG", save_all=True, append_images=frames[1:])
    return out.getvalue()


def many_scans() -> bytes:
    """A progressive JPEG whose last scan, some fifty bytes, stands there often: each passes over all pixels."""
    whole = saved("JPEG", np.zeros((64, 64), np.uint8), progressive=True)
    last = whole[whole.rindex(b"\xff\xda") : -2]
    return whole[:-2] + last * 3_000 + whole[-2:]


GRAY = np.arange(400, dtype=np.uint8).reshape(20, 20)
HOSTILE = {
    "empty": (b"", "is no JPEG or PNG"),
    "text": (b"<svg/>", "is no JPEG or PNG"),
    "another format": (saved("GIF", GRAY), "is no JPEG or PNG"),
    "truncated png": (saved("PNG", GRAY)[:60], "cannot be decoded"),
    "truncated jpeg": (saved("JPEG", GRAY)[:-60], "cannot be decoded: image file is truncated"),
    "a jpeg of very many scans": (many_scans(), r"has 3\d\d\d scans; a JPEG may have 64"),
    "animated": (animation(), "is an animation of 2 frames"),
    "sixteen bits": (saved("PNG", GRAY.astype(np.uint16)), "has pixels of the kind I;16"),
    "more pixels than are read": (bomb(30_000, 30_000), "cannot be decoded|has 30000x30000 pixels"),
    "some more pixels": (bomb(4_001, 4_000), "has 4001x4000 pixels; an image may have 16000000"),
    "as many pixels, of which few are there": (bomb(4_000, 4_000), "cannot be decoded"),
    "a long line": (bomb(2_000_000, 1), "has 2000000x1 pixels, too long a side to resize"),
    "no height": (bomb(20, 0), "is no JPEG or PNG|cannot be decoded"),
}
BOMBS = [content for content, _ in HOSTILE.values()]


@pytest.mark.parametrize("case", HOSTILE)
def test_an_image_that_is_none_or_too_large_is_refused(case: str) -> None:
    content, error = HOSTILE[case]
    with pytest.raises(ValueError, match=error) as refused:
        decoded(content, STEPS)
    assert "\n" not in str(refused.value)


def test_images_of_a_request_share_a_budget_of_pixels() -> None:
    budget = Budget(1000)
    content = saved("PNG", GRAY)
    decoded(content, STEPS, budget=budget)
    decoded(content, STEPS, budget=budget)
    with pytest.raises(ValueError, match="the images of a request have more than 1000 pixels together; send fewer"):
        decoded(content, STEPS, budget=budget)
    assert MAX_PIXELS <= steps.MAX_REQUEST_PIXELS


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_images_of_any_colors_become_rows_of_the_model(mode: str) -> None:
    form = "JPEG" if mode == "CMYK" else "PNG"
    content = sent.image(prepared.images(1, seed=1)[0][0], form=form, mode=mode)
    for channels_first, shape in ((True, (3, 16, 16)), (False, (16, 16, 3))):
        row = decoded(content, replace(STEPS, channels_first=channels_first))
        assert (row.shape, row.dtype, row.flags.c_contiguous) == (shape, np.uint8, True)
    assert decoded(content, replace(STEPS, mode="L")).shape == (1, 16, 16)


def test_a_side_shorter_than_the_crop_is_refused_where_nothing_resizes() -> None:
    with pytest.raises(ValueError, match="has 20x20 pixels; at least 32x24 are needed"):
        decoded(saved("PNG", GRAY), ImageSteps(crop=(24, 32)))


@pytest.mark.slow
def test_rows_that_wait_are_bounded_by_what_images_become(made: Any) -> None:
    bundle, _ = made("image")
    settings = Settings(bundle=bundle.path, max_bodies_bytes=2_560)  # ten rows of 256 pixels
    assert most_rows(settings, bundle) == 10
    assert most_rows(replace(settings, max_bodies_bytes=1), bundle) == 1
    assert most_rows(replace(settings, max_bodies_bytes=2**30), bundle) == settings.max_queue_rows
    assert most_rows(settings, replace(bundle, encoded=None)) == settings.max_queue_rows


@pytest.mark.slow
def test_pairs_of_texts_become_one_row_each(made: Any) -> None:
    bundle, _ = made("text")
    assert bundle.encoded is not None
    rows = bundle.encoded.rows(["w1 w2", "w3", b"w4", b""], n=2)
    np.testing.assert_array_equal(rows, [[1, 2, 3], [4, 0, 0]])
    assert rows.dtype == bundle.input_dtype
    long = bundle.encoded.rows([" ".join(["w7"] * 500)], n=1)
    assert long.shape == (1, bundle.manifest.inputs[0].longest)
    assert bundle.encoded.rows([""], n=1).tolist() == [[0]]  # nothing but padding, which never leaves early


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_trained_again_on_what_clients_send(made: Any, kind: str, tmp_path: Path) -> None:
    bundle, _ = made(kind)
    data = write_data(tmp_path, kind, strings_of(kind, 600, seed=21))
    request = PrepareRequest(str(bundle.path), data, tmp_path / "new", head_share=0.3)
    refresh_bundle(request, Reporter(io.StringIO()))
    new = load_bundle(tmp_path / "new").manifest
    assert new.ramp_set_digest != bundle.manifest.ramp_set_digest
    assert (new.backbone_digest, new.preprocess) == (bundle.manifest.backbone_digest, bundle.manifest.preprocess)


BROKEN: dict[str, dict[str, Any]] = {
    "both": {"image": {"resize": [20], "crop": [16, 16]}, "text": {"tokens": 4}},
    "neither": {},
    "other rows": {"image": {"resize": [20], "crop": [16, 17], "mode": "L"}},
    "no one size": {"image": {"resize": [20], "mode": "L"}},
    "a crop beyond": {"image": {"resize": [16, 16], "crop": [17, 16], "mode": "L"}},
    "no side": {"image": {"resize": [0, 16], "mode": "L"}},
    "another filter": {"image": {"resize": [16, 16], "resample": "exec", "mode": "L"}},
    "texts for an image": {"text": {"tokens": 4}},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BROKEN)
def test_a_bundle_whose_steps_do_not_lead_to_its_model_is_refused(made: Any, case: str, tmp_path: Path) -> None:
    bundle, _ = made("image")
    for file in bundle.path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    declared = msgspec.json.decode((tmp_path / "manifest.json").read_bytes()) | {"preprocess": BROKEN[case]}
    (tmp_path / "manifest.json").write_bytes(msgspec.json.encode(declared))
    if case != "another filter":  # what can be parsed has a digest, which is right here
        manifest = manifest_of(tmp_path)
        files = {**manifest.files, "tokenizer.json": manifest.files["probe.npz"]}
        (tmp_path / "tokenizer.json").write_bytes((tmp_path / "probe.npz").read_bytes())
        declared |= {"files": files, "backbone_digest": backbone_digest(files, manifest.preprocess)}
        (tmp_path / "manifest.json").write_bytes(msgspec.json.encode(declared))
    with pytest.raises(
        InvalidBundleError, match=r"manifest\.json: .*preprocess|manifest\.json: .*resample|Invalid enum"
    ):
        load_bundle(tmp_path)


@pytest.mark.slow
def test_steps_and_tokenizer_are_part_of_the_models_digest(made: Any, tmp_path: Path) -> None:
    bundle, _ = made("image")
    manifest = bundle.manifest
    assert manifest.backbone_digest != backbone_digest(manifest.files)
    for file in bundle.path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    declared = msgspec.json.decode((tmp_path / "manifest.json").read_bytes())
    del declared["preprocess"]
    (tmp_path / "manifest.json").write_bytes(msgspec.json.encode(declared))
    with pytest.raises(InvalidBundleError, match="backbone_digest is not the digest"):  # a worker of before reads it so
        load_bundle(tmp_path)
    text = made("text")[0].manifest
    other = {**text.files, "tokenizer.json": "0" * 64}
    assert backbone_digest(other, text.preprocess) != text.backbone_digest


CONFIGS = {
    "no size": ({"size": None}, r"size is None; it must be"),
    "a size that classes read differently": ({"size": 224}, r"size is 224; it must be"),
    "a size that is none": ({"size": {"height": 0, "width": 4}}, "must be sides of 1 to 8192"),
    "a step that is not known": ({"do_pad": True}, "do_pad is not understood"),
    "another filter": ({"resample": 9}, "resample is 9"),
    "a mean for other channels": ({"image_mean": [0.5] * 3}, "for RGB they need 3 numbers"),
    "no deviation": ({"image_std": [0]}, "deviations and factor above 0"),
    "a deviation that is next to none": ({"image_std": [1e-320]}, "make no finite numbers of pixels"),
    "a factor beyond float32": ({"rescale_factor": 1e308}, "rescale_factor is 1e\\+308; it must be a number"),
    "a whole number beyond any float": ({"image_mean": [10**400]}, "image_mean is .*; it must be a number"),
    "a step that is neither": ({"do_resize": "yes"}, "do_resize is 'yes'"),
    "no one size": ({"do_center_crop": False}, "images must end in one size"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_preprocessor_that_is_not_understood_is_refused_by_its_field(case: str, tmp_path: Path) -> None:
    change, error = CONFIGS[case]
    (tmp_path / "p.json").write_text(json.dumps(sent.CONFIG | change))
    with pytest.raises(InvalidArgumentError, match=error) as refused:
        load_preprocessor(tmp_path / "p.json")
    assert "p.json" in str(refused.value)


def test_a_preprocessor_says_what_pixels_become(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps(sent.CONFIG))
    reader = load_preprocessor(tmp_path / "p.json")
    assert reader.scaling is not None
    content = sent.images(2, seed=5)[1]
    scaled = reader.scaling.of(decoded(content, reader.steps)[None])
    np.testing.assert_allclose(scaled[0], sent.pixels(content), rtol=1e-5, atol=1e-5)
    plain = sent.CONFIG | {"do_rescale": False, "do_normalize": False}
    (tmp_path / "p.json").write_text(json.dumps(plain))
    assert load_preprocessor(tmp_path / "p.json").scaling is None


def test_scaling_stands_before_a_model_of_any_float_input() -> None:
    scaling = Scaling((1 / 64,), (-2.0,), channels_first=False)
    x = np.random.default_rng(3).integers(0, 256, (5, 4)).astype(np.uint8)
    for kind, datatype in ((TensorProto.FLOAT16, "FP16"), (TensorProto.FLOAT, "FP32")):
        single = in_single_precision(inputs.scores(kind))
        spec = TensorSpec("x", datatype, (4,))
        behind = scaling.before(Backbone(single, "m", spec, TensorSpec("y", "FP32", (3,))))
        assert (behind.input.datatype, behind.program) == ("UINT8", None)
        given = (x / 64 - 2).astype(np.float16 if datatype == "FP16" else np.float32)
        np.testing.assert_allclose(prepared.run(behind.model, x), prepared.run(single, given), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [str, bytes])
def test_texts_are_counted_in_bytes_however_they_came(kind: type) -> None:
    """In JSON four bytes of a text may be one character."""
    spec = TensorSpec("ids", "INT64", (-1,), pad=texts.PAD, longest=20, values=texts.WORDS)
    encoded = steps.load_encoded(
        Preprocess(text=TextSteps(20)), spec, np.int64, tokenizer=sent.tokenizer().to_str().encode()
    )
    whole = "w1 " * 1000 + "\N{GRINNING FACE}" * ((steps.MAX_TEXT_BYTES - 3000) // 4)
    long = whole + "\N{GRINNING FACE}" * 8
    each = [text if kind is str else text.encode() for text in (whole, long)]
    assert len(encoded.rows(each[:1], n=1)) == 1
    with pytest.raises(steps.UnreadableError, match=f"has more than {steps.MAX_TEXT_BYTES} bytes"):
        encoded.rows(each[1:], n=1)
    with pytest.raises(steps.UnreadableError, match=f"is beyond {steps.MAX_REQUEST_TEXT_BYTES} bytes") as refused:
        encoded.rows(each[:1] * 9, n=9)
    assert refused.value.index == 8


def test_rows_of_strings_are_one_string_or_a_pair() -> None:
    spec = TensorSpec("text", "BYTES", (), longest=2)
    assert [spec.fits(shape) for shape in ((), (1,), (2,), (3,), (1, 1))] == [True, True, True, False, False]
