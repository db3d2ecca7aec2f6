"""Installs wheels into empty environments, as a stranger would, and tries them there; `make wheel-check` calls it.

    python tests/wheel/environments.py --pythons python3.11 python3.12 --jax 0.10.0 newest -- dist/*.whl

For every Python and every JAX a new virtual environment gets the wheel for this Python and what it needs from PyPI. In
it, with nothing on PATH but the environment: no compiler, no TileLang, no PyTorch; forward and backward agree with the
reference; `python -m jax_qla` finds all kernels, vouched for, and no problem, and notices when a cubin, the manifest or
both are swapped. The last environment also gets the extra `examples` and trains the small model for a few steps.
Commands and what they print go to build/wheel-check/<environment>.log; exits with 1 if anything fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TREE = Path(__file__).parents[2]
LOGS = TREE / "build" / "wheel-check"

ALONE = """
import importlib.util, shutil, sys
found = [name for name in ("c++", "g++", "gcc", "clang", "cc", "nvcc", "cmake", "ninja") if shutil.which(name)]
found += [name for name in ("torch", "tilelang", "tvm", "flax", "equinox") if importlib.util.find_spec(name)]
assert not found, f"not empty: {found}"
import jax_qla
assert jax_qla.__file__.startswith(sys.prefix), jax_qla.__file__
print("alone with", sys.version.split()[0], "and", jax_qla.__file__)
"""

MAIN = """
import jax, jax.numpy as jnp, numpy as np
from jax_qla import chunk_gated_delta_rule

keys = jax.random.split(jax.random.key(0), 5)
B, T, Hk, Hv, K, V = 2, 200, 2, 4, 64, 64
q, k = (jax.random.normal(key, (B, T, Hk, K)) for key in keys[:2])
v = jax.random.normal(keys[2], (B, T, Hv, V))
g, beta = jax.nn.log_sigmoid(jax.random.normal(keys[3], (B, T, Hv))), jax.random.uniform(keys[4], (B, T, Hv))

def loss(implementation, *operands):
    o, state = chunk_gated_delta_rule(
        *operands, output_final_state=True, use_qk_l2norm_in_kernel=True, implementation=implementation
    )
    return jnp.sum(jnp.sin(o)) + jnp.sum(state**2)

