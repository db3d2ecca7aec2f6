"""The packages are layered as their docstrings say."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType

import pytest

from jax_qla import cuda, policy


@pytest.mark.parametrize("package", [cuda, policy], ids=lambda package: package.__name__)
def test_each_file_imports_only_those_above_it(package: ModuleType) -> None:
    """In the order of the package's docstring, which names all of them."""
    folder = Path(str(package.__file__)).parent
    order = re.findall(r"^\| (\w+)\.py \|", package.__doc__ or "", re.MULTILINE)
    assert sorted(order) == sorted(file.stem for file in folder.glob("*.py") if file.stem != "__init__")
    for place, name in enumerate(order):
        imported = set()
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == package.__name__:
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{package.__name__}."):
                imported.add(node.module.rpartition(".")[2])
        assert imported <= set(order[:place]), name
