"""The messages of ``inference.GRPCInferenceService``, from the field numbers of the Open Inference Protocol v2.

They live in a descriptor pool of their own: another package in the process (a client library) may bring the same names.
``MESSAGES`` is the part of the standard that a server of one model needs; unknown fields are skipped, as Protocol
Buffers do.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

# Message → (number, name, type). "type[]" is repeated, "type{}" a map from string, "type?" one of a oneof.
MESSAGES: dict[str, tuple[tuple[int, str, str], ...]] = {
    "ServerLiveRequest": (),
    "ServerLiveResponse": ((1, "live", "bool"),),
    "ServerReadyRequest": (),
    "ServerReadyResponse": ((1, "ready", "bool"),),
    "ModelReadyRequest": ((1, "name", "string"), (2, "version", "string")),
    "ModelReadyResponse": ((1, "ready", "bool"),),
    "ServerMetadataRequest": (),
    "ServerMetadataResponse": ((1, "name", "string"), (2, "version", "string"), (3, "extensions", "string[]")),
    "ModelMetadataRequest": ((1, "name", "string"), (2, "version", "string")),
    "ModelMetadataResponse": (
        (1, "name", "string"),
        (2, "versions", "string[]"),
        (3, "platform", "string"),
        (4, "inputs", "ModelMetadataResponse.TensorMetadata[]"),
        (5, "outputs", "ModelMetadataResponse.TensorMetadata[]"),
    ),
    "ModelMetadataResponse.TensorMetadata": ((1, "name", "string"), (2, "datatype", "string"), (3, "shape", "int64[]")),
    "InferParameter": (
        (1, "bool_param", "bool?"),
        (2, "int64_param", "int64?"),
        (3, "string_param", "string?"),
        (4, "double_param", "double?"),
        (5, "uint64_param", "uint64?"),
    ),
    "InferTensorContents": (
        (1, "bool_contents", "bool[]"),
        (2, "int_contents", "int32[]"),
        (3, "int64_contents", "int64[]"),
        (4, "uint_contents", "uint32[]"),
        (5, "uint64_contents", "uint64[]"),
        (6, "fp32_contents", "float[]"),
        (7, "fp64_contents", "double[]"),
        (8, "bytes_contents", "bytes[]"),
    ),
    "ModelInferRequest": (
        (1, "model_name", "string"),
        (2, "model_version", "string"),
        (3, "id", "string"),
        (4, "parameters", "InferParameter{}"),
        (5, "inputs", "ModelInferRequest.InferInputTensor[]"),
        (6, "outputs", "ModelInferRequest.InferRequestedOutputTensor[]"),
        (7, "raw_input_contents", "bytes[]"),
    ),
    "ModelInferRequest.InferInputTensor": (
        (1, "name", "string"),
        (2, "datatype", "string"),
        (3, "shape", "int64[]"),
        (4, "parameters", "InferParameter{}"),
        (5, "contents", "InferTensorContents"),
    ),
    "ModelInferRequest.InferRequestedOutputTensor": ((1, "name", "string"), (2, "parameters", "InferParameter{}")),
    "ModelInferResponse": (
        (1, "model_name", "string"),
        (2, "model_version", "string"),
        (3, "id", "string"),
        (4, "parameters", "InferParameter{}"),
        (5, "outputs", "ModelInferResponse.InferOutputTensor[]"),
        (6, "raw_output_contents", "bytes[]"),
    ),
    "ModelInferResponse.InferOutputTensor": (
        (1, "name", "string"),
        (2, "datatype", "string"),
        (3, "shape", "int64[]"),
        (4, "parameters", "InferParameter{}"),
        (5, "contents", "InferTensorContents"),
    ),
}
SCALARS = ("bool", "int32", "int64", "uint32", "uint64", "float", "double", "string", "bytes")


def _file() -> FileDescriptorProto:
    file = FileDescriptorProto(name="offramp/open_inference.proto", package=PACKAGE, syntax="proto3")
    made: dict[str, DescriptorProto] = {}
    for path, fields in MESSAGES.items():
        holder, _, name = path.rpartition(".")
        message = made[holder].nested_type.add(name=name) if holder else file.message_type.add(name=name)
        made[path] = message
        for number, field_name, kind in fields:
            _add_field(message, path, number, field_name, kind)
    return file


def _add_field(message: DescriptorProto, path: str, number: int, name: str, kind: str) -> None:
    bare = kind.rstrip("[]{}?")
    field = message.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
    if kind.endswith(("[]", "{}")):
        field.label = FieldDescriptorProto.LABEL_REPEATED
    if kind.endswith("?"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
    if kind.endswith("{}"):  # on the wire a map is a repeated message of key and value
        entry = message.nested_type.add(name="".join(word.title() for word in name.split("_")) + "Entry")
        entry.options.map_entry = True
        _add_field(entry, f"{path}.{entry.name}", 1, "key", "string")
        _add_field(entry, f"{path}.{entry.name}", 2, "value", bare)
        bare = f"{path}.{entry.name}"
    if bare in SCALARS:
        field.type = getattr(FieldDescriptorProto, f"TYPE_{bare.upper()}")
    else:
        field.type = FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{bare}"


_POOL = DescriptorPool()
_POOL.Add(_file())


def message(name: str) -> Any:
    """The class of a message, by its name within the package."""
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


ModelInferResponse = message("ModelInferResponse")
