"""The layers compute what the Qwen3-Next and Qwen3.5 modules of Hugging Face transformers compute, weight for weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs the flax extra")
pytest.importorskip("equinox", reason="needs the equinox extra")
torch = pytest.importorskip("torch", reason="transformers needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs the test extra")

from frameworks import FRAMEWORKS, Framework, assert_close
from transformers import DynamicCache

from jax_qla.nn import GatedDeltaNetCache, GatedDeltaNetConfig, load_gated_deltanet_weights

LIMIT = 1e-4
SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-5,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
LAYER = 1


def make_model(kind: str) -> Any:
    """A whole model in which no weight is left at the special value that its initialisation gives."""
    torch.manual_seed(0)
    if kind == "qwen3_next":
        model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**SIZES, **MIXTURE))
    else:
        model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SIZES))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn_like(parameter)
            if parameter.ndim > 1:
                values *= (parameter.numel() / parameter.shape[0]) ** -0.5
            elif name.endswith("linear_attn.norm.weight"):
                values = 1 + 0.3 * values
            elif name.endswith("norm.weight"):
                values *= 0.3
            parameter.copy_(values)
    return model.eval()


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5"])
def model(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param)


@pytest.fixture(scope="module")
def theirs(model: Any) -> Any:
    return model.model.layers[LAYER].linear_attn


@pytest.fixture(scope="module")
def config(model: Any) -> GatedDeltaNetConfig:
    return GatedDeltaNetConfig.from_huggingface(model.config)


@pytest.fixture(scope="module")
def checkpoint(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Framework:
    return FRAMEWORKS[request.param]


@pytest.fixture
def ours(framework: Framework, checkpoint: Path, config: GatedDeltaNetConfig) -> Any:
    return framework.make(config, load_gated_deltanet_weights(checkpoint, LAYER, config))


def random_input(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, length, SIZES["hidden_size"])).astype(np.float32)


def their_cache(cache: Any) -> GatedDeltaNetCache:
    """transformers keeps one more input of the convolution than it needs, and channels before time."""
    layer = cache.layers[LAYER]
    conv, state = layer.conv_states[0], layer.recurrent_states[0]
    return GatedDeltaNetCache(conv[:, :, 1:].transpose(1, 2).numpy(), state.numpy())


@pytest.mark.parametrize("length", [1, 3, 150])
def test_outputs_and_gradients_of_every_parameter(
    framework: Framework, ours: Any, theirs: Any, length: int
) -> None:
    x, weighting = random_input(length), random_input(length, seed=1)
    their_x = torch.tensor(x, requires_grad=True)
    theirs.zero_grad()
    their_y = theirs(their_x)
    (their_y * torch.tensor(weighting)).sum().backward()
    assert_close(framework.jit(type(ours).__call__)(ours, jnp.asarray(x)), their_y.detach(), LIMIT)

    gradients = framework.gradients(lambda layer, x: jnp.sum(layer(x) * weighting), ours, jnp.asarray(x))
    names = {name.removesuffix(".weight"): parameter.grad for name, parameter in theirs.named_parameters()}
    names["x"] = their_x.grad
    assert gradients.keys() == names.keys()
    for name, expected in names.items():
        expected = expected[:, 0].T if name == "conv1d" else expected.T if name.endswith(("proj", "_qkvz", "_ba")) else expected
        if name.startswith("in_proj") and expected.shape != gradients[name].shape:
            expected = expected.T
        assert_close(gradients[name], expected, LIMIT, name)


@pytest.mark.parametrize("prompt_length", [2, 70])
def test_prefill_and_decoding(
    framework: Framework, ours: Any, theirs: Any, model: Any, prompt_length: int
) -> None:
    x = random_input(prompt_length + 4)
    past = DynamicCache(config=model.config)
    prefill, step = framework.jit(type(ours).prefill), framework.jit(type(ours).step)
    with torch.no_grad():
        y, cache = prefill(ours, jnp.asarray(x[:, :prompt_length]))
        assert_close(y, theirs(torch.tensor(x[:, :prompt_length]), cache_params=past), LIMIT)
        for position in range(prompt_length, x.shape[1]):
            for name, computed, expected in zip(cache._fields, cache, their_cache(past), strict=True):
                assert_close(computed, expected, LIMIT, name)
            token = x[:, position : position + 1]
            y, cache = step(ours, jnp.asarray(token), cache)
            assert_close(y, theirs(torch.tensor(token), cache_params=past), LIMIT)
        for name, computed, expected in zip(cache._fields, cache, their_cache(past), strict=True):
            assert_close(computed, expected, LIMIT, name)
