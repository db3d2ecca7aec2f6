"""The training example: it learns, resumes exactly, and generates what its parallel form computes."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from thorough import only_thorough, rarely

pytest.importorskip("flax", reason="the example needs the flax extra")

import stdlib_text
import train_lm
import training
from flax import nnx
from gdn_lm import LanguageModel

STEPS = 20
TINY = ["--size", "tiny", "--implementation", "xla", "--steps", str(STEPS), "--checkpoint-every", "10"]
SAMPLE = ["--sample-length", "12", "--prompt", "def \udcff"]  # a byte that is no text, as Python reads it from argv
MODEL = dataclasses.replace(train_lm.SIZES["tiny"].model, implementation="xla")
# Between two orders of the same float32 sums; the norm after the gated delta rule enlarges them where o is small.
TOLERANCE = 1e-4

parallel = nnx.jit(LanguageModel.__call__)
prefill = nnx.jit(LanguageModel.prefill)
decode = nnx.jit(LanguageModel.decode)


def read_log(output: Path) -> Any:
    return json.loads((output / "log.json").read_text())


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of one complete run of the tiny size, on a terminal that knows ASCII only."""
    output = tmp_path_factory.mktemp("train_lm") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
        train_lm.main([*TINY, *SAMPLE, "--output", str(output)])
    return output


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel(MODEL, nnx.Rngs(0))


