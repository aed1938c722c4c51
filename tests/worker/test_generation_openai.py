"""OpenAI's API by its own client against a real server, with a real small model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import openai
import pytest
import stories
from generation import ONCE, GenerationServer

MESSAGES = [{"role": "user", "content": "Tell me a story about a cat."}]


@pytest.fixture(scope="module")
def server() -> Iterator[GenerationServer]:
    with GenerationServer() as server:
        yield server


def test_the_model_is_listed(server: GenerationServer) -> None:
    listed = server.openai.models.list().data
    assert [m.id for m in listed] == ["stories"]
    assert server.openai.models.retrieve("stories").created == 1_700_000_000
    with pytest.raises(openai.NotFoundError) as error:
        server.openai.models.retrieve("another")
    assert error.value.code == "model_not_found" and error.value.param == "model"


def test_a_completion_is_the_models_greedy_answer(server: GenerationServer) -> None:
    tokens, text = stories.greedy(ONCE, n=30)
    reply = server.openai.completions.create(model="stories", prompt=ONCE, max_tokens=30, temperature=0)
    assert reply.choices[0].text == text
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (7, len(tokens))
    assert reply.usage.total_tokens == 7 + len(tokens)


def test_a_stream_has_the_same_text_as_the_whole_reply(server: GenerationServer) -> None:
    stream = server.openai.completions.create(
        model="stories", prompt=ONCE, max_tokens=30, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks[:-1]) == stories.greedy(ONCE, n=30)[1]
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 30
    assert len(chunks) > 10


@pytest.mark.slow
def test_an_answer_ends_where_the_model_ends_it(server: GenerationServer) -> None:
    reply = server.openai.completions.create(model="stories", prompt=ONCE, max_tokens=500, temperature=0)
    tokens, text = stories.greedy(ONCE, n=500)
    assert tokens[-1] in (stories.BEGIN, stories.END)
    assert reply.choices[0].finish_reason == "stop" and reply.choices[0].text == text


def test_a_chat_goes_through_the_models_template(server: GenerationServer) -> None:
    reply = server.openai.chat.completions.create(model="stories", messages=MESSAGES, max_tokens=20, temperature=0)  # type: ignore[arg-type]
    prompt = f"<|im_start|>user\n{MESSAGES[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content == stories.greedy(prompt, n=20)[1]
    parts = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
    same = server.openai.chat.completions.create(
        model="stories", messages=parts, max_completion_tokens=20, temperature=0
    )  # type: ignore[arg-type]
    assert same.choices[0].message.content == reply.choices[0].message.content


def test_a_streamed_chat_begins_with_the_role(server: GenerationServer) -> None:
    stream = server.openai.chat.completions.create(
        model="stories", messages=MESSAGES, max_tokens=20, temperature=0, stream=True
    )  # type: ignore[call-overload]
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(c.choices[0].delta.role is None for c in chunks[1:])
    assert chunks[-1].choices[0].finish_reason == "length"
    whole = server.openai.chat.completions.create(model="stories", messages=MESSAGES, max_tokens=20, temperature=0)  # type: ignore[arg-type]
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content


@pytest.mark.parametrize("stop", ["Lily", "girl named", " little g", [" named", "little girl"], "zzz"])
def test_an_answer_ends_before_a_stop_string_wherever_tokens_end(
    server: GenerationServer, stop: str | list[str]
) -> None:
    _, text = stories.greedy(ONCE, n=30)
    stops = [stop] if isinstance(stop, str) else stop
    ends = [text.find(s) + len(s) for s in stops if s in text]
    wanted = min(
        (text[: text.find(s)] for s in stops if s in text and text.find(s) + len(s) == min(ends)), default=text
    )
    reply = server.openai.completions.create(model="stories", prompt=ONCE, max_tokens=30, temperature=0, stop=stop)
    assert reply.choices[0].text == wanted
    assert reply.choices[0].finish_reason == ("stop" if ends else "length")
    stream = server.openai.completions.create(
        model="stories", prompt=ONCE, max_tokens=30, temperature=0, stop=stop, stream=True
    )
    assert "".join(c.choices[0].text for c in stream) == wanted


def test_a_stop_string_stops_the_computing(server: GenerationServer) -> None:
    before = server.engine.positions
    server.openai.completions.create(model="stories", prompt=ONCE, max_tokens=300, temperature=0, stop="girl")
    server.until_idle()
    assert server.engine.positions - before < 30


def test_log_probabilities_are_the_models(server: GenerationServer) -> None:
    reply = server.openai.completions.create(model="stories", prompt=ONCE, max_tokens=8, temperature=0, logprobs=3)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.text_offset is not None
    assert "".join(logprobs.tokens) == reply.choices[0].text
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(8)]
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs or [], logprobs.top_logprobs or [], strict=True
    ):
        assert logprob is not None and top[token] == logprob == max(top.values()) and len(top) == 3
    chat = server.openai.chat.completions.create(
        model="stories", messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=2
    )  # type: ignore[arg-type]
    content = chat.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None and len(content) == 5
    assert b"".join(bytes(t.bytes or []) for t in content).decode() == chat.choices[0].message.content
    assert all(t.top_logprobs[0].logprob == t.logprob and math.exp(t.logprob) <= 1 for t in content)


def test_a_seed_gives_the_same_samples_and_others_differ(server: GenerationServer) -> None:
    def sampled(**fields: object) -> list[str]:
        reply = server.openai.completions.create(
            model="stories",
            prompt=ONCE,
            max_tokens=12,
            temperature=1.5,
            **fields,  # type: ignore[arg-type]
        )
        return [c.text for c in reply.choices]

    assert sampled(seed=7) == sampled(seed=7)
    assert sampled(seed=7) != sampled(seed=8)
    assert sampled() != sampled()
    several = sampled(seed=7, n=3)
    assert len(set(several)) == 3 and several[0] == sampled(seed=7)[0]


def test_a_nucleus_of_next_to_nothing_is_greedy(server: GenerationServer) -> None:
    reply = server.openai.completions.create(model="stories", prompt=ONCE, max_tokens=20, temperature=2, top_p=1e-9)
    assert reply.choices[0].text == stories.greedy(ONCE, n=20)[1]


def test_several_prompts_are_answered_in_their_order_as_text_or_as_tokens(server: GenerationServer) -> None:
    prompts = ["Once upon a time", "The cat", "Tom and Lily"]
    wanted = [stories.greedy(p, n=10)[1] for p in prompts]
    reply = server.openai.completions.create(model="stories", prompt=prompts, max_tokens=10, temperature=0)
    assert [c.text for c in reply.choices] == wanted and [c.index for c in reply.choices] == [0, 1, 2]
    tokens = [stories.tokenizer().encode(p) for p in prompts]
    reply = server.openai.completions.create(model="stories", prompt=tokens, max_tokens=10, temperature=0)
    assert [c.text for c in reply.choices] == wanted
    stream = server.openai.completions.create(
        model="stories", prompt=prompts, max_tokens=10, temperature=0, stream=True
    )
    texts, finished = ["", "", ""], list[int]()
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
        if chunk.choices[0].finish_reason:
            finished.append(chunk.choices[0].index)
    assert texts == wanted and sorted(finished) == [0, 1, 2]


@pytest.mark.slow
def test_characters_of_several_tokens_never_break(server: GenerationServer) -> None:
    """A high temperature makes the model write bytes that are no characters; a chunk alone is always whole text."""
    stream = server.openai.completions.create(
        model="stories", prompt="é ü 🐱 日本", max_tokens=200, temperature=2, seed=3, stream=True, logprobs=0
    )
    raw, shown = b"", ""
    for chunk in stream:
        choice = chunk.choices[0]
        shown += choice.text
        json.dumps(choice.text, ensure_ascii=False).encode()  # no half of a surrogate pair
    reply = server.openai.completions.create(
        model="stories", prompt="é ü 🐱 日本", max_tokens=200, temperature=2, seed=3
    )
    assert shown == reply.choices[0].text and raw == b""


def test_the_client_raises_its_own_errors(server: GenerationServer) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        server.openai.completions.create(model="gpt", prompt=ONCE)
    assert missing.value.param == "model" and missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        server.openai.completions.create(model="stories", prompt=ONCE, max_tokens=-1)
    assert bad.value.param == "max_tokens" and "is -1" in bad.value.message
    with pytest.raises(openai.BadRequestError) as long:
        server.openai.completions.create(model="stories", prompt="a b c " * 500)
    assert long.value.code == "context_length_exceeded" and "512" in long.value.message


def test_a_stream_that_the_model_breaks_off_ends_with_an_error() -> None:
    with GenerationServer() as server:
        stream = server.openai.completions.create(
            model="stories", prompt=ONCE, max_tokens=400, temperature=0, stream=True
        )
        next(stream)
        server.engine.broken = "the device is gone"
        with pytest.raises(openai.APIError, match="the model failed"):
            list(stream)
        server.engine.broken = ""
        server.until_idle()
        assert server.complete(max_tokens=3).status_code == 200
