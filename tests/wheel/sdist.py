"""Installs the sdist with and without a compiler; `make wheel-check` calls it.

    python tests/wheel/sdist.py --python python3.11 dist/*.tar.gz

Without one the installation must fail and say what is missing, unless it is for a system that JAX for CUDA is not for:
there the wheel is Python alone, and computes. With one it must work, and `python -m jax_qla` find no problem. The log
is build/wheel-check/sdist.log.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import zipfile
from pathlib import Path

from environments import LOGS, MAIN, Environment

MISSING = "needs a C++17 compiler, which was not found"

# What pip has a build backend do, for Windows. What Python finds out about itself it has found out before.
BUILD_ELSEWHERE = """
import os, sys, sysconfig
sysconfig.get_config_vars()
from scikit_build_core import build
os.chdir(sys.argv[1])
sys.platform = "win32"
print(build.build_wheel(sys.argv[2]))
"""


def install_elsewhere(environment: Environment, sdist: Path) -> None:
    """The wheel that the sdist becomes on another system; it has no extension and no cubins, and needs no compiler."""
    unpacked, wheels = environment.folder / "unpacked", environment.folder / "wheels"
    wheels.mkdir()
    shutil.unpack_archive(sdist, unpacked)
    (source,) = unpacked.iterdir()
    environment.pip("install", "scikit-build-core")
    environment.run([environment.python, "-c", BUILD_ELSEWHERE, str(source), str(wheels)])
    (wheel,) = wheels.iterdir()
    if not wheel.name.endswith("-py3-none-any.whl"):
        raise AssertionError(f"{wheel.name} is not for any system")
    with zipfile.ZipFile(wheel) as files:
        if machine_code := [name for name in files.namelist() if name.endswith((".so", ".cubin"))]:
            raise AssertionError(f"{wheel.name} has {machine_code}")
    environment.pip("install", str(wheel), alone=True)
    environment.run([environment.python, "-c", MAIN])
    environment.pip("uninstall", "--yes", "jax_qla")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", required=True)
    parser.add_argument("sdist", type=Path)
    options = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    environment = Environment("sdist", options.python)
    sdist = str(options.sdist.resolve())
    try:
        environment.pip("install", "jax==0.10.0", "jaxlib==0.10.0")
        # Everything that PyPI has is there (CMake, Ninja), and nothing that the system has.
        environment.pip("install", "cmake", "ninja")
        environment.pip("install", sdist, alone=True, expected=1)
        if MISSING not in " ".join(environment.log.read_text().split()):  # CMake breaks lines.
            raise AssertionError(f"it is not said that a compiler is missing: {environment.log}")
        install_elsewhere(environment, options.sdist)
        environment.pip("install", sdist)
        problems = environment.doctor()["problems"]
        if problems:
            raise AssertionError(f"{problems}: {environment.log}")
    except AssertionError as error:
        print(f"{options.sdist.name}: FAILED: {error}", file=sys.stderr)
        return 1
    shutil.rmtree(environment.folder)
    print(f"{options.sdist.name} needs a compiler, says so, and works with it; for Windows without: {environment.log}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