grad = lambda implementation: jax.jit(jax.value_and_grad(lambda *x: loss(implementation, *x), argnums=(0, 1, 2, 3, 4)))
ours, reference = grad(None)(q, k, v, g, beta), grad("reference")(q, k, v, g, beta)
pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(reference))
worst = max(float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)) for x, y in pairs)
print("jax", jax.__version__, "forward and backward, largest relative error", worst)
assert worst < 1e-4
"""


class Environment:
    """A new virtual environment and its log."""

    def __init__(self, name: str, python: str) -> None:
        self.name = name
        self.folder = LOGS / name
        shutil.rmtree(self.folder, ignore_errors=True)
        self.log = LOGS / f"{name}.log"
        self.log.write_text("")
        self.run([python, "-m", "venv", str(self.folder)], alone=False)

    def pip(self, *arguments: str, alone: bool = False, expected: int = 0) -> None:
        """Runs pip; `alone` as in `run`."""
        self.run([self.python, "-m", "pip", "--no-cache-dir", *arguments], alone=alone, expected=expected)

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def run(self, command: list[str], *, alone: bool = True, expected: int = 0) -> str:
        """Runs a command, `alone` with nothing but the environment on PATH; returns what it printed."""
        variables = dict(os.environ)
        for name in ("PYTHONPATH", "VIRTUAL_ENV", "JAX_QLA_CACHE", "PYTHONHOME"):
            variables.pop(name, None)
        if alone:
            variables |= {"PATH": str(self.folder / "bin"), "HOME": str(self.folder)}
        start = time.monotonic()
        done = subprocess.run(command, env=variables, cwd=self.folder.parent, text=True, capture_output=True)
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}")
            log.write(f"[{done.returncode} after {time.monotonic() - start:.1f} s]\n\n")
        if done.returncode != expected:
            raise AssertionError(f"{' '.join(command)[:200]} ended with {done.returncode}, not {expected}: {self.log}")
        return done.stdout

    def doctor(self, *, expected: int = 0) -> Any:
        return json.loads(self.run([self.python, "-m", "jax_qla", "--json"], expected=expected))


def check_kernels(environment: Environment) -> None:
    """The doctor finds nothing wrong, and then what is made wrong."""
    environment.run([environment.python, "-m", "jax_qla"])
    report = environment.doctor()
    packaged = report["kernels"]["packaged"]
    assert packaged["count"] == packaged["of"] > 0, packaged
    assert packaged["vouched for by the extension"] is True, packaged
    assert [test["passed"] for test in report["self_test"] if test["implementation"] == "xla"] == [True]
    folder = Path(packaged["folder"])
    manifest, cubins = folder / "manifest.json", sorted(folder.glob("*.cubin"))
    one, other = (file.read_bytes() for file in cubins[:2])

    def corrupt() -> None:
        cubins[0].write_bytes(one[:-1] + bytes([one[-1] ^ 1]))

    def swap_cubins() -> None:
        cubins[0].write_bytes(other)
        cubins[1].write_bytes(one)

    def swap_entries() -> None:
        text = manifest.read_text().replace(cubins[0].stem, "?").replace(cubins[1].stem, cubins[0].stem)
        manifest.write_text(text.replace("?", cubins[1].stem))

    def swap_both() -> None:
        swap_cubins()
        swap_entries()

    original = manifest.read_bytes()
    wrongs: list[tuple[Callable[[], None], str]] = [
        (corrupt, "1 of the kernels in "),
        (swap_cubins, "2 of the kernels in "),
        (swap_entries, "must be the manifest that this wheel of jax_qla was built with"),
        (swap_both, "must be the manifest that this wheel of jax_qla was built with"),
        (manifest.unlink, "which belongs to this wheel of jax_qla, is missing"),
    ]
    for make, said in wrongs:
        make()
        problems = environment.doctor(expected=1)["problems"]
        assert len(problems) == 1, problems
        assert said in problems[0], problems
        manifest.write_bytes(original)
        cubins[0].write_bytes(one)
        cubins[1].write_bytes(other)
    assert environment.doctor()["problems"] == []


def train(environment: Environment, wheel: Path, steps: int = 3) -> None:
    """The example, with its own dependencies, still without a compiler."""
    environment.pip("install", "--quiet", f"{wheel}[examples]")
    examples = environment.folder / "examples"
    shutil.copytree(TREE / "examples", examples)
    output = str(environment.folder / "run")
    script = str(examples / "train_lm.py")
    environment.run([environment.python, script, "--size", "small", "--steps", str(steps), "--output", output])


def wheel_for(python: str, wheels: list[Path]) -> Path:
    """The wheel of the stable ABI from 3.12 on, the one for 3.11 before."""
    command = [python, "-c", "import sys; print(sys.version_info >= (3, 12))"]
    stable = subprocess.run(command, check=True, text=True, capture_output=True).stdout.strip() == "True"
    (found,) = (wheel for wheel in wheels if ("-cp312-abi3-" in wheel.name) == stable)
    return found.resolve()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pythons", nargs="+", required=True)
    parser.add_argument("--jax", nargs="+", required=True, help="versions, or newest")
    parser.add_argument("wheels", nargs="+", type=Path)
    options = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    failed = 0
    pairs = [(python, jax) for python in options.pythons for jax in options.jax]
    for python, jax in pairs:
        start = time.monotonic()
        try:
            wheel = wheel_for(python, options.wheels)
            environment = Environment(f"{Path(python).name}-jax-{jax}", python)
            versions = ["jax", "jaxlib"] if jax == "newest" else [f"jax=={jax}", f"jaxlib=={jax}"]
            environment.pip("install", "--quiet", str(wheel), *versions)
            environment.pip("freeze")
            environment.run([environment.python, "-c", ALONE])
            print(environment.run([environment.python, "-c", MAIN]).strip(), flush=True)
            check_kernels(environment)
            if (python, jax) == pairs[-1]:
                train(environment, wheel)
            shutil.rmtree(environment.folder)
            print(
                f"{environment.name}: {wheel.name} works, {time.monotonic() - start:.0f} s, {environment.log}",
                flush=True,
            )
        except AssertionError as error:
            failed += 1
            print(f"{python}, jax {jax}: FAILED: {error}", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
