"""The weights of a Gated DeltaNet layer from a Hugging Face checkpoint of a Qwen3-Next or Qwen3.5 model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jax_qla.checks import is_integer, type_name
from jax_qla.nn.config import GatedDeltaNetConfig
from jax_qla.nn.parameters import check_weights, parameter_shapes
from jax_qla.nn.safetensors import Checkpoint

_LAYER = re.compile(r"(?P<prefix>(?:.*\.)?layers\.(?P<layer>\d+)\.linear_attn\.)(?P<rest>.+)")
_NOT_LINEAR = ("A_log", "dt_bias")


def load_gated_deltanet_weights(
    checkpoint: str | Path, layer: int, config: GatedDeltaNetConfig
) -> dict[str, np.ndarray]:
    """Reads the weights of one Gated DeltaNet layer from a safetensors checkpoint.

    They go into a layer with `GatedDeltaNet.set_weights` (Flax) or `GatedDeltaNet.with_weights` (Equinox).

    Args:
        checkpoint: a safetensors file, or a folder as `save_pretrained` of transformers writes it, with one file or
            with many and an index. Only this layer's bytes are read.
        layer: the index of the layer in the model, from 0; full-attention layers count.
        config: of the layer; see `GatedDeltaNetConfig.from_huggingface`. Its `projections` need not be the model's.

    Returns:
        NumPy arrays by name, with the names and shapes of `jax_qla.nn.parameter_shapes(config)`, in the dtypes of the
        checkpoint. Matrices are [inputs, outputs] and conv1d is [width, channels], both transposed from the checkpoint.

    Raises:
        TypeError: layer is not an integer, or config is not a GatedDeltaNetConfig.
        FileNotFoundError: there is no such checkpoint, or a file of it is missing.
        ValueError: the checkpoint has no Gated DeltaNet layer of this index; a weight of the layer is missing, does not
            belong to it, or has another shape than the configuration says; or a file is damaged or quantised.
    """
    if not is_integer(layer):
        raise TypeError(f"layer must be an integer, got {layer!r} of type {type_name(layer)}")
    wanted = parameter_shapes(config)
    arrays = Checkpoint(checkpoint)
    matches = [match for match in map(_LAYER.fullmatch, arrays.names) if match]
    here = [match for match in matches if int(match["layer"]) == layer]
    prefixes = sorted({match["prefix"] for match in here})
    if not prefixes:
        layers = sorted({int(match["layer"]) for match in matches})
        raise ValueError(
            f"{checkpoint} has no Gated DeltaNet layer {layer}; it has layers {layers or 'of no such kind'}"
        )
    if len(prefixes) > 1:
        raise ValueError(f"{checkpoint} has more than one Gated DeltaNet layer {layer}: {', '.join(prefixes)}")
    names: dict[str, str] = {}
    try:
        for match in here:
            other = names.setdefault(_plain_name(match["rest"]), match[0])
            if other != match[0]:
                raise ValueError(f"{other} and {match[0]} are the same weight: leave one of them out")
        weights = {name: _transposed(name, arrays.read(full)) for name, full in names.items()}
        given = config
        if "in_proj_qkvz" in weights:
            given = dataclasses.replace(config, projections="fused")
        elif "in_proj_qkv" in weights:
            given = dataclasses.replace(config, projections="split")
        check_weights(weights, given)
        if given != config:
            weights = _rearranged(weights, config)
    except ValueError as error:
        raise ValueError(f"layer {layer} of {checkpoint}: {error}") from error
    return {name: weights[name] for name in wanted}


def _rearranged(weights: Mapping[str, np.ndarray], config: GatedDeltaNetConfig) -> dict[str, np.ndarray]:
    """Weights with the other `projections` than the configuration's: one of these side by side, or by key head."""
    heads, ratio = config.num_key_heads, config.num_value_heads // config.num_key_heads
    key, value = config.key_head_dim, ratio * config.value_head_dim
    found = dict(weights)
    for fused, apart, sizes in (
        ("in_proj_qkvz", ("in_proj_qkv", "in_proj_z"), (key, key, value, value)),
        ("in_proj_ba", ("in_proj_b", "in_proj_a"), (ratio, ratio)),
    ):
        if config.projections == "fused":
            side_by_side = np.concatenate([found.pop(name) for name in apart], axis=1)
            parts = np.split(side_by_side, np.cumsum(sizes)[:-1] * heads, axis=1)
            parts = [part.reshape(len(part), heads, -1) for part in parts]
            found[fused] = np.concatenate(parts, axis=2).reshape(side_by_side.shape)
        else:
            by_head = found.pop(fused)
            parts = np.split(by_head.reshape(len(by_head), heads, -1), np.cumsum(sizes)[:-1], axis=2)
            *first, last = (part.reshape(len(part), -1) for part in parts)
            found |= zip(apart, (np.concatenate(first, axis=1), last), strict=True)
    return found


def _plain_name(rest: str) -> str:
    """in_proj_qkv.weight -> in_proj_qkv; what has no such ending, and should have none, stays."""
    return rest if rest in _NOT_LINEAR else rest.removesuffix(".weight")


def _transposed(name: str, array: np.ndarray) -> np.ndarray:
    """PyTorch's orientation to ours: [outputs, inputs] of a matrix, [channels, 1, width] of the convolution."""
    if name == "conv1d" and array.ndim == 3 and array.shape[1] == 1:
        array = array[:, 0]
    return array.T
