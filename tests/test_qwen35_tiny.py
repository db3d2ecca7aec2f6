"""The hybrid decoder in both frameworks: the same as in transformers, with caches that go on, and it learns."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="the example needs the flax extra")
pytest.importorskip("equinox", reason="the example needs the equinox extra")

import meshes
import qwen35_tiny
import training
from frameworks import QUICK, assert_close
from qwen35_checkpoint import load_parameters
from qwen35_config import Qwen35Config
from qwen35_layers import KeyValueCache, rotate
from stdlib_text import Batch
from thorough import rarely

STEPS = 16
TINY = ["--size", "tiny", "--implementation", "xla", "--steps", str(STEPS), "--checkpoint-every", "8"]
TINY += ["--sample-length", "12"]
# Between two orders of the same float32 sums through four layers.
LIMIT = 1e-4
FRAMEWORKS = sorted(qwen35_tiny.MAKERS)


@pytest.fixture(scope="module", params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


RARELY_EQUINOX = pytest.mark.parametrize(
    "framework", [rarely(name) if name == "equinox" else name for name in FRAMEWORKS], indirect=True
)


def compiled(merge: Any, method: str) -> Any:
    """`method` of the model as a function of its parameters."""

    @partial(jax.jit, compiler_options=QUICK)
    def run(params: Any, *arguments: Any) -> Any:
        return getattr(merge(params), method)(*arguments)

    return run


def random_tokens(rows: int, length: int) -> jax.Array:
    return jax.random.randint(jax.random.key(1), (rows, length), 0, 60)


@pytest.fixture(scope="module")
def theirs() -> Any:
    """A random model of transformers in which no weight is at a special value."""
    torch = pytest.importorskip("torch", reason="transformers needs PyTorch")
    transformers = pytest.importorskip("transformers", reason="needs the test extra")
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        # Large, so that four layers of norms do not enlarge rounding errors: with the usual 1e-6, gradients of
        # transformers in float32 differ by 2e-4 from its own in float64. The layer alone is compared with 1e-5.
        rms_norm_eps=1e-2,
    )
    model = transformers.Qwen3_5ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = (parameter.numel() / parameter.shape[0]) ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.add_(scale * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def checkpoint(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen35")
    theirs.save_pretrained(folder)
    return folder


@RARELY_EQUINOX
def test_logits_and_gradients_of_the_whole_model(framework: str, theirs: Any, checkpoint: Path) -> None:
    import torch

    config = Qwen35Config.from_huggingface(json.loads((checkpoint / "config.json").read_text()))
    merge, initial = qwen35_tiny.MAKERS[framework](config, 0)
    params = load_parameters(initial, checkpoint)
    tokens = random_tokens(2, 70)
    dlogits = np.random.default_rng(0).standard_normal((2, 70, 60)).astype(np.float32)

    @partial(jax.jit, compiler_options=QUICK)
    def run(params: Any) -> Any:
        logits, transpose = jax.vjp(lambda params: merge(params)(tokens), params)
        return logits, transpose(jnp.asarray(dlogits))[0]

    logits, gradients = run(params)
    theirs.zero_grad()
    their_logits = theirs(torch.tensor(np.asarray(tokens))).logits
    their_logits.backward(torch.tensor(dlogits))
    assert_close(logits, their_logits.detach(), LIMIT)

    of_gradients = copy.deepcopy(theirs)
    with torch.no_grad():
        for gradient, parameter in zip(of_gradients.parameters(), theirs.parameters(), strict=True):
            gradient.copy_(parameter.grad)
    of_gradients.save_pretrained(checkpoint / "gradients")
    expected = load_parameters(initial, checkpoint / "gradients")
    paths = jax.tree_util.tree_leaves_with_path(expected)
    assert len(paths) == sum(1 for _ in theirs.parameters())
    for (path, gradient), computed in zip(paths, jax.tree.leaves(gradients), strict=True):
        name = jax.tree_util.keystr(path)
        # One number a head, the sum of what 140 tokens contribute with both signs: where it nearly vanishes,
        # transformers in float32 differs by 2.5e-4 from its own in float64.
        cancels = "A_log" in name or "dt_bias" in name
        assert_close(computed, gradient, 2e-3 if cancels else LIMIT, name)


@RARELY_EQUINOX
def test_pieces_and_steps_equal_the_whole(framework: str) -> None:
    merge, params = qwen35_tiny.MAKERS[framework](qwen35_tiny.SIZES["tiny"].model, 0)
    tokens = random_tokens(2, 75)
    expected = compiled(merge, "__call__")(params, tokens)
    prefill, decode = compiled(merge, "prefill"), compiled(merge, "decode")
    whole, whole_caches = prefill(params, tokens, merge(params).init_cache(2, 75))
    assert_close(whole, expected, LIMIT)
    caches, pieces = merge(params).init_cache(2, 75), []
    for start, end in [(0, 3), (3, 70)]:
        logits, caches = prefill(params, tokens[:, start:end], caches)
        pieces.append(logits)
    for position in range(70, 75):
        logits, caches = decode(params, tokens[:, position : position + 1], caches)
        pieces.append(logits)
    assert_close(jnp.concatenate(pieces, axis=1), expected, LIMIT)
    kinds = [isinstance(cache, KeyValueCache) for cache in caches]
    assert kinds == [False, True]
    for computed, wanted in zip(jax.tree.leaves(caches), jax.tree.leaves(whole_caches), strict=True):
        assert_close(computed, wanted, LIMIT)


@RARELY_EQUINOX
def test_packed_documents_do_not_see_each_other(framework: str) -> None:
    config = dataclasses.replace(qwen35_tiny.SIZES["tiny"].model, tied_embeddings=False)
    merge, params = qwen35_tiny.MAKERS[framework](config, 0)
    tokens = random_tokens(2, 40)
    call = compiled(merge, "__call__")
    segment_ids = jnp.repeat(jnp.array([[1, 2]]), 40, axis=1)
    packed = call(params, tokens.reshape(1, 80), segment_ids)
    assert_close(packed.reshape(2, 40, -1), call(params, tokens), LIMIT)


def train(framework: str, output: Path, *arguments: str) -> Any:
    """Runs the example and returns its log."""
    qwen35_tiny.main([*TINY, "--framework", framework, "--output", str(output), *arguments])
    return json.loads((output / "log.json").read_text())


@pytest.fixture(scope="module")
def finished_run(framework: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of one complete run on one device."""
    output = tmp_path_factory.mktemp("qwen35_tiny") / "run"
    train(framework, output)
    return output


