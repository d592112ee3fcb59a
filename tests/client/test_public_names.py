"""The package's public names: that both clients have the same, and what importing it costs."""

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys

import pytest

import deepseek_triton_client as package
from deepseek_triton_client import Answer, AsyncClient, AsyncStream, Client, Completion, Logprob, Stream, testing


def test_public_names():
    assert all(hasattr(module, name) for module in (package, testing) for name in module.__all__)
    public = {name for name in vars(package) if not name.startswith("_")}
    assert public - {"TYPE_CHECKING", "Any", "annotations", "testing"} <= set(package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Clientt'"):
        _ = package.Clientt


def methods(kind):
    members = inspect.getmembers(kind, callable)
    return {name: member for name, member in members if not name.startswith("_") or name == "__init__"}


@pytest.mark.parametrize(("blocking", "asynchronous"), [(Client, AsyncClient), (Stream, AsyncStream)])
def test_both_have_the_same_methods_with_the_same_parameters(blocking, asynchronous):
    def parameters(method):
        return [(each.name, each.kind, each.default) for each in inspect.signature(method).parameters.values()]

    same, other = (
        {name: parameters(method) for name, method in methods(kind).items()} for kind in (blocking, asynchronous)
    )
    assert same == other
    properties = [
        {name for name, value in inspect.getmembers(kind) if isinstance(value, property) and name[0] != "_"}
        for kind in (blocking, asynchronous)
    ]
    assert properties[0] == properties[1] != set()


def test_the_four_verbs_take_the_same():
    """The methods differ only in the first argument, a prompt or messages."""
    verbs = [inspect.signature(getattr(Client, name)) for name in ("generate", "stream", "chat", "stream_chat")]
    shared = [[(each.name, each.default) for each in list(verb.parameters.values())[2:]] for verb in verbs]
    assert shared == shared[:1] * 4


def test_records_can_be_pickled_and_copied_and_not_changed():
    kinds = [kind for name in package.__all__ if dataclasses.is_dataclass(kind := getattr(package, name))]
    assert len(kinds) > 12
    assert [kind.__name__ for kind in kinds if not kind.__dataclass_params__.frozen] == []
    answer = Answer(text="t", logprobs=((Logprob(3, -0.5, 1, "t"),),))
    counts = {"num_input_tokens": 1, "num_output_tokens": 1, "num_cached_tokens": 0}
    times = {"time_to_first_token_s": 0.1, "total_s": 0.2, "perf_metrics": package.PerfMetrics(arrival_time_ns=5)}
    record = Completion(answers=(answer,), request_id="r", url="http://h:8000", **counts, **times)
    for same in (pickle.loads(pickle.dumps(record)), copy.copy(record), copy.deepcopy(record)):
        assert same == record


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.slow
def test_importing_the_client_imports_no_heavy_package():
    """Neither asyncio nor the fake server is imported before it is asked for."""
    heavy = {"grpc", "numpy", "tritonclient", "google.protobuf", "yaml", "rich", "deepseek_triton_client.testing"}
    loaded = python("import sys, deepseek_triton_client; print(*sys.modules)").split()
    assert heavy.isdisjoint(loaded)
    assert "asyncio" not in loaded


@pytest.mark.slow
def test_grpc_without_its_extra_says_what_to_install():
    code = """
import sys
sys.modules["tritonclient"] = None  # what an import finds where it is not installed
from deepseek_triton_client import AsyncClient, Client, DeepseekTritonError
for kind in (Client, AsyncClient):
    try:
        kind("grpc://localhost")
    except DeepseekTritonError as exc:
        print(exc)
"""
    assert python(code).count("pip install '.[grpc]'") == 2
