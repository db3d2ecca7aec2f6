"""Trains a byte-level language model on the source files of the Python standard library, in any framework.

Writes into --output: a checkpoint (continue from it with --resume), the loss curve as PNG, the losses as JSON, and a
sample that the trained model writes token by token from its caches. The scripts train_lm.py and qwen35_tiny.py choose
the model; the text is in stdlib_text.py; this file is the training.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import statistics
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import orbax.checkpoint as ocp
import stdlib_text
from matplotlib.figure import Figure
from stdlib_text import DOCUMENT_START, Batch, Corpus
from tqdm import tqdm

import jax_qla

EVALUATION_WINDOWS = 64
REPORT_EVERY = 10
"""Steps between two readings of the loss. Each reading waits for the device, so not every step does it."""


@dataclass(frozen=True)
class TrainConfig:
    """All that the losses of a run depend on, beside the text and the machine."""

    model: Any
    """A frozen dataclass with the fields `vocabulary`, `gated_deltanet`, `dtype` and `implementation`."""
    batch_size: int
    sequence_length: int
    steps: int
    learning_rate: float
    seed: int = 0
    packed: bool = False
    """Keep the documents in a window apart: no state, no convolution and no prediction reaches across their border."""
    framework: str = "flax"
    """Of the model, whose parameters a checkpoint has."""


class Model(Protocol):
    """A language model of either framework."""

    def __call__(self, tokens: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """tokens int32 [B, T] -> logits float32 [B, T, vocabulary], in parallel."""

    def init_cache(self, batch_size: int, room: int) -> Any:
        """The cache before the first of at most `room` tokens: a pytree."""

    def prefill(self, tokens: jax.Array, caches: Any) -> tuple[jax.Array, Any]:
        """Logits of what follows each token, in parallel, and the cache after them."""

    def decode(self, tokens: jax.Array, caches: Any) -> tuple[jax.Array, Any]:
        """As `prefill`, token by token."""


Parameters: TypeAlias = Any
"""The trainable arrays of a model: a pytree."""
Merge: TypeAlias = Callable[[Parameters], Model]
"""Puts parameters back into their model."""


class TrainState(NamedTuple):
    """What a step changes and a checkpoint keeps."""

    params: Parameters
    optimizer: optax.OptState


def which_implementation(config: TrainConfig) -> jax_qla.Implementation:
    """Which implementation of the gated delta rule the training steps run on this machine, and why."""
    layer, shape = config.model.gated_deltanet, (config.batch_size, config.sequence_length)
    array: Callable[..., Any] = jax.ShapeDtypeStruct
    q = k = array((*shape, layer.num_key_heads, layer.key_head_dim), config.model.dtype)
    v = array((*shape, layer.num_value_heads, layer.value_head_dim), config.model.dtype)
    g = beta = array((*shape, layer.num_value_heads), jnp.float32)
    return jax_qla.which_implementation(q, k, v, g, beta, implementation=config.model.implementation)


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW behind gradient clipping, with linear warm-up and cosine decay. Only matrices decay."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=min(max(1, config.steps // 10), config.steps - 1),
        decay_steps=config.steps,
        end_value=0.1 * config.learning_rate,
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            schedule, b2=0.95, weight_decay=0.1, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
        ),
    )


def mean_loss(merge: Merge, params: Parameters, batch: Batch, packed: bool) -> jax.Array:
    """Mean of -log p(next byte) over a batch of windows, in nats."""
    model = merge(params)
    tokens, segment_ids = jnp.asarray(batch.tokens), jnp.asarray(batch.segment_ids)
    logits = model(meshes.cut(tokens[:, :-1]), meshes.cut(segment_ids[:, :-1]) if packed else None)
    losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    if not packed:
        return losses.mean()
    inside = segment_ids[:, 1:] == segment_ids[:, :-1]
    return jnp.sum(losses * inside) / jnp.sum(inside)


def make_train_step(
    merge: Merge, optimizer: optax.GradientTransformation, packed: bool
) -> Callable[[TrainState, Batch], tuple[TrainState, jax.Array]]:
    @partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        loss, gradients = jax.value_and_grad(partial(mean_loss, merge, packed=packed))(state.params, batch)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        return meshes.whole(TrainState(optax.apply_updates(state.params, updates), optimizer_state)), loss

    return train_step


def evaluate(merge: Merge, params: Parameters, config: TrainConfig, corpus: Corpus) -> float:
    """The mean loss in nats per byte over windows spread evenly over `corpus`."""
    windows = corpus.even_windows(EVALUATION_WINDOWS, config.sequence_length + 1)
    loss = jax.jit(partial(mean_loss, merge, packed=config.packed))
    starts = range(0, EVALUATION_WINDOWS, config.batch_size)
    batches = [Batch(*(rows[start : start + config.batch_size] for rows in windows)) for start in starts]
    return float(np.mean([loss(params, batch) for batch in batches]))


@partial(jax.jit, static_argnames=("merge", "length"))
def generate(
    merge: Merge, params: Parameters, prompt: jax.Array, key: jax.Array, *, length: int, temperature: float
) -> jax.Array:
    """Continues prompt int32 [B, P] by `length` sampled tokens: int32 [B, length].

    The prompt is read in parallel. After it a Gated DeltaNet layer spends the same on every token, however long the
    text has become, because all that it keeps of it is one state and one convolution tail.
    """
    model = merge(params)
    logits, caches = model.prefill(prompt, model.init_cache(prompt.shape[0], prompt.shape[1] + length))

    def step(carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        logits, caches = carry
        token = jax.random.categorical(key, logits / temperature)
        logits, caches = model.decode(token[:, None], caches)
        return (logits[:, -1], caches), token

    _, tokens = jax.lax.scan(step, (logits[:, -1], caches), jax.random.split(key, length))
    return tokens.T


def train(
    config: TrainConfig,
    merge: Merge,
    state: TrainState,
    losses: list[float],
    corpus: Corpus,
    save: Callable[[TrainState], None],
    save_every: int,
) -> tuple[TrainState, float]:
    """Takes the steps from len(losses) to config.steps and appends their losses to `losses`.

    Calls `save` every `save_every` steps and after the last one. Returns the new state and the median rate in tokens
    per second, compilation left out.
    """
    train_step = make_train_step(merge, make_optimizer(config), config.packed)
    first = len(losses)
    unread: list[jax.Array] = []
    rates: list[float] = []
    with tqdm(total=config.steps, initial=first, unit="step", dynamic_ncols=True) as progress:
        clock = time.perf_counter()
        for step in range(first, config.steps):
            batch = corpus.random_windows(config.batch_size, config.sequence_length + 1, seed=config.seed, step=step)
            state, loss = train_step(state, batch)
            unread.append(loss)
            done = step + 1
            save_now = done % save_every == 0 or done == config.steps
            # Reading a loss waits for the device, which then runs dry; so it is not done at every step.
            if step == first or done % REPORT_EVERY == 0 or save_now:
                losses.extend(float(loss) for loss in unread)
                rate = len(unread) * config.batch_size * config.sequence_length / (time.perf_counter() - clock)
                if step > first:
                    rates.append(rate)
                progress.update(len(unread))
                progress.set_postfix_str(f"loss {losses[-1]:.3f}, {rate:,.0f} tokens/s")
                unread.clear()
                if save_now:
                    save(state)
                clock = time.perf_counter()
    return state, statistics.median(rates) if rates else float("nan")


def restore(
    checkpoints: ocp.CheckpointManager, config: TrainConfig, state: TrainState
) -> tuple[TrainState, list[float]]:
    """The newest checkpoint: its state (in the structure of `state`) and the losses of the steps up to it."""
    step = checkpoints.latest_step()
    if step is None:
        raise SystemExit(f"--resume: there is no checkpoint in {checkpoints.directory}")
    history = checkpoints.restore(step, args=ocp.args.Composite(history=ocp.args.JsonRestore()))["history"]
    if history["config"] != dataclasses.asdict(config):
        raise SystemExit(
            f"--resume: the checkpoint was made with {history['config']}, "
            f"this run asks for {dataclasses.asdict(config)}"
        )
    restored = checkpoints.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(state)))["state"]
    return restored, history["losses"]


def plot_losses(losses: Sequence[float], held_out_loss: float, entropy: float, path: Path) -> None:
    """Draws the loss curve as PNG."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1, label="training")
    axes.axhline(entropy, color="gray", linestyle="--", label=f"byte unigrams: {entropy:.3f}")
    axes.axhline(held_out_loss, color="C1", linestyle=":", label=f"held out, at the end: {held_out_loss:.3f}")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Gated DeltaNet on the Python standard library")
    axes.legend()
    figure.savefig(path, dpi=150)


