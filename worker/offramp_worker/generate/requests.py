"""What clients ask for: bodies of OpenAI's API and of Triton's generate extension, read field by field. Everything else
is refused with the field's name.

A body is read in two steps: :func:`read_chat` and the others look at fields, :func:`tokenized` makes tokens of texts,
which may take long and belongs in a thread. Nothing here knows of connections.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

import orjson

from offramp_core.errors import InvalidArgumentError, OfframpError
from offramp_core.generation.stops import clean_stops
from offramp_worker.generate.seam import GenerationBundle, Sampling, Tokenizer
from offramp_worker.http.tensors import shown

T = TypeVar("T")
Form = Literal["completion", "chat", "triton"]
MAX_ANSWERS = 16  # of one request: prompts times n
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
MAX_TOP_LOGPROBS, MAX_LEGACY_LOGPROBS = 20, 5
DEFAULT_TOKENS = {"completion": 16, "chat": 512, "triton": 16}
MAX_CLASS, MAX_STREAM, MAX_USER = 32, 128, 512
MAX_SEED = 2**63 - 1
ROLES = ("system", "developer", "user", "assistant", "tool")
Prompt = str | tuple[int, ...] | tuple[Mapping[str, str], ...]  # text, tokens, or the messages of a chat


class RequestError(OfframpError):
    """A request is malformed. ``field`` is the JSON path at fault, ``code`` OpenAI's word for the kind of error, if
    there is one."""

    def __init__(self, field_: str, message: str, *, code: str | None = None, status: int = 400) -> None:
        super().__init__(f"{field_}: {message}")
        self.field, self.code, self.status = field_, code, status


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request as its fields say. ``prompts`` times ``n`` answers are wanted; ``max_tokens`` of each, None where it
    is not said.

    ``request_class`` is what its traffic is called (code, chat, ...), ``source`` the stream it comes from;
    ``never_exit`` asks for the reference. ``id`` is the client's own name for it (Triton).
    """

    form: Form
    model: str
    prompts: tuple[Prompt, ...]
    n: int = 1
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    seeded: bool = False
    stops: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    request_class: str = ""
    source: str = ""
    never_exit: bool = False
    id: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request whose prompts are tokens: ``prompts`` by answer, and the most tokens of each answer."""

    wanted: Wanted
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]


@dataclass(slots=True)
class Fields:
    """An object of a body, whose fields are taken one by one; :meth:`done` refuses those that nobody took. ``null`` is
    as good as none."""

    values: dict[str, Any]
    path: str = ""
    taken: set[str] = field(default_factory=set)

    def at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def take(self, name: str) -> Any:
        self.taken.add(name)
        return self.values.get(name)

    def text(self, name: str, *, longest: int) -> str:
        what = f"text of at most {longest} characters"
        return self._checked(name, "", what, lambda value: isinstance(value, str) and len(value) <= longest)

    def boolean(self, name: str) -> bool:
        return self._checked(name, False, "true or false", lambda value: isinstance(value, bool))

    def integer(self, name: str, *, low: int, high: int) -> int | None:
        what, default = f"a whole number from {low} to {high}", cast(int | None, None)
        return self._checked(name, default, what, lambda value: type(value) is int and low <= value <= high)

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        what, kinds = f"a number from {low:g} to {high:g}", (int, float)
        return float(self._checked(name, default, what, lambda value: type(value) in kinds and low <= value <= high))

    def object(self, name: str) -> Fields:
        empty: dict[str, Any] = {}
        return Fields(self._checked(name, empty, "an object", lambda value: isinstance(value, dict)), self.at(name))

    def _checked(self, name: str, default: T, what: str, fits: Callable[[Any], bool]) -> T:
        """A field's value; it must be ``what`` it says, which it is where it ``fits``."""
        value = self.take(name)
        if value is None:
            return default
        if not fits(value):
            raise RequestError(self.at(name), f"is {shown(value)}; it must be {what}")
        return cast(T, value)

    def only(self, name: str, *allowed: Any) -> None:
        """A field that there is for others' sake: these values change nothing, and any other is not to be had."""
        value = self.take(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in allowed):
            known = ", ".join(orjson.dumps(one).decode() for one in allowed)
            raise RequestError(self.at(name), f"is {shown(value)}; only {known} is supported", code="unsupported_value")

    def done(self) -> None:
        unknown = next((name for name in self.values if name not in self.taken), None)
        if unknown is not None:
            raise RequestError(
                self.at(shown(unknown)[1:-1]), "is no field that is known here", code="unknown_parameter"
            )


