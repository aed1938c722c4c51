"""Named families: checkpoints under the names of the wider world's libraries give those libraries' answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from offramp_core.errors import InvalidArgumentError
from offramp_worker.prepare.families import FAMILIES, build_family, check_family, checkpoint_tensors

IDS = np.random.default_rng(0).integers(1, 50, (2, 7))
IDS[1, 4:] = 0
IMAGES = np.random.default_rng(1).normal(size=(2, 3, 8, 8)).astype(np.float32)
WIDTH, INNER, LAYERS = 24, 40, 2


def bert_shapes(layer: str = "bert.encoder.layer") -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "bert.embeddings.word_embeddings.weight": (50, WIDTH),
        "bert.embeddings.position_embeddings.weight": (16, WIDTH),
        "bert.embeddings.token_type_embeddings.weight": (2, WIDTH),
        **norm("bert.embeddings.LayerNorm"),
        **linear("bert.pooler.dense", WIDTH, WIDTH),
        **linear("classifier", WIDTH, 3),
    }
    for i in range(LAYERS):
        for part in ("query", "key", "value"):
            shapes |= linear(f"{layer}.{i}.attention.self.{part}", WIDTH, WIDTH)
        shapes |= linear(f"{layer}.{i}.attention.output.dense", WIDTH, WIDTH)
        shapes |= norm(f"{layer}.{i}.attention.output.LayerNorm") | norm(f"{layer}.{i}.output.LayerNorm")
        shapes |= linear(f"{layer}.{i}.intermediate.dense", WIDTH, INNER) | linear(
            f"{layer}.{i}.output.dense", INNER, WIDTH
        )
    return shapes


def distilbert_shapes(layer: str = "distilbert.transformer.layer") -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "distilbert.embeddings.word_embeddings.weight": (50, WIDTH),
        "distilbert.embeddings.position_embeddings.weight": (16, WIDTH),
        **norm("distilbert.embeddings.LayerNorm"),
        **linear("pre_classifier", WIDTH, WIDTH),
        **linear("classifier", WIDTH, 3),
    }
    for i in range(LAYERS):
        for part in ("q_lin", "k_lin", "v_lin", "out_lin"):
            shapes |= linear(f"{layer}.{i}.attention.{part}", WIDTH, WIDTH)
        shapes |= norm(f"{layer}.{i}.sa_layer_norm") | norm(f"{layer}.{i}.output_layer_norm")
        shapes |= linear(f"{layer}.{i}.ffn.lin1", WIDTH, INNER) | linear(f"{layer}.{i}.ffn.lin2", INNER, WIDTH)
    return shapes


def vit_shapes(layer: str = "vit.encoder.layer") -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "vit.embeddings.cls_token": (1, 1, WIDTH),
        "vit.embeddings.position_embeddings": (1, 5, WIDTH),
        "vit.embeddings.patch_embeddings.projection.weight": (WIDTH, 3, 4, 4),
        "vit.embeddings.patch_embeddings.projection.bias": (WIDTH,),
        **norm("vit.layernorm"),
        **linear("classifier", WIDTH, 3),
    }
    for i in range(LAYERS):
        for part in ("query", "key", "value"):
            shapes |= linear(f"{layer}.{i}.attention.attention.{part}", WIDTH, WIDTH)
        shapes |= linear(f"{layer}.{i}.attention.output.dense", WIDTH, WIDTH)
        shapes |= norm(f"{layer}.{i}.layernorm_before") | norm(f"{layer}.{i}.layernorm_after")
        shapes |= linear(f"{layer}.{i}.intermediate.dense", WIDTH, INNER) | linear(
            f"{layer}.{i}.output.dense", INNER, WIDTH
        )
    return shapes


def linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}


def checkpoint(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Weights by rule: the i-th name in alphabetical order is drawn with seed i."""
    return {
        name: torch.from_numpy(np.random.default_rng(i).normal(0, 0.3, shapes[name]).astype(np.float32))
        for i, name in enumerate(sorted(shapes))
    }


# Logits of transformers 5.23.0 (BertForSequenceClassification, ...) for these configurations, weights and inputs.
TRANSFORMERS = {
    "bert": (bert_shapes(), [[0.587434, -1.510232, -0.84829], [0.620692, -1.576601, -0.851654]]),
    "distilbert": (distilbert_shapes(), [[0.217561, -0.681368, -0.106985], [0.214132, -0.655881, -0.11585]]),
    "vit": (vit_shapes(), [[-0.008882, 0.903331, -0.624723], [-0.020226, 0.917695, -0.668883]]),
}