def argument_parser(description: str, sizes: Collection[str], output: str) -> argparse.ArgumentParser:
    """The command line of a training script; it may add its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--size", choices=sorted(sizes), default="small", help="default: small, for a CPU")
    parser.add_argument("--implementation", help="of chunk_gated_delta_rule: cuda, xla, ...; default: jax_qla chooses")
    parser.add_argument("--steps", type=_whole(1), help="optimizer steps; default: by size")
    parser.add_argument("--seed", type=_whole(0, 2**32 - 1), default=0, help="of parameters, batches and the sample")
    parser.add_argument("--packed", action="store_true", help="keep documents apart, by segment_ids")
    parser.add_argument("--output", type=Path, default=Path(output), help="folder; default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --output")
    parser.add_argument("--checkpoint-every", type=_whole(1), default=100, metavar="STEPS", help="default: %(default)s")
    parser.add_argument("--log", type=Path, metavar="FILE", help="losses as JSON; default: log.json in --output")
    parser.add_argument("--prompt", default="def ", help="start of the sample; default: %(default)r")
    parser.add_argument("--sample-length", type=_whole(0), default=400, metavar="BYTES", help="default: %(default)s")
    parser.add_argument("--mesh", type=meshes.sizes, metavar="data=N,seq=M", help="devices that cut batch and windows")
    parser.add_argument("--temperature", type=_positive, default=0.7, help="of the sample; default: %(default)s")
    return parser


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an argument that is a whole number, `least` or more, and not above `most`."""
    span = f"{least} or more" if most is None else f"from {least} to {most}"

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            raise argparse.ArgumentTypeError(f"must be a whole number, {span}, got {text!r}")
        return int(text)

    return number


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be a number more than 0, got {text!r}")
    return number


