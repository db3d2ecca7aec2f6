"""Trains a byte-level language model of Gated DeltaNet layers on the source files of the Python standard library.

    python examples/train_lm.py                     two minutes on two CPU cores
    python examples/train_lm.py --size large        a Hopper GPU: bfloat16, long sequences, the jax_qla kernels
    python examples/train_lm.py --mesh data=2,seq=2     four devices, each with half of the batch and of every window

The model is in gdn_lm.py, the training and what it writes in training.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import meshes
import training
from flax import nnx
from gdn_lm import LanguageModel, ModelConfig
from training import TrainConfig

from jax_qla.nn import GatedDeltaNetConfig

SIZES = {
    "tiny": TrainConfig(  # for tests
        ModelConfig(256, layers=2, gated_deltanet=GatedDeltaNetConfig(32, 1, 2, 16, 16), mlp_width=64),
        batch_size=4,
        sequence_length=80,
        steps=20,
        learning_rate=1e-2,
    ),
    "small": TrainConfig(  # for two CPU cores
        ModelConfig(256, layers=2, gated_deltanet=GatedDeltaNetConfig(128, 2, 4, 32, 32), mlp_width=384),
        batch_size=8,
        sequence_length=256,
        steps=500,
        learning_rate=4e-3,
    ),
    "large": TrainConfig(  # for one Hopper GPU
        ModelConfig(
            256, layers=8, gated_deltanet=GatedDeltaNetConfig(1024, 4, 8, 128, 128), mlp_width=2816, dtype="bfloat16"
        ),
        batch_size=8,
        sequence_length=8192,
        steps=500,
        learning_rate=1e-3,
    ),
}


def make_model(config: ModelConfig, seed: int) -> tuple[training.Merge, training.Parameters]:
    graphdef, params = nnx.split(LanguageModel(config, nnx.Rngs(seed)))
    return partial(nnx.merge, graphdef), params


def main(argv: Sequence[str] | None = None) -> None:
    parser = training.argument_parser((__doc__ or "").partition("\n")[0], SIZES, "runs/train_lm")
    arguments = parser.parse_args(argv)
    with meshes.use(arguments.mesh):
        training.run(arguments, SIZES[arguments.size], make_model)


if __name__ == "__main__":
    main()
