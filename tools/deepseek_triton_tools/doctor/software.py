"""Python, the C library, tritonserver, TensorRT-LLM and other software that has to be installed."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepseek_triton_tools.doctor.findings import (
    VLLM,
    Expected,
    MachineFinding,
    error,
    error_if,
    error_or_note,
    note,
    ok,
    skipped,
    warning,
)
from deepseek_triton_tools.doctor.machine import Machine
from deepseek_triton_tools.host.preflight import NEWEST_PYTHON, OLDEST_GLIBC, OLDEST_PYTHON
from deepseek_triton_tools.host.tritonserver import CONTAINER_BINARY
from deepseek_triton_tools.pages import install_extra

ENTRY_POINT = "trtllm-llmapi-launch"
# Pythons that may have TensorRT-LLM. The second is container 26.04's (triton-inference-server/server issue 8824).
_PYTHONS = ("python3", "/opt/venv-tritonserver/bin/python3", "/usr/bin/python3")
STUB = "triton_python_backend_stub"
_USE_NVCC = "TRTLLM_DG_JIT_USE_NVCC"
_COUNT_GPUS = "import torch; print(torch.cuda.device_count(), torch.version.cuda)"
# Seconds; a first import from a slow disk takes half a minute.
_TORCH_S = 120
_LOCALE = "C.UTF-8"
# CUDA's version (TensorRT-LLM examples/models/core/deepseek_v3/README.md, DeepGEMM).
_OLDEST_NVCC = "12.3"
CONTAINER = "container"
"""Key of the Triton container's tag, among the names of distributions."""


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers; () when there are none."""
    match = re.match(r"[v=]?(\d+(?:\.\d+)*)", version.strip())
    return tuple(map(int, match[1].split("."))) if match else ()


def is_before(version: str, other: str) -> bool:
    """Return whether `version` is older than `other`, by numbers; False when it has none. 4.1.9a1 counts as 4.1.9."""
    mine, theirs = version_numbers(version), version_numbers(other)
    length = max(len(mine), len(theirs))
    if not mine:
        return False
    padded, bound = (each + (0,) * (length - len(each)) for each in (mine, theirs))
    # Two candidates are compared: 1.3.0rc13 is before 1.3.0rc14, and 1.3.0 is not.
    candidates = [re.search(r"rc(\d+)", text) for text in (version, other)]
    if padded == bound and candidates[0] and candidates[1]:
        return int(candidates[0][1]) < int(candidates[1][1])
    return padded < bound


@dataclass(frozen=True, kw_only=True)
class BadCombination:
    versions: Mapping[str, tuple[str, str]]
    """Distribution -> its versions, from the first on and older than the second; "" for no limit. All of them must be
    present at once."""
    what: str
    """The failure, in words."""
    fix: str
    source: str
    stops_the_load: bool = True
    fixed_by_start_sh: bool = False
    """Whether the start.sh of a generated repository works around it."""

    def is_in(self, versions: Mapping[str, str]) -> bool:
        """:param versions: distribution -> the version that is installed."""
        for name, (since, before) in self.versions.items():
            version = versions.get(name, "")
            if not version_numbers(version) or (since and is_before(version, since)):
                return False
            if before and not is_before(version, before):
                return False
        return True


# Combinations of what is read from the installed packages. mpi.py judges Open MPI, because only mpirun
# tells its version.
KNOWN_BAD: Sequence[BadCombination] = (
    BadCombination(
        versions={"openai": ("", "1.108.1"), "tensorrt_llm": ("1.2.0", "1.3.0")},
        what="openai lacks PartReasoningText, which every worker of TensorRT-LLM imports: no model loads",
        fix="start it by the start.sh of a generated repository, which supplies the name, or "
        "pip install 'openai>=1.108.1'",
        source="triton-inference-server/tutorials, Qwen2.5-VL guide, containers 26.03 to 26.07; openai-python d296d858",
        fixed_by_start_sh=True,
    ),
    BadCombination(
        versions={"cuda-python": ("13", ""), "tensorrt_llm": ("", "1.0.1")},
        what="`import tensorrt_llm` ends with ImportError: cannot import name 'cuda' from 'cuda'",
        fix="pip install 'cuda-python>=12,<13'",
        source="ai-dynamo/dynamo pull request 2379, NVIDIA/TensorRT-LLM pull request 6703; seen with 1.0.0rc4",
    ),
    BadCombination(
        versions={"transformers": ("5", ""), "tensorrt_llm": ("", "1.3.0rc14")},
        what="TensorRT-LLM imports AutoModelForVision2Seq, which transformers 5 no longer has",
        fix="pip install the transformers version that TensorRT-LLM pins (4.x)",
        source="NVIDIA/TensorRT-LLM issue 13822, seen with 1.3.0rc13; it is assumed that older releases import it "
        "too and later ones don't (pull request 14456 of that repository)",
    ),
    BadCombination(
        versions={"mpi4py": ("", "4"), "tensorrt_llm": ("0.13.0", "0.15.0")},
        what="this TensorRT-LLM is built against mpi4py 4: with mpi4py 3 `import tensorrt_llm` hangs",
        fix="install mpi4py 4, built against the MPI that mpirun belongs to",
        source="NVIDIA/TensorRT-LLM issues 2286 and 2172",
    ),
    BadCombination(
        versions={"tensorrt_llm": ("1.0.3", "1.0.4")},
        what="this build exists in container 25.11 only; nothing public says which keys it takes, so no repository is "
        "made for it",
        fix="use container 25.12 (1.1.0) or 25.10 (1.0.0)",
        source="triton-inference-server/server docs/introduction/compatibility.md",
        stops_the_load=False,
    ),
    BadCombination(
        versions={CONTAINER: ("", "26.03"), "tensorrt_llm": ("", "")},
        what="this Triton does not ask a model whether it is ready: /v2/models/MODEL/ready keeps answering 200 while "
        "the engine is stuck",
        fix="also probe with `deepseek-triton probe generate`, or use container 26.03 or newer",
        source="triton-inference-server/python_backend 65529b0 (2026-03)",
        stops_the_load=False,
    ),
)


def wheel_server(machine: Machine) -> str | None:
    """Return the nvidia-pytriton wheel's binary, when `serve` would run that one."""
    if machine.which("tritonserver") or machine.exists(str(CONTAINER_BINARY)) or machine.python.pytriton is None:
        return None
    binary = f"{machine.python.pytriton}/tritonserver/bin/tritonserver"
    return binary if machine.exists(binary) else None