def run(
    arguments: argparse.Namespace,
    config: TrainConfig,
    make_model: Callable[[Any, int], tuple[Merge, Parameters]],
) -> None:
    """Trains, evaluates and samples as the command line asks.

    Args:
        arguments: of `argument_parser`.
        config: of the size that the arguments name; they change it further.
        make_model: from config.model and a seed, the model's initial parameters and what puts them into it.
    """
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, implementation=arguments.implementation),
        steps=arguments.steps or config.steps,
        seed=arguments.seed,
        packed=arguments.packed,
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a sample may have what the terminal's encoding lacks
    output: Path = arguments.output.resolve()
    log_file: Path = arguments.log or output / "log.json"
    for folder in (output, log_file.parent):
        folder.mkdir(parents=True, exist_ok=True)

    training, held_out = stdlib_text.load()
    merge, params = make_model(config.model, config.seed)
    state = TrainState(params, make_optimizer(config).init(params))
    parameters = sum(p.size for p in jax.tree.leaves(params))
    implementation, reason = which_implementation(config)
    print(f"device: {jax.devices()[0].device_kind} (jax {jax.__version__}, jax_qla {jax_qla.__version__})")
    print(f"gated delta rule: {implementation}, because {reason}")
    print(f"text: {len(training.text):,} bytes to train on, {len(held_out.text):,} held out")
    print(f"model: {parameters:,} parameters; batch: {config.batch_size} x {config.sequence_length} bytes")

    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with ocp.CheckpointManager(output / "checkpoints", options=options) as checkpoints:
        losses: list[float] = []
        if arguments.resume:
            state, losses = restore(checkpoints, config, state)
            print(f"resumed after step {len(losses)}")
        elif checkpoints.latest_step() is not None:
            raise SystemExit(f"{output} holds a run already: continue it with --resume, or choose another --output")

        def save(state: TrainState) -> None:
            history = {"config": dataclasses.asdict(config), "losses": losses}
            checkpoints.save(
                len(losses),
                args=ocp.args.Composite(state=ocp.args.StandardSave(state), history=ocp.args.JsonSave(history)),
            )

        state, rate = train(config, merge, state, losses, training, save, arguments.checkpoint_every)

    entropy = training.unigram_entropy()
    held_out_loss = evaluate(merge, state.params, config, held_out)
    print(f"held-out loss: {held_out_loss:.4f} nats per byte; byte-unigram entropy of the text: {entropy:.4f}")
    print(f"training rate: {rate:,.0f} tokens/s")

    plot_losses(losses, held_out_loss, entropy, output / "loss.png")
    log = {
        "config": dataclasses.asdict(config),
        "implementation": implementation,
        "reason": reason,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "tokens_per_second": rate,
        "byte_unigram_entropy": entropy,
        "held_out_loss": held_out_loss,
        "losses": losses,
    }
    log_file.write_text(json.dumps(log, indent=1) + "\n")

    # Bytes that are no text reach Python's arguments as surrogates.
    start = arguments.prompt.encode(errors="surrogateescape")
    prompt = np.frombuffer(bytes([DOCUMENT_START]) + start, np.uint8).astype(np.int32)[None]
    sampled = generate(
        merge,
        state.params,
        jnp.asarray(prompt),
        jax.random.key(config.seed),
        length=arguments.sample_length,
        temperature=arguments.temperature,
    )
    sample = (start + bytes(np.asarray(sampled[0], np.uint8))).decode(errors="replace")
    (output / "sample.txt").write_text(sample, encoding="utf-8")
    print(f"sample, from the caches:\n{sample}\n")
    print(f"written to {output}: loss.png, log.json, sample.txt, checkpoints")
