"""A device plugin that advertises devices which exist in name only, over the kubelet's own gRPC API.

The messages are those of ``k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1``, with the fields that are used here.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

VERSION = "v1beta1"
# Message → (number, name, type); "[]" is repeated.
MESSAGES: dict[str, tuple[tuple[int, str, str], ...]] = {
    "Empty": (),
    "DevicePluginOptions": (),
    "RegisterRequest": ((1, "version", "string"), (2, "endpoint", "string"), (3, "resource_name", "string")),
    "Device": ((1, "ID", "string"), (2, "health", "string")),
    "ListAndWatchResponse": ((1, "devices", "Device[]"),),
    "ContainerAllocateRequest": ((1, "devices_ids", "string[]"),),
    "AllocateRequest": ((1, "container_requests", "ContainerAllocateRequest[]"),),
    "ContainerAllocateResponse": (),
    "AllocateResponse": ((1, "container_responses", "ContainerAllocateResponse[]"),),
}


def _pool() -> DescriptorPool:
    file = FileDescriptorProto(name="deviceplugin/v1beta1/api.proto", package=VERSION, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, field_name, kind in fields:
            field = message.field.add(name=field_name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
            if kind.endswith("[]"):
                field.label = FieldDescriptorProto.LABEL_REPEATED
            if kind.startswith("string"):
                field.type = FieldDescriptorProto.TYPE_STRING
            else:
                field.type = FieldDescriptorProto.TYPE_MESSAGE
                field.type_name = f".{VERSION}.{kind.removesuffix('[]')}"
    pool = DescriptorPool()
    pool.Add(file)
    return pool


_POOL = _pool()


def _message(name: str) -> Any:
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{VERSION}.{name}"))


Empty, Options, RegisterRequest = _message("Empty"), _message("DevicePluginOptions"), _message("RegisterRequest")
Device, ListAndWatchResponse = _message("Device"), _message("ListAndWatchResponse")
AllocateRequest, AllocateResponse = _message("AllocateRequest"), _message("AllocateResponse")


class DevicePlugin:
    """Advertises ``devices``, healthy ones at first, as ``resource`` of the node whose kubelet has its sockets in
    ``folder``. ``allocated`` are the ids that containers were given, one after another; while it ``refuses`` with some
    words, none."""

    def __init__(self, folder: Path, resource: str, *devices: str) -> None:
        self.allocated: list[str] = []
        self.refuses = ""
        self._resource = resource
        self._health = dict.fromkeys(devices, True)
        self._changes, self._changed, self._ended = 0, threading.Condition(), False
        self._kubelet, endpoint = _socket(folder / "kubelet.sock"), f"offramp-{uuid.uuid4().hex[:8]}.sock"
        self._server = grpc.server(ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers((self._handlers(),))
        self._server.add_insecure_port(_socket(folder / endpoint))
        self._server.start()
        self._register(endpoint)

    def report(self, device: str, *, healthy: bool) -> None:
        with self._changed:
            self._health[device] = healthy
            self._change()

    def end(self) -> None:
        """As a plugin ends whose process does: the kubelet's stream breaks."""
        with self._changed:
            self._ended = True
            self._change()
        self._server.stop(grace=1).wait()

    def _change(self) -> None:
        self._changes += 1
        self._changed.notify_all()

    def _register(self, endpoint: str) -> None:
        request = RegisterRequest(version=VERSION, endpoint=endpoint, resource_name=self._resource)
        with grpc.insecure_channel(self._kubelet) as channel:
            call = channel.unary_unary(
                f"/{VERSION}.Registration/Register",
                request_serializer=RegisterRequest.SerializeToString,
                response_deserializer=Empty.FromString,
            )
            call(request, timeout=10.0, wait_for_ready=True)

    def _handlers(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            f"{VERSION}.DevicePlugin",
            {
                "GetDevicePluginOptions": grpc.unary_unary_rpc_method_handler(
                    lambda request, context: Options(),
                    request_deserializer=Empty.FromString,
                    response_serializer=Options.SerializeToString,
                ),
                "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                    self._list_and_watch,
                    request_deserializer=Empty.FromString,
                    response_serializer=ListAndWatchResponse.SerializeToString,
                ),
                "Allocate": grpc.unary_unary_rpc_method_handler(
                    self._allocate,
                    request_deserializer=AllocateRequest.FromString,
                    response_serializer=AllocateResponse.SerializeToString,
                ),
            },
        )

    def _list_and_watch(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        seen = -1
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._changes != seen)  # noqa: B023 - read while this loop waits
                if self._ended:
                    return
                seen = self._changes
                now = [Device(ID=i, health="Healthy" if well else "Unhealthy") for i, well in self._health.items()]
            yield ListAndWatchResponse(devices=now)

    def _allocate(self, request: Any, context: grpc.ServicerContext) -> Any:
        if self.refuses:
            context.abort(grpc.StatusCode.UNKNOWN, self.refuses)
        response = AllocateResponse()
        for container in request.container_requests:
            self.allocated += container.devices_ids
            response.container_responses.add()
        return response


def _socket(path: Path) -> str:
    """From here, since the path of a socket must be short and a clone's may be long."""
    return f"unix:{os.path.relpath(path)}"