def server_binary(machine: Machine) -> str | None:
    """Return the first of PATH's, the container's and the wheel's, as host.tritonserver.find_tritonserver does."""
    if on_path := machine.which("tritonserver"):
        return on_path
    return str(CONTAINER_BINARY) if machine.exists(str(CONTAINER_BINARY)) else wheel_server(machine)


def check_python(machine: Machine, expected: Expected) -> MachineFinding:
    version, where = machine.python.version, machine.python.executable
    oldest, newest = (".".join(map(str, each)) for each in (OLDEST_PYTHON, NEWEST_PYTHON))
    if is_before(version, oldest):
        return error(f"{version} ({where})", f"the backend needs Python {oldest} or newer", "use a newer Python")
    if wheel_server(machine) and version_numbers(version)[:2] > NEWEST_PYTHON:
        cause = f"the nvidia-pytriton wheel's server needs numpy 1.26, which is built for Python {newest} at most"
        return error(f"{version} ({where})", cause, f"make the environment with Python {oldest} to {newest}")
    return ok(f"{version} ({where})")


def check_libpython(machine: Machine, expected: Expected) -> MachineFinding:
    if machine.python.libpython:
        return ok(machine.python.libpython)
    if not wheel_server(machine):
        return skipped("only the nvidia-pytriton wheel's server needs this Python's libpython")
    minor = machine.python.minor
    fix = f"apt install libpython{minor}, or use a Python built with --enable-shared"
    return error(f"libpython{minor}.so.1.0 is missing", "tritonserver's Python backend is linked with it", fix)


def check_glibc(machine: Machine, expected: Expected) -> MachineFinding:
    glibc, oldest = machine.python.glibc, ".".join(map(str, OLDEST_GLIBC))
    library = f"glibc {glibc}" if glibc else "not glibc"
    if not wheel_server(machine):
        fix = "use NVIDIA's Triton container"
        return ok(library) if glibc else note(library, "tritonserver is built for glibc", fix)
    if glibc and not is_before(glibc, oldest):
        return ok(library)
    fix = "use Ubuntu 22.04, Debian 12 or newer, or NVIDIA's Triton container"
    return error(library, f"the nvidia-pytriton wheel is built against glibc {oldest}", fix)


