"""Every check on a made-up machine: when all is well, for each thing that can be wrong, and when it can't look."""

import errno
import json
import struct
from dataclasses import replace

from deepseek_triton_tools.doctor.examine import CHECKS, examine
from deepseek_triton_tools.doctor.findings import CAPABILITIES, Expected, assess_capabilities, is_for
from deepseek_triton_tools.doctor.machine import Disk, Done, HostProcess, Interface
from deepseek_triton_tools.doctor.software import ENTRY_POINT
from deepseek_triton_tools.host.host_memory import CgroupMemory, HostMemory
from support.faked_machine import BASIC, GOOD_PROGRAMS, GOOD_RUNS, LDD, PYTHON, STUB, FakedMachine, nvidia_smi, topology

GIB, MIB = 2**30, 2**20
REFUSED = PermissionError(errno.EACCES, "Permission denied", "/where")
IMAGE = "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"

NOTHING = Expected()
R1 = Expected(
    repository="/r1",
    is_ours=True,
    engine="tensorrt_llm",
    release="1.2.1",
    image=IMAGE,
    driver="580.0",
    gpu="h200",
    gpus_per_node=8,
    world_size=8,
    checkpoint="/models/R1",
    checkpoint_bytes=640 * GIB,
    drivers={"26.07": "580.44.01", "26.03": "580.44.01"},
    last_image="26.07 is the last",
)
THEIRS = replace(R1, is_ours=False)
VLLM_IMAGE = "nvcr.io/nvidia/tritonserver:26.07-vllm-python-py3"
R1_VLLM = replace(R1, engine="vllm", release=None, vllm="0.24.0", image=VLLM_IMAGE)
TWO_NODES = replace(R1, world_size=16)
TINY = Expected(repository="/tiny", is_ours=True, engine="reference")
HUB = replace(R1, checkpoint="deepseek-ai/DeepSeek-R1")
HUB_SMALL = replace(HUB, checkpoint_bytes=100)
VAST = {"/root/.cache": Disk(total=2000 * GIB, free=1000 * GIB)}
NVCC = replace(R1, uses_nvcc=True)
CONTAINER = "NVIDIA_TRITON_SERVER_VERSION"
SEND_BUFFER = "/proc/sys/net/core/wmem_default"
USE_NVCC = "TRTLLM_DG_JIT_USE_NVCC"


def shard(*, missing=0):
    header = json.dumps({"__metadata__": {}, "t": {"dtype": "F8_E4M3", "shape": [64], "data_offsets": [0, 64]}})
    return struct.pack("<Q", len(header)) + header.encode() + bytes(64 - missing)


INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
MODEL = {
    "/models/R1/config.json": "{}",
    "/models/R1/model.safetensors.index.json": INDEX,
    "/models/R1/model-1.safetensors": shard(),
    "/models/R1/model-2.safetensors": shard(),
}
GOOD_FILES = {STUB: b"", "/r1/start.sh": "#!", "/r1/tensorrt_llm/1/model.yaml": "model: /models/R1", **MODEL}
WHEEL = "/env/pytriton/tritonserver"
DEMO = dict.fromkeys(("tokenizers", "jinja2", "pyyaml"), "1.0") | {"numpy": "1.26.4"}
BARE = {name: path for name, path in GOOD_PROGRAMS.items() if name != "tritonserver"}


def machine(**given):
    return FakedMachine(**{"files": GOOD_FILES, **given})


def with_files(files, **changed):
    """A machine with GOOD_FILES and `files`, a mapping of paths; a file whose content is None is removed."""
    files = {**GOOD_FILES, **files}
    return machine(files={path: content for path, content in files.items() if content is not None}, **changed)


def of_wheel(**python):
    """A machine with the nvidia-pytriton wheel in a virtual environment, outside of a container."""
    packages = {"numpy": "1.26.4", "nvidia-pytriton": "0.7.0", "deepseek-triton": "0.1.0"}
    given = {"pytriton": "/env/pytriton", "packages": packages, **python}
    stub = f"{WHEEL}/python_backend_stubs/3.12/triton_python_backend_stub"
    files = {f"{WHEEL}/bin/tritonserver": b"", stub: b""}
    return machine(programs=BARE, environ={"HOME": "/root"}, files=files, python=replace(PYTHON, **given))


def having(**packages):
    """A machine with changed packages. Names have __ for -; None means not installed."""
    changed = {**PYTHON.packages, **{name.replace("__", "-"): version for name, version in packages.items()}}
    there = {name: version for name, version in changed.items() if version is not None}
    return machine(python=replace(PYTHON, packages=there))


def without(*programs):
    return machine(programs={name: path for name, path in GOOD_PROGRAMS.items() if name not in programs})


def told(answers, **given):
    """A machine whose programs give these answers."""
    return machine(runs={**GOOD_RUNS, **answers}, **given)


def no_gpus(out="", *, code=9, **given):
    answers = dict.fromkeys((start for start in GOOD_RUNS if start.startswith("nvidia-smi")), Done(code=code, out=out))
    return told(answers, **given)


def gpus(**given):
    return told(nvidia_smi(**given))


def may_lock(owners):
    """A machine with a limit of locked memory, CAP_IPC_LOCK and this /proc/self/uid_map."""
    files = {"/proc/self/status": "Name:\tx\nCapEff:\t0000000000004000\n", "/proc/self/uid_map": f"   {owners}\n"}
    return with_files(files, limits={"memlock": (8 * MIB, 8 * MIB)})


def cuda(release):
    """The answer of NVCC of that CUDA."""
    return Done(code=0, out=f"nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release {release}, V1\n")


def torch(out, *, code=0, err=""):
    """A machine with vLLM, whose PyTorch gives this answer."""
    answer = {"/usr/bin/python3 -c import torch": Done(code=code, out=out, err=err)}
    return replace(having(vllm="0.24.0"), runs={**GOOD_RUNS, **answer})


def ends(start, code, *, out="", err="", **given):
    """A machine on which the program whose command line starts so ends so."""
    return told({start: Done(code=code, out=out, err=err)}, **given)


def failed_spawn(err):
    return ends(SPAWN, 1, err=f"{err}\n")


def running(*processes):
    return machine(running=processes)


def launched(*processes):
    return [replace(process, launch=LAUNCH) for process in processes]


def gpus_with(old, new):
    return gpus(basic=BASIC.replace(old, new))


def checkpoint_with(name, content):
    return with_files({f"/models/R1/{name}": content})


