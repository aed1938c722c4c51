"""Other engines are given the very same model, asked in turns, and left out with the reason where they cannot be
had."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from bench.generate.rivals import compared, converted, engines
from bench.generate.rivals.compared import YARDSTICK, figures, in_turns, rate, writing_seconds
from bench.generate.rivals.converted import gguf_file, huggingface_folder
from bench.generate.rivals.engines import Answers, Child, EngineFailedError, Model, Rival
from bench.peers import environments
from bench.peers.environments import Peer
from story_bundles import OPENINGS, checkpoint, write_story_bundle
from story_checkpoints import same, write_gguf

from offramp_worker.prepare.generation.sources import read_checkpoint

LINES = f"import sys; sys.path.insert(0, {str(engines.CHILDREN)!r}); from lines import serve, until_end\n"
ECHOES = (
    LINES
    + """
def answer(prompts, tokens, end):
    print("what a library prints is no answer")
    return {"tokens": [until_end(p, end)[:tokens] for p in prompts], "times": [[0.5] * len(p) for p in prompts]}

serve(lambda model: ("1.2 of " + model, answer))
"""
)
FAILS = LINES + "serve(lambda model: (_ for _ in ()).throw(ValueError('no such kernel')))"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((converted, "BUILD"), (environments, "FOLDER"), (compared, "LOGS")):
        monkeypatch.setattr(module, name, tmp_path / name)


def child(program: str, log: Path) -> Child:
    return Child([sys.executable, "-c", program, "model"], end=[2], log=log)


def test_the_model_is_the_same_as_transformers_reads_it() -> None:
    original = checkpoint()
    folder = huggingface_folder(original)
    read = read_checkpoint(str(folder))
    same(replace(read, begin_tokens=original.begin_tokens), original)  # prompts are given as tokens
    assert read.end_tokens == original.end_tokens
    assert huggingface_folder(original) == folder  # kept by content


def test_the_model_is_the_same_in_a_file_of_other_bits(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "stories.gguf")
    same(read_checkpoint(str(gguf_file(file, bits="F32"))), read_checkpoint(str(file)))


def test_an_engine_in_its_own_process_answers_up_to_what_ends_an_answer(tmp_path: Path) -> None:
    engine = child(ECHOES, tmp_path / "log")
    try:
        assert engine.version == "1.2 of model"
        found = engine([[5, 6, 2, 7], [8, 9, 10, 11]], 3)
        assert found.tokens == [[5, 6], [8, 9, 10]]
    finally:
        engine.close()


def test_an_engine_that_cannot_load_says_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(EngineFailedError, match="ValueError: no such kernel"):
        child(FAILS, tmp_path / "log")


def test_time_per_token_counts_what_is_written_once_every_prompt_is_read() -> None:
    # the second prompt is read at 2 s; behind it come 2 tokens of the first answer and 2 of the second within 4 s
    answers = Answers([[1, 1, 1, 1], [1, 1, 1]], [[1.0, 1.5, 3.0, 5.0], [2.0, 4.0, 6.0]])
    assert writing_seconds(answers) == pytest.approx(1.0)
    assert rate(answers) == pytest.approx(7 / 6)
    assert writing_seconds(Answers([[1], [1]], [[1.0], [2.0]])) is None
    assert writing_seconds(Answers([[], [1, 1]], [[], [1.0, 3.0]])) == 2.0  # one ended before its first word
    assert (writing_seconds(Answers([[]], [[]])), rate(Answers([[]], [[]]))) == (None, 0)


def test_engines_take_turns_in_being_first_and_all_get_the_same_prompts() -> None:
    asked: list[tuple[str, list[list[int]]]] = []

    def engine(name: str, seconds: float) -> engines.Answering:
        def answer(prompts: Sequence[Sequence[int]], tokens: int) -> Answers:
            asked.append((name, [list(p) for p in prompts]))
            return Answers(
                [[3] * tokens for _ in prompts], [[seconds * (i + 1) for i in range(tokens)] for _ in prompts]
            )

        return answer

    contenders = {YARDSTICK: engine(YARDSTICK, 1.0), "other": engine("other", 2.0)}
    found = in_turns(contenders, [[1], [2], [3]], rounds=2, tokens=5, tick=lambda: None, at_once=(1, 2))
    assert [name for name, _ in asked] == [YARDSTICK, "other"] * 2 + ["other", YARDSTICK] * 2
    assert [prompts for _, prompts in asked[::2]] == [[[1]], [[2], [3]], [[1]], [[2], [3]]]
    assert [prompts for _, prompts in asked[1::2]] == [prompts for _, prompts in asked[::2]]
    row = figures(found, "other")["2"]
    assert (row["ratio"], row["throughput"], row["equal"], row["answers"]) == (2.0, 0.5, 4, 4)


def test_engines_that_cannot_be_had_are_left_out_with_the_reason_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = Peer("absent", ("./there-is-no-such-0.1-py3-none-any.whl",), "with_llama.py")
    gguf_only = next(rival for rival in engines.RIVALS if rival.name == "llama.cpp F32")
    here = Peer("here", (), gguf_only.peer.module)
    rivals = (Rival("absent", absent, lambda m: m.file), replace(gguf_only, peer=here))
    monkeypatch.setattr(compared, "RIVALS", rivals)
    write_story_bundle(tmp_path / "bundle")
    model = Model(checkpoint(), Path("stories260K.bin"))
    found = compared.compared(tmp_path / "bundle", model, OPENINGS, rounds=1, tokens=4, tick=lambda: None)
    assert found["left_out"].keys() == {"absent", "llama.cpp F32"}
    assert "stories260K.bin" in found["left_out"]["llama.cpp F32"]
    reference = found["engines"][YARDSTICK]
    assert reference.keys() == {"1", "2", "4", "8"}
    assert all(row["ratio"] == 1 and row["equal"] == row["answers"] for row in reference.values())