def loaded(
    name: str, tensors: dict[str, torch.Tensor], parameters: dict[str, str], folder: Path | None = None
) -> nn.Module:
    model = build_family(name, parameters, tensors, folder=folder)
    model.load_state_dict(checkpoint_tensors(tensors), assign=True)
    return model.eval()


def answers(model: nn.Module, *, tokens: bool) -> npt.NDArray[np.float32]:
    ids = torch.from_numpy(IDS)
    with torch.inference_mode():
        logits = model(ids, (ids != 0).long()) if tokens else model(torch.from_numpy(IMAGES))
    return np.asarray(logits.numpy())


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_an_encoder_answers_as_transformers_does_for_the_same_checkpoint(name: str) -> None:
    shapes, expected = TRANSFORMERS[name]
    model = loaded(name, checkpoint(shapes), {"heads": "3"})
    np.testing.assert_allclose(answers(model, tokens=name != "vit"), expected, atol=2e-6)


def test_what_the_shapes_do_not_say_is_read_from_the_config_beside_the_weights(tmp_path: Path) -> None:
    shapes, expected = TRANSFORMERS["bert"]
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 3, "hidden_act": "gelu"}))
    model = loaded("minilm", checkpoint(shapes), {}, folder=tmp_path)
    np.testing.assert_allclose(answers(model, tokens=True), expected, atol=2e-6)
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 3, "hidden_act": "swish"}))
    with pytest.raises(InvalidArgumentError, match="activation 'swish' is unknown"):
        build_family("minilm", {}, checkpoint(shapes), folder=tmp_path)


def test_old_names_half_precision_and_saved_buffers_of_a_checkpoint_are_taken() -> None:
    shapes, expected = TRANSFORMERS["bert"]
    old = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value.half()
        for key, value in checkpoint(shapes).items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(16)[None]
    model = loaded("bert", old, {"heads": "3"})
    np.testing.assert_allclose(answers(model, tokens=True), expected, atol=5e-3)


def test_the_second_text_of_a_pair_has_types_of_its_own() -> None:
    model = loaded("bert", checkpoint(bert_shapes()), {"heads": "3"})
    ids = torch.from_numpy(IDS)
    types = torch.zeros_like(ids)
    alone = answers(model, tokens=True)
    with torch.inference_mode():
        np.testing.assert_allclose(model(ids, (ids != 0).long(), types).numpy(), alone, atol=1e-6)
        types[:, 2:] = 1
        assert np.abs(model(ids, (ids != 0).long(), types).numpy() - alone).max() > 0.01
    assert model.typed and not loaded("distilbert", checkpoint(distilbert_shapes()), {"heads": "3"}).typed


def test_without_a_pooler_the_classifier_reads_the_mean_over_the_tokens() -> None:
    tensors = {k: v for k, v in checkpoint(bert_shapes()).items() if "pooler" not in k}
    model = loaded("minilm", tensors, {"heads": "3"})
    alone = model(torch.from_numpy(IDS[1:, :4]), torch.ones(1, 4, dtype=torch.long))
    np.testing.assert_allclose(answers(model, tokens=True)[1:], alone.detach().numpy(), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "vgg11_bn", "mobilenet_v2", "densenet121"])
def test_a_convolutional_network_answers_as_torchvision_does_for_the_same_checkpoint(name: str) -> None:
    from torchvision import models

    torch.manual_seed(0)
    reference = getattr(models, name)(weights=None, num_classes=7).eval()
    x = torch.randn(2, 3, 64, 64)
    model = loaded(name, dict(reference.state_dict()), {})
    with torch.inference_mode():
        torch.testing.assert_close(model(x), reference(x))


REFUSED = {
    "heads that do not divide": ("bert", {"heads": "5"}, bert_shapes(), "heads is 5"),
    "heads nowhere": ("bert", {}, bert_shapes(), "heads is missing; add heads=N"),
    "no classifier": (
        "bert",
        {"heads": "3"},
        {k: v for k, v in bert_shapes().items() if "classifier" not in k},
        "hold no classifier.weight",
    ),
    "another library's names": ("resnet18", {}, bert_shapes(), r"hold no fc\.weight"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_checkpoints_that_say_too_little_are_refused_with_what_is_missing(case: str) -> None:
    name, parameters, shapes, message = REFUSED[case]
    with pytest.raises(InvalidArgumentError, match=message):
        build_family(name, parameters, checkpoint(shapes))


def test_every_family_is_named_in_the_refusal_of_an_unknown_one() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check_family("alexnet", {})
    assert all(name in str(caught.value) for name in FAMILIES)
