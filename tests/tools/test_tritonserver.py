import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepseek_triton_tools.host import preflight, tritonserver
from deepseek_triton_tools.host.tritonserver import find_tritonserver
from deepseek_triton_tools.server.server_log import LogLine, failure_cause, parse_log_line
from deepseek_triton_tools.tool_errors import InstallationError

STUB = "triton_python_backend_stub"


def program(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine with no tritonserver, and a cache of its own."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tritonserver, "CONTAINER_BINARY", tmp_path / "container/tritonserver")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    return tmp_path


@pytest.fixture
def wheel(bare, monkeypatch):
    """The wheel's folder with what is looked for in it, for this Python."""
    package = bare / "site-packages/pytriton"
    program(package / "tritonserver/bin/tritonserver")
    for name in ("libtriton_python.so", "triton_python_backend_utils.py", "other.txt"):
        path = package / "tritonserver/backends/python" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    for version in ("3.9", "3.10", "{}.{}".format(*sys.version_info)):
        program(package / "tritonserver/python_backend_stubs" / version / STUB)
    versions = {"numpy": "1.26.4", "nvidia-pytriton": "0.7.0"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(package / "__init__.py")))
    return package


def test_nowhere_says_how_to_get_one(bare):
    with pytest.raises(InstallationError, match=r"pip install '\.\[demo\]'"):
        find_tritonserver()
    for name in ("missing", __file__, "."):
        with pytest.raises(InstallationError, match="is no program that can be run"):
            find_tritonserver(bare / name)


def test_the_order_is_explicit_path_container_wheel(wheel, bare):
    def kind():
        return find_tritonserver().kind

    assert kind() == "wheel"
    program(tritonserver.CONTAINER_BINARY)
    assert kind() == "container"
    program(bare / "bin/tritonserver")
    assert kind() == "path"
    explicit = program(bare / "mine")
    assert find_tritonserver(explicit) == tritonserver.Installation(explicit, "explicit")


def test_the_wheel_is_run_with_its_libraries_and_the_stub_of_this_python(wheel, bare):
    """The backend directory is made once and leaves no scratch."""
    found = find_tritonserver()

    assert found.binary == wheel / "tritonserver/bin/tritonserver"
    libraries = found.environment["LD_LIBRARY_PATH"].split(os.pathsep)
    assert libraries[0] == str(wheel.parent / "nvidia_pytriton.libs")
    assert Path(libraries[1], preflight.libpython_name()).is_file()
    assert found.environment["PATH"].split(os.pathsep)[0] == str(Path(sys.prefix, "bin"))
    (argument,) = found.extra_args
    backend = Path(argument.removeprefix("--backend-directory=")) / "python"
    names = ["libtriton_python.so", STUB, "triton_python_backend_utils.py"]
    assert sorted(path.name for path in backend.iterdir()) == names
    version = "{}.{}".format(*sys.version_info)
    assert (backend / STUB).resolve() == wheel / "tritonserver/python_backend_stubs" / version / STUB
    assert find_tritonserver().extra_args == (argument,)
    assert len(list((bare / "cache/deepseek-triton/backends").iterdir())) == 1


def test_a_backend_of_the_repository_is_added_beside_the_servers_own(wheel, tmp_path):
    for name, text in (("vllm", "ours"), ("python", "not taken")):
        (tmp_path / "ours" / name).mkdir(parents=True)
        (tmp_path / "ours" / name / "model.py").write_text(text)
    found = find_tritonserver()
    (found.backends / "vllm").mkdir()
    folder = found.backend_directory(tmp_path / "made", [tmp_path / "ours/vllm"])

    assert (folder / "vllm/model.py").read_text() == "ours"
    assert {path.name for path in (folder / "python").iterdir()} == {
        path.name for path in (found.backends / "python").iterdir()
    }
    assert not (folder / "python/libtriton_python.so").is_symlink()
    assert (folder / "python/libtriton_python.so").read_text() == "libtriton_python.so"


def test_two_that_make_the_backend_directory_at_once_agree(wheel, bare, monkeypatch):
    rename = Path.rename

    def late(scratch, target):
        target.mkdir()
        (target / "of the other").touch()
        return rename(scratch, target)

    monkeypatch.setattr(Path, "rename", late)

    (argument,) = find_tritonserver().extra_args

    (directory,) = (bare / "cache/deepseek-triton/backends").iterdir()
    assert argument == f"--backend-directory={directory}"
    assert [path.name for path in directory.iterdir()] == ["of the other"]


