"""The generator's public modules: their names, and what the root imports."""

import subprocess
import sys
from types import ModuleType

import pytest

import deepseek_triton_build as package
from deepseek_triton_build import arithmetic, catalog, check


@pytest.mark.parametrize("module", [package, check, catalog, arithmetic], ids=lambda module: module.__name__)
def test_a_module_holds_its_public_names_and_no_others(module):
    assert all(hasattr(module, name) for name in module.__all__)  # the root finds a name when it is asked for
    held = {name for name, value in vars(module).items() if name[0] != "_" and not isinstance(value, ModuleType)}
    assert held - {"annotations", "TYPE_CHECKING", "Any", "import_module"} == set(module.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'build'"):
        _ = module.build


@pytest.mark.slow
def test_the_root_imports_nothing_heavy():
    """A plan needs PyYAML alone."""
    code = "import sys; from deepseek_triton_build import *; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()

    assert {"numpy", "grpc", "tritonclient", "google.protobuf", "httpx", "rich"}.isdisjoint(loaded)
    assert "deepseek_triton_build.check" not in loaded
