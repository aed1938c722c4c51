"""Convolutional networks for photographs, built by torchvision: its own code reads no network and its names are the
checkpoints'."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from offramp_core.errors import InvalidArgumentError

CLASSIFIERS = ("fc.weight", "classifier.weight", "classifier.1.weight", "classifier.6.weight")  # the last layer's names


def build_torchvision(name: str, shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """torchvision's model ``name`` for as many classes as the checkpoint's last layer has.

    Parameters
    ----------
    shapes : mapping
        The checkpoint's shapes by parameter name.

    Raises
    ------
    InvalidArgumentError
        torchvision is not installed, or the checkpoint has no last layer of a known name.
    """
    try:
        from torchvision import models
    except ImportError as error:
        raise InvalidArgumentError(
            f"model family {name} is built by torchvision, which is not installed; pip install 'offramp[prepare]'"
        ) from error
    with torch.device("meta"):
        wanted = getattr(models, name)(weights=None)
    last = [key for key in wanted.state_dict() if key in CLASSIFIERS][-1]
    if last not in shapes:
        raise InvalidArgumentError(f"model weights hold no {last}; a checkpoint of family {name} does")
    with torch.device("meta"):  # no time is spent on weights that are replaced at once
        model: nn.Module = getattr(models, name)(weights=None, num_classes=shapes[last][0])
    return model
