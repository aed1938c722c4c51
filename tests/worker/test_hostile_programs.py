"""What an archive of ``torch.export`` may hold: anything else is refused before torch sees it, and nothing in it is
executed.

Tests that export or load a program are slow: each process first imports the compiler of torch.
"""

from __future__ import annotations

import io
import json
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
from hostile import CONSTANTS, PROGRAM, ROWS, SAMPLES, WEIGHTS, Json

from offramp_core.errors import InvalidArgumentError, ModelRefusedError
from offramp_worker.prepare.exported import checked_archive
from offramp_worker.prepare.exported.expressions import check_expression
from offramp_worker.prepare.exported.operators import ATEN
from offramp_worker.prepare.source.sources import Backbone, load_backbone


class Planted:
    """What writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return exec, (f"open({str(self.marker)!r}, 'w').close()",)


def code(marker: Path) -> str:
    """An expression that writes the marker when something evaluates it."""
    return f"__import__('builtins').open({str(marker)!r}, 'w')"


def graph(program: Json) -> Json:
    return program["graph_module"]["graph"]


def of_program(edit: Callable[[Json, Path], object]) -> Callable[[Path], bytes]:
    return lambda marker: hostile.edited(hostile.program_archive(), PROGRAM, lambda program: edit(program, marker))


def an_expression(program: Json, marker: Path) -> None:
    graph(program)["tensor_values"]["linear"]["sizes"][0] = {"as_expr": {"expr_str": code(marker), "hint": None}}


def an_expression_of_a_symbolic_integer(program: Json, marker: Path) -> None:
    graph(program)["sym_int_values"]["n"] = {"as_expr": {"expr_str": code(marker), "hint": None}}


def a_symbol_s_name(program: Json, marker: Path) -> None:
    expression = f"Symbol({code(marker)!r}, integer=True)"
    graph(program)["tensor_values"]["input"]["sizes"][0] = {"as_expr": {"expr_str": expression, "hint": None}}


def a_guard(program: Json, marker: Path) -> None:
    program["guards_code"] = [code(marker)]


def an_input_s_name(program: Json, marker: Path) -> None:
    name = f"input={code(marker)}, other"
    program.update(json.loads(json.dumps(program).replace('"name": "input"}', json.dumps({"name": name})[1:])))
    values = graph(program)["tensor_values"]
    values[name] = values.pop("input")


def a_forward_argument(program: Json, marker: Path) -> None:
    signature = program["graph_module"]["module_call_graph"][0]["signature"]
    signature["forward_arg_names"] = [f"input={code(marker)}"]


def a_tree_of_inputs(program: Json, marker: Path) -> None:
    folder = marker.parent / "planted"
    folder.mkdir()
    (folder / "__init__.py").write_text(f"open({str(marker)!r}, 'w').close()")
    context = json.dumps([{"__enum__": True, "fqn": "planted:A", "name": "B"}])
    signature = program["graph_module"]["module_call_graph"][0]["signature"]
    signature["out_spec"] = json.dumps([1, {"type": "builtins.dict", "context": context, "children_spec": []}])


def an_operator(target: str) -> Callable[[Json, Path], None]:
    def edit(program: Json, marker: Path) -> None:
        node = graph(program)["nodes"][0]
        node["target"] = target
        node["inputs"] = [{"name": "", "arg": {"as_string": f"touch {marker}"}, "kind": 1}]

    return edit


def an_operator_as_argument(program: Json, marker: Path) -> None:
    graph(program)["nodes"][0]["inputs"][0]["arg"] = {"as_operator": "torch.hub.load"}


def metadata(program: Json, marker: Path) -> None:
    graph(program)["nodes"][0]["metadata"]["custom"] = code(marker)
    graph(program)["nodes"][0]["metadata"]["source_fn_stack"] = "a,torch.hub.load"
    program["guards_code"] = [code(marker)]
    raise_unknown = an_operator("torch.hub.load")
    raise_unknown(program, marker)


def a_pickled_weight(marker: Path) -> bytes:
    archive = hostile.edited(
        hostile.program_archive(), WEIGHTS, lambda config: config["config"]["0.weight"].update(use_pickle=True)
    )
    return hostile.with_member(archive, "m/data/weights/weight_0", pickle.dumps(Planted(marker)))


def pickled_samples(marker: Path) -> bytes:
    """Sample inputs are not needed, so they are not read: the program loads, and nothing is executed."""
    buffer = io.BytesIO()
    torch.save((Planted(marker),), buffer)
    return hostile.with_member(hostile.program_archive(), SAMPLES, buffer.getvalue())


def a_constant(name: str) -> Callable[[Path], bytes]:
    def make(marker: Path) -> bytes:
        constant = {"path_name": name, "is_param": False, "use_pickle": True, "tensor_meta": None}
        archive = hostile.edited(
            hostile.program_archive(), CONSTANTS, lambda config: config["config"].update(c=constant)
        )
        return hostile.with_member(archive, f"m/data/constants/{name}", pickle.dumps(Planted(marker)))

    return make


def a_legacy_file_of_weights(marker: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"0.weight": Planted(marker)}, buffer)
    return hostile.with_member(hostile.program_archive(), "m/data/weights/model.pt", buffer.getvalue())


def compiled_code(_marker: Path) -> bytes:
    return hostile.with_member(hostile.program_archive(), "m/data/aotinductor/model/model.so", b"\x7fELF")


def a_plain_pickle(marker: Path) -> bytes:
    return pickle.dumps(Planted(marker))


CODE: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "an expression": (of_program(an_expression), r"tensor_values.linear.sizes\[0\]"),
    "an expression of a symbolic integer": (of_program(an_expression_of_a_symbolic_integer), "sym_int_values.n"),
    "a symbol's name": (of_program(a_symbol_s_name), "expr_str"),
    "an input's name": (of_program(an_input_s_name), "is no name"),
    "a forward argument": (of_program(a_forward_argument), "forward_arg_names"),
    "a tree of inputs": (of_program(a_tree_of_inputs), "out_spec"),
    "an operator of the system": (of_program(an_operator("torch.os.system")), "torch.os.system"),
    "an operator that downloads": (of_program(an_operator("torch.hub.load")), "torch.hub.load"),
    "an operator that looks up attributes": (of_program(an_operator("_operator.attrgetter")), "attrgetter"),
    "an operator that reads files": (of_program(an_operator("torch.ops.aten.from_file.default")), "from_file"),
    "an operator that writes files": (of_program(an_operator("torch.ops.aten.save.default")), "save"),
    "an attribute of an operator": (of_program(an_operator("torch.ops.aten.relu.__class__")), "__class__"),
    "an operator that loads libraries": (of_program(an_operator("torch.ops.load_library")), "load_library"),
    "an operator as an argument": (of_program(an_operator_as_argument), "as_operator"),
    "metadata": (of_program(metadata), "torch.hub.load"),
    "a pickled weight": (a_pickled_weight, "holds a pickled object"),
    "a pickled object": (a_constant("custom_obj_0"), "holds a pickled object"),
    "an opaque object": (a_constant("opaque_obj_0"), "holds a pickled object"),
    "a pickled constant": (a_constant("tensor_0"), "holds a pickled object"),
    "weights of an older torch": (a_legacy_file_of_weights, "model.pt"),
    "compiled code": (compiled_code, "holds compiled code"),
    "a plain pickle": (a_plain_pickle, "is not a readable torch.export program"),
}


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "executed"


@pytest.mark.slow
@pytest.mark.parametrize("case", CODE)
def test_what_could_execute_code_is_refused_by_name_before_torch_sees_it(
    case: str, tmp_path: Path, marker: Path
) -> None:
    make, message = CODE[case]
    path = hostile.saved(tmp_path, make(marker))
    with pytest.raises((InvalidArgumentError, ModelRefusedError), match=message) as caught:
        load_backbone(path, ROWS)
    assert not marker.exists()
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("make", [of_program(a_guard), pickled_samples], ids=["guards", "sample inputs"])
def test_what_conversion_does_not_need_is_left_out(make: Callable[[Path], bytes], tmp_path: Path, marker: Path) -> None:
    backbone = load_backbone(hostile.saved(tmp_path, make(marker)), ROWS)
    assert backbone.n_classes == 3
    assert not marker.exists()


def of_tensor(**fields: Any) -> Callable[[Json, Path], None]:
    return lambda program, _: graph(program)["tensor_values"]["input"].update(fields)


def a_size(expression: str) -> Callable[[Path], bytes]:
    return of_program(of_tensor(sizes=[{"as_expr": {"expr_str": expression, "hint": None}}, {"as_int": 4}]))


def of_weight(**fields: Any) -> Callable[[Path], bytes]:
    return lambda _: hostile.edited(
        hostile.program_archive(), WEIGHTS, lambda config: config["config"]["0.weight"].update(fields)
    )


def of_weight_meta(**fields: Any) -> Callable[[Path], bytes]:
    return lambda _: hostile.edited(
        hostile.program_archive(), WEIGHTS, lambda config: config["config"]["0.weight"]["tensor_meta"].update(fields)
    )


def repeated(_marker: Path) -> bytes:
    """Two members of one name: readers differ in which they take."""
    content = hostile.program_archive()
    buffer = io.BytesIO(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(buffer, "a") as archive:
            archive.writestr(PROGRAM, b"{}")
    return buffer.getvalue()


def compressed(_marker: Path) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as target:
        for name, content in hostile.members(hostile.program_archive()).items():
            target.writestr(name, content)
        target.writestr("m/data/weights/weight_9", bytes(100_000_000))
    return buffer.getvalue()


STRUCTURE: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "a tower of powers": (a_size("9**9**9**9"), "expr_str"),
    "powers as functions": (a_size("Pow(Integer(9), Pow(Integer(9), Integer(99)))"), "expr_str"),
    "a shift": (a_size("LShift(Integer(1), Integer(99999999999))"), "expr_str"),
    "an attribute": (a_size("s0.__class__"), "expr_str"),
    "an unknown function": (a_size("lambdify(s0, s0)"), "expr_str"),
    "a deep expression": (a_size("(" * 5_000 + "s0" + ")" * 5_000), "expr_str"),
    "a comprehension": (a_size("[s0 for s0 in ()]"), "expr_str"),
    "an unknown kind of argument": (
        of_program(lambda p, _: graph(p)["nodes"][0]["inputs"][0].update(arg={"as_file": "x"})),
        "as_file",
    ),
    "no graph": (of_program(lambda p, _: p["graph_module"].pop("graph")), "graph_module.graph"),
    "a million symbols": (
        of_program(lambda p, _: p["range_constraints"].update(u99999999999={"min_val": 0, "max_val": 1})),
        "range_constraints",
    ),
    "a weight's file outside": (of_weight(path_name="../../etc/passwd"), "path_name"),
    "a weight larger than its bytes": (of_weight_meta(sizes=[{"as_int": 10**9}, {"as_int": 10**9}]), "0.weight"),
    "a weight beyond its bytes": (of_weight_meta(storage_offset={"as_int": 1 << 40}), "0.weight"),
    "a weight with a negative stride": (of_weight_meta(strides=[{"as_int": -4}, {"as_int": 1}]), "0.weight"),
    "an upward name": (
        lambda _: hostile.with_member(hostile.program_archive(), "m/../../evil", b"x"),
        "names 'm/../../evil'",
    ),
    "a second root": (lambda _: hostile.with_member(hostile.program_archive(), "n/x", b"x"), "names 'n/x'"),
    "a name twice": (repeated, "twice"),
    "compressed members": (compressed, "is compressed"),
    "no program": (lambda _: hostile.zipped({"m/archive_format": b"pt2"}), r"models/model\.json"),
    "half of it": (lambda _: hostile.program_archive()[:3000], "is not a readable torch.export program"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", STRUCTURE)
def test_a_broken_or_greedy_archive_is_refused_by_name(case: str, tmp_path: Path) -> None:
    make, message = STRUCTURE[case]
    path = hostile.saved(tmp_path, make(tmp_path / "executed"))
    with pytest.raises((InvalidArgumentError, ModelRefusedError), match=message) as caught:
        load_backbone(path, ROWS)
    assert "\n" not in str(caught.value)


class Everything(torch.nn.Module):
    """Shapes that are computed, operators that write in place, branches, a block without gradients and a weight that is
    a view."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(4, 3)
        self.register_buffer("shift", torch.ones(1, 4).expand(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] * 3 + 1 < 100_000)
        x = x.reshape(x.shape[0] * 2, 2).reshape(x.shape[0], -1)
        with torch.no_grad():
            scale = x.abs().amax(1, keepdim=True)
        x = torch.einsum("bi,bi->bi", x, scale.expand(-1, 4)) + self.shift.sum(0)
        x = torch.nn.functional.gelu(x, approximate="tanh")
        x += 1
        return torch.cond(x.shape[1] > 3, lambda x: 1 + self.last(x), lambda x: 2 * self.last(x), (x,))


