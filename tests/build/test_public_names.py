"""The generator's root: its names, and what it imports."""

import subprocess
import sys

import pytest

import deepseek_triton_build as package


def test_the_root_finds_a_name_when_it_is_asked_for():
    assert all(hasattr(package, name) for name in package.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'build'"):
        _ = package.build


@pytest.mark.slow
def test_the_root_imports_nothing_heavy():
    """A plan needs PyYAML alone."""
    code = "import sys; from deepseek_triton_build import *; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()

    assert {"numpy", "grpc", "tritonclient", "google.protobuf", "httpx", "rich"}.isdisjoint(loaded)
    assert "deepseek_triton_build.check" not in loaded