def check_numpy(machine: Machine, expected: Expected) -> MachineFinding:
    version, fix = machine.python.packages.get("numpy"), "pip install 'numpy>=1.26,<2'"
    if version is None:
        cause = "tritonserver's Python backend needs it, in the Python that it uses"
        return error_if(server_binary(machine), "not installed", cause, fix)
    if wheel_server(machine) and version_numbers(version) >= (2,):
        return error(
            version, "with numpy 2 the wheel's Python backend silently hands over other values than were sent", fix
        )
    return ok(version)


def check_yaml(machine: Machine, expected: Expected) -> MachineFinding:
    if version := machine.python.packages.get("pyyaml"):
        return ok(version)
    cause = "the backend reads model.yaml with PyYAML, in the Python that tritonserver uses"
    return error_if(server_binary(machine), "not installed", cause, "pip install pyyaml")


def check_tools(machine: Machine, expected: Expected) -> MachineFinding:
    if "deepseek-triton" not in machine.python.packages:
        return skipped("deepseek-triton is not installed for this Python; serving a repository doesn't need it")
    if missing := _lacking(machine, "pyyaml", "rich"):
        cause = "all commands except serve, probe, generate, chat and doctor need them"
        return note(f"{missing} missing", cause, install_extra("tools"), blocks=True)
    return ok("installed")


def check_client(machine: Machine, expected: Expected) -> MachineFinding:
    packages = machine.python.packages
    if "deepseek-triton" not in packages:
        return skipped("deepseek-triton is not installed for this Python")
    if missing := _lacking(machine, "certifi", "h11"):
        fix = f"pip install {missing.replace(',', '')}"
        return error(f"{missing} missing", "the client needs them for HTTP", fix)
    return ok("HTTP and gRPC" if "tritonclient" in packages else f"HTTP; gRPC needs {install_extra('grpc')}")


def check_reference(machine: Machine, expected: Expected) -> MachineFinding:
    names = ("numpy", "tokenizers", "jinja2")
    if not (missing := _lacking(machine, *names)):
        return ok(", ".join(f"{name} {machine.python.packages[name]}" for name in names))
    result, cause = f"{missing} missing", "the reference engine, which the demo runs, needs them"
    return error_if(expected.engine == "reference", result, cause, install_extra("demo"))


def _lacking(machine: Machine, *names: str) -> str:
    return ", ".join(name for name in names if name not in machine.python.packages)


def check_tritonserver(machine: Machine, expected: Expected) -> MachineFinding:
    if (binary := server_binary(machine)) is None:
        fix = (
            f"run in NVIDIA's Triton container{f': {expected.image}' if expected.image and expected.by_triton else ''}"
        )
        if not expected.uses_gpus:
            fix = f"{install_extra('demo' if expected.engine == 'reference' else 'server')}; or {fix}"
        cause = "not on PATH, in /opt/tritonserver/bin or in this Python's environment"
        return error_if(expected.repository and expected.by_triton, "none", cause, fix)
    if wheel_server(machine):
        return ok(f"{binary} (nvidia-pytriton {machine.python.packages.get('nvidia-pytriton', '?')})")
    version, tag = machine.environ.get("TRITON_SERVER_VERSION"), container_tag(machine)
    known = ", ".join(filter(None, [f"version {version}" if version else "", f"container {tag}" if tag else ""]))
    target = (expected.image or "").rpartition(":")[2].partition("-")[0]
    if expected.uses_gpus and tag and target and tag != target:
        others = [f"or build with --image {tag}"] if tag in expected.drivers else [expected.last_image]
        fix = "; ".join([f"run in {expected.image}", *filter(None, others)])
        return warning(f"{binary} ({known})", f"the repository was made for container {target}", fix)
    return ok(f"{binary} ({known})" if known else binary)


def container_tag(machine: Machine) -> str | None:
    """Return such as `26.07` inside a Triton container, whose image sets the variable."""
    tag = machine.environ.get("NVIDIA_TRITON_SERVER_VERSION", "")
    return tag if len(version_numbers(tag)) >= 2 else None


