"""The sizes and options of a Gated DeltaNet layer."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jax_qla.checks import check_flag, is_integer, type_name

_HUGGINGFACE = {
    "hidden_size": "hidden_size",
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_head_dim": "linear_key_head_dim",
    "value_head_dim": "linear_value_head_dim",
    "conv_kernel_size": "linear_conv_kernel_dim",
    "norm_eps": "rms_norm_eps",
}
"""What the configurations of transformers call sizes and options."""


@dataclass(frozen=True)
class GatedDeltaNetConfig:
    """Sizes and options of one Gated DeltaNet layer, as in Qwen3-Next and Qwen3.5.

    Raises:
        TypeError, ValueError: a size is not a positive integer, or two of them do not go together; an option is not
            what it may be.

    Example:
        >>> from jax_qla.nn import GatedDeltaNetConfig
        >>> config = GatedDeltaNetConfig(hidden_size=256, num_key_heads=2, num_value_heads=4)
        >>> config.conv_channels
        1024
    """

    hidden_size: int
    """D, the width of the model."""
    num_key_heads: int
    """Hk, the number of heads of q and k."""
    num_value_heads: int
    """Hv, the number of heads of v and of the state: a multiple of `num_key_heads`."""
    key_head_dim: int = 128
    """K, the size of a head of q and k. The CUDA kernels take 64 and 128."""
    value_head_dim: int = 128
    """V, the size of a head of v. The CUDA kernels take 64 and 128."""
    conv_kernel_size: int = 4
    """Tokens that the causal convolution sees: the current one and those right before it."""
    norm_eps: float = 1e-6
    """Added to the mean square in the gated RMS norm; positive."""
    projections: Literal["split", "fused"] = "split"
    """"split": in_proj_qkv, in_proj_z, in_proj_b and in_proj_a (Qwen3.5). "fused": in_proj_qkvz and in_proj_ba, whose
    outputs are grouped by key head (Qwen3-Next). With "fused", devices exchange less in tensor parallelism."""
    allow_neg_eigval: bool = False
    """Doubles beta, so that it lies in (0, 2) and the state's transition may have negative eigenvalues (Grazzi et al.,
    arXiv 2411.12537). In bfloat16 whole sequences are then computed with precision "high" (`chunk_gated_delta_rule`).
    """

    def __post_init__(self) -> None:
        sizes = (
            "hidden_size",
            "num_key_heads",
            "num_value_heads",
            "key_head_dim",
            "value_head_dim",
            "conv_kernel_size",
        )
        for name in sizes:
            size = getattr(self, name)
            if not is_integer(size):
                raise TypeError(f"{name} must be an integer, got {type_name(size)}")
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
            object.__setattr__(self, name, int(size))  # NumPy's too, whose few bits a product of sizes may not fit into
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads must be a multiple of num_key_heads ({self.num_key_heads}), got "
                f"{self.num_value_heads}"
            )
        if self.projections not in ("split", "fused"):
            raise ValueError(f'projections must be "split" or "fused", got {self.projections!r}')
        # Of a file of settings both may be strings: YAML reads 1e-6 as one.
        if isinstance(self.norm_eps, bool) or not isinstance(self.norm_eps, numbers.Real):
            raise TypeError(f"norm_eps must be a number, got {self.norm_eps!r} of type {type_name(self.norm_eps)}")
        # A row of zeros, as padding has, would be divided by zero.
        least, largest = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
        if not least <= self.norm_eps <= largest:
            raise ValueError(f"norm_eps must be positive, and within the range of float32, got {self.norm_eps}")
        object.__setattr__(self, "norm_eps", float(self.norm_eps))
        check_flag("allow_neg_eigval", self.allow_neg_eigval)

    @property
    def key_size(self) -> int:
        """Hk * K, the features of all heads of q, and of k."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Hv * V, the features of all heads of v, and of the output gate z."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        """2 * Hk * K + Hv * V, the features of q, k and v, which the convolution mixes over time."""
        return 2 * self.key_size + self.value_size

    @property
    def input_projections(self) -> dict[str, int]:
        """The linear layers that read the layer's input, and how many features each of them makes."""
        if self.projections == "fused":
            return {
                "in_proj_qkvz": self.conv_channels + self.value_size,
                "in_proj_ba": 2 * self.num_value_heads,
            }
        return {
            "in_proj_qkv": self.conv_channels,
            "in_proj_z": self.value_size,
            "in_proj_b": self.num_value_heads,
            "in_proj_a": self.num_value_heads,
        }

    @classmethod
    def from_huggingface(cls, config: Any) -> GatedDeltaNetConfig:
        """The layer of a Qwen3-Next or Qwen3.5 model.

        Args:
            config: the model's configuration: what is in `config.json`, as a mapping, or an object of transformers. A
                model of text and images is asked for its `text_config`.

        Raises:
            TypeError: config is neither, or one of its values has a wrong type.
            ValueError: the model is of another type, its convolution is followed by something else than SiLU, the
                configuration lacks what the layer needs, or one of its values is wrong.
        """
        if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
            raise TypeError(
                "config must be a mapping, such as json.load makes of config.json, or an object of transformers, got "
                f"{type(config).__name__}"
            )
        values: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
        values = values.get("text_config") or values
        model_type = values.get("model_type", "")
        if not str(model_type).startswith(("qwen3_next", "qwen3_5")):
            raise ValueError(f"config must be of a Qwen3-Next or Qwen3.5 model, got model_type {model_type!r}")
        try:
            activation = values["hidden_act"]
            sizes_and_eps = {name: values[theirs] for name, theirs in _HUGGINGFACE.items()}
        except KeyError as error:
            raise ValueError(f"config lacks {error}, which says what its Gated DeltaNet layers are") from error
        if activation != "silu":
            raise ValueError(f'hidden_act must be "silu", got {activation!r}')
        return cls(**sizes_and_eps, projections="fused" if model_type.startswith("qwen3_next") else "split")


def check_config(config: Any) -> None:
    """Whether it is the configuration of a layer.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(config, GatedDeltaNetConfig):
        raise TypeError(
            "config must be a GatedDeltaNetConfig, such as GatedDeltaNetConfig.from_huggingface makes of a model's, "
            f"got {type(config).__name__}"
        )
