"""Installs the sdist with and without a compiler; `make wheel-check` calls it.

    python tests/wheel/sdist.py --python python3.11 dist/*.tar.gz

Without one the installation must fail and say what is missing; with one it must work, and `python -m jax_qla` find no
problem. The log is build/wheel-check/sdist.log.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from environments import LOGS, Environment

MISSING = "needs a C++17 compiler, which was not found"


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
        environment.pip("install", sdist)
        problems = environment.doctor()["problems"]
        if problems:
            raise AssertionError(f"{problems}: {environment.log}")
    except AssertionError as error:
        print(f"{options.sdist.name}: FAILED: {error}", file=sys.stderr)
        return 1
    shutil.rmtree(environment.folder)
    print(f"{options.sdist.name} says that it needs a compiler, and works with one, {environment.log}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