def read_body(body: bytes | bytearray) -> Fields:
    """The object that a body is.

    Raises
    ------
    RequestError
        It is no JSON, no object, nested too deeply, or has text that is no UTF-8.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError("body", f"is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError("body", "must be a JSON object")
    return Fields(value)


def read_completion(body: bytes | bytearray) -> Wanted:
    """``POST /v1/completions``."""
    fields = read_body(body)
    prompts = _prompts(fields)
    n = _answers(fields, len(prompts))
    logprobs = fields.integer("logprobs", low=0, high=MAX_LEGACY_LOGPROBS)
    fields.only("echo", False)
    fields.only("suffix", "")
    fields.only("best_of", n)
    max_tokens = fields.integer("max_tokens", low=1, high=MAX_SEED)
    sampling, seeded = _sampling(fields, logprobs=logprobs is not None, top=logprobs or 0)
    return _common(fields, "completion", prompts, n=n, max_tokens=max_tokens, sampling=sampling, seeded=seeded)


def read_chat(body: bytes | bytearray) -> Wanted:
    """``POST /v1/chat/completions``."""
    fields = read_body(body)
    messages = _messages(fields)
    n = _answers(fields, 1)
    top = fields.integer("top_logprobs", low=0, high=MAX_TOP_LOGPROBS)
    logprobs = fields.boolean("logprobs")
    if top and not logprobs:
        raise RequestError("top_logprobs", "needs logprobs: true")
    old = fields.integer("max_tokens", low=1, high=MAX_SEED)
    new = fields.integer("max_completion_tokens", low=1, high=MAX_SEED)
    if old is not None and new is not None and old != new:
        raise RequestError("max_completion_tokens", f"is {new} where max_tokens is {old}; give one of them")
    for name, neutral in (
        ("tools", []),
        ("tool_choice", "none"),
        ("functions", []),
        ("function_call", "none"),
        ("response_format", {"type": "text"}),
        ("modalities", ["text"]),
        ("store", False),
        ("parallel_tool_calls", True),
        ("service_tier", "auto"),
    ):
        fields.only(name, neutral)
    sampling, seeded = _sampling(fields, logprobs=logprobs, top=top or 0)
    return _common(
        fields, "chat", (messages,), n=n, max_tokens=new if old is None else old, sampling=sampling, seeded=seeded
    )


def read_triton(body: bytes | bytearray, *, model: str, stream: bool) -> Wanted:
    """``POST /v2/models/NAME/generate`` and ``generate_stream``: ``text_input``, and all else in ``parameters``."""
    fields = read_body(body)
    text = fields.take("text_input")
    if not isinstance(text, str):
        raise RequestError("text_input", f"is {shown(text)}; it must be text")
    name = fields.text("id", longest=MAX_USER)
    parameters = fields.object("parameters")
    fields.only("stream", stream)
    fields.done()
    parameters.only("stream", stream)
    max_tokens = parameters.integer("max_tokens", low=1, high=MAX_SEED)
    stops = _stops(parameters)
    sampling, seeded = _sampling(parameters, logprobs=False, top=0, temperature=0.0)
    request_class, source, never = _ours(parameters)
    parameters.done()
    return Wanted(
        "triton",
        model,
        (text,),
        max_tokens=max_tokens,
        sampling=sampling,
        seeded=seeded,
        stops=stops,
        stream=stream,
        request_class=request_class,
        source=source,
        never_exit=never,
        id=name,
    )


def tokenized(wanted: Wanted, bundle: GenerationBundle, tokenizer: Tokenizer, *, longest_token: int) -> Asked:
    """Tokens of every prompt, each within the context together with the answer that is wanted.

    Parameters
    ----------
    longest_token : int
        Most bytes that a token stands for. A text that cannot fit the context whatever its tokens are is not tokenized.

    Raises
    ------
    RequestError
        A prompt or ``max_tokens`` does not fit.
    """
    prompts = [_tokens(wanted, i, bundle, tokenizer, longest_token) for i in range(len(wanted.prompts))]
    limits = [_limit(wanted, _place(wanted, i), tokens, bundle) for i, tokens in enumerate(prompts)]
    each = range(wanted.n)
    return Asked(wanted, tuple(p for p in prompts for _ in each), tuple(m for m in limits for _ in each))


def _place(wanted: Wanted, i: int) -> str:
    """What the body calls a prompt."""
    if wanted.form == "completion":
        return f"prompt[{i}]" if len(wanted.prompts) > 1 else "prompt"
    return "messages" if wanted.form == "chat" else "text_input"


def _tokens(wanted: Wanted, i: int, bundle: GenerationBundle, tokenizer: Tokenizer, longest: int) -> tuple[int, ...]:
    prompt, place, begin = wanted.prompts[i], _place(wanted, i), bundle.begin_tokens
    size = _bytes(prompt)
    if size > bundle.context_length * longest:
        raise _too_long(place, f"at least {math.ceil(size / longest)}", bundle)
    try:
        if isinstance(prompt, str):
            tokens = tuple(tokenizer.encode(prompt))
        elif prompt and isinstance(prompt[0], Mapping):
            tokens = tuple(tokenizer.chat([m for m in prompt if isinstance(m, Mapping)]))
        else:
            tokens = tuple(t for t in prompt if isinstance(t, int))
    except InvalidArgumentError as error:
        raise RequestError(place, str(error)) from error
    bad = next((t for t in tokens if not 0 <= t < bundle.vocabulary), None)
    if bad is not None:
        raise RequestError(place, f"has token {bad}; tokens are whole numbers from 0 to {bundle.vocabulary - 1}")
    if begin and tokens[: len(begin)] != begin:
        tokens = begin + tokens
    if not tokens:
        raise RequestError(place, "is empty")
    if len(tokens) >= bundle.context_length:
        raise _too_long(place, str(len(tokens)), bundle)
    return tokens


def _bytes(prompt: Prompt) -> int:
    """A lower bound of the size of a prompt's text."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(m["content"]) for m in prompt if isinstance(m, Mapping))


