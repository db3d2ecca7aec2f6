"""Whether a trained hybrid says the same by "cuda" in bfloat16 as by "xla", on text of the Python standard library.

    python benchmarks/model_accuracy.py                                      one Hopper GPU
    python benchmarks/model_accuracy.py --implementations xla --steps 20     a CPU, to try the script

Trains a small Qwen3.5 (examples/qwen35_flax.py) with the first implementation in bfloat16. Then, from its weights:
logits of held-out text against those by "xla" in float32 with float32 matrix products (limit 2e-2 of their norm).
Then it trains on an excerpt until it knows that by heart, and continues prompts from it: 256 greedy tokens after a
prompt that each implementation reads (limit: no difference). A model that is in two minds about a token decides it by
rounding, whatever computes it; one that knows the text does not, and what it generates depends on all that the state
remembers. Ends with an error if a limit is missed. Needs flax and optax.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import jax
import jax.numpy as jnp
import numpy as np
import optax
import stdlib_text
from flax import nnx
from qwen35_config import Qwen35Config
from qwen35_flax import Qwen35

from jax_qla.nn import GatedDeltaNetConfig

CONFIG = Qwen35Config(
    256,
    layers=4,
    width=256,
    mlp_width=768,
    gated_deltanet=GatedDeltaNetConfig(256, num_key_heads=2, num_value_heads=4, key_head_dim=64, value_head_dim=64),
    attention_heads=4,
    key_value_heads=2,
    head_dim=64,
    rotary_dim=16,
)
BATCH, LENGTH = 16, 1024
ROWS = 8
"""Rows of held-out text, and of prompts."""
PROMPT, GENERATED = 700, 256
EXCERPT = 32768
"""Bytes of the text that the model learns by heart."""
LOGITS_LIMIT = 2e-2


def train(config: Qwen35Config, corpus: stdlib_text.Corpus, steps: int, params: Any = None) -> Any:
    """The trained parameters; without `params`, from random ones."""
    graphdef, first = nnx.split(Qwen35(config, nnx.Rngs(0)))
    params = first if params is None else params
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10 + 1, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95))

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graphdef, params)(tokens[:, :-1])
        losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, optimizer_state: Any, tokens: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
        return optax.apply_updates(params, updates), optimizer_state, value

    optimizer_state = optimizer.init(params)
    for index in range(steps):
        tokens = corpus.random_windows(BATCH, LENGTH + 1, seed=0, step=index).tokens
        params, optimizer_state, value = step(params, optimizer_state, jnp.asarray(tokens))
        if index in (0, steps - 1):
            print(f"  loss of step {index + 1}: {value:.4f}")
    return params


def model_of(config: Qwen35Config, params: Any) -> Qwen35:
    return nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: Qwen35(config, nnx.Rngs(0)))), params)


def logits(config: Qwen35Config, params: Any, tokens: jax.Array) -> np.ndarray:
    """float64 [B, T, vocabulary]."""
    return np.asarray(jax.jit(lambda params: model_of(config, params)(tokens))(params), np.float64)


def greedy(config: Qwen35Config, params: Any, prompts: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest continuations [B, GENERATED], and by how much each token's logit exceeds the second."""

    @jax.jit
    def run(params: Any) -> tuple[jax.Array, jax.Array]:
        model = model_of(config, params)
        out, caches = model.prefill(prompts, model.init_cache(ROWS, PROMPT + GENERATED))

        def step(carry: Any, _: None) -> Any:
            out, caches = carry
            best, index = jax.lax.top_k(out, 2)
            out, caches = model.decode(index[:, :1], caches)
            return (out[:, -1], caches), (index[:, 0], best[:, 0] - best[:, 1])

        _, (tokens, margins) = jax.lax.scan(step, (out[:, -1], caches), length=GENERATED)
        return tokens.T, margins.T

    tokens, margins = run(params)
    return np.asarray(tokens), np.asarray(margins)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--implementations", nargs="+", default=["cuda", "xla"], help="default: cuda xla")
    parser.add_argument("--steps", type=int, default=400, help="of the training; default: %(default)s")
    parser.add_argument("--excerpt-steps", type=int, default=800, help="on the excerpt; default: %(default)s")
    arguments = parser.parse_args()
    training, held_out = stdlib_text.load()
    half = {
        name: dataclasses.replace(CONFIG, dtype="bfloat16", implementation=name) for name in arguments.implementations
    }
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}; training by {arguments.implementations[0]}, bfloat16"
    )
    params = train(half[arguments.implementations[0]], training, arguments.steps)

    tokens = jnp.asarray(held_out.even_windows(ROWS, LENGTH).tokens)
    with jax.default_matmul_precision("float32"):
        expected = logits(dataclasses.replace(CONFIG, implementation="xla"), params, tokens)
    failures = []
    for name, config in half.items():
        difference = logits(config, params, tokens) - expected
        relative = np.linalg.norm(difference) / np.linalg.norm(expected)
        print(
            f"  logits by {name}, bfloat16: {relative:.2e} of the norm, largest {np.abs(difference).max():.2e} "
            f"of {np.abs(expected).max():.1f}"
        )
        if not relative <= LOGITS_LIMIT:
            failures.append(f"logits by {name} differ by {relative:.2e}, limit {LOGITS_LIMIT}")

    excerpt = stdlib_text.Corpus(training.text[:EXCERPT], training.offsets[training.offsets < EXCERPT])
    params = train(half[arguments.implementations[0]], excerpt, arguments.excerpt_steps, params)
    windows = jnp.asarray(excerpt.even_windows(ROWS, PROMPT + GENERATED).tokens)
    generations = {name: greedy(config, params, windows[:, :PROMPT]) for name, config in half.items()}
    first, *others = generations
    expected_tokens = generations[first][0]
    print(f"  greedy by {first}: {bytes(expected_tokens[0].astype(np.uint8))[:60]!r}")
    known = float((expected_tokens == np.asarray(windows[:, PROMPT:])).mean())
    print(f"  of the tokens by {first}, {known:.1%} are the excerpt's")
    for name in others:
        found, margins = generations[name]
        different = found != expected_tokens
        rows = np.flatnonzero(different.any(axis=1))
        print(f"  greedy by {name}: {ROWS - len(rows)} of {ROWS} rows of {GENERATED} tokens equal those by {first}")
        for row in rows:
            position = int(different[row].argmax())
            print(f"    row {row} parts at token {position}, between two that differ by {margins[row, position]:.2e}")
        if len(rows):
            failures.append(f"greedy generations by {name} differ from those by {first} in {len(rows)} rows")
    if failures:
        raise SystemExit("; ".join(failures))


if __name__ == "__main__":
    main()
