"""Text to tokens and back by a bundle's ``tokenizer.json`` and ``tokenizer_config.json``. Nothing of them is executed
but a chat template, in a sandbox.

Decoding works on bytes: each token has its bytes, once and for all, and a character is shown when its last byte is
there. So no piece of a stream ends within a character, and the pieces joined are the answer.
"""

from __future__ import annotations

import codecs
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Library

from offramp_core.errors import InvalidArgumentError, InvalidBundleError

TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
MAX_TEMPLATE_CHARACTERS = 64 * 1024
MAX_RENDERED_CHARACTERS = 16 * 2**20
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
SPACE = "▁"  # of SentencePiece


class BundleTokenizer:
    """See :class:`offramp_worker.generate.seam.Tokenizer`."""

    def __init__(self, library: Library, *, template: str | None, special: Mapping[str, str] | None = None) -> None:
        """``special`` are the texts that a template knows by name: ``bos_token``, ``eos_token``.

        Raises
        ------
        InvalidBundleError
            Decoder or template are not understood.
        """
        self._plain, self._special_too = library, Library.from_str(library.to_str())
        self._plain.encode_special_tokens = True
        self._special_too.encode_special_tokens = False
        self._bytes, self._hidden = _table(library)
        self._special = dict(special or {})
        self._template = _compiled(template) if template else None
        added = library.get_added_tokens_decoder().values()
        names = sorted((t.content for t in added if t.special), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names))) if names else None

    @property
    def vocabulary(self) -> int:
        """Number of ids, unused ones included."""
        return len(self._bytes)

    @property
    def longest_token(self) -> int:
        """Most bytes that one token stands for."""
        return max(map(len, self._bytes), default=1)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        library = self._special_too if special else self._plain
        return list(library.encode(text, add_special_tokens=False).ids)

    def decoder(self) -> BytesDecoder:
        return BytesDecoder(self._bytes, self._hidden)

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode(errors="replace")

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if self._template is None:
            raise InvalidArgumentError("this model has no chat template; use /v1/completions")
        names = self._names
        if names is None or not any(names.search(m["content"]) for m in messages):
            return self.encode(self._rendered(messages), special=True)
        # Somebody wrote the name of a special token: contents are kept apart, and are letters.
        mark = secrets.token_hex(8)
        marked = [{**m, "content": f"{mark}{i:06d}"} for i, m in enumerate(messages)]
        tokens: list[int] = []
        for i, part in enumerate(re.split(mark + r"(\d{6})", self._rendered(marked))):
            tokens += self.encode(messages[int(part)]["content"]) if i % 2 else self.encode(part, special=True)
        return tokens

    def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> str:
        assert self._template is not None
        try:
            text = self._template.render(messages=messages, add_generation_prompt=True, **self._special)
        except (TemplateError, TypeError, ValueError, ArithmeticError, RecursionError, LookupError) as error:
            raise InvalidArgumentError(f"the model's chat template refuses them: {error}") from error
        if len(text) > MAX_RENDERED_CHARACTERS:
            raise InvalidArgumentError(f"they become more than {MAX_RENDERED_CHARACTERS} characters")
        return str(text)


class BytesDecoder:
    """See :class:`offramp_worker.generate.seam.TextDecoder`."""

    def __init__(self, table: Sequence[bytes], hidden: frozenset[int]) -> None:
        self._table, self._hidden = table, hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        if token in self._hidden or not 0 <= token < len(self._table):
            return ""
        return self._utf8.decode(self._table[token])

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


def load_tokenizer(folder: Path) -> BundleTokenizer:
    """Read a bundle's tokenizer.

    Raises
    ------
    InvalidBundleError
        Names the file.
    """
    try:
        library = Library.from_file(str(folder / TOKENIZER_FILE))
    except Exception as error:  # the library raises bare ones
        raise InvalidBundleError(f"{TOKENIZER_FILE}: cannot be read: {error}") from error
    config = _config(folder / CONFIG_FILE)
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next(
            (t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None
        )
    if template is not None and not isinstance(template, str):
        raise InvalidBundleError(f"{CONFIG_FILE}: chat_template must be text")
    named = {name: _content(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return BundleTokenizer(library, template=template, special={k: v for k, v in named.items() if v is not None})


def _config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidBundleError(f"{CONFIG_FILE}: is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidBundleError(f"{CONFIG_FILE}: must be an object")
    return value


def _content(token: Any) -> str | None:
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _compiled(source: str) -> Any:
    """A chat template that can read messages and nothing else of this process, and change neither."""
    if len(source) > MAX_TEMPLATE_CHARACTERS:
        raise InvalidBundleError(f"{CONFIG_FILE}: chat_template has more than {MAX_TEMPLATE_CHARACTERS} characters")

    def refuse(message: str) -> None:
        raise TemplateError(message)

    world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    world.globals["raise_exception"] = refuse
    try:
        return world.from_string(source)
    except TemplateError as error:
        raise InvalidBundleError(f"{CONFIG_FILE}: chat_template is no template: {error}") from error


def _table(library: Library) -> tuple[list[bytes], frozenset[int]]:
    """The bytes of every id, and the ids that are never shown: those of special tokens."""
    added = library.get_added_tokens_decoder()
    vocabulary = library.get_vocab(with_added_tokens=True)
    table = [b""] * (1 + max(vocabulary.values(), default=-1))
    read = _reader(library)
    for text, token in vocabulary.items():
        table[token] = text.encode(errors="replace") if token in added else read(text)
    return table, frozenset(token for token, one in added.items() if one.special)


def _reader(library: Library) -> Any:
    """How the text of a token becomes its bytes, by the kind of decoder."""
    kinds = _kinds(json.loads(library.to_str()).get("decoder"))
    if "ByteLevel" in kinds:
        return _of_byte_level
    if "Metaspace" in kinds or "ByteFallback" in kinds:
        return _of_sentence_piece
    raise InvalidBundleError(
        f"{TOKENIZER_FILE}: its decoder ({', '.join(sorted(kinds)) or 'none'}) is not understood; "
        "byte-level BPE and SentencePiece with byte fallback are"
    )


def _kinds(decoder: Any) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    inner = decoder.get("decoders") or []
    return {str(decoder.get("type"))}.union(*(_kinds(one) for one in inner))


def _of_byte_level(text: str) -> bytes:
    table = _byte_of_letter()
    return bytes(table[c] for c in text) if all(c in table for c in text) else text.encode(errors="replace")


def _of_sentence_piece(text: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else text.replace(SPACE, " ").encode(errors="replace")


@lru_cache(maxsize=1)
def _byte_of_letter() -> dict[str, int]:
    """The letters that stand for bytes in byte-level BPE (GPT-2's ``bytes_to_unicode``)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(others)}
