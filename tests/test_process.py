"""jax_qla and the life of a process: import without a GPU or extension, fork after import, exit while a call runs.

Each happens in a new Python: a function of SCENARIOS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest


def import_and_fork() -> None:
    """Prints what imports bring that they do not need, also those of the convolution's and the norm's kernels, by
    which the rule's are not to come; then forks, and prints what child and parent compute."""
    import jax_qla
    from jax_qla.cuda import conv1d, norm

    del conv1d, norm
    of_the_rule = {"jax_qla.cuda.rule", "jax_qla.kernels.packaged"}
    heavy = sorted({"torch", "tilelang", "tvm", "flax", "equinox", *of_the_rule} & set(sys.modules))
    mapped = Path("/proc/self/maps").read_text()
    import jax

    jax.config.update("jax_num_cpu_devices", 2)  # Raises if JAX has started its backends.
    print(json.dumps([heavy, "libcuda.so" in mapped]), flush=True)
    child = os.fork()
    # In one write: print's own line feed is a second one where PYTHONUNBUFFERED is set, and both processes write here.
    os.write(sys.stdout.fileno(), f"{json.dumps(_forward(jax_qla))}\n".encode())
    if child == 0:
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)


def _forward(jax_qla: Any) -> list[float]:
    import jax
    import jax.numpy as jnp

    q = jnp.linspace(-1, 1, 3 * 2 * 4, dtype=jnp.float32).reshape(1, 3, 2, 4)
    g = jnp.full((1, 3, 2), -0.1)
    o, _ = jax.jit(lambda *x: jax_qla.chunk_gated_delta_rule(*x, implementation="xla"))(q, q, q, g, -g)
    return [float(x) for x in o[0, 2].ravel()]


def elsewhere() -> None:
    """Takes away from Python what Windows has not, and the extension, which is built on Linux only; prints what
    `python -m jax_qla` ends with, and an error. From jax_qla alone: JAX is imported before."""
    import jax.numpy as jnp

    os.environ["JAX_QLA_CACHE"] = tempfile.mkdtemp()
    sys.platform = "win32"
    sys.modules |= {"fcntl": None, "jax_qla._ffi": None}  # type: ignore[dict-item]
    del os.getuid
    import jax_qla
    from jax_qla import doctor

    doctor.text = lambda report: json.dumps([report["extension"], report["self_test"][1]["passed"]])
    print(doctor.main([]))
    q, g = jnp.zeros((1, 64, 2, 64), jnp.bfloat16), jnp.zeros((1, 64, 2))
    try:
        jax_qla.chunk_gated_delta_rule(q, q, q, g, g, implementation="cuda")
    except NotImplementedError as error:
        print(error)


def exit_during_a_call() -> None:
    """The main thread ends while another is in the middle of a call, whose driver needs a second.

    Not a daemon thread: Python takes those away from under C++, and plain JAX aborts then ("exception not rethrown").
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from stub_driver import stub_driver, write_cubin

    from jax_qla import _ffi

    driver = stub_driver()
    os.environ["JAX_QLA_LIBCUDA"] = str(driver.library)
    folder = Path(tempfile.mkdtemp())
    _ffi.set_cubin_directories([str(folder)])
    digest = write_cubin(folder, {"main": [8]})
    plan = np.array([1, 1, 1, 1, 1, 32, 1, 1, 1, 1, 1, 0, 0, 1, 0, 0], np.int64)

    @jax.jit
    def run(x: jax.Array) -> Any:
        launch = jax.ffi.ffi_call("jax_qla.launch.v1", jax.ShapeDtypeStruct((4,), jnp.float32))
        return launch(x, cubins=digest, functions="main", plan=plan)

    x = jnp.zeros(4)
    jax.block_until_ready(run(x))
    driver.set_launch_milliseconds(1000)

    def call() -> None:
        jax.block_until_ready(run(x))
        print("done", flush=True)

    threading.Thread(target=call).start()
    time.sleep(0.25)
    print("leaving", flush=True)


def exit_with_calls_on_the_device() -> None:
    """Exits while the GPU has seconds of kernels before it."""
    import jax
    import jax.numpy as jnp

    import jax_qla

    q = jnp.ones((1, 65536, 16, 128), jnp.bfloat16) / 128**0.5
    g = jnp.zeros((1, 65536, 16))
    run = jax.jit(lambda v: jax_qla.chunk_gated_delta_rule(q, q, v, g, g, implementation="cuda")[0])
    v = jax.block_until_ready(run(q))
    for _ in range(500):
        v = run(v)
    print("leaving", flush=True)


SCENARIOS = {
    function.__name__: function
    for function in (import_and_fork, elsewhere, exit_during_a_call, exit_with_calls_on_the_device)
}


def in_new_process(scenario: str) -> list[str]:
    """Runs a scenario and returns the lines it printed; it must end with 0 and print no error."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    if scenario != "exit_with_calls_on_the_device":
        environment["JAX_PLATFORMS"] = "cpu"
    environment.pop("JAX_QLA_LIBCUDA", None)
    command = [sys.executable, __file__, scenario]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_import_opens_no_driver_and_survives_a_fork() -> None:
    brought, *results, status = in_new_process("import_and_fork")
    assert json.loads(brought) == [[], False]
    one, other = results
    assert one == other
    assert any(json.loads(one))
    assert status == "0"


def test_systems_that_jax_for_cuda_is_not_for() -> None:
    reason = "the kernels of 'cuda' need Linux, and this is win32"
    report, code, error = in_new_process("elsewhere")
    assert (json.loads(report), code) == ([{"none": reason}, True], "0")
    assert error == f"implementation='cuda' cannot take these inputs: {reason}"


def test_exit_while_a_call_runs() -> None:
    assert in_new_process("exit_during_a_call") == ["leaving", "done"]


@pytest.mark.gpu
def test_exit_while_kernels_run() -> None:
    assert in_new_process("exit_with_calls_on_the_device") == ["leaving"]


if __name__ == "__main__":
    SCENARIOS[sys.argv[1]]()