def check_python_backend(machine: Machine, expected: Expected) -> MachineFinding:
    if (binary := server_binary(machine)) is None:
        return skipped("there is no tritonserver")
    if wheel := wheel_server(machine):
        stubs = f"{wheel.removesuffix('/bin/tritonserver')}/python_backend_stubs"
        minor = machine.python.minor
        if machine.exists(f"{stubs}/{minor}/{STUB}"):
            return ok(f"the wheel's, for Python {minor}")
        known = ", ".join(sorted(machine.list_folder(stubs), key=version_numbers))
        fix = "make the environment with one of those"
        return error(f"none for Python {minor}", f"the wheel has it for {known}", fix)
    root = binary.removesuffix("/bin/tritonserver") if binary.endswith("/bin/tritonserver") else "/opt/tritonserver"
    stub = f"{root}/backends/python/{STUB}"
    if not machine.exists(stub):
        fix = "use an image that has it (…-py3, …-trtllm-python-py3), or give its folder with --backend-directory"
        return warning(f"{stub} is not there", "without the Python backend no model of this project loads", fix)
    libraries = machine.run("ldd", stub)
    if missing := [line.split()[0] for line in libraries.out.splitlines() if "not found" in line]:
        fix = "put their folder on LD_LIBRARY_PATH, or install them (apt install libpython3.x)"
        return error(f"{stub} lacks {', '.join(missing)}", "it can't start without its libraries", fix)
    linked = [line.split()[0] for line in libraries.out.splitlines() if "libpython" in line]
    version = linked[0].removeprefix("libpython").partition(".so")[0] if linked else None
    if version and version != machine.python.minor:
        cause = "the checks look at the packages of the Python that runs them, and the backend uses another Python"
        fix = f"let the backend's Python run the checks: doctor --python python{version}"
        return note(f"for Python {version}, this one is {machine.python.minor}", cause, fix)
    return ok(f"for Python {version}" if version else stub)


def check_tensorrt_llm(machine: Machine, expected: Expected) -> MachineFinding:
    if (version := machine.python.packages.get("tensorrt_llm")) is None:
        return error_or_note(expected, "not installed", *_no_tensorrt_llm(machine, expected))
    if wheel_server(machine) and expected.by_triton:
        result = f"{version}, without a tritonserver for it"
        cause = "start.sh takes tritonserver from PATH, and the nvidia-pytriton wheel's is not there"
        return error_or_note(
            expected, result, cause, f"run in the container{f': {expected.image}' if expected.image else ''}"
        )
    if machine.which(ENTRY_POINT) is None:
        fix = f"put its folder on PATH; it was installed beside {machine.python.executable}"
        return error(
            f"{version}, without {ENTRY_POINT} on PATH", "it or trtllm-serve, which is beside it, starts the ranks", fix
        )
    if expected.release and version_numbers(version) != version_numbers(expected.release):
        fix = f"run in {expected.image or 'a container with it'}, or build again with --trtllm {version}"
        why = "keys and samplers differ, and model.py refuses other releases"
        return error(version, f"the repository is for {expected.release}: {why}", fix)
    return ok(version)


def _no_tensorrt_llm(machine: Machine, expected: Expected) -> tuple[str, str]:
    """Return cause and fix."""
    for python in _PYTHONS:
        done = machine.run(python, "-c", "import importlib.metadata as m; print(m.version('tensorrt_llm'))")
        if done.code == 0:
            return (
                f"{python} has {done.out.strip()}, this Python ({machine.python.executable}) has none",
                f"let that Python run the checks: doctor --python {python}",
            )
    image = expected.image or "nvcr.io/nvidia/tritonserver:<yy.mm>-trtllm-python-py3"
    return "serving DeepSeek on GPUs needs it", f"run in the container {image}"


def check_vllm(machine: Machine, expected: Expected) -> MachineFinding:
    if (version := machine.python.packages.get("vllm")) is None:
        image = expected.image or "nvcr.io/nvidia/tritonserver:<yy.mm>-vllm-python-py3"
        fix = f"run in the container {image}, or pip install vllm=={expected.vllm or '<version>'} for this Python"
        return error_if(expected.engine == VLLM, "not installed", "serving with vLLM needs it", fix)
    if expected.vllm and version_numbers(version) != version_numbers(expected.vllm):
        where = f"run in {expected.image}" if expected.image else f"pip install vllm=={expected.vllm}"
        cause = f"the repository is for {expected.vllm}: arguments and interfaces differ between versions"
        return error(version, cause, f"{where}, or build again with --vllm {version}")
    return ok(version)


