"""The layers compute what Qwen3-Next and Qwen3.5 of Hugging Face transformers compute, weight for weight."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from thorough import every_value

pytest.importorskip("flax", reason="needs the flax extra")
pytest.importorskip("equinox", reason="needs the equinox extra")
torch = pytest.importorskip("torch", reason="transformers needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs the test extra")

import safetensors.torch
from frameworks import FRAMEWORKS, Framework, assert_close, random_weights
from transformers import DynamicCache

from jax_qla.nn import GatedDeltaNetCache, GatedDeltaNetConfig, load_gated_deltanet_weights, parameter_shapes
from jax_qla.nn import checkpoint as checkpoint_module

LIMIT = 1e-4
SIZES: dict[str, Any] = {
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
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
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


pytestmark = every_value


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


def as_ours(name: str, theirs: Any) -> np.ndarray:
    """A parameter of theirs, or its gradient, in our orientation."""
    array: np.ndarray = theirs.detach().numpy()
    return array[:, 0].T if name == "conv1d.weight" else array.T


def test_outputs_and_gradients_of_every_parameter(framework: Framework, ours: Any, theirs: Any) -> None:
    x, dy = random_input(150), random_input(150, seed=1)
    their_x = torch.tensor(x, requires_grad=True)
    theirs.zero_grad()
    their_y = theirs(their_x)
    their_y.backward(torch.tensor(dy))
    y, gradients = framework.outputs_and_gradients(ours, x, dy)
    assert_close(y, their_y.detach(), LIMIT)
    assert_close(gradients.pop("x"), their_x.grad, LIMIT)
    expected = {name: as_ours(name, parameter.grad) for name, parameter in theirs.named_parameters()}
    assert {name.removesuffix(".weight") for name in expected} == gradients.keys()
    for name, gradient in expected.items():
        assert_close(gradients[name.removesuffix(".weight")], gradient, LIMIT, name)


def test_projections_of_the_other_kind(framework: Framework, checkpoint: Path, config: GatedDeltaNetConfig) -> None:
    """The same layer, whichever way its projections are arranged; and there and back the same weights."""
    other = dataclasses.replace(config, projections="split" if config.projections == "fused" else "fused")
    weights = load_gated_deltanet_weights(checkpoint, LAYER, config)
    rearranged = load_gated_deltanet_weights(checkpoint, LAYER, other)
    assert list(rearranged) == list(parameter_shapes(other))
    x = random_input(20)
    layers = framework.make(config, weights), framework.make(other, rearranged)
    y, found = (framework.jit(type(layer).__call__)(layer, x) for layer in layers)
    assert_close(found, y, LIMIT)
    for name, array in checkpoint_module._rearranged(rearranged, config).items():
        np.testing.assert_array_equal(array, weights[name])


@pytest.mark.parametrize("prompt_length", [2, 70])
def test_prefill_and_decoding(framework: Framework, ours: Any, theirs: Any, model: Any, prompt_length: int) -> None:
    x = random_input(prompt_length + 4)
    past = DynamicCache(config=model.config)
    prefill, step = (framework.jit(getattr(type(ours), name)) for name in ("prefill", "step"))
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


def test_prompts_padded_before_their_start(framework: Framework, ours: Any, theirs: Any, model: Any) -> None:
    x, mask = random_input(20), np.ones((2, 20), np.int32)
    mask[0, :7] = 0
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        their_y = theirs(torch.tensor(x), cache_params=past, attention_mask=torch.tensor(mask))
    prefill = framework.jit(lambda layer, x, ids: layer.prefill(x, segment_ids=ids))
    y, cache = prefill(ours, jnp.asarray(x), jnp.asarray(mask))
    assert_close(y * mask[..., None], their_y * torch.tensor(mask)[..., None], LIMIT)
    for name, computed, expected in zip(cache._fields, cache, their_cache(past), strict=True):
        assert_close(computed, expected, LIMIT, name)


def test_single_file_and_sharded_checkpoint(
    model: Any, theirs: Any, config: GatedDeltaNetConfig, checkpoint: Path, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    for path in (checkpoint, checkpoint / "model.safetensors", tmp_path):
        weights = load_gated_deltanet_weights(path, LAYER, config)
        assert weights.keys() == parameter_shapes(config).keys()
        for name, parameter in theirs.named_parameters():
            np.testing.assert_array_equal(weights[name.removesuffix(".weight")], as_ours(name, parameter))


def test_bfloat16_checkpoint(framework: Framework, config: GatedDeltaNetConfig, tmp_path: Path) -> None:
    weights = {f"model.language_model.layers.0.linear_attn.{name}": tensor for name, tensor in tensors(config).items()}
    safetensors.torch.save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, tmp_path / "x")
    loaded = load_gated_deltanet_weights(tmp_path / "x", 0, config)
    assert loaded["out_proj"].dtype == jnp.bfloat16
    layer = framework.make(config, loaded, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
    assert layer.get_weights()["A_log"].dtype == jnp.float32
    assert layer.get_weights()["conv1d"].dtype == jnp.bfloat16
    x = random_input(70)
    call = framework.jit(lambda layer, x: layer(x))
    expected = call(framework.make(config, loaded), jnp.asarray(x))
    difference = call(layer, jnp.asarray(x)).astype(jnp.float32) - expected
    assert jnp.linalg.norm(difference) < 0.02 * jnp.linalg.norm(expected)


def tensors(config: GatedDeltaNetConfig) -> dict[str, Any]:
    """Random weights of one layer under transformers' names, relative to the layer."""
    random = random_weights(config)
    arrays = {
        name if name in ("A_log", "dt_bias") else f"{name}.weight": array[:, None] if name == "conv1d" else array
        for name, array in random.items()
    }
    return {name: torch.tensor(array.T.copy()) for name, array in arrays.items()}