def exported(model: torch.nn.Module) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", max=64)
    return torch.export.export(model.eval(), (torch.zeros(2, 4),), dynamic_shapes=({0: batch},))


@pytest.mark.slow
def test_a_program_answers_the_same_after_it_was_read_and_written_again(tmp_path: Path) -> None:
    program = exported(Everything())
    path = tmp_path / "m.pt2"
    torch.export.save(program, path)
    with checked_archive(path) as archive:
        read = torch.export.load(archive)
    x = torch.from_numpy(ROWS)
    assert torch.equal(read.module()(x), program.module()(x))
    assert not read._guards_code


@pytest.mark.slow
def test_control_flow_is_read_like_the_graph_around_it(tmp_path: Path) -> None:
    class Branches(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, torch.exp, torch.neg, (x,))

    path = tmp_path / "m.pt2"
    torch.export.save(exported(Branches()), path)
    with checked_archive(path) as archive:
        read = torch.export.load(archive)
    assert torch.equal(read.module()(torch.ones(3, 4)), torch.ones(3, 4).exp())

    def inner(program: Json) -> Json:
        cond = next(node for node in graph(program)["nodes"] if "cond" in node["target"])
        return next(i["arg"]["as_graph"]["graph"] for i in cond["inputs"] if "as_graph" in i["arg"])

    name = next(name for name in hostile.members(path.read_bytes()) if name.endswith("models/model.json"))
    hostile_branch = hostile.edited(
        path.read_bytes(), name, lambda program: inner(program)["nodes"][0].update(target="torch.os.system")
    )
    path.write_bytes(hostile_branch)
    with pytest.raises(InvalidArgumentError, match=r"as_graph\.graph\.nodes\[0\]\.target is torch\.os\.system"):
        checked_archive(path)


