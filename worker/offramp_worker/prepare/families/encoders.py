"""Transformer encoders: BERT (and MiniLM, which has its layout), DistilBERT and ViT.

Parameters are named as transformers' checkpoints name them. Devlin et al. 2019 (arXiv:1810.04805), Sanh et al. 2019
(arXiv:1910.01108), Wang et al. 2020 (arXiv:2002.10957), Dosovitskiy et al. 2021 (arXiv:2010.11929).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offramp_core.errors import InvalidArgumentError

Shapes = Mapping[str, tuple[int, ...]]
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": nn.functional.gelu,
    "gelu_new": partial(nn.functional.gelu, approximate="tanh"),
    "relu": nn.functional.relu,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What layers need to know besides their widths."""

    width: int
    inner: int
    heads: int
    layers: int
    epsilon: float
    activation: Callable[[Tensor], Tensor]


class Attention(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Multi-head attention without its output layer; ``names`` are those of the query, key and value layers."""

    def __init__(self, sizes: Sizes, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.heads, self.names = sizes.heads, names
        for name in names:
            setattr(self, name, nn.Linear(sizes.width, sizes.width))

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        """(B, T, C) and (B, 1, 1, T), true at tokens -> (B, T, C)."""
        query, key, value = (
            getattr(self, name)(h).unflatten(2, (self.heads, -1)).transpose(1, 2) for name in self.names
        )
        seen = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return seen.transpose(1, 2).flatten(2)


class Dense(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A linear layer called ``dense``, with a normalisation called ``LayerNorm`` of its sum with the shortcut where
    asked for."""

    def __init__(self, inputs: int, outputs: int, *, epsilon: float | None = None) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, outputs)
        if epsilon is not None:
            self.LayerNorm = nn.LayerNorm(outputs, eps=epsilon)

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """(..., inputs), (..., outputs) -> (..., outputs)."""
        out: Tensor = self.dense(x)
        return out if shortcut is None else self.LayerNorm(out + shortcut)


