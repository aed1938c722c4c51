"""What edge and core say to each other: requests and replies of the Open Inference Protocol with binary tensors.

| POST under ``/v2/models/NAME/edge`` | a request is | a reply is |
|---|---|---|
| ``/`` | anything, to measure the uplink | who the core is, see :class:`Core` |
| ``/rows`` | rows of the model's input | the model's own logits |
| ``/features/RAMP`` | what the stages up to a ramp hand on | the model's own logits |
| ``/scores`` | rows of the model's input | what the model and every column of a record say |

A request may also be handed on as it came, to ``/v2/models/NAME/infer``, with the header :data:`PLAN_HEADER`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import orjson

from offramp_core.errors import OfframpError
from offramp_worker.bundle.load import NUMPY_TYPES

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
DATATYPES = {dtype: name for name, dtype in NUMPY_TYPES.items()}
#: Of every request: the digests of model and ramps, which the reply repeats, and how many seconds the answer is of use.
DIGEST_HEADER, RAMPS_HEADER, SECONDS_HEADER, LENGTH_HEADER = (
    "offramp-backbone-digest",
    "offramp-ramp-set-digest",
    "offramp-seconds",
    "inference-header-content-length",
)
#: Of a request that an edge hands on as it came: the content hash of the plan whose exits may answer it.
PLAN_HEADER = "offramp-plan"
BOOT_HEADER = "offramp-boot"  # of every reply: which process of a core it comes from
FEATURES = "features"
UPLINK_BYTES = 65536  # of a body that measures the uplink


class UnreadableReplyError(OfframpError):
    """A reply of the core is none of this protocol."""


@dataclass(frozen=True, slots=True)
class Core:
    """Who the core is."""

    model: str
    backbone_digest: str
    ramp_set_digest: str
    #: Another one each time that it is started.
    boot: str


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back, and which process of a core answered."""

    arrays: Arrays
    boot: str


def edge_path(model: str) -> str:
    """Where the core takes rows of edges."""
    return f"/v2/models/{quote(model, safe='')}/edge"


def features_path(ramp: str) -> str:
    """Where it takes what the stages up to a ramp hand on."""
    return f"features/{quote(ramp, safe='')}"


def request_body(name: str, x: Array) -> tuple[bytes, int]:
    """A request with one tensor, and the length of its JSON."""
    tensor = _described(name, x)
    header = orjson.dumps({"inputs": [tensor]})
    return header + _little(x).tobytes(), len(header)


def reply_body(arrays: Mapping[str, Array]) -> tuple[bytes, int]:
    """A reply with these tensors, and the length of its JSON."""
    header = orjson.dumps({"outputs": [_described(name, array) for name, array in arrays.items()]})
    return b"".join((header, *(_little(array).tobytes() for array in arrays.values()))), len(header)


def read_reply(body: bytes, header_length: str | None) -> dict[str, Array]:
    """The tensors of a reply.

    Raises
    ------
    UnreadableReplyError
        It says other sizes than it has.
    """
    try:
        length = int(header_length or "")
        arrays, at = {}, length
        for output in orjson.loads(body[:length])["outputs"]:
            dtype, shape = NUMPY_TYPES[output["datatype"]], tuple(int(size) for size in output["shape"])
            count = math.prod(shape)
            arrays[str(output["name"])] = np.frombuffer(body, dtype, count, at).reshape(shape)
            at += count * dtype.itemsize
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableReplyError(f"the core's reply cannot be read: {error}") from error
    if at != len(body):
        raise UnreadableReplyError(f"the core's reply has {len(body)} bytes; it says {at}")
    return arrays


def _described(name: str, x: Array) -> dict[str, Any]:
    return {
        "name": name,
        "datatype": DATATYPES[x.dtype.newbyteorder("<")],
        "shape": list(x.shape),
        "parameters": {"binary_data_size": x.nbytes},
    }


def _little(x: Array) -> Array:
    return x.astype(x.dtype.newbyteorder("<"), copy=False)