def check_torch(machine: Machine, expected: Expected) -> MachineFinding:
    """Check that the PyTorch that vLLM brings can use the GPUs: nvidia-smi may see those that CUDA can't."""
    if expected.engine != VLLM or "vllm" not in machine.python.packages:
        return skipped("no repository for vLLM was named, or vLLM is not installed")
    done = machine.run(machine.python.executable, "-c", _COUNT_GPUS, timeout_s=_TORCH_S)
    if done.code != 0:
        words = (done.err.strip().splitlines() or ["no answer within its deadline"])[-1][:160]
        fix = "install vLLM again, in an environment of its own, or run in its container"
        return error(words, "vLLM computes with PyTorch, which can't be imported", fix)
    count, cuda = done.out.split()[-2:]
    num_needed = expected.gpus_per_node or 1
    result = f"{count} GPUs, CUDA {cuda}"
    if int(count) >= num_needed:
        return ok(result)
    cause = (
        f"the repository needs {num_needed} on each machine, and PyTorch can use only those that CUDA_VISIBLE_DEVICES "
        "names and that its CUDA supports"
    )
    return error(result, cause, "unset CUDA_VISIBLE_DEVICES, start the container with --gpus all, or renew the driver")


def check_locale(machine: Machine, expected: Expected) -> MachineFinding:
    """Check the locale that the engine sets, because Triton's stub has "C", in which PyTorch can't be imported."""
    done = machine.run(
        machine.python.executable, "-c", f"import locale; locale.setlocale(locale.LC_CTYPE, '{_LOCALE}')"
    )
    if done.code == 0:
        return ok(_LOCALE)
    cause = "Triton's stub runs in the locale C, in which importing PyTorch fails; the engine changes it to this one"
    fix = "apt-get install locales, or libc-bin"
    return error_if(expected.engine == VLLM, f"{_LOCALE} is missing", cause, fix)


def check_nvcc(machine: Machine, expected: Expected) -> MachineFinding:
    """DeepGEMM's own search for it is in TensorRT-LLM's cpp/tensorrt_llm/deep_gemm/compiler.cuh."""
    if machine.environ.get(_USE_NVCC, "1") != "1" or not expected.uses_nvcc:
        return skipped("no repository was named whose DeepGEMM compiles with NVCC")
    if "tensorrt_llm" not in machine.python.packages:
        return skipped("TensorRT-LLM is not installed here: its container has its own NVCC, or none")
    compiler, home = machine.environ.get("TRTLLM_DG_NVCC_COMPILER"), machine.environ.get("CUDA_HOME")
    nvcc = compiler or (f"{home}/bin/nvcc" if home else "nvcc")
    done = machine.run(nvcc, "--version")
    release = re.search(r"release (\d+\.\d+)", done.out)
    other = f"start the server with {_USE_NVCC}=0, which compiles with NVRTC"
    if done.code != 0 or release is None:
        where = f"{nvcc} can't be run" if compiler or home else "not on PATH, and CUDA_HOME is not set"
        fix = f"set CUDA_HOME to the folder of a CUDA toolkit ({_OLDEST_NVCC} or newer) on every node, or {other}"
        return error(where, f"start.sh sets {_USE_NVCC}=1: DeepGEMM compiles its kernels with NVCC", fix)
    if is_before(release[1], _OLDEST_NVCC):
        fix = f"set CUDA_HOME to the folder of a newer CUDA toolkit, or {other}"
        return error(f"CUDA {release[1]} ({nvcc})", f"DeepGEMM needs CUDA {_OLDEST_NVCC} or newer", fix)
    return ok(f"CUDA {release[1]} ({nvcc})")


def check_known_bad(machine: Machine, expected: Expected) -> MachineFinding:
    versions = {**machine.python.packages}
    if tag := container_tag(machine):
        versions[CONTAINER] = tag
    bad = [one for one in KNOWN_BAD if one.is_in(versions)]
    left = [one for one in bad if not (one.fixed_by_start_sh and expected.is_ours)]
    names = "; ".join(" with ".join(f"{name} {versions[name]}" for name in one.versions) for one in left or bad)
    if not bad:
        return ok("none")
    if not left:
        return note(names, "start.sh brings the work-around", "nothing to do")
    cause = "; ".join(f"{one.what} ({one.source})" for one in left)
    is_fatal = any(one.stops_the_load for one in left) and expected.uses_gpus
    return (error if is_fatal else warning)(names, cause, "; ".join(one.fix for one in left))
