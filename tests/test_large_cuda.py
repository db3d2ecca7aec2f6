"""The kernels on operands of more than 2^31 elements. Needs an H200 and 115 GB of its memory, which eight processes of
other tests do not leave: `make gpu-test` runs it when these have ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ENOUGH = 115 * 10**9
"""Bytes, of which the tests take 108e9 at their peak."""


def _free() -> int:
    """Bytes of the first card's memory that nobody has."""
    query = ["nvidia-smi", "--id=0", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, check=True, capture_output=True, text=True).stdout) * 2**20


def test_large_operands() -> None:
    """By a process of its own: JAX keeps the memory that it has once taken, and other tests run at the same time."""
    if (free := _free()) < ENOUGH:
        pytest.skip(f"needs {ENOUGH // 10**9} GB of a card's memory, of which {free // 10**9} are free")
    tests = Path(__file__).with_name("large_operands.py")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(command, env=environment, cwd=tests.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    if " skipped" in done.stdout:
        pytest.skip(done.stdout.strip().splitlines()[-1])