def with_cuda(nvcc, **environ):
    return ends(f"{nvcc}", 0, out=cuda("13.1").out, environ={"CUDA_HOME": "/opt/cuda", **environ})


def run(check, where, expected):
    [report] = examine(where, expected, checks=[each for each in CHECKS if each.id == check]).findings
    return report.finding


HELLO = "mpirun --allow-run-as-root"
SPAWN = "/usr/bin/python3 -c import sys; from mpi4py"
LIBRARY = "/usr/bin/python3 -c from mpi4py import rc"
SERVER = HostProcess(pid=10, parent=1, name="tritonserver", command=("tritonserver",))
STUB_LINE = (
    STUB,
    *["/r/1/model.py", "deepseek_triton_0123abcd_1", "1048576", "1048576", "10", "/opt", "336", "m_0_0", "DEFAULT"],
)
LAUNCH = "0123abcd"
A_STUB = HostProcess(pid=11, parent=10, name="triton_python_b", command=STUB_LINE)
FORKED = HostProcess(pid=12, parent=11, name="model_guard", command=STUB_LINE)
RENAMED = replace(SERVER, name="server-prod", command=("/srv/server-prod",))
FRONT_END = replace(SERVER, name="python3", command=("python3", "main.py"))
# The pids are a host's, and the server is process 10 of its container.
CONTAINED = (replace(RENAMED, pid=4010, pid_inside=10), replace(A_STUB, pid=4011, parent=4010, pid_inside=11))
SUPERVISE = ("python3", "/r/1/supervise.py")
SUPERVISOR = HostProcess(pid=5, parent=1, name="python3", command=(*SUPERVISE, "run"), launch=LAUNCH)
RANK = HostProcess(pid=6, parent=5, name="python3", command=(*SUPERVISE, "rank"), launch=LAUNCH)
VLLM = replace(SERVER, pid=1, name="vllm", command=("vllm", "serve"))
ORTED = HostProcess(pid=4, parent=1, name="orted", command=("orted", "-mca"))
CORE = HostProcess(pid=21, parent=11, name="VLLM::EngineCor", command=("VLLM::EngineCore",))
WORKER = HostProcess(pid=22, parent=21, name="VLLM::Worker_TP", command=("VLLM::Worker_TP0",))
SET_LOCALE = "/usr/bin/python3 -c import locale"
APPS = "439, python3, 21090\n"
ROWS = "".join(BASIC.format(n, n, 9) + "\n" for n in range(7))
UNABLE = "Unable to determine the device handle for GPU7: 0000:DB:00.0: Unknown Error"
CGROUP = CgroupMemory(path="/sys/fs/cgroup", version=2, limit=400 * GIB, usage=0, file_cache=0)
SMALL = HostMemory(total=2000 * GIB, available=1900 * GIB, cgroups=(CGROUP,))
TIGHT = HostMemory(total=8, available=8, cgroups=())
SNAPSHOT = "/hf/hub/models--deepseek-ai--DeepSeek-R1"
PARTLY = {f"{SNAPSHOT}/blobs/c0ffee.incomplete": bytes(40)}
NODES_FILLED = "All nodes which are allocated for this job are already filled."
NO_HEADER = b"\3" + bytes(7) + b"[1]"
IN_CACHE = {f"{SNAPSHOT}/refs/main": "c0ffee\n"} | {
    path.replace("/models/R1", f"{SNAPSHOT}/snapshots/c0ffee"): content for path, content in MODEL.items()
}
PCI = {"/sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n", "/sys/bus/pci/devices/0000:01:00.0/class": "0x030200\n"}
FILTERED = "Name:\tpython3\nSeccomp:\t2\nCapEff:\t{}\n"
ETH1 = Interface(name="eth1", is_up=True, addresses=("10.1.0.1",))
DOWN = Interface(name="ib0", is_up=False)
LO = Interface(name="lo", is_up=True, addresses=("127.0.0.1",))
DOCKER0 = Interface(name="docker0", is_up=True, addresses=("172.17.0.1",))
ETH0 = Interface(name="eth0", is_up=True, addresses=("10.0.0.1",))
ROUTE = {"/proc/net/route": "Iface\tDestination\tGateway\neth1\t00000000\t0100000A\n"}
OVER_IB = replace(R1, interface="ib0")
SHM = "/dev/shm/deepseek_triton"
REGION = {"/dev/shm/triton_python_backend_shm_region_1": b""}
FULL = Disk(total=64 * GIB, free=MIB)
SMALL_SHM = {"/dev/shm": Disk(total=64 * MIB, free=64 * MIB)}
DOCKERS_SHM = {"/dev/shm": Disk(total=64 * MIB, free=60 * MIB)}
POOR = with_files({"/.dockerenv": "", **PCI}, disks=SMALL_SHM, limits={"memlock": (1, 1)})
NO_PACKAGES = replace(PYTHON, packages={})
VENV = "/opt/venv-tritonserver/bin/python3"
IN_VENV = ends(f"{VENV} -c import importlib", 0, out="1.2.1\n", python=NO_PACKAGES)
HELD = told(nvidia_smi(used=21099, apps=APPS), running=(replace(RANK, pid=439),))
QUERY, HEALTH_QUERY = "nvidia-smi --query-gpu=index,name", "nvidia-smi --query-gpu=index,ecc"
ANOTHER = replace(SERVER, pid=20)
MPI_5 = {
    "mpirun --version": Done(code=0, out="mpirun (Open MPI) 5.0.10rc2\n"),
    LIBRARY: Done(code=0, out="Open MPI v5.0.10rc2"),
}
NO_CONTEXT = {
    "kubectl config": Done(code=1, err="error: current-context is not set\n"),
    "kubectl config get-contexts": Done(code=0, out="prod\ntest\n"),
}