def _too_long(place: str, has: str, bundle: GenerationBundle) -> RequestError:
    message = f"has {has} tokens; the model's context of {bundle.context_length} holds prompt and answer together"
    return RequestError(place, message, code="context_length_exceeded")


def _limit(wanted: Wanted, place: str, tokens: Sequence[int], bundle: GenerationBundle) -> int:
    """The most tokens of an answer."""
    room = bundle.context_length - len(tokens)
    if wanted.max_tokens is None:
        return min(room, DEFAULT_TOKENS[wanted.form])
    if wanted.max_tokens > room:
        raise RequestError(
            "max_tokens",
            f"is {wanted.max_tokens}; {place} has {len(tokens)} tokens, which leaves {room} of the context of "
            f"{bundle.context_length}",
            code="context_length_exceeded",
        )
    return wanted.max_tokens


def _common(
    fields: Fields,
    form: Form,
    prompts: tuple[Prompt, ...],
    *,
    n: int,
    max_tokens: int | None,
    sampling: Sampling,
    seeded: bool,
) -> Wanted:
    """What both ways of OpenAI's have."""
    model = fields.take("model")
    if not isinstance(model, str) or not model:
        raise RequestError("model", f"is {shown(model)}; it must be the name of the model")
    stops = _stops(fields)
    stream = fields.boolean("stream")
    options = fields.object("stream_options")
    if options.values and not stream:
        raise RequestError("stream_options", "needs stream: true")
    include_usage = options.boolean("include_usage")
    options.boolean("include_obfuscation")
    options.done()
    fields.only("presence_penalty", 0, 0.0)
    fields.only("frequency_penalty", 0, 0.0)
    fields.only("logit_bias", {})
    fields.text("user", longest=MAX_USER)
    fields.text("safety_identifier", longest=MAX_USER)
    fields.text("prompt_cache_key", longest=MAX_USER)
    fields.object("metadata")
    parameters = fields.object("parameters")
    request_class, source, never = _ours(parameters)
    parameters.done()
    fields.done()
    return Wanted(
        form,
        model,
        prompts,
        n=n,
        max_tokens=max_tokens,
        sampling=sampling,
        seeded=seeded,
        stops=stops,
        stream=stream,
        include_usage=include_usage,
        request_class=request_class,
        source=source,
        never_exit=never,
    )


def _ours(parameters: Fields) -> tuple[str, str, bool]:
    """``parameters``: the request's class, its stream, and whether the reference is to answer."""
    request_class = parameters.text("class", longest=MAX_CLASS)
    if not request_class.isprintable():
        raise RequestError(parameters.at("class"), f"is {shown(request_class)}; it must be printable, on one line")
    source = parameters.text("stream_name", longest=MAX_STREAM)
    wish = parameters.take("exit")
    if wish not in (None, "never"):
        raise RequestError(parameters.at("exit"), f'is {shown(wish)}; only "never" is known')
    return request_class, source, wish == "never"


