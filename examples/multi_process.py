"""One sequence over several processes: `jax.distributed` with one process a GPU, or on CPUs.

    python examples/multi_process.py --launch 4             four processes on this machine, each with one of its GPUs
    python examples/multi_process.py --launch 2 --cpu       two processes on its CPU

On a cluster, start it on every host with the options that `jax.distributed.initialize` would be given, or with none of
them where JAX finds out by itself (Slurm, Open MPI, Cloud TPU):

    python examples/multi_process.py --coordinator HOST:PORT --processes N --process I

Every process computes the loss and the gradients of a sequence that is cut over all, and compares its part with the
same sequence computed whole on its own device.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_qla import chunk_gated_delta_rule

KEY_HEADS, VALUE_HEADS, DIM = 2, 4, 64


def loss(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array) -> jax.Array:
    o, _ = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    return jnp.sum(o.astype(jnp.float32) ** 2)


def operands(length: int, dtype: jnp.dtype) -> list[np.ndarray]:
    """q, k, v, g, beta of the whole sequence, the same in every process."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal((1, length, *shape)).astype(np.float32)

    tokens = [normal(heads, DIM).astype(dtype) for heads in (KEY_HEADS, KEY_HEADS, VALUE_HEADS)]
    return [*tokens, -0.02 * np.exp(normal(VALUE_HEADS)), 1 / (1 + np.exp(-normal(VALUE_HEADS)))]


def run(length: int) -> None:
    if length < 1 or length % jax.device_count():
        raise SystemExit(f"--length: must be a multiple of the {jax.device_count()} devices, got {length}")
    cpu = jax.default_backend() == "cpu"
    whole = operands(length, jnp.dtype(jnp.float32 if cpu else jnp.bfloat16))
    gradients = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(5))))

    mesh = jax.make_mesh((jax.device_count(),), ("seq",), axis_types=(AxisType.Explicit,))
    cut = NamedSharding(mesh, P(None, "seq"))
    with jax.set_mesh(mesh):
        # Every process holds the whole arrays here; reading its own part of a file does as well.
        parts = [jax.make_array_from_callback(x.shape, cut, x.__getitem__) for x in whole]
        value, found = gradients(*parts)

    with jax.default_device(jax.local_devices()[0]):
        expected_value, expected = gradients(*map(jnp.asarray, whole))
    errors = [abs(float(value) - float(expected_value)) / float(expected_value)]
    for actual, wanted in zip(found, expected, strict=True):
        for shard in actual.addressable_shards:
            part = np.asarray(wanted[shard.index], np.float32)
            difference = float(np.linalg.norm(shard.data - part))
            # Of a first token alone, gradients of g are 0, and so is what they differ by.
            errors.append(difference and difference / float(np.linalg.norm(part)))
    error = float(np.max(errors))  # NaN if any is
    print(
        f"process {jax.process_index()} of {jax.process_count()}, {jax.device_count()} devices "
        f"({jax.devices()[0].device_kind}): {length} tokens, loss {float(value):.6g}, largest difference {error:.1e}",
        flush=True,
    )
    if not error < (1e-4 if cpu else 2e-2):
        raise SystemExit("the sequence cut over the processes differs from the whole one")


def launch(processes: int, arguments: list[str]) -> None:
    """Starts `processes` of this script on this machine, and waits for them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, __file__, *arguments, "--coordinator", coordinator, "--processes", str(processes)]
    children = [subprocess.Popen([*command, "--process", str(i), "--gpu", str(i)]) for i in range(processes)]
    codes = [child.wait() for child in children]
    if any(codes):
        raise SystemExit("a process failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--launch", type=int, metavar="N", help="start N processes on this machine")
    parser.add_argument("--cpu", action="store_true", help="one CPU device a process, talking by gloo")
    parser.add_argument("--length", type=int, default=4096, help="tokens of the sequence; default: %(default)s")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of jax.distributed.initialize, as the next two")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    parser.add_argument(
        "--gpu", type=int, metavar="I", help="the GPU of this host to use; default: JAX asks the launcher"
    )
    arguments = parser.parse_args()
    if arguments.launch is not None and arguments.launch < 1:
        parser.error(f"argument --launch: must be 1 or more, got {arguments.launch}")
    if arguments.launch is not None:
        launch(arguments.launch, ["--length", str(arguments.length), *(["--cpu"] if arguments.cpu else [])])
        return
    if arguments.cpu:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 1)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    own = None if arguments.gpu is None or arguments.cpu else [arguments.gpu]
    jax.distributed.initialize(arguments.coordinator, arguments.processes, arguments.process, local_device_ids=own)
    run(arguments.length)


if __name__ == "__main__":
    main()