GOOD = {"python": "3.12.3", "yaml": "6.0.3", "tritonserver": "version 2.71.0, container 26.07"}
GOOD |= {"python-backend": "for Python 3.12", "tensorrt-llm": "1.2.1", "known-bad": "none"}
GOOD |= {"mpi": "Open MPI 4.1.6, mpi4py 3.1.5", "mpi-hello": "two ranks", "mpi-spawn": "one process spawned"}
GOOD |= {"gpus": "8 x NVIDIA H200, 143771 MiB, compute capability 9.0", "gpu-driver": "580.159.04, needed: 580.44.01"}
GOOD |= {"gpu-memory": "free", "gpu-health": "no uncorrected error", "gpu-mig": "off", "gpu-links": "28 pairs NV18"}
GOOD |= {"gpu-persistence": "on", "shm": "12 of 512 GiB used", "memlock": "unlimited", "nofile": "unlimited"}
GOOD |= {"container": "not in a container", "repository": "/r1, ", "checkpoint": "2 files"}
GOOD |= {"host-memory": "the checkpoint has 640 GiB", "disk": "/root/.cache 500 GiB free"}
GOOD |= {"ports": "free: HTTP 8000, gRPC 8001, metrics 8002", "interface": "eth0 10.0.0.1", "ssh": "/usr/bin/ssh"}
GOOD |= {"leftovers": "nothing left", "docker": "docker", "slurm": "debug* up 2 idle", "kubectl": "context prod"}
"""Words of each check's result where all is well."""

