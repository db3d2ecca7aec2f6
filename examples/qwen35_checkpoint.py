"""The parameters of a Qwen3.5 decoder, in either framework, from a Hugging Face checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_qla.nn.safetensors import Checkpoint


def load_parameters(parameters: Any, path: str | Path) -> Any:
    """The values of a checkpoint in the structure and dtypes of `parameters`, the arrays of `Qwen35`.

    Everything but `load_gated_deltanet_weights` does for one layer is done here by name: the attributes of both models
    are called as in transformers. The vision tower and the multi-token-prediction head of a checkpoint are not read.

    Raises:
        FileNotFoundError, ValueError: there is no such checkpoint, or it lacks a parameter or has another shape of it.
    """
    checkpoint = Checkpoint(path)
    prefix = next((p for p in ("model.language_model.", "model.") if f"{p}norm.weight" in checkpoint.names), "")

    def load(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        theirs, transposed = their_name(name)
        theirs = theirs if theirs.startswith("lm_head") else prefix + theirs
        if theirs not in checkpoint.names:
            raise ValueError(f"the checkpoint has no {theirs}")
        array = checkpoint.read(theirs)
        array = array[:, 0].T if theirs.endswith("conv1d.weight") else array.T if transposed else array
        if array.shape != leaf.shape:
            raise ValueError(f"{theirs} must have shape {leaf.shape} in the model's orientation, got {array.shape}")
        return jnp.asarray(np.asarray(array), leaf.dtype)

    return jax.tree_util.tree_map_with_path(load, parameters)


def their_name(ours: str) -> tuple[str, bool]:
    """transformers' name of a parameter, and whether it is a matrix that we keep transposed (as Flax does)."""
    module, _, last = ours.rpartition(".")
    if last == "kernel":
        return f"{module}.weight", True
    if last == "embedding":
        return f"{module}.weight", False
    if module.endswith("linear_attn") and last in ("conv1d", "norm"):
        return f"{ours}.weight", False
    return ours, False
