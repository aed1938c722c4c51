"""Residual networks for small images (He et al. 2015, arXiv:1512.03385, section 4.2)."""

from __future__ import annotations

from torch import Tensor, nn


class SubsampleShortcut(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Identity that halves the map and pads new channels with zeros on both sides (He et al. 2015, option A)."""

    def __init__(self, *, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        extra = out_channels - in_channels
        self.before, self.after = extra // 2, extra - extra // 2

    def forward(self, x: Tensor) -> Tensor:
        """(B, C_in, H, W) -> (B, C_out, ceil(H / stride), ceil(W / stride))."""
        x = x[:, :, :: self.stride, :: self.stride]
        return nn.functional.pad(x, (0, 0, 0, 0, self.before, self.after))


class BasicBlock(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Two 3x3 convolutions and a shortcut around them."""

    def __init__(self, *, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = SubsampleShortcut(in_channels=in_channels, out_channels=out_channels, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C_in, H, W) -> (B, C_out, H / stride, W / stride)."""
        y = nn.functional.relu(self.bn1(self.conv1(x)))
        return nn.functional.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Three-stage residual network for small images: depth ``6 * blocks + 2``, widths w, 2w, 4w.

    Parameter names follow the common CIFAR checkpoints (``conv1``, ``bn1``, ``layer1.0.conv1``, ..., ``linear``).
    """

    def __init__(self, *, blocks: int, width: int = 16, channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _stage(blocks=blocks, in_channels=width, out_channels=width, stride=1)
        self.layer2 = _stage(blocks=blocks, in_channels=width, out_channels=2 * width, stride=2)
        self.layer3 = _stage(blocks=blocks, in_channels=2 * width, out_channels=4 * width, stride=2)
        self.linear = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) -> logits (B, classes)."""
        x = nn.functional.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.linear(x.mean(dim=(2, 3)))
        return logits


def _stage(*, blocks: int, in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    widths = [in_channels] + [out_channels] * blocks
    return nn.Sequential(
        *(
            BasicBlock(in_channels=widths[i], out_channels=out_channels, stride=stride if i == 0 else 1)
            for i in range(blocks)
        )
    )