# check, machine, what is expected of it, level, words in the finding
CASES = [
    ("python", machine(python=replace(PYTHON, version="3.9.2")), NOTHING, "error", "3.10 or newer"),
    ("python", machine(python=replace(PYTHON, version="3.13.0")), NOTHING, "ok", "3.13.0"),
    ("python", of_wheel(version="3.13.0"), NOTHING, "error", "3.12 at most"),
    ("libpython", of_wheel(), NOTHING, "ok", "libpython3.12.so.1.0"),
    ("libpython", of_wheel(libpython=None), NOTHING, "error", "apt install libpython3.12"),
    ("libpython", machine(python=replace(PYTHON, libpython=None)), NOTHING, "skipped", "wheel's server"),
    ("glibc", of_wheel(), NOTHING, "ok", "2.39"),
    ("glibc", of_wheel(glibc="2.34"), NOTHING, "error", "glibc 2.35"),
    ("glibc", of_wheel(glibc=None), NOTHING, "error", "not glibc"),
    ("glibc", machine(python=replace(PYTHON, glibc=None)), NOTHING, "note", "not glibc"),
    ("glibc", machine(python=replace(PYTHON, glibc="2.31")), NOTHING, "ok", "2.31"),
    ("numpy", of_wheel(), NOTHING, "ok", "1.26.4"),
    ("numpy", of_wheel(packages={"numpy": "2.1.0"}), NOTHING, "error", "other values than were sent"),
    ("numpy", having(numpy="2.1.0"), NOTHING, "ok", "2.1.0"),
    ("numpy", having(numpy=None), NOTHING, "error", "pip install"),
    ("numpy", machine(programs={}, python=replace(PYTHON, packages={})), NOTHING, "note", "not installed"),
    ("yaml", having(pyyaml=None), R1, "error", "pip install pyyaml"),
    ("yaml", having(pyyaml=None), NOTHING, "error", "model.yaml"),
    ("yaml", machine(programs={}, python=replace(PYTHON, packages={})), NOTHING, "note", "not installed"),
    ("tools", having(), NOTHING, "skipped", "not installed for this Python"),
    ("tools", having(deepseek__triton="0.1.0", rich="15", pyyaml=None), NOTHING, "note", "pyyaml missing"),
    ("tools", having(deepseek__triton="0.1.0", rich="15", pyyaml="6"), NOTHING, "ok", "installed"),
    ("client", having(), NOTHING, "skipped", "not installed"),
    ("client", having(deepseek__triton="0.1.0", h11="1"), NOTHING, "error", "certifi missing"),
    ("client", having(deepseek__triton="0.1.0", h11="1", certifi="1"), NOTHING, "ok", "gRPC needs"),
    ("reference", having(), NOTHING, "note", "tokenizers, jinja2"),
    ("reference", having(), TINY, "error", "pip install '.[demo]'"),
    ("reference", having(tokenizers="0.23.3", jinja2="3"), TINY, "ok", "tokenizers 0.23.3, jinja2 3"),
    ("tritonserver", of_wheel(), R1, "ok", "nvidia-pytriton 0.7.0"),
    ("tritonserver", machine(programs={}), NOTHING, "note", "pip install '.[server]'"),
    ("tritonserver", machine(programs={}), TINY, "error", "pip install '.[demo]'"),
    ("tritonserver", machine(programs={}), R1, "error", IMAGE),
    ("tritonserver", machine(programs={}), replace(R1, by_triton=False), "note", "Triton container"),
    ("tritonserver", machine(environ={CONTAINER: "26.03"}), R1, "warning", "container 26.07 | run in"),
    ("tritonserver", machine(environ={CONTAINER: "26.08"}), R1, "warning", f"run in {IMAGE}; 26.07 is the last"),
    ("tritonserver", machine(environ={}), R1, "ok", "/opt/tritonserver/bin/tritonserver"),
    ("tritonserver", machine(programs=BARE, files={"/opt/tritonserver/bin/tritonserver": b""}), NOTHING, "ok", "26.07"),
    ("python-backend", machine(programs={}), R1, "skipped", "no tritonserver"),
    ("python-backend", with_files({STUB: None}), R1, "warning", "is not there"),
    ("python-backend", ends("ldd", 0, out="\tlibpython3.12.so.1.0 => not found\n"), R1, "error", "lacks libpython3.12"),
    ("python-backend", ends("ldd", 0, out=LDD.replace("3.12", "3.10")), R1, "note", "doctor --python python3.10"),
    ("python-backend", ends("ldd", 127), R1, "ok", STUB),
    ("python-backend", of_wheel(), NOTHING, "ok", "the wheel's, for Python 3.12"),
    ("python-backend", of_wheel(version="3.11.1"), NOTHING, "error", "none for Python 3.11"),
    ("tensorrt-llm", having(tensorrt_llm="1.1.0"), R1, "error", "build again with --trtllm 1.1.0"),
    ("tensorrt-llm", having(tensorrt_llm="1.1.0"), NOTHING, "ok", "1.1.0"),
    ("tensorrt-llm", having(tensorrt_llm=None), NOTHING, "note", "serving DeepSeek on GPUs needs it"),
    ("tensorrt-llm", having(tensorrt_llm=None), TINY, "skipped", "not installed"),
    ("tensorrt-llm", without(ENTRY_POINT), TINY, "skipped", "on PATH"),
    ("gpus", machine(runs={}), TINY, "skipped", "no nvidia-smi"),
    ("slurm", without("srun"), replace(TINY, engine="simulated"), "skipped", "srun not on PATH"),
    ("kubectl", without("kubectl"), replace(R1, by_triton=False), "skipped", "no kubectl on PATH"),
    ("tensorrt-llm", having(tensorrt_llm=None), R1, "error", IMAGE),
    ("tensorrt-llm", of_wheel(packages={"tensorrt_llm": "1.2.1"}), R1, "error", f"run in the container: {IMAGE}"),
    ("tensorrt-llm", of_wheel(packages={"tensorrt_llm": "1.2.1"}), NOTHING, "note", "takes tritonserver from PATH"),
    ("tensorrt-llm", without(ENTRY_POINT), R1, "error", "without trtllm-llmapi-launch on PATH"),
    ("tensorrt-llm", IN_VENV, R1, "error", f"doctor --python {VENV}"),
    ("tensorrt-llm", having(tensorrt_llm=None), R1_VLLM, "skipped", "not installed"),
    ("mpi", without("mpirun"), R1_VLLM, "skipped", "no mpirun on PATH"),
    ("vllm", having(vllm="0.24.0"), R1_VLLM, "ok", "0.24.0"),
    ("vllm", having(vllm="0.25.1"), R1_VLLM, "error", f"run in {VLLM_IMAGE}, or build again with --vllm 0.25.1"),
    ("vllm", having(vllm="0.24.0"), replace(R1_VLLM, vllm="0.33.0", image=None), "error", "pip install vllm==0.33.0"),
    ("vllm", machine(), R1_VLLM, "error", VLLM_IMAGE),
    ("vllm", machine(), NOTHING, "note", "<yy.mm>-vllm-python-py3"),
    ("vllm", machine(), R1, "skipped", "not installed"),
    ("torch", machine(), R1, "skipped", "no repository for vLLM"),
    ("torch", torch("8 13.0"), R1_VLLM, "ok", "8 GPUs, CUDA 13.0"),
    ("torch", torch("4 13.0"), R1_VLLM, "error", "the repository needs 8 on each machine"),
    ("torch", torch("", code=1, err="libcudart.so.13: cannot open\n"), R1_VLLM, "error", "libcudart.so.13"),
    ("torch", torch("", code=None), R1_VLLM, "error", "no answer within its deadline"),
    ("locale", machine(), R1_VLLM, "ok", "C.UTF-8"),
    ("locale", ends(SET_LOCALE, 1, err="locale.Error"), R1_VLLM, "error", "C.UTF-8 is missing"),
    ("locale", ends(SET_LOCALE, 1), NOTHING, "note", "importing PyTorch fails"),
    ("gpus", gpus(count=4), R1_VLLM, "error", "the repository needs 8"),
    ("gpu-memory", gpus(used=21099, apps=APPS), R1_VLLM, "error", "439"),
    ("leftovers", running(SERVER, A_STUB, CORE, WORKER), R1_VLLM, "ok", "nothing left"),
    ("leftovers", running(replace(CORE, parent=1), WORKER), R1_VLLM, "warning", "kill 21 22"),
    ("leftovers", running(VLLM, replace(CORE, parent=1)), NOTHING, "ok", "nothing left"),
    ("leftovers", running(*launched(replace(CORE, parent=1), WORKER)), R1_VLLM, "warning", f"launch stop {LAUNCH}"),
    ("nvcc", machine(), R1, "skipped", "no repository was named whose DeepGEMM compiles with NVCC"),
    ("nvcc", machine(environ={USE_NVCC: "0"}), NVCC, "skipped", "compiles with NVCC"),
    ("nvcc", having(tensorrt_llm=None), NVCC, "skipped", "TensorRT-LLM is not installed here"),
    ("nvcc", told({"nvcc --version": cuda("12.3")}), NVCC, "ok", "CUDA 12.3 (nvcc)"),
    ("nvcc", told({"nvcc --version": cuda("12.2")}), NVCC, "error", "needs CUDA 12.3 or newer"),
    ("nvcc", machine(), NVCC, "error", "not on PATH, and CUDA_HOME is not set"),
    ("nvcc", machine(environ={"CUDA_HOME": "/opt/cuda"}), NVCC, "error", "/opt/cuda/bin/nvcc can't be run"),
    ("nvcc", with_cuda("/opt/cuda/bin/nvcc", **{USE_NVCC: "1"}), NVCC, "ok", "CUDA 13.1 (/opt/cuda/bin/nvcc)"),
    ("nvcc", with_cuda("/my/nvcc", TRTLLM_DG_NVCC_COMPILER="/my/nvcc"), NVCC, "ok", "/my/nvcc"),
    ("known-bad", having(openai="1.107.3"), R1, "note", "start.sh brings the work-around"),
    ("known-bad", having(openai="1.107.3"), THEIRS, "error", "PartReasoningText"),
    ("known-bad", having(openai="1.107.3"), NOTHING, "warning", "openai 1.107.3 with tensorrt_llm 1.2.1"),
    ("known-bad", having(cuda__python="13.0.1", tensorrt_llm="1.0.0"), R1, "error", "cuda-python>=12,<13"),
    ("known-bad", having(cuda__python="13.0.1", tensorrt_llm="1.2.1"), R1, "ok", "none"),
    ("known-bad", having(transformers="5.1.0"), R1, "error", "AutoModelForVision2Seq"),
    ("known-bad", having(transformers="5.1.0", tensorrt_llm="1.3.0rc13"), R1, "error", "AutoModelForVision2Seq"),
    ("known-bad", having(transformers="5.3.0", tensorrt_llm="1.3.0rc14"), R1, "ok", "none"),
    ("known-bad", having(tensorrt_llm="0.14.0"), R1, "error", "2286"),
    ("known-bad", having(tensorrt_llm="1.0.3.2510"), R1, "warning", "container 25.11"),
    ("known-bad", machine(environ={CONTAINER: "26.02"}), R1, "warning", "probe generate"),
    ("mpi", without("mpirun"), NOTHING, "note", "no mpirun on PATH"),
    ("mpi", without("mpirun"), R1, "error", "openmpi-bin"),
    ("mpi", told(MPI_5), R1, "warning", "15060"),
    ("mpi", ends("mpirun --version", 0, out="HYDRA build details:\n Version: 4.2.1\n"), R1, "error", "MPICH 4.2.1"),
    ("mpi", ends("mpirun --version", 0, out="?"), R1, "error", "another MPI"),
    ("mpi", ends(LIBRARY, 0, out="MPICH Version:      4.2.1\n"), R1, "error", "--no-binary mpi4py"),
    ("mpi", ends(LIBRARY, 0, out="Open MPI v5.0.3, package"), R1, "error", "linked with Open MPI v5.0.3"),
    ("mpi", ends(LIBRARY, 1), R1, "ok", "4.1.6"),
    ("mpi-hello", without("mpirun"), R1, "skipped", "no mpirun"),
    ("mpi-hello", ends(HELLO, 0, out="hello 0 1\nhello 0 1\n"), R1, "error", "an MPI world of its own"),
    ("mpi-hello", ends(HELLO, None), R1, "error", "OMPI_MCA_btl_tcp_if_include=lo"),
    ("mpi-hello", ends(HELLO, 1, err="orted: command not found"), R1, "error", "OPAL_PREFIX"),
    ("mpi-hello", ends(HELLO, 1, err="There are not enough slots available in"), NOTHING, "note", "no free slot"),
    ("mpi-hello", ends(HELLO, 213, err="mpirun has detected an attempt to run as root.\n"), R1, "error", "--allow-run"),
    ("mpi-hello", ends(HELLO, 1, err="something else"), R1, "error", "mpirun -n 2 hostname"),
    ("mpi-hello", ends(HELLO, 0, out="hello\nhello\n", python=NO_PACKAGES), R1, "ok", "without mpi4py"),
    ("mpi-spawn", having(mpi4py=None), R1, "skipped", "mpi4py is not installed"),
    ("mpi-spawn", failed_spawn(NODES_FILLED), THEIRS, "error", "-launch"),
    ("mpi-spawn", failed_spawn("mpi4py.MPI.Exception: MPI_ERR_SPAWN: could not spawn"), R1, "note", "MPI_ERR_SPAWN"),
    ("mpi-spawn", ends(SPAWN, None), NOTHING, "note", "gave nothing before its deadline"),
    ("mpi-spawn", failed_spawn("libmpi.so.40: cannot open shared object file"), NOTHING, "note", "LD_LIBRARY_PATH"),
    ("mpi-spawn", failed_spawn("OPAL ERROR: not built with SLURM's PMI support"), NOTHING, "note", "srun --mpi=pmix"),
    ("gpus", machine(runs={}), NOTHING, "note", "no NVIDIA device is on the PCI bus"),
    ("gpus", machine(runs={}), R1, "error", "no nvidia-smi"),
    ("gpus", machine(runs={}, files=PCI), R1, "error", "but no driver works"),
    ("gpus", machine(runs={}, files={**PCI, "/.dockerenv": ""}), R1, "error", "docker run --gpus all"),
    ("gpus", no_gpus("Failed to initialize NVML: Driver/library version mismatch"), R1, "error", "restart the machine"),
    ("gpus", no_gpus("Failed to initialize NVML: Unknown Error\n"), R1, "error", "restart the container"),
    ("gpus", no_gpus("it couldn't communicate with the NVIDIA driver"), R1, "error", "modprobe nvidia"),
    ("gpus", no_gpus("No devices were found\n", code=6), R1, "error", "No devices were found"),
    ("gpus", no_gpus("", code=0), R1, "error", "names no GPU"),
    ("gpus", no_gpus(code=None), R1, "error", "no answer before its deadline | the driver hangs"),
    ("gpus", no_gpus(f"{ROWS}{UNABLE}\n", code=15), R1, "error", f"{UNABLE} | a GPU has fallen off the bus"),
    ("gpus", gpus_with("9.0", "[GPU requires reset]"), R1, "error", "[GPU requires reset] | a GPU"),
    ("gpus", ends(QUERY, 0, out=f"{ROWS}{UNABLE}\n"), R1, "error", f"nvidia-smi: {UNABLE} | the repository needs 8"),
    ("gpus", gpus_with("H200", "GH200 480GB"), R1, "error", "made for h200"),
    ("gpus", gpus_with("NVIDIA H200", "NVIDIA B300 SXM6 AC"), replace(R1, gpu="b300"), "ok", "B300"),
    ("gpus", gpus_with("NVIDIA H200", "NVIDIA GB300"), replace(R1, gpu="gb300-nvl72"), "ok", "GB300"),
    ("gpus", gpus(count=4), R1, "error", "needs 8 on each machine"),
    ("gpus", gpus_with("H200", "H100 80GB HBM3"), R1, "error", "made for h200"),
    ("gpus", gpus(basic=BASIC.replace("H200", "A100-SXM4-80GB").replace("9.0", "8.0")), NOTHING, "note", "Hopper"),
    ("gpu-driver", machine(), NOTHING, "ok", "580.159.04"),
    ("gpu-driver", machine(environ={}), replace(R1, driver="590.44.01"), "warning", "install driver 590 or newer"),
    ("gpu-memory", gpus(used=21099, apps=APPS), R1, "error", "if nobody needs them: end 439"),
    ("gpu-memory", gpus(used=2000, apps=APPS), R1, "warning", "439 (python3) 21090 MiB"),
    ("gpu-memory", gpus(used=21099, apps=APPS), NOTHING, "note", "439"),
    ("gpu-memory", HELD, R1, "error", f"if nobody needs them: deepseek-triton launch stop {LAUNCH}"),
    ("gpu-memory", gpus(used=21099, apps="439, [N/A], [N/A]\n"), R1, "error", "439 ([N/A]) memory"),
    ("gpu-memory", gpus(used=21099), R1, "error", "no process is seen that holds it"),
    ("gpu-health", gpus(health="{}, 0, No, No, Completed, Success"), R1, "ok", "fabric ready"),
    ("gpu-health", gpus(health="{}, 3, No, No, N/A, N/A"), R1, "error", "3 uncorrected ECC errors"),
    ("gpu-health", gpus(health="{}, 0, Yes, No, N/A, N/A"), R1, "error", "reset the GPU"),
    ("gpu-health", gpus(health="{}, 0, No, Yes, N/A, N/A"), NOTHING, "note", "have the GPU replaced"),
    ("gpu-health", gpus(health="{}, 0, No, No, In Progress, N/A"), R1, "error", "CUDA error 802"),
    ("gpu-health", gpus(health="{}, 0, No, No, Completed, Not Supported Here"), R1, "error", "nvidia-fabricmanager"),
    ("gpu-health", ends(HEALTH_QUERY, 2, out='Field "x" is not a valid field to query.\n'), R1, "skipped", "Field"),
    ("gpu-mig", gpus_with("Disabled", "Enabled"), R1, "error", "nvidia-smi -mig 0"),
    ("gpu-links", gpus(topo=topology("PHB")), R1, "warning", "28 pairs PHB"),
    ("gpu-links", gpus(topo=topology("PHB")), NOTHING, "note", "NVLink"),
    ("gpu-links", gpus(count=2), R1, "ok", "1 pair NV18"),
    ("gpu-links", gpus(count=1), R1, "skipped", "one GPU"),
    ("gpu-links", ends("nvidia-smi topo -m", 3), R1, "skipped", "says nothing"),
    ("gpu-persistence", gpus_with("Enabled", "Disabled"), R1, "note", "nvidia-persistenced"),
    ("gpu-persistence", gpus_with("Enabled", "[N/A]"), R1, "ok", "on"),
    ("shm", machine(disks=DOCKERS_SHM), NOTHING, "warning", "--ipc=host"),
    ("shm", machine(disks=DOCKERS_SHM), R1, "error", "NCCL asks for"),
    ("shm", machine(), replace(R1, tables=(2**40, 0)), "warning", "without room each rank keeps its own"),
    ("shm", machine(disks={"/dev/shm": FULL}), NOTHING, "error", "SIGBUS"),
    ("shm", with_files(REGION, disks={"/dev/shm": FULL}), NOTHING, "error", "1 regions of tritonservers"),
    ("shm", machine(disks={"/dev/shm": REFUSED}), NOTHING, "error", "Permission denied"),
    ("memlock", machine(limits={"memlock": (8 * MIB, None)}), R1, "warning", "8.0 MiB, at most unlimited"),
    ("memlock", machine(limits={"memlock": (8 * MIB, 8 * MIB)}), TWO_NODES, "error", "memlock=-1"),
    ("memlock", machine(limits={"memlock": (8 * MIB, 8 * MIB)}), NOTHING, "note", "LimitMEMLOCK"),
    ("memlock", may_lock("0 0 4294967295"), TWO_NODES, "ok", "IPC_LOCK"),
    ("memlock", may_lock("0 1000 1\n 1 100000 65536"), TWO_NODES, "error", "memlock=-1"),  # a rootless container
    ("nofile", machine(limits={"nofile": (20000, 20000)}), R1, "ok", "20000"),
    ("nofile", machine(limits={"nofile": (1024, 4096)}), NOTHING, "warning", "1024, at most 4096"),
    ("send-buffer", with_files({SEND_BUFFER: "16777216"}), NOTHING, "ok", "16777216 bytes, which take 21846 responses"),
    ("send-buffer", with_files({SEND_BUFFER: "212992"}), replace(R1, by_triton=False), "ok", "212992 bytes"),
    ("send-buffer", with_files({SEND_BUFFER: "212992"}), R1, "note", "sysctl -w net.core.wmem_default=16777216"),
    ("stack", machine(limits={"stack": (8 * MIB, None)}), R1, "ok", "8.0 MiB"),
    ("stack", machine(limits={"stack": (MIB, None)}), R1, "warning", "1.0 MiB"),
    ("container", with_files({"/.dockerenv": "", "/dev/nvidiactl": ""}), R1, "ok", "Docker"),
    ("container", POOR, R1, "warning", "--ipc=host or --shm-size, --gpus all, --ulimit memlock=-1"),
    ("container", with_files({"/run/.containerenv": ""}, disks=SMALL_SHM), NOTHING, "note", "Podman, without --ipc"),
    ("container", machine(environ={"KUBERNETES_SERVICE_HOST": "10.0.0.1"}), NOTHING, "ok", "Kubernetes"),
    ("container", with_files({"/.singularity.d/x": ""}), NOTHING, "ok", "Apptainer"),
    ("container", with_files({"/.dockerenv": ""}, disks={"/dev/shm": REFUSED}), R1, "skipped", "Permission denied"),
    ("seccomp", with_files({"/proc/self/status": "Seccomp:\t0\n"}), R1, "ok", "no system call filter"),
    ("seccomp", with_files({"/proc/self/status": FILTERED.format("00000000a80425fb")}), R1, "note", "SYS_NICE"),
    ("seccomp", with_files({"/proc/self/status": FILTERED.format("00000000a88425fb")}), R1, "ok", "with SYS_NICE"),
    ("seccomp", machine(), R1, "skipped", "/proc/self/status"),
    ("repository", machine(), NOTHING, "skipped", "no repository was named"),
    ("repository", machine(files={}), R1, "error", "/r1 is not there"),
    ("repository", with_files({"/r1/start.sh": REFUSED}), R1, "skipped", "Permission denied"),
    ("checkpoint", machine(), NOTHING, "skipped", "no repository was named"),
    ("checkpoint", machine(), TINY, "skipped", "none is known"),
    ("checkpoint", machine(files={}), R1, "error", "/models/R1 is not there"),
    ("checkpoint", machine(files={"/models/R1": ""}), R1, "error", "/models/R1 is a file"),
    ("checkpoint", checkpoint_with("model-2.safetensors", None), R1, "error", "model-2.safetensors is missing"),
    ("checkpoint", checkpoint_with("model-2.safetensors", shard(missing=3)), R1, "error", "model-2.safetensors has"),
    ("checkpoint", checkpoint_with("model-2.safetensors", b"<html>!"), R1, "error", "not a safetensors file"),
    ("checkpoint", checkpoint_with("model-2.safetensors", NO_HEADER), R1, "error", "not a safetensors file"),
    ("checkpoint", checkpoint_with("model.safetensors.index.json", "{"), R1, "error", "index.json can't be parsed"),
    ("checkpoint", checkpoint_with("config.json", None), R1, "error", "config.json is missing"),
    ("checkpoint", machine(files={"/models/R1/config.json": "{}"}), R1, "error", "no *.safetensors file"),
    ("checkpoint", checkpoint_with("model-2.safetensors", REFUSED), R1, "error", "give this user read access"),
    ("checkpoint", machine(disks=VAST), replace(HUB, checkpoint="d/R1@v1"), "warning", "checkpoint download d/R1@v1"),
    ("checkpoint", machine(), HUB, "error", "download 640 GiB to /root/.cache/huggingface/hub, which has 500 GiB"),
    ("checkpoint", with_files(PARTLY, environ={"HF_HOME": "/hf"}), HUB_SMALL, "warning", "downloads 60 bytes"),
    ("checkpoint", machine(), replace(HUB, checkpoint_bytes=None), "warning", "the first load downloads it"),
    ("checkpoint", machine(files=IN_CACHE, environ={"HF_HOME": "/hf"}), HUB, "ok", "snapshots/c0ffee: 2 files"),
    ("host-memory", machine(), NOTHING, "ok", "available"),
    ("host-memory", machine(memory=SMALL), replace(R1, tables=(0, 2**43)), "error", "Engram's tables"),
    ("host-memory", machine(memory=SMALL), R1, "warning", "TensorRT-LLM looks at /proc/meminfo only"),
    ("host-memory", machine(memory=TIGHT), R1, "error", "8 ranks that each hold one file"),
    ("host-memory", machine(memory=REFUSED), R1, "skipped", "Permission denied"),
    ("disk", machine(disks={"/tmp": Disk(total=GIB, free=MIB)}), R1, "warning", "/tmp: 1.0 MiB free of 1.0 GiB wanted"),
    ("disk", machine(closed=frozenset({"/root/.cache"})), R1, "warning", "/root/.cache can't be written to"),
    ("disk", machine(folders=frozenset({"/tmp"}), closed=frozenset({"/"})), NOTHING, "note", "/ can't be written to"),
    ("disk", machine(environ={"HOME": "/root", "HF_HOME": "/hf"}), HUB, "warning", "/hf/hub: 500 GiB free of 640 GiB"),
    ("disk", machine(environ={"TILELANG_CACHE_DIR": "/t"}, closed=frozenset({"/"})), R1, "warning", "/ can't be"),
    ("disk", machine(disks={"/tmp": REFUSED}), R1, "skipped", "Permission denied"),
    ("ports", machine(taken={8001: "process 7 (nginx)"}), R1, "error", "8001 (gRPC) is taken by process 7 (nginx)"),
    ("ports", machine(taken={8001: "process 7 (nginx)"}), NOTHING, "note", "GRPC_PORT"),
    ("ports", machine(taken={8001: "process 7"}), replace(R1, grpc_port=9001), "ok", "gRPC 9001"),
    ("ports", machine(taken={8001: "process 7"}), replace(R1, by_triton=False), "ok", "free: HTTP 8000"),
    ("interface", machine(), replace(R1, interface="eth0"), "ok", "eth0 10.0.0.1"),
    ("interface", machine(), replace(R1, interface="lo"), "error", "lo reaches no other machine"),
    ("interface", machine(), OVER_IB, "error", "name one of eth0"),
    ("interface", machine(nics=(LO, DOWN)), OVER_IB, "error", "ib0 is down"),
    ("interface", machine(nics=(LO, replace(DOWN, is_up=True))), OVER_IB, "error", "ib0 has no address"),
    ("interface", machine(nics=(LO, DOCKER0)), R1, "note", "none but loopback"),
    ("interface", machine(nics=(LO,)), TWO_NODES, "error", "no other machine can be reached"),
    ("interface", machine(nics=(LO, ETH0, ETH1, DOCKER0)), TWO_NODES, "warning", "INTERFACE=eth0"),
    ("interface", with_files(ROUTE, nics=(LO, ETH0, ETH1)), TWO_NODES, "warning", "INTERFACE=eth1"),
    ("interface", machine(nics=(LO, ETH0, DOCKER0)), TWO_NODES, "ok", "eth0 10.0.0.1"),
    ("hostname", machine(), TWO_NODES, "ok", "node1 is 10.0.0.1"),
    ("hostname", machine(names_of_hosts={}), R1, "warning", "node1 has no address"),
    ("hostname", machine(names_of_hosts={}), TWO_NODES, "error", "/etc/hosts"),
    ("hostname", machine(names_of_hosts={"node1": ["127.0.1.1"]}), R1, "ok", "enough for one machine"),
    ("hostname", machine(names_of_hosts={"node1": ["127.0.1.1"]}), TWO_NODES, "warning", "connect to themselves"),
    ("hostname", machine(names_of_hosts={"node1": ["10.9.9.9"]}), TWO_NODES, "error", "no address of this machine"),
    ("hostname", machine(names_of_hosts={"node1": ["10.9.9.9"]}), R1, "warning", "10.9.9.9"),
    ("ssh", without("ssh"), R1, "note", "openssh-client"),
    ("ssh", without("ssh"), TWO_NODES, "error", "openssh-client"),
    ("leftovers", running(SERVER, A_STUB, FORKED), R1, "ok", "nothing left"),
    ("leftovers", running(RENAMED, A_STUB, FORKED), R1, "ok", "nothing left"),
    ("leftovers", running(FRONT_END, A_STUB, FORKED), R1, "ok", "nothing left"),
    ("leftovers", machine(running=CONTAINED), R1, "ok", "nothing left"),
    ("leftovers", running(A_STUB), R1, "ok", "nothing left"),  # the server is above doctor itself
    ("leftovers", running(replace(A_STUB, parent=1), FORKED), R1, "warning", "kill 11 12"),
    ("leftovers", running(SERVER, replace(A_STUB, parent=1)), R1, "warning", "kill 11"),
    ("leftovers", running(SERVER, replace(FORKED, parent=1)), R1, "warning", "kill 12"),  # the guard is left
    ("leftovers", running(ANOTHER, replace(A_STUB, parent=20)), R1, "warning", "kill 11"),
    ("leftovers", running(*launched(SERVER, A_STUB)), R1, "warning", f"any more: deepseek-triton launch stop {LAUNCH}"),
    ("leftovers", running(SUPERVISOR, RANK), R1, "ok", "running: 0123abcd (2 processes)"),
    ("leftovers", running(RANK), R1, "warning", "deepseek-triton launch stop 0123abcd"),
    ("leftovers", running(replace(RANK, parent=6)), R1, "warning", "1 process, no supervisor"),
    ("leftovers", running(ORTED, replace(RANK, parent=4)), R1, "ok", "running: 0123abcd (1 process)"),
    ("leftovers", running(ORTED, replace(RANK, parent=1)), R1, "warning", "no supervisor"),
    ("leftovers", with_files({f"{SHM}_0000aaaa_1": b"", "/dev/shm/other": b""}), R1, "note", f"rm {SHM}_0000aaaa_*"),
    ("leftovers", with_files({f"{SHM}_{LAUNCH}_1": b""}, running=(SUPERVISOR,)), R1, "ok", "running"),
    ("leftovers", with_files({f"{SHM}_{LAUNCH}_1": b""}, running=(SERVER, A_STUB)), R1, "ok", "nothing"),  # of `serve`
    ("leftovers", machine(folders=frozenset()), R1, "ok", "nothing left"),
    ("docker", without("docker"), R1, "note", "none"),
    ("docker", ends("docker info", 1, err="Cannot connect to the Docker daemon\n"), R1, "note", "doesn't answer"),
    ("docker", told({"docker info": Done(code=0, out='{"runc":{}}')}), R1, "note", "nvidia-container-toolkit"),
    ("slurm", without("srun"), R1, "note", "srun not on PATH"),
    ("slurm", ends("sinfo", 1, err="sinfo: error: no controller\n"), R1, "note", "no controller"),
    ("slurm", ends("sinfo", 1, err="Could not establish a configuration source"), R1, "note", "with SLURM_CONF"),
    ("slurm", ends("sinfo", None, err="cannot stat file /x: No such file\n"), R1, "note", "No such file |"),
    ("slurm", ends("sinfo", 1, err="Unable to contact slurm controller (connect failure)\n"), R1, "note", "scontrol"),
    ("slurm", ends("sinfo", 1, err="slurm_load_partitions: Protocol authentication error\n"), R1, "note", "munge"),
    ("slurm", ends("sinfo", None), R1, "note", "nothing before its deadline"),
    ("kubectl", without("kubectl"), R1, "note", "no kubectl"),
    ("kubectl", ends("kubectl config", 1, err="error: not set\n"), R1, "note", "name it with KUBECONFIG"),
    ("kubectl", told(NO_CONTEXT), R1, "note", "kubectl config use-context prod (or test)"),
]
OF_GPUS = ("gpu-driver", "gpu-memory", "gpu-health", "gpu-mig", "gpu-links", "gpu-persistence")
CASES += [(check, machine(runs={}), R1, "skipped", "no GPU is seen") for check in OF_GPUS]