def tensors(values: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def as_torch_2_8_saved_it() -> bytes:
    content = hostile.members(hostile.program_archive())
    return hostile.zipped(
        {name: data for name, data in content.items() if not name.startswith(("m/data/weights", "m/data/constants"))}
        | {"m/data/weights/model.pt": tensors(hostile.state()), "m/data/constants/model.pt": tensors({})}
    )


def as_torch_2_7_saved_it() -> bytes:
    return hostile.zipped(
        {
            "version": b"8.8",
            "serialized_exported_program.json": hostile.members(hostile.program_archive())[PROGRAM],
            "serialized_state_dict.pt": tensors(hostile.state()),
            "serialized_constants.pt": tensors({}),
            "serialized_example_inputs.pt": tensors(((torch.zeros(2, 4),), {})),
        }
    )


@pytest.fixture(scope="module")
def today(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    """The harmless program, as this release of torch saves it."""
    return load_backbone(hostile.saved(tmp_path_factory.mktemp("today"), hostile.program_archive()), ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("make", [as_torch_2_7_saved_it, as_torch_2_8_saved_it], ids=["2.7", "2.8"])
def test_layouts_of_older_releases_of_torch_are_read_as_strictly(
    make: Callable[[], bytes], tmp_path: Path, today: Backbone
) -> None:
    older = load_backbone(hostile.saved(tmp_path, make()), ROWS)
    assert older.model.SerializeToString(deterministic=True) == today.model.SerializeToString(deterministic=True)


@pytest.mark.slow
def test_a_file_of_tensors_that_is_an_archive_of_code_is_refused(tmp_path: Path, marker: Path) -> None:
    content = hostile.members(as_torch_2_7_saved_it())
    for name in ("serialized_state_dict.pt", "serialized_constants.pt"):
        path = hostile.saved(tmp_path, hostile.zipped({**content, name: tensors({"a": Planted(marker)})}))
        with pytest.raises(InvalidArgumentError, match="is no file of plain tensors"):
            load_backbone(path, ROWS)
    assert not marker.exists()


@pytest.mark.slow
def test_a_program_with_a_fixed_batch_is_refused_with_how_to_export_it(tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    torch.export.save(torch.export.export(Everything().eval(), (torch.zeros(2, 4),)), path)
    with pytest.raises(InvalidArgumentError, match=r"its batch axis is fixed .*dynamic_shapes"):
        load_backbone(str(path), ROWS)


@pytest.mark.slow
def test_every_operator_that_the_converter_knows_is_allowed_or_left_out_knowingly() -> None:
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    known = {str(key) for key in ONNXRegistry.from_torchlib().functions}
    names = {name.partition("::")[2].partition(".")[0] for name in known if name.startswith("aten::")}
    assert names - ATEN == set()


def test_no_operator_that_is_allowed_takes_the_name_of_a_file() -> None:
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.removeprefix("aten::") in ATEN]
    assert len(schemas) > 500
    arguments = {argument.name for schema in schemas for argument in schema.arguments if "str" in str(argument.type)}
    assert not {name for name in arguments if "file" in name or "path" in name or "url" in name}


EXPRESSIONS = {
    "a symbol": "Symbol('s31', positive=True, integer=True)",
    "arithmetic": "Add(Mul(Integer(-2), Symbol('s0', integer=True)), FloorDiv(Symbol('u1', integer=True), Integer(3)))",
    "a comparison": "StrictLessThan(Mul(Integer(3), Symbol('s0', integer=True)), Integer(99999))",
    "a root": "Pow(Symbol('s0', integer=True), Rational(1, 2))",
    "a number": "Mul(Float('0.5', precision=53), ToFloat(Symbol('s0', integer=True)))",
    "as Python writes it": "((s0 - 1)//2 + 1)**2 <= 4096 and s1 % 8 == 0",
    "a case": "Piecewise(ExprCondPair(Integer(1), Equality(Symbol('s0'), Integer(1))), ExprCondPair(Integer(0), true))",
}


@pytest.mark.parametrize("case", EXPRESSIONS)
def test_expressions_of_shapes_are_read(case: str) -> None:
    check_expression(EXPRESSIONS[case])


NO_EXPRESSIONS = {
    "a call": "exec('1')",
    "a call of an attribute": "s0.diff()",
    "a lambda": "(lambda: 1)()",
    "a string": "'s0'",
    "bytes": "Symbol(b's0')",
    "a format": "f'{s0}'",
    "a symbol of another name": "Symbol('os')",
    "an unknown assumption": "Symbol('s0', cls=True)",
    "assumptions from a mapping": "Symbol('s0', **s1)",
    "arguments from a list": "Add(*s0)",
    "an assignment": "(s0 := 3)",
    "a subscript": "s0[0]",
    "powers in powers": "Pow(Pow(Pow(s0, Integer(9)), Integer(9)), Integer(9))",
    "an exponent that is computed": "Pow(Integer(2), Symbol('s0'))",
    "a large number": "Integer(" + "9" * 40 + ")",
    "more digits than Python reads": "9" * 5_000,
    "infinity": "1e999",
    "a Float of an expression": "Float('s0')",
    "two lines": "s0\ns1",
    "nothing": "",
}


@pytest.mark.parametrize("case", NO_EXPRESSIONS)
def test_anything_else_is_no_expression(case: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        check_expression(NO_EXPRESSIONS[case])