@RARELY_EQUINOX
def test_run_learns_resumes_exactly_and_samples(framework: str, finished_run: Path, tmp_path: Path) -> None:
    log = json.loads((finished_run / "log.json").read_text())
    sample = (finished_run / "sample.txt").read_text()
    assert len(log["losses"]) == STEPS
    assert np.mean(log["losses"][-3:]) < 0.8 * log["losses"][0]
    assert sample.startswith("def ")
    output = tmp_path / "run"
    shutil.copytree(finished_run, output)
    shutil.rmtree(output / "checkpoints" / str(STEPS))  # as if the run had been killed in its second half
    resumed = train(framework, output, "--resume")
    assert resumed["losses"] == log["losses"]
    assert resumed["held_out_loss"] == log["held_out_loss"]
    assert (output / "sample.txt").read_text() == sample


@RARELY_EQUINOX
def test_checkpoint_of_the_other_framework_is_refused(framework: str, finished_run: Path) -> None:
    other = next(name for name in FRAMEWORKS if name != framework)
    with pytest.raises(SystemExit, match=f"was made with .*'framework': '{framework}'.* for .*'framework': '{other}'"):
        train(other, finished_run, "--resume")


@RARELY_EQUINOX
def test_run_on_a_mesh_repeats_the_losses(framework: str, finished_run: Path, tmp_path: Path) -> None:
    logs = [json.loads((finished_run / "log.json").read_text()), train(framework, tmp_path, "--mesh", "data=2,seq=2")]
    np.testing.assert_allclose(logs[1]["losses"], logs[0]["losses"], rtol=1e-4)
    np.testing.assert_allclose(logs[1]["held_out_loss"], logs[0]["held_out_loss"], rtol=1e-4)