def test_checks():
    wrong = []
    for check, where, expected, level, words in CASES:
        finding = run(check, where, expected)
        told = " | ".join((finding.result, finding.cause, finding.fix))
        is_advice = level not in ("warning", "error") or bool(finding.cause and finding.fix)
        is_whole = "\n" not in told and is_advice and (level != "error" or bool(finding.blocks))
        if (finding.level, words in told, is_whole) != (level, True, True):
            wrong.append((check, level, words, finding))
    assert wrong == []


def test_all_is_well_on_a_good_machine():
    report = examine(with_files({"/proc/self/status": "Seccomp:\t0\n"}), R1)
    found = {found.check: found.finding for found in report.findings}
    assert [finding for finding in found.values() if finding.level in ("warning", "error")] == []
    assert [check for check in GOOD if found[check].level != "ok" or GOOD[check] not in found[check].result] == []
    assert report.facts == {
        "Python": "3.12.3",
        "TensorRT-LLM": "1.2.1",
        "container": "26.07",
        "mpi4py": "3.1.5",
        "MPI": "Open MPI 4.1.6",
        "GPUs": "8 x NVIDIA H200, 143771 MiB",
        "GPU driver": "580.159.04",
        "repository": report.facts["repository"],
        "checkpoint index": report.facts["checkpoint index"],
    }


