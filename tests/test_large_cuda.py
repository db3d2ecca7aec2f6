"""The kernels on operands of more than 2^31 elements. Needs an H200 and 90 GB of its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def test_large_operands() -> None:
    """By a process of its own: JAX keeps the memory that it has once taken, and other tests run at the same time."""
    tests = Path(__file__).with_name("large_operands.py")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(command, env=environment, cwd=tests.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    if " skipped" in done.stdout:
        pytest.skip(done.stdout.strip().splitlines()[-1])
