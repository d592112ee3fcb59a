"""The package's face: its names, and what importing it costs."""

import subprocess
import sys

import deepseek_triton_client

PUBLIC = [
    "Cancelled",
    "Chunk",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "DeepseekTritonError",
    "InvalidRequest",
    "ModelMetadata",
    "ModelNotFound",
    "Overloaded",
    "ProtocolError",
    "SamplingParams",
    "ServerError",
    "ServerUnavailable",
    "Stream",
    "TensorMetadata",
    "Timeouts",
]


def test_public_names():
    assert deepseek_triton_client.__all__ == PUBLIC
    public = [name for name in vars(deepseek_triton_client) if not name.startswith("_")]
    assert sorted(public) == PUBLIC


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_importing_the_client_imports_no_heavy_package():
    heavy = {"grpc", "numpy", "tritonclient", "google.protobuf", "yaml"}
    loaded = python("import sys, deepseek_triton_client; print(*sys.modules)").split()
    assert "httpx" in loaded
    assert heavy.isdisjoint(loaded)


def test_grpc_without_its_extra_says_what_to_install():
    code = """
import sys
sys.modules["tritonclient"] = None  # what an import finds where it is not installed
from deepseek_triton_client import Client
try:
    Client("grpc://localhost")
except ImportError as exc:
    print(exc)
"""
    assert "pip install deepseek-triton[grpc]" in python(code)
