"""Archives of arrays that promise more than they hold, or hold what is no plain array."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from offramp_core import npz
from offramp_core.errors import InvalidRecordsError
from offramp_core.npz import read_npy, read_npz
from offramp_core.records import records_from_arrays


def saved(**values: object) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **values)  # type: ignore[arg-type]
    return buffer.getvalue()


def archive(*members: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as target:
        for name, content in members:
            target.writestr(name, content)
    return buffer.getvalue()


def npy(value: object) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, value)  # type: ignore[arg-type]
    return buffer.getvalue()


def with_header(text: str, *, content: bytes = b"") -> bytes:
    """An ``.npy`` file with a header as its author likes it."""
    header = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content


@given(
    value=arrays.arrays(
        st.one_of(arrays.integer_dtypes(), arrays.floating_dtypes(), arrays.unicode_string_dtypes(), st.just(np.bool_)),
        arrays.array_shapes(min_dims=0, max_dims=3, max_side=4),
    ),
    fortran=st.booleans(),
)
def test_what_numpy_saves_is_read_as_numpy_reads_it(value: np.ndarray, fortran: bool) -> None:
    value = np.asfortranarray(value) if fortran else value
    np.testing.assert_array_equal(read_npz(io.BytesIO(saved(x=value)))["x"], value)
    np.testing.assert_array_equal(read_npy(npy(value)), value)


def test_only_the_arrays_that_are_asked_for_are_read() -> None:
    raw = archive(("x.npy", npy(np.arange(3))), ("notes.txt", b"not an array"))
    assert list(read_npz(io.BytesIO(raw), names=("x", "y"))) == ["x"]
    with pytest.raises(ValueError, match=r"notes\.txt"):
        read_npz(io.BytesIO(raw))


HUGE = "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }"
FILES: dict[str, Callable[[], bytes]] = {
    "a shape beyond its bytes": lambda: with_header(HUGE),
    "a shape below its bytes": lambda: with_header(HUGE.replace("000000000000", ""), content=bytes(64)),
    "a negative shape": lambda: with_header(HUGE.replace("1000000000000,", "-1, -8"), content=bytes(64)),
    "text of gigabytes": lambda: with_header(HUGE.replace("<f8", "<U999999999").replace("1000000000000,", "")),
    "objects": lambda: npy(np.array([{}, None], dtype=object)),
    "a header that is a call": lambda: with_header("__import__('os')"),
    "a header of brackets": lambda: with_header("(" * 100),
    "another version": lambda: npy(np.arange(3)).replace(b"NUMPY\x01", b"NUMPY\x03"),
    "nothing": lambda: b"",
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_lies_about_itself_is_refused_before_room_is_made_for_it(case: str) -> None:
    raw = FILES[case]()
    with pytest.raises(ValueError, match=r"."):
        read_npy(raw)
    with pytest.raises(ValueError, match=r"x\.npy: "):
        read_npz(io.BytesIO(archive(("x.npy", raw))))


def test_an_archive_that_unpacks_to_far_more_than_its_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = archive(("x.npy", npy(np.zeros(1_000_000))))
    assert len(read_npz(io.BytesIO(raw))["x"]) == 1_000_000
    monkeypatch.setattr(npz, "ALWAYS_BYTES", 1_000_000)
    with pytest.raises(ValueError, match="bytes unpack to 8000128; at most 1000000 are read"):
        read_npz(io.BytesIO(raw))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_array_that_is_there_twice_is_refused() -> None:
    for second in ("x.npy", "x"):
        with pytest.raises(ValueError, match="the array 'x' twice"):
            read_npz(io.BytesIO(archive(("x.npy", npy(np.arange(3))), (second, npy(np.arange(4))))))


@given(raw=st.binary(max_size=200))
def test_any_other_bytes_are_a_value_error(raw: bytes) -> None:
    for read in (read_npy, lambda raw: read_npz(io.BytesIO(raw))):
        with pytest.raises(ValueError, match=r"."):
            read(raw)


@pytest.mark.parametrize("sizes", [[], [1.0, np.inf], [np.nan], [0.5]], ids=str)
def test_batch_sizes_of_records_that_are_no_sizes_are_refused(sizes: list[float]) -> None:
    n, b = 3, len(sizes)
    arrays = {
        "uncertainty": np.zeros((n, 1)),
        "prediction": np.zeros((n, 1), np.int64),
        "final": np.zeros(n, np.int64),
        "batch_size": np.array(sizes),
        "segment_seconds": np.ones((b, 2)),
        "ramp_seconds": np.ones((b, 1)),
    }
    with pytest.raises(InvalidRecordsError, match="batch_size"):
        records_from_arrays(arrays)