def test_the_index_says_which_file_an_array_is_of(config: GatedDeltaNetConfig, tmp_path: Path) -> None:
    weights = {f"layers.0.linear_attn.{name}": tensor for name, tensor in tensors(config).items()}
    safetensors.torch.save_file(weights, tmp_path / "1.safetensors")
    stale = {"layers.0.linear_attn.A_log": torch.full((config.num_value_heads,), 7.0), "other": torch.zeros(1)}
    safetensors.torch.save_file(stale, tmp_path / "2.safetensors")
    index = {"weight_map": {**dict.fromkeys(weights, "1.safetensors"), "other": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = load_gated_deltanet_weights(tmp_path, 0, config)
    np.testing.assert_array_equal(loaded["A_log"], weights["layers.0.linear_attn.A_log"])


def test_wrong_checkpoints_are_refused(config: GatedDeltaNetConfig, tmp_path: Path) -> None:
    prefix = "model.layers.3.linear_attn."
    right = {prefix + name: tensor for name, tensor in tensors(config).items()}

    def load(arrays: dict[str, Any], layer: int = 3) -> None:
        safetensors.torch.save_file(arrays, tmp_path / "model.safetensors")
        load_gated_deltanet_weights(tmp_path, layer, config)

    load(right)
    with pytest.raises(ValueError, match=r"has no Gated DeltaNet layer 2; it has layers \[3\]"):
        load(right, 2)
    with pytest.raises(TypeError, match="layer must be an integer, got '3' of type str"):
        load_gated_deltanet_weights(tmp_path, "3", config)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"has more than one Gated DeltaNet layer 3: draft\."):
        load({**right, f"draft.{prefix}A_log": torch.zeros(6)})
    with pytest.raises(ValueError, match=r"layer 3 of .*\.norm(\.weight)? and .*\.norm(\.weight)? are the same weight"):
        load({**right, prefix + "norm": torch.zeros(config.value_head_dim)})
    with pytest.raises(ValueError, match=r"layer 3 of .*: weights do not fit .*: dt_bias is missing$"):
        load({name: array for name, array in right.items() if not name.endswith("dt_bias")})
    with pytest.raises(ValueError, match=r"gate\.bias does not belong to the layer$"):
        load({**right, prefix + "gate.bias": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"norm must have shape \(12,\), got \(11,\)$"):
        load({**right, prefix + "norm.weight": torch.zeros(11)})
    with pytest.raises(ValueError, match="quantised weights cannot be loaded"):
        load({**right, prefix + "norm.weight": torch.zeros(12, dtype=torch.int8)})


def test_damaged_checkpoints_are_refused(config: GatedDeltaNetConfig, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with pytest.raises(FileNotFoundError, match="is neither a safetensors file nor a folder"):
        load_gated_deltanet_weights(tmp_path, 0, config)
    file.write_bytes(b"not a checkpoint, but long enough to hold the length of a header")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        load_gated_deltanet_weights(tmp_path, 0, config)
    file.write_bytes((5).to_bytes(8, "little") + b"{nope")
    with pytest.raises(ValueError, match="its header is not JSON"):
        load_gated_deltanet_weights(tmp_path, 0, config)
    file.write_bytes((4).to_bytes(8, "little") + b"null")
    with pytest.raises(ValueError, match="is not a safetensors file: its header is a NoneType"):
        load_gated_deltanet_weights(tmp_path, 0, config)
    layer = {f"layers.0.linear_attn.{name}": tensor for name, tensor in tensors(config).items()}
    safetensors.torch.save_file(layer, file)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match="is damaged"):
        load_gated_deltanet_weights(tmp_path, 0, config)
    index = tmp_path / "model.safetensors.index.json"
    for content in ("", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"A_log": 2}}'):
        index.write_text(content)
        with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is damaged"):
            load_gated_deltanet_weights(tmp_path, 0, config)
    index.write_text('{"weight_map": {"A_log": "model-2.safetensors"}}')
    with pytest.raises(FileNotFoundError, match=r"lacks model-2\.safetensors"):
        load_gated_deltanet_weights(tmp_path, 0, config)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": None},
        {"dtype": ["F32"]},
        {"shape": 6},
        {"shape": [6.0]},
        {"data_offsets": [0, 8, 24]},
        {"data_offsets": ["0", "24"]},
        {"data_offsets": [-24, 0]},  # in the file, but in its header
    ],
)
def test_headers_that_describe_no_array_are_refused(
    wrong: dict[str, Any], config: GatedDeltaNetConfig, tmp_path: Path
) -> None:
    entry = {"dtype": "F32", "shape": [6], "data_offsets": [0, 24], **wrong}
    header = json.dumps({"layers.0.linear_attn.A_log": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    with pytest.raises(ValueError, match=r"is damaged: of layers\.0\.linear_attn\.A_log its header says \{"):
        load_gated_deltanet_weights(tmp_path, 0, config)


def test_config_of_the_model(model: Any, config: GatedDeltaNetConfig) -> None:
    assert (config.num_value_heads, config.value_head_dim, config.norm_eps) == (6, 12, 1e-5)
    assert GatedDeltaNetConfig.from_huggingface(model.config.to_dict()) == config
    nested = {"model_type": "qwen3_5", "text_config": model.config.to_dict()}
    assert GatedDeltaNetConfig.from_huggingface(nested) == config
    with pytest.raises(ValueError, match=r"must be of a Qwen3-Next or Qwen3\.5 model, got model_type 'llama'"):
        GatedDeltaNetConfig.from_huggingface({"model_type": "llama"})
    with pytest.raises(ValueError, match='hidden_act must be "silu"'):
        GatedDeltaNetConfig.from_huggingface({**model.config.to_dict(), "hidden_act": "gelu"})
