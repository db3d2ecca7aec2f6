"""Trains a small Qwen3.5 (three Gated DeltaNet layers to one of full attention) on the Python standard library.

    python examples/qwen35_tiny.py                          a few minutes on two CPU cores
    python examples/qwen35_tiny.py --framework equinox      the same model in Equinox
    python examples/qwen35_tiny.py --size large             a Hopper GPU: 0.3 B parameters in bfloat16, by kernels
    python examples/qwen35_tiny.py --mesh data=2,seq=2      four devices: each half of the batch and of every window

The model is in qwen35_flax.py and qwen35_equinox.py, with qwen35_layers.py and qwen35_config.py; the training and what
it writes in training.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import meshes
import training
from qwen35_config import Qwen35Config
from training import TrainConfig

from jax_qla.nn import GatedDeltaNetConfig

SIZES = {
    "tiny": TrainConfig(  # for tests
        Qwen35Config(
            256,
            layers=2,
            full_attention_interval=2,
            width=32,
            mlp_width=64,
            gated_deltanet=GatedDeltaNetConfig(32, 1, 2, 16, 16),
            attention_heads=4,
            key_value_heads=2,
            head_dim=16,
            rotary_dim=8,
        ),
        batch_size=4,
        sequence_length=80,
        steps=20,
        learning_rate=1e-2,
    ),
    "small": TrainConfig(  # for two CPU cores
        Qwen35Config(
            256,
            layers=4,
            width=128,
            mlp_width=384,
            gated_deltanet=GatedDeltaNetConfig(128, 2, 4, 32, 32),
            attention_heads=4,
            key_value_heads=2,
            head_dim=32,
            rotary_dim=8,
        ),
        batch_size=8,
        sequence_length=256,
        steps=500,
        learning_rate=4e-3,
    ),
    "large": TrainConfig(  # for one Hopper GPU: 0.3 B parameters
        Qwen35Config(
            256,
            layers=24,
            width=1024,
            mlp_width=2048,
            gated_deltanet=GatedDeltaNetConfig(1024, 8, 16, 128, 128),
            attention_heads=8,
            key_value_heads=2,
            head_dim=128,
            rotary_dim=32,
            dtype="bfloat16",
            attention_implementation="cudnn",
        ),
        batch_size=2,
        sequence_length=8192,
        steps=500,
        learning_rate=5e-4,
    ),
}


def make_flax(config: Qwen35Config, seed: int) -> tuple[training.Merge, training.Parameters]:
    from flax import nnx
    from qwen35_flax import Qwen35

    graphdef, params = nnx.split(Qwen35(config, nnx.Rngs(seed)))
    return partial(nnx.merge, graphdef), params


def make_equinox(config: Qwen35Config, seed: int) -> tuple[training.Merge, training.Parameters]:
    import equinox as eqx
    from qwen35_equinox import Qwen35

    params, rest = eqx.partition(Qwen35(config, jax.random.key(seed)), eqx.is_inexact_array)
    return partial(_combine, rest), params


def _combine(rest: Any, params: training.Parameters) -> training.Model:
    import equinox as eqx

    model: training.Model = eqx.combine(params, rest)
    return model


MAKERS: dict[str, Callable[[Qwen35Config, int], tuple[training.Merge, training.Parameters]]] = {
    "flax": make_flax,
    "equinox": make_equinox,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = training.argument_parser((__doc__ or "").partition("\n")[0], SIZES, "runs/qwen35_tiny")
    parser.add_argument("--framework", choices=sorted(MAKERS), default="flax", help="default: %(default)s")
    arguments = parser.parse_args(argv)
    config = dataclasses.replace(SIZES[arguments.size], framework=arguments.framework)
    with meshes.use(arguments.mesh):
        training.run(arguments, config, MAKERS[arguments.framework])


if __name__ == "__main__":
    main()