def test_what_is_in_the_way_of_the_wheel_is_said(wheel, monkeypatch):
    versions = {"numpy": "2.1.3", "nvidia-pytriton": "0.7.0"}

    def installed(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    def refused():
        with pytest.raises(InstallationError) as caught:
            find_tritonserver()
        return str(caught.value)

    monkeypatch.setattr(importlib.metadata, "version", installed)
    for expected in ("numpy 2.1.3", "needs numpy"):
        message = refused()
        assert (expected in message, "pip install 'numpy>=1.26,<2'" in message) == (True, True)
        versions.pop("numpy", None)
    versions["numpy"] = "1.26.4"
    assert find_tritonserver().kind == "wheel"
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", "/home/Zoë Q/.cache")
        assert "XDG_CACHE_HOME" in refused()
    for check in ("glibc_problem", "libpython_problem"):
        with monkeypatch.context() as patch:
            patch.setattr(tritonserver, check, lambda: "the problem and its cure")
            assert "the problem and its cure" in refused()
    (wheel / "tritonserver/python_backend_stubs/{}.{}".format(*sys.version_info) / STUB).unlink()
    assert all(part in refused() for part in ("no Python backend for Python 3", "use one of 3.9, 3.10"))


def test_log_lines():
    lines = {
        'W1120 21:42:15.6 7144 model.py:5] "two\\nlines, \\"quoted\\""': ("W", "model.py:5", 'two\nlines, "quoted"'),
        '2026-11-20T21:49:03Z E 9984 server.cc:241] "not initialized."': ("E", "server.cc:241", "not initialized."),
        "I1120 21:40:58.169483 6941 pb_stub.cc:298]  Failed: x": ("I", "pb_stub.cc:298", "Failed: x"),
        'I1120 21:40:58.1 6941 a.cc:2] "bad \\escape"': ("I", "a.cc:2", "bad \\escape"),
        "I1120 21:40:57.131197 6906 server.cc:604] ": ("I", "server.cc:604", ""),
        "Loading shard 3/163": ("", "", "Loading shard 3/163"),
    }
    assert {line: parse_log_line(line) for line in lines} == {line: LogLine(*parts) for line, parts in lines.items()}
    whose = {
        'I1120 21:43:49.45 8399 model.py:8] "executing"': True,
        "printed": True,
        'I1120 21:43:49.45 8399 http_server.cc:8] "x"': False,
        **dict.fromkeys(("| Model | Version |", "+-------+", ""), False),
    }
    assert {line: parse_log_line(line).is_from_model for line in whose} == whose


def failed(cause, model="r1"):
    return f"E1120 21:40:57.131020 69 model_lifecycle.cc:642] \"failed to load '{model}' version 1: {cause}\""


CRASH = "its Python process died while loading (a crash, or killed for want of memory)"
LAST_WORDS = ["CUDA error: an illegal memory access", failed("Internal: Stub process 'r1_0_0' is not healthy.")]
PORT = "E1120 21:44:02.29 8615 main.cc:245] \"failed to start GRPC service: Unavailable - Socket 'a' in use \""
OF_MODEL = ['E1120 21:44:02.29 8615 model.py:9] "rank 3 is gone"', 'I1120 21:44:02.29 8615 server.cc:3] "stopping"']
NO_LIBRARY = "error while loading shared libraries: libx.so: cannot open"
AT = "\\n\\nAt:\\n  /r/1/model.py(5): load\\n"
TWO = [failed("Internal: ValueError: x"), failed("Internal: ValueError: y", "v3")]
CAUSES = [
    ([failed(f"Internal: ConfigError: a: no\\n b: no{AT}")], "model 'r1' failed to load: a: no b: no"),
    ([failed(f"Internal: KeyError: 'engine'{AT}")], "model 'r1' failed to load: KeyError: 'engine'"),
    (TWO, "model 'r1' failed to load: x (and 1 more: v3)"),
    (LAST_WORDS, f"model 'r1' failed to load: {CRASH}; its last words: {LAST_WORDS[0]}"),
    ([PORT], "Socket 'a' in use"),
    ([f"tritonserver: {NO_LIBRARY}"], NO_LIBRARY),
    (["tritonserver: unrecognized option '--nonsense'", "Usage: tritonserver"], "unrecognized option '--nonsense'"),
    (OF_MODEL, "rank 3 is gone"),
    (["something", "", "+--+"], "something"),
    ([], "tritonserver ended without a word"),
]


def test_the_cause_is_one_plain_line():
    assert [failure_cause(lines) for lines, _ in CAUSES] == [cause for _, cause in CAUSES]