def test_run_learns_and_writes_its_files(finished_run: Path) -> None:
    log = read_log(finished_run)
    assert len(log["losses"]) == STEPS
    assert np.mean(log["losses"][-5:]) < 0.8 * log["losses"][0]
    assert log["implementation"] == "xla"
    assert 2.5 < log["byte_unigram_entropy"] < 4.0
    assert log["held_out_loss"] < log["losses"][0]
    assert (finished_run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (finished_run / "sample.txt").read_text(encoding="utf-8").startswith("def \ufffd")


@only_thorough  # test_qwen35_tiny.py resumes the other example
def test_resumed_run_repeats_the_losses_exactly(finished_run: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    shutil.copytree(finished_run, output)
    shutil.rmtree(output / "checkpoints" / str(STEPS))  # as if the run had been killed in its second half
    train_lm.main([*TINY, *SAMPLE, "--output", str(output), "--resume"])
    resumed, complete = read_log(output), read_log(finished_run)
    assert resumed["losses"] == complete["losses"]
    assert resumed["held_out_loss"] == complete["held_out_loss"]
    assert (output / "sample.txt").read_bytes() == (finished_run / "sample.txt").read_bytes()


def test_run_refuses_to_mix_runs(finished_run: Path, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "log.json"
    with pytest.raises(SystemExit, match="holds a run already"):
        train_lm.main([*TINY, "--output", str(finished_run), "--log", str(log)])
    assert log.parent.is_dir()  # before a run, not in vain after it
    with pytest.raises(SystemExit, match="the checkpoint was made with"):
        train_lm.main([*TINY, "--output", str(finished_run), "--resume", "--seed", "1"])
    with pytest.raises(SystemExit, match="there is no checkpoint"):
        train_lm.main([*TINY, "--output", str(tmp_path), "--resume"])


@only_thorough  # test_qwen35_tiny.py trains the other example on a mesh
def test_run_on_a_mesh_repeats_the_losses(tmp_path: Path) -> None:
    more = ["--steps", "5", "--sample-length", "3", "--packed"]
    logs = []
    for mesh in ([], ["--mesh", "data=2,seq=2"]):
        output = tmp_path / f"run{len(mesh)}"
        train_lm.main([*TINY, *more, *mesh, "--output", str(output)])
        logs.append(read_log(output))
    np.testing.assert_allclose(logs[1]["losses"], logs[0]["losses"], rtol=1e-4)
    np.testing.assert_allclose(logs[1]["held_out_loss"], logs[0]["held_out_loss"], rtol=1e-4)


def test_mesh_option_is_checked(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="99 devices are needed"):
        train_lm.main([*TINY, "--mesh", "seq=99", "--output", str(tmp_path)])
    for text in ("seq", "seq=0", "model=2", "data=2,data=3"):
        with pytest.raises(SystemExit):
            train_lm.main([*TINY, "--mesh", text, "--output", str(tmp_path)])


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--steps", "0", "must be a whole number, 1 or more, got '0'"),
        ("--checkpoint-every", "0", "must be a whole number, 1 or more, got '0'"),
        ("--seed", "-1", "must be a whole number, from 0 to 4294967295, got '-1'"),
        ("--seed", "4294967296", "must be a whole number, from 0 to 4294967295, got '4294967296'"),
        ("--sample-length", "x", "must be a whole number, 0 or more, got 'x'"),
        ("--temperature", "0", "must be a number more than 0, got '0'"),
        ("--temperature", "x", "must be a number more than 0, got 'x'"),
    ],
)
def test_numbers_are_checked_before_anything_is_trained(
    option: str, value: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train_lm.main([*TINY, option, value, "--output", str(tmp_path)])
    assert f"argument {option}: {expected}" in capsys.readouterr().err


def test_a_single_step_is_taken_at_the_peak() -> None:
    """With no warm-up, after which no step would be left."""
    config = dataclasses.replace(train_lm.SIZES["tiny"], steps=1)
    optimizer, params = training.make_optimizer(config), jnp.ones(2)
    updates, _ = optimizer.update(jnp.ones(2), optimizer.init(params), params)
    np.testing.assert_allclose(updates, -config.learning_rate, rtol=1e-3)


@pytest.mark.parametrize("prompt_length", [rarely(2), 70])  # test_nn_huggingface.py: of the layer alone, both
def test_decoding_equals_the_parallel_form(model: LanguageModel, prompt_length: int) -> None:
    tokens = jax.random.randint(jax.random.key(1), (2, prompt_length + 5), 0, 256)
    expected = parallel(model, tokens)
    logits, caches = prefill(model, tokens[:, :prompt_length], model.init_cache(2))
    computed = [logits]
    for position in range(prompt_length, tokens.shape[1]):
        logits, caches = decode(model, tokens[:, position : position + 1], caches)
        computed.append(logits)
    np.testing.assert_allclose(jnp.concatenate(computed, axis=1), expected, atol=TOLERANCE)


def test_packed_documents_do_not_see_each_other(model: LanguageModel) -> None:
    first, second = jax.random.randint(jax.random.key(2), (2, 1, 70), 0, 256)
    segment_ids = jnp.repeat(jnp.array([[1, 2]]), 70, axis=1)
    packed = parallel(model, jnp.concatenate([first, second], axis=1), segment_ids)
    separate = jnp.concatenate([parallel(model, first), parallel(model, second)], axis=1)
    np.testing.assert_allclose(packed, separate, atol=TOLERANCE)


def test_packed_loss_leaves_out_predictions_across_documents(model: LanguageModel) -> None:
    batch = stdlib_text.Corpus.of([b"x" * 100, b"y" * 100]).windows(np.array([40]), 141)
    graphdef, params = nnx.split(model)
    loss = jax.jit(partial(training.mean_loss, partial(nnx.merge, graphdef), packed=True))(params, batch)
    logits = parallel(model, batch.tokens[:, :-1], batch.segment_ids[:, :-1])
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch.tokens[:, 1:, None], axis=-1)[0, :, 0]
    border = 60  # the last of the window's 61 bytes of the first document, whose next byte starts the second one
    np.testing.assert_allclose(loss, jnp.mean(jnp.delete(losses, border)), rtol=1e-5)


def test_text_is_marked_and_numbered_by_document() -> None:
    corpus = stdlib_text.Corpus.of([b"ab", b"", b"c"])
    tokens, segment_ids = corpus.windows(np.array([0, 2]), 4)
    assert tokens.tolist() == [[0, 97, 98, 0], [98, 0, 0, 99]]
    assert segment_ids.tolist() == [[1, 1, 1, 2], [1, 2, 3, 3]]


def test_text_of_the_standard_library() -> None:
    training, held_out = stdlib_text.load()
    assert len(training.text) > 10 * len(held_out.text) > 1_000_000
    batch = training.random_windows(2, 50, seed=0, step=3)
    again = training.random_windows(2, 50, seed=0, step=3)
    assert np.array_equal(batch.tokens, again.tokens)
    assert not np.array_equal(batch.tokens, training.random_windows(2, 50, seed=0, step=4).tokens)
