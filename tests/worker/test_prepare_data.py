"""Which rows may train heads, and how inputs are read and refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from offramp_core.errors import InvalidArgumentError
from offramp_worker.prepare.source.data import load_inputs, plan_split, remove_repeats, shifted_copies
from offramp_worker.prepare.source.texts import find_tokenizer
from offramp_worker.preprocess.texts import load_tokenizer


@given(total=st.integers(40, 50_000), share=st.floats(0.001, 0.8), doublings=st.integers(0, 5))
def test_head_rows_and_records_partition_the_data_and_records_keep_a_fifth(
    total: int, share: float, doublings: int
) -> None:
    for name in ("default", "apparate"):
        split = plan_split(total, name=name, share=share, doublings=doublings)
        if split is None:
            assert doublings
            continue
        assert split.train >= 1
        assert split.validation >= 1
        assert split.train + split.validation + split.records == total
        assert split.records >= total // 5 - 1
        assert split.records >= total // 2 or share > 0.5  # only the user's own share takes more than half


@pytest.mark.parametrize(("name", "train", "validation"), [("default", 900, 100), ("apparate", 100, 900)])
def test_the_first_tenth_is_split_as_named(name: str, train: int, validation: int) -> None:
    split = plan_split(10_000, name=name, share=0.1)  # type: ignore[arg-type]
    assert split is not None
    assert (split.train, split.validation, split.records) == (train, validation, 9_000)


def test_doubling_stops_before_records_are_the_smaller_half() -> None:
    heads = [plan_split(10_000, name="default", share=0.1, doublings=d) for d in range(4)]
    assert [split and split.head for split in heads] == [1_000, 2_000, 4_000, None]


def write_npz(path: Path, **arrays: object) -> str:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return str(path)


def test_labels_are_ignored_and_values_become_float32(tmp_path: Path) -> None:
    x = np.linspace(0, 1, 24).reshape(6, 4)
    read = load_inputs(write_npz(tmp_path / "d.npz", x=x, y=np.arange(6)))
    assert read.dtype == np.float32
    np.testing.assert_allclose(read, x, rtol=1e-6)


def test_a_folder_of_images_is_read_in_order_of_name_channels_first(tmp_path: Path) -> None:
    for index, name in enumerate(["b.png", "a.png"]):
        Image.new("RGB", (5, 4), (255 * index, 0, 51)).save(tmp_path / name)
    read = load_inputs(str(tmp_path))
    assert read.shape == (2, 3, 4, 5)
    assert read[0, 0, 0, 0] == 1.0  # a.png comes first
    assert read[1, :, 0, 0] == pytest.approx([0, 0, 0.2])


def images_of_two_sizes(folder: Path) -> str:
    Image.new("L", (4, 4)).save(folder / "a.png")
    Image.new("L", (4, 5)).save(folder / "b.png")
    return str(folder)


def text_file(folder: Path) -> str:
    (folder / "broken.npz").write_text("not a zip")
    return str(folder / "broken.npz")


def pickled(folder: Path) -> str:
    return write_npz(folder / "p.npz", x=np.array([{"a": 1}, None], dtype=object))


def lines(folder: Path, *rows: str) -> str:
    (folder / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return str(folder / "rows.jsonl")


def tokenizer_file(folder: Path, *, pad: str = "[PAD]", pair: str | None = None) -> Path:
    """A tokenizer.json that divides at white space and knows a few words. ``pair`` marks two texts, each ended by
    [SEP]."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    known = {pad: 0, "[UNK]": 1, "[CLS]": 2, "a": 3, "good": 4, "film": 5, "[SEP]": 6}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    single, marks = ("[CLS] $A", [("[CLS]", 2)]) if pair is None else ("[CLS] $A [SEP]", [("[CLS]", 2), ("[SEP]", 6)])
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=marks)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_json_lines_become_token_ids_with_the_tokenizers_own_marks_filled_up_and_cut(tmp_path: Path) -> None:
    reader = load_tokenizer(tokenizer_file(tmp_path), most=4)
    path = lines(tmp_path, '{"text": "a good film", "label": 1}', "", '"a film that is good"', '{"text": ""}')
    read = load_inputs(path, texts=reader)
    assert read.dtype == np.int64
    np.testing.assert_array_equal(read, [[2, 3, 4, 5], [2, 3, 5, 1], [2, 0, 0, 0]])
    assert reader.pad == 0


