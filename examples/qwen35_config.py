"""The sizes of a Qwen3.5 decoder: three Gated DeltaNet layers to one of full attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax_qla.nn import GatedDeltaNetConfig


@dataclass(frozen=True)
class Qwen35Config:
    """Sizes of a text model. `dtype` is that of the activations; parameters are float32."""

    vocabulary: int
    layers: int
    width: int
    mlp_width: int
    gated_deltanet: GatedDeltaNetConfig
    attention_heads: int
    key_value_heads: int
    head_dim: int
    rotary_dim: int
    """Features of each attention head that are rotated; the rest knows no position."""
    rope_theta: float = 1e7
    norm_eps: float = 1e-6
    full_attention_interval: int = 4
    """Every so many layers, the last one is full attention."""
    tied_embeddings: bool = True
    dtype: str = "float32"
    implementation: str | None = None
    """Which implementation of `jax_qla.chunk_gated_delta_rule` to run; None lets jax_qla choose."""
    attention_implementation: str | None = None
    """Which implementation of `jax.nn.dot_product_attention` to train with: "xla", "cudnn" or None."""

    def is_full_attention(self, layer: int) -> bool:
        return (layer + 1) % self.full_attention_interval == 0

    @classmethod
    def from_huggingface(cls, config: Mapping[str, Any]) -> Qwen35Config:
        """The configuration of a Qwen3.5 text model of transformers, as in its `config.json`."""
        tied = config["tie_word_embeddings"]
        config = config.get("text_config") or config
        # A model too short for one full_attention has none.
        interval = [*config["layer_types"], "full_attention"].index("full_attention") + 1
        expected = [
            "full_attention" if (i + 1) % interval == 0 else "linear_attention"
            for i in range(len(config["layer_types"]))
        ]
        if config["layer_types"] != expected:
            raise ValueError(f"layer_types must repeat with one full_attention at the end, got {config['layer_types']}")
        rope = config["rope_parameters"]
        if rope["rope_type"] != "default" or config["attention_bias"]:
            raise ValueError(f"only default RoPE and attention without bias are written here, got {rope}")
        return cls(
            vocabulary=config["vocab_size"],
            layers=config["num_hidden_layers"],
            width=config["hidden_size"],
            mlp_width=config["intermediate_size"],
            gated_deltanet=GatedDeltaNetConfig.from_huggingface(config),
            attention_heads=config["num_attention_heads"],
            key_value_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            rotary_dim=int(config["head_dim"] * rope["partial_rotary_factor"]),
            rope_theta=rope["rope_theta"],
            norm_eps=config["rms_norm_eps"],
            full_attention_interval=interval,
            tied_embeddings=tied,
        )
