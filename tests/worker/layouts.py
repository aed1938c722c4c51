"""Small networks whose features lie in every order that PyTorch's own layers use, as files that ``offramp prepare``
takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

CLASSES, WORDS, TIME = 3, 40, 12
Array = npt.NDArray[Any]


class Signal(nn.Module):
    """Convolutions along time: [batch, channels, time]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(4, 16, 5, padding=2),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Conv1d(16, 16, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(16, 16, 5, stride=2, padding=2),
            nn.ReLU(),
        )
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean(dim=2))


class Recurrent(nn.Module):
    """Two recurrent layers over [batch, time, features], the batch first or second inside."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], *, batch_first: bool, both_ways: bool = False) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.first = kind(4, 16, batch_first=batch_first, bidirectional=both_ways)
        self.second = kind(32 if both_ways else 16, 16, batch_first=batch_first, bidirectional=both_ways)
        self.head = nn.Linear(32 if both_ways else 16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        x, _ = self.first(x)
        x, _ = self.second(x)
        return self.head(x.mean(dim=1 if self.batch_first else 0))


class Encoder(nn.Module):
    """A transformer encoder, with the batch axis second in most of it as in PyTorch's older interface."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Linear(4, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        x = self.layers(x if self.batch_first else x.transpose(0, 1))
        return self.head(x.mean(dim=1 if self.batch_first else 0))


class Mixer(nn.Module):
    """Products along channels and along patches, in turn."""

    def __init__(self, tokens: int = 16, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.along_patches = nn.ModuleList(nn.Linear(tokens, tokens) for _ in range(2))
        self.along_channels = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for i in range(2):
            x = x + torch.relu(self.along_patches[i](self.norms[2 * i](x).transpose(1, 2))).transpose(1, 2)
            x = x + torch.relu(self.along_channels[i](self.norms[2 * i + 1](x)))
        return self.head(self.norms[4](x).mean(dim=1))


def swin() -> nn.Module:
    """Features lie [batch, height, width, channels], windows [batch * windows, tokens, channels]."""
    from torchvision.models import SwinTransformer

    return SwinTransformer([2, 2], 12, [2, 2], [2, 4], [4, 4], num_classes=CLASSES, stochastic_depth_prob=0.0)


def convnext() -> nn.Module:
    """Features lie [batch, channels, height, width], and otherwise inside of a block."""
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    settings = [CNBlockConfig(12, 24, 2), CNBlockConfig(24, None, 2)]
    return ConvNeXt(settings, stochastic_depth_prob=0.0, layer_scale=0.5, num_classes=CLASSES)


def vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=CLASSES)


def mobilenet() -> nn.Module:
    """Five of the blocks that MobileNetV2 has, those that narrow and those that add."""
    from torchvision.models import MobileNetV2

    settings = [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 2, 2]]  # expansion, channels, blocks, stride
    return MobileNetV2(num_classes=CLASSES, width_mult=0.25, inverted_residual_setting=settings)


def resnet() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=CLASSES)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "swin": (swin, (3, 32, 32)),
    "convnext": (convnext, (3, 32, 32)),
    "vit": (vit, (3, 32, 32)),
    "mixer": (Mixer, (3, 16, 16)),
    "mobilenet": (mobilenet, (3, 64, 64)),
    "resnet": (resnet, (3, 64, 64)),
    "signal": (Signal, (4, 24)),
    "lstm": (lambda: Recurrent(nn.LSTM, batch_first=True), (TIME, 4)),
    "lstm-seq-first": (lambda: Recurrent(nn.LSTM, batch_first=False), (TIME, 4)),
    "lstm-both-ways": (lambda: Recurrent(nn.LSTM, batch_first=True, both_ways=True), (TIME, 4)),
    "gru": (lambda: Recurrent(nn.GRU, batch_first=True), (TIME, 4)),
    "gru-seq-first": (lambda: Recurrent(nn.GRU, batch_first=False), (TIME, 4)),
    "encoder": (lambda: Encoder(batch_first=True), (TIME, 4)),
    "encoder-seq-first": (lambda: Encoder(batch_first=False), (TIME, 4)),
}


def network(name: str) -> nn.Module:
    """One of NETWORKS with random weights, ready to answer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return NETWORKS[name][0]().eval()


def save(model: nn.Module, shape: tuple[int, ...], path: Path) -> str:
    """Export a network that takes rows of ``shape`` to a .pt2 or an .onnx file; returns its URI."""
    example = torch.from_numpy(np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32))
    shapes = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(model.eval(), (example,), dynamic_shapes=shapes)
    if path.suffix == ".pt2":
        torch.export.save(program, path)
    else:
        torch.onnx.export(program, dynamo=True, verbose=False).save(path)
    return str(path)