def test_pairs_of_texts_are_read_and_the_separator_is_the_one_behind_which_the_second_begins(tmp_path: Path) -> None:
    reader = load_tokenizer(tokenizer_file(tmp_path, pair="[CLS] $A [SEP] $B:1 [SEP]:1"), most=9)
    path = lines(tmp_path, '{"text": "a film", "text_pair": "good"}', '{"text": "good"}')
    np.testing.assert_array_equal(load_inputs(path, texts=reader), [[2, 3, 5, 6, 4, 6], [2, 4, 6, 0, 0, 0]])
    assert reader.sep == 6
    (tmp_path / "other").mkdir()
    other = tokenizer_file(tmp_path / "other", pair="[CLS] $A [SEP]:1 $B:1 [SEP]:1")  # the first separator has type 1
    assert load_tokenizer(other, most=9).sep is None


def test_the_tokenizer_is_looked_for_beside_the_model_unless_one_is_given(tmp_path: Path) -> None:
    file = tokenizer_file(tmp_path)
    assert find_tokenizer(str(tmp_path / "m.onnx"), "") == file
    assert find_tokenizer(f"family:bert?heads=2&weights={tmp_path / 'w.safetensors'}&x=1", "") == file
    assert find_tokenizer(str(tmp_path / "elsewhere" / "m.onnx"), "") is None
    with pytest.raises(InvalidArgumentError, match=r"none\.json does not exist"):
        find_tokenizer("m.onnx", str(tmp_path / "none.json"))


def test_token_ids_in_an_npz_stay_whole_numbers(tmp_path: Path) -> None:
    read = load_inputs(write_npz(tmp_path / "d.npz", x=np.array([[1, 2], [3, 0]], dtype=np.int32)))
    assert read.dtype == np.int64
    np.testing.assert_array_equal(read, [[1, 2], [3, 0]])


BAD_TEXTS = {
    "no JSON": (["{text}"], r"rows\.jsonl, line 1 is no JSON"),
    "no text": (['{"text": "a"}', '{"sentence": "a"}'], r'line 2: needs a string "text"'),
    "half a pair": (['{"text": "a", "text_pair": 3}'], r"line 1: text_pair must be a string"),
    "a number": (["3"], r'line 1: needs a string "text"'),
}


@pytest.mark.parametrize("case", BAD_TEXTS)
def test_bad_lines_are_refused_with_their_number(case: str, tmp_path: Path) -> None:
    rows, message = BAD_TEXTS[case]
    reader = load_tokenizer(tokenizer_file(tmp_path), most=4)
    with pytest.raises(InvalidArgumentError, match=message):
        load_inputs(lines(tmp_path, *rows), texts=reader)


def test_a_tokenizer_without_a_pad_token_or_of_rubbish_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="has no pad token"):
        load_tokenizer(tokenizer_file(tmp_path, pad="[NOTHING]"), most=4)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidArgumentError, match=r"is no tokenizer\.json"):
        load_tokenizer(tmp_path / "tokenizer.json", most=4)


BAD_DATA = {
    "missing file": (lambda d: str(d / "none.npz"), r"none\.npz does not exist"),
    "texts without a tokenizer": (
        lambda d: lines(d, '{"text": "a"}'),
        r"rows\.jsonl: texts need the model's tokenizer",
    ),
    "no x": (lambda d: write_npz(d / "d.npz", images=np.ones((3, 2))), r"d\.npz: array x is missing"),
    "integers": (lambda d: write_npz(d / "d.npz", x=np.ones((3, 2), np.uint16)), "x has dtype uint16"),
    "one axis": (lambda d: write_npz(d / "d.npz", x=np.ones(3)), r"x has shape \(3,\)"),
    "NaN": (lambda d: write_npz(d / "d.npz", x=np.array([[1.0, 2], [np.nan, 1]])), r"x\[1\] is not finite"),
    "no zip": (text_file, r"broken\.npz is not a readable"),
    "pickled": (pickled, r"p\.npz is not a readable"),
    "empty folder": (str, "holds no images"),
    "two sizes": (images_of_two_sizes, r"b\.png is 4x5 pixels, a\.png is 4x4"),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_is_refused_with_the_file_or_array_named(case: str, tmp_path: Path) -> None:
    make, message = BAD_DATA[case]
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        load_inputs(make(tmp_path))
    assert "\n" not in str(caught.value)


def test_rows_that_are_in_both_sets_leave_the_one_that_only_trains() -> None:
    stream = np.arange(12, dtype=np.float32).reshape(4, 3)
    extra = np.concatenate([stream[1:3], stream + 100])
    np.testing.assert_array_equal(remove_repeats(extra, of=stream), stream + 100)


def test_variations_are_near_copies_made_from_the_seed() -> None:
    x = np.random.default_rng(0).random((5, 1, 32, 32), dtype=np.float32)
    a, b, c = (shifted_copies(x, copies=3, seed=seed) for seed in (1, 1, 2))
    assert a.shape == (15, 1, 32, 32)
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, c)
    assert abs(float(a.mean() - x.mean())) < 0.05