def test_a_check_that_breaks_does_not_hide_the_others():
    class Broken(FakedMachine):
        def limit(self, name):
            raise ZeroDivisionError("oh")

    report = examine(Broken(files=GOOD_FILES), NOTHING)
    broken = {found.check: found.finding for found in report.findings if "itself failed" in found.finding.result}
    assert set(broken) == {"memlock", "nofile", "stack"}
    assert broken["stack"].cause == "ZeroDivisionError: oh"
    assert len(report.findings) == len(CHECKS)


def test_what_several_have_is_reported_once():
    finding = run("gpu-health", gpus(count=3, health="{}, 0, No, No, In Progress, N/A"), R1)
    assert finding.result.startswith("GPU 0, 1, 2: NVSwitch fabric in progress")
    assert finding.result.count("NVSwitch") == 1
    finding = run("disk", machine(folders=frozenset({"/tmp"}), closed=frozenset({"/"})), R1)
    assert finding.result == "/ can't be written to"


def test_what_works():
    simulated = replace(TINY, engine="simulated")
    no_gpu, no_checkpoint = machine(runs={}, files={STUB: b""}), {STUB: b"", "/tiny/a": ""}
    llm, local, mpirun, docker = "tensorrt-llm", "launch-local", "launch-mpirun", "launch-docker"
    cases = [
        # A need of the repository does not block the capabilities that don't serve it.
        (of_wheel(packages=DEMO), R1, {"demo": True, "simulated": True, llm: False, local: False}),
        (machine(disks=DOCKERS_SHM), R1, {llm: False, "simulated": True, local: False}),
        (machine(taken={8000: "process 7"}), R1, {llm: False, "simulated": True, local: False, docker: False}),
        (no_gpu, R1, {llm: False, "simulated": True, mpirun: False, docker: False}),
        (having(deepseek__triton="0.1.0", pyyaml=None), R1, {local: False, mpirun: False}),
        (having(pyyaml=None), R1, {local: False, "simulated": False}),
        (no_gpus(files=no_checkpoint), simulated, {llm: False, docker: True}),
        (without(ENTRY_POINT), R1, {llm: False, local: False, mpirun: False, docker: True}),
        (with_files({"/tiny/a": ""}), TINY, {"demo": False, "simulated": True, local: False}),  # no tokenizers
        (machine(), simulated, {"demo": False, local: False}),  # there is no /tiny
        (with_files({"/tiny/a": ""}), simulated, {"demo": False, local: True}),
        (machine(), R1, {llm: True, local: True, mpirun: True, docker: True}),
        (machine(), TWO_NODES, {docker: False}),
    ]
    for where, expected, works in cases:
        found = {each.id: each.works for each in assess_capabilities(examine(where, expected).findings, expected)}
        assert {name: found[name] for name in works} == works
    unused = [[each for each in CAPABILITIES if not is_for(each, replace(R1, by_triton=by))] for by in (True, False)]
    assert unused == [["vllm", mpirun], ["vllm", local, mpirun, "launch-slurm", "launch-kubernetes"]]


def test_fields_that_a_driver_does_not_know_are_left_out():
    known = f"{HEALTH_QUERY}.errors.uncorrected.volatile.total,remapped_rows.pending,remapped_rows.failure"
    refused = {
        f"{known},{field}": Done(code=2, out=f'Field "{field}" is not a valid field to query.\n\n')
        for field in ("fabric.state", "fabric.status")
    }
    finding = run("gpu-health", told({**refused, f"{known} ": Done(code=0, out="0, 0, Yes, No\n")}), R1)
    assert finding.level == "error"
    assert finding.result == "GPU 0: rows wait to be remapped"