def _sampling(fields: Fields, *, logprobs: bool, top: int, temperature: float = 1.0) -> tuple[Sampling, bool]:
    """How tokens are drawn, and whether the client chose the seed."""
    temperature = fields.number("temperature", temperature, low=0, high=2)
    top_p = fields.number("top_p", 1.0, low=0, high=1)
    seed = fields.integer("seed", low=-MAX_SEED - 1, high=MAX_SEED)
    sampling = Sampling(temperature, top_p, (seed or 0) & MAX_SEED, logprobs, top)
    return sampling, seed is not None


def _answers(fields: Fields, prompts: int) -> int:
    n = fields.integer("n", low=1, high=MAX_ANSWERS) or 1
    if n * prompts > MAX_ANSWERS:
        raise RequestError("n", f"is {n} for {prompts} prompts; a request gets at most {MAX_ANSWERS} answers")
    return n


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        many = f"has {len(stops)} entries" if isinstance(stops, list) else f"is {shown(value)}"
        raise RequestError(fields.at("stop"), f"{many}; it must be text, or a list of at most {MAX_STOPS}")
    for i, stop in enumerate(stops):
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            place = fields.at("stop") if isinstance(value, str) else fields.at(f"stop[{i}]")
            raise RequestError(place, f"is {shown(stop)}; it must be text of 1 to {MAX_STOP_CHARACTERS} characters")
    return clean_stops(stops)


def _prompts(fields: Fields) -> tuple[Prompt, ...]:
    """A text, tokens, or several of either."""
    value = fields.take("prompt")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise RequestError("prompt", f"is {shown(value)}; it must be text, tokens, or a list of either")
    if isinstance(value[0], str | list):
        if len(value) > MAX_ANSWERS:
            raise RequestError("prompt", f"has {len(value)} prompts; a request may have at most {MAX_ANSWERS}")
        return tuple(_one_prompt(one, f"prompt[{i}]", type(value[0])) for i, one in enumerate(value))
    return (_token_prompt(value, "prompt"),)


def _one_prompt(value: Any, place: str, kind: type[Any]) -> Prompt:
    if not isinstance(value, kind):
        raise RequestError(place, f"is {shown(value)}; prompts of one request are all text or all tokens")
    return value if isinstance(value, str) else _token_prompt(value, place)


def _token_prompt(value: list[Any], place: str) -> tuple[int, ...]:
    bad = next((i for i, token in enumerate(value) if type(token) is not int), None)
    if bad is not None:
        raise RequestError(f"{place}[{bad}]", f"is {shown(value[bad])}; it must be a token, a whole number")
    if not value:
        raise RequestError(place, "is empty")
    return tuple(value)


def _messages(fields: Fields) -> tuple[Mapping[str, str], ...]:
    value = fields.take("messages")
    if not isinstance(value, list) or not value:
        raise RequestError("messages", f"is {shown(value)}; it must be a list of messages, at least one")
    return tuple(_message(one, f"messages[{i}]") for i, one in enumerate(value))


def _message(value: Any, path: str) -> Mapping[str, str]:
    if not isinstance(value, dict):
        raise RequestError(path, f"is {shown(value)}; it must be an object with role and content")
    message = Fields(value, path)
    role = message.take("role")
    if role not in ROLES:
        raise RequestError(message.at("role"), f"is {shown(role)}; it must be one of {', '.join(ROLES)}")
    content = _content(message.take("content"), message.at("content"))
    message.text("name", longest=MAX_USER)  # known, and shown to no template
    message.only("refusal")
    message.only("tool_calls", [])
    message.text("tool_call_id", longest=MAX_USER)
    message.done()
    return {"role": "system" if role == "developer" else role, "content": content}


def _content(value: Any, path: str) -> str:
    """Text, or parts that are text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise RequestError(path, f"is {shown(value)}; it must be text, or a list of parts of type text")
    texts = []
    for i, one in enumerate(value):
        part = Fields(one if isinstance(one, dict) else {}, f"{path}[{i}]")
        kind, text = part.take("type"), part.take("text")
        if kind != "text" or not isinstance(text, str):
            raise RequestError(
                part.path, f"is {shown(one)}; only parts of type text are supported", code="unsupported_value"
            )
        part.done()
        texts.append(text)
    return "".join(texts)