@pytest.mark.parametrize("packed", [rarely(False), True])
def test_gradients_where_more_devices_cut_the_sequence_than_there_are_key_heads(packed: bool) -> None:
    config = qwen35_tiny.SIZES["tiny"].model
    assert config.key_value_heads == 2
    merge, params = qwen35_tiny.make_flax(config, 0)
    tokens = np.asarray(random_tokens(2, 41)).astype(np.int32)
    batch = Batch(tokens, np.repeat([[1, 2], [3, 3]], [30, 11], axis=1).astype(np.int32))

    def compile() -> Any:
        def run(params: Any, batch: Batch) -> Any:
            loss = partial(training.mean_loss, merge, packed=packed)
            return meshes.whole(jax.value_and_grad(loss)(meshes.whole(params), batch))

        return jax.jit(run).lower(params, batch).compile()

    expected = compile()(params, batch)
    with meshes.use(meshes.sizes("data=2,seq=4")):
        compiled = compile()
        actual = compiled(params, batch)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_close(a, b, LIMIT)
    # Heads change hands; of floating arrays nothing is gathered.
    text = compiled.as_text()
    assert "all-to-all(" in text
    assert not re.search(r"= f32\[[\d,]*\]\S* all-gather", text)


def test_attention_heads_that_do_not_divide_are_refused() -> None:
    config = qwen35_tiny.SIZES["tiny"].model
    merge, params = qwen35_tiny.make_flax(config, 0)
    with (
        meshes.use(meshes.sizes("seq=8")),
        pytest.raises(ValueError, match="4 attention heads cannot be shared out among the 8 devices"),
    ):
        jax.eval_shape(lambda params, tokens: merge(params)(tokens), params, random_tokens(2, 80))


def test_rotation_turns_pairs_and_leaves_the_rest() -> None:
    x = jax.random.normal(jax.random.key(0), (1, 5, 2, 10))
    positions = jnp.arange(5)
    turned = rotate(x, positions, 4, 100.0)
    np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])
    for feature, frequency in enumerate([1.0, 0.1]):
        pair = np.asarray(x[..., feature] + 1j * x[..., feature + 2])
        pair = pair * np.exp(1j * frequency * np.arange(5))[:, None]
        np.testing.assert_allclose(turned[..., feature] + 1j * turned[..., feature + 2], pair, atol=1e-5)


def test_a_model_too_short_for_attention(checkpoint: Path) -> None:
    values = json.loads((checkpoint / "config.json").read_text())
    values |= {"layer_types": ["linear_attention"] * 3, "num_hidden_layers": 3}
    config = Qwen35Config.from_huggingface(values)
    assert not any(map(config.is_full_attention, range(config.layers)))


def test_wrong_checkpoints_and_configurations_are_refused(checkpoint: Path) -> None:
    values = json.loads((checkpoint / "config.json").read_text())
    config = Qwen35Config.from_huggingface(values)
    _, params = qwen35_tiny.make_flax(dataclasses.replace(config, layers=5), 0)
    with pytest.raises(ValueError, match=r"the checkpoint has no model\.layers\.4\."):
        load_parameters(params, checkpoint)
    _, params = qwen35_tiny.make_equinox(dataclasses.replace(config, mlp_width=47), 0)
    with pytest.raises(ValueError, match=r"proj\.weight must have shape .*47.* got .*48"):
        load_parameters(params, checkpoint)
    with pytest.raises(ValueError, match="layer_types must repeat"):
        Qwen35Config.from_huggingface({**values, "layer_types": ["full_attention", "linear_attention"]})