class BertLayer(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Attention, then two dense layers, each with a shortcut and a normalisation after it."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, inner = sizes.width, sizes.inner
        parts = {
            "self": Attention(sizes, ("query", "key", "value")),
            "output": Dense(width, width, epsilon=sizes.epsilon),
        }
        self.attention = nn.ModuleDict(parts)
        self.intermediate = Dense(width, inner)
        self.output = Dense(inner, width, epsilon=sizes.epsilon)
        self.activation = sizes.activation

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        """(B, T, C), (B, 1, 1, T) -> (B, T, C)."""
        h = self.attention["output"](self.attention["self"](h, mask), h)
        out: Tensor = self.output(self.activation(self.intermediate(h)), h)
        return out


class Embedding(nn.Embedding):  # type: ignore[misc]  # torch is untyped here
    """Draws nothing where it has no memory: torch would load its compiler for that, which takes seconds."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class Embeddings(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Words plus positions (plus token types, 0 where none are given), normalised."""

    def __init__(self, *, words: int, positions: int, width: int, types: int, epsilon: float) -> None:
        super().__init__()
        self.word_embeddings = Embedding(words, width)
        self.position_embeddings = Embedding(positions, width)
        if types:
            self.token_type_embeddings = Embedding(types, width)
        self.typed = types > 0
        self.LayerNorm = nn.LayerNorm(width, eps=epsilon)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """(B, T), (B, T) -> (B, T, C)."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        h = self.word_embeddings(input_ids) + self.position_embeddings(places)
        if self.typed:
            kinds = self.token_type_embeddings
            h = h + (kinds.weight[0] if token_type_ids is None else kinds(token_type_ids))
        out: Tensor = self.LayerNorm(h)
        return out


class Bert(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """BERT with a classifier on its pooler; without a pooler, on the mean over the tokens.

    ``longest`` is how many positions there are; ``typed`` says that texts of a pair are told apart.
    """

    def __init__(self, sizes: Sizes, *, words: int, positions: int, types: int, classes: int, pooler: bool) -> None:
        super().__init__()
        self.longest, self.typed = positions, types > 1
        parts: dict[str, nn.Module] = {
            "embeddings": Embeddings(
                words=words, positions=positions, width=sizes.width, types=types, epsilon=sizes.epsilon
            ),
            "encoder": nn.ModuleDict({"layer": nn.ModuleList(BertLayer(sizes) for _ in range(sizes.layers))}),
        }
        if pooler:
            parts["pooler"] = Dense(sizes.width, sizes.width)
        self.bert = nn.ModuleDict(parts)
        self.classifier = nn.Linear(sizes.width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """(B, T), (B, T), (B, T) -> logits (B, classes)."""
        h = self.bert["embeddings"](input_ids, token_type_ids)
        for layer in self.bert["encoder"]["layer"]:
            h = layer(h, attention_mask[:, None, None, :].bool())
        if "pooler" in self.bert:
            pooled = torch.tanh(self.bert["pooler"](h[:, 0]))
        else:
            weight = attention_mask.to(h.dtype)[..., None]
            pooled = (h * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1)
        logits: Tensor = self.classifier(pooled)
        return logits


class DistilBertLayer(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A BERT layer under other names."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention = Attention(sizes, ("q_lin", "k_lin", "v_lin"))
        self.attention.out_lin = nn.Linear(sizes.width, sizes.width)
        self.sa_layer_norm = nn.LayerNorm(sizes.width, eps=sizes.epsilon)
        self.ffn = nn.ModuleDict(
            {"lin1": nn.Linear(sizes.width, sizes.inner), "lin2": nn.Linear(sizes.inner, sizes.width)}
        )
        self.output_layer_norm = nn.LayerNorm(sizes.width, eps=sizes.epsilon)
        self.activation = sizes.activation

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        """(B, T, C), (B, 1, 1, T) -> (B, T, C)."""
        h = self.sa_layer_norm(self.attention.out_lin(self.attention(h, mask)) + h)
        out: Tensor = self.output_layer_norm(self.ffn["lin2"](self.activation(self.ffn["lin1"](h))) + h)
        return out


class DistilBert(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """DistilBERT with its two-layer classifier on the first token; it tells texts of a pair apart by the separator
    alone."""

    typed = False

    def __init__(self, sizes: Sizes, *, words: int, positions: int, classes: int) -> None:
        super().__init__()
        self.longest = positions
        embeddings = Embeddings(words=words, positions=positions, width=sizes.width, types=0, epsilon=sizes.epsilon)
        layers = nn.ModuleList(DistilBertLayer(sizes) for _ in range(sizes.layers))
        self.distilbert = nn.ModuleDict({"embeddings": embeddings, "transformer": nn.ModuleDict({"layer": layers})})
        self.pre_classifier = nn.Linear(sizes.width, sizes.width)
        self.classifier = nn.Linear(sizes.width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, T), (B, T) -> logits (B, classes)."""
        h = self.distilbert["embeddings"](input_ids)
        for layer in self.distilbert["transformer"]["layer"]:
            h = layer(h, attention_mask[:, None, None, :].bool())
        logits: Tensor = self.classifier(nn.functional.relu(self.pre_classifier(h[:, 0])))
        return logits


class VitLayer(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Normalise, attend, add; normalise, two dense layers, add."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        parts = {"attention": Attention(sizes, ("query", "key", "value")), "output": Dense(sizes.width, sizes.width)}
        self.attention = nn.ModuleDict(parts)
        self.intermediate = Dense(sizes.width, sizes.inner)
        self.output = Dense(sizes.inner, sizes.width)
        self.layernorm_before = nn.LayerNorm(sizes.width, eps=sizes.epsilon)
        self.layernorm_after = nn.LayerNorm(sizes.width, eps=sizes.epsilon)
        self.activation = sizes.activation

    def forward(self, h: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        h = h + self.attention["output"](self.attention["attention"](self.layernorm_before(h), None))
        out: Tensor = h + self.output(self.activation(self.intermediate(self.layernorm_after(h))))
        return out


class Vit(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """ViT with a classifier on its class token."""

    def __init__(self, sizes: Sizes, *, channels: int, patch: int, tokens: int, classes: int) -> None:
        super().__init__()
        embeddings = nn.Module()
        embeddings.cls_token = nn.Parameter(torch.zeros(1, 1, sizes.width))
        embeddings.position_embeddings = nn.Parameter(torch.zeros(1, tokens, sizes.width))
        embeddings.patch_embeddings = nn.ModuleDict(
            {"projection": nn.Conv2d(channels, sizes.width, patch, stride=patch)}
        )
        layers = nn.ModuleList(VitLayer(sizes) for _ in range(sizes.layers))
        norm = nn.LayerNorm(sizes.width, eps=sizes.epsilon)
        self.vit = nn.ModuleDict(
            {"embeddings": embeddings, "encoder": nn.ModuleDict({"layer": layers}), "layernorm": norm}
        )
        self.classifier = nn.Linear(sizes.width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) -> logits (B, classes)."""
        embeddings = self.vit["embeddings"]
        patches = embeddings.patch_embeddings["projection"](x).flatten(2).transpose(1, 2)
        first = embeddings.cls_token.expand(x.shape[0], -1, -1)
        h = torch.cat([first, patches], dim=1) + embeddings.position_embeddings
        for layer in self.vit["encoder"]["layer"]:
            h = layer(h)
        logits: Tensor = self.classifier(self.vit["layernorm"](h)[:, 0])
        return logits


def build_bert(values: Mapping[str, int], shapes: Shapes, config: Mapping[str, Any]) -> nn.Module:
    """BERT or MiniLM as large as the checkpoint says."""
    words, width = _shape(shapes, "bert.embeddings.word_embeddings.weight")
    inner, _ = _shape(shapes, "bert.encoder.layer.0.intermediate.dense.weight")
    sizes = _sizes(values, shapes, config, width=width, inner=inner, layer="bert.encoder.layer.")
    return Bert(
        sizes,
        words=words,
        positions=_shape(shapes, "bert.embeddings.position_embeddings.weight")[0],
        types=_shape(shapes, "bert.embeddings.token_type_embeddings.weight")[0],
        classes=_shape(shapes, "classifier.weight")[0],
        pooler="bert.pooler.dense.weight" in shapes,
    )


def build_distilbert(values: Mapping[str, int], shapes: Shapes, config: Mapping[str, Any]) -> nn.Module:
    """DistilBERT as large as the checkpoint says."""
    words, width = _shape(shapes, "distilbert.embeddings.word_embeddings.weight")
    inner, _ = _shape(shapes, "distilbert.transformer.layer.0.ffn.lin1.weight")
    sizes = _sizes(values, shapes, config, width=width, inner=inner, layer="distilbert.transformer.layer.")
    positions, _ = _shape(shapes, "distilbert.embeddings.position_embeddings.weight")
    return DistilBert(sizes, words=words, positions=positions, classes=_shape(shapes, "classifier.weight")[0])


def build_vit(values: Mapping[str, int], shapes: Shapes, config: Mapping[str, Any]) -> nn.Module:
    """ViT as large as the checkpoint says."""
    width, channels, patch, _ = _shape(shapes, "vit.embeddings.patch_embeddings.projection.weight")
    inner, _ = _shape(shapes, "vit.encoder.layer.0.intermediate.dense.weight")
    sizes = _sizes(values, shapes, config, width=width, inner=inner, layer="vit.encoder.layer.")
    tokens = _shape(shapes, "vit.embeddings.position_embeddings")[1]
    return Vit(sizes, channels=channels, patch=patch, tokens=tokens, classes=_shape(shapes, "classifier.weight")[0])


def _sizes(
    values: Mapping[str, int], shapes: Shapes, config: Mapping[str, Any], *, width: int, inner: int, layer: str
) -> Sizes:
    """Sizes of which the shapes say nothing come from the URI, else from the checkpoint's config, else from BERT's
    own."""
    heads = (
        values["heads"]
        or config.get("num_attention_heads")
        or config.get("n_heads")
        or (12 if width in (384, 768) else 0)
    )
    if not isinstance(heads, int) or heads < 1 or width % heads:
        raise InvalidArgumentError(
            f"model parameter heads is {heads or 'missing'}; add heads=N to the model URI, a divisor of the width "
            f"{width}"
        )
    activation = config.get("hidden_act") or config.get("activation") or "gelu"
    if activation not in ACTIVATIONS:
        raise InvalidArgumentError(f"config.json: activation {activation!r} is unknown; use {', '.join(ACTIVATIONS)}")
    layers = {key.removeprefix(layer).partition(".")[0] for key in shapes if key.startswith(layer)}
    epsilon = float(config.get("layer_norm_eps", 1e-12))
    return Sizes(width, inner, heads, len(layers), epsilon, ACTIVATIONS[activation])


def _shape(shapes: Shapes, name: str) -> tuple[int, ...]:
    if name not in shapes:
        raise InvalidArgumentError(
            f"model weights hold no {name}; checkpoints with transformers' names and a classifier do"
        )
    return shapes[name]
