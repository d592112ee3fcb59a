"""Real tritonservers, one for each engine, started once in a session on free ports."""

import os
import shutil
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from deepseek_triton_build import model_repository
from deepseek_triton_client import Client
from deepseek_triton_tools.server.server_process import ServerProcess
from support.hosts import Host, HostsError, two_hosts
from support.launched import Launched, install_launchers, prepare
from support.on_vllm import select
from support.scraping import scrape
from support.servers import build, change_yaml, see_it_die, standin_repository, twin, url
from support.vllm_arguments import filler_arguments, gpu_arguments, reference_arguments
from support.vllm_repository import vllm_repository
from support.waiting import wait_for
from support.web import web

SCHEMES = ("http", "grpc")
ONE_PLACE_STEP_S = 0.006
"""Pace of vLLM in place of the digital twin."""


SERVERS = (
    "hosts",
    "v31_server",
    "r1_server",
    "tiny_server",
    "trtllm_server",
    "simulated_server",
    "small_server",
    "explicit_server",
    "dead_server",
)
"""One of each for the whole session: its tests are a group, which one worker has."""
KINDS = ("client_kind", "way", "scheme", "tiny", "simulated", "trtllm")
"""Parameters that say by which client, and how, a server is asked."""


@pytest.hookimpl(tryfirst=True)  # before tests/conftest.py makes groups of the files
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        parameters = getattr(item, "callspec", None)
        values = parameters.params.values() if parameters else ()
        named = {value if isinstance(value, str) else getattr(value, "server", "") for value in values}
        used = {*getattr(item, "fixturenames", ()), *named, *(f"{name}_server" for name in named)}
        if server := next((name for name in SERVERS if name in used), None):
            item.add_marker(pytest.mark.xdist_group(server))
    _share_kinds(items)
    if config.getoption("--engine") == "vllm":
        select(items, config)


def _share_kinds(items: list[pytest.Item]) -> None:
    """Give each case of a test some of the kinds of client, in turn, so that each kind has some of the cases. All cases
    with all kinds are nightly."""
    tests: dict[str, dict[str, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        parameters = dict(item.callspec.params) if hasattr(item, "callspec") else {}
        if kind := next((name for name in KINDS if name in parameters), None):
            del parameters[kind]
            tests[item.nodeid.partition("[")[0]][repr(parameters)].append(item)
    for cases in tests.values():
        for place, kinds in enumerate(cases.values()):
            step = min(len(kinds), len(cases))
            for number, item in enumerate(kinds):
                if number % step != place % step:
                    item.add_marker(pytest.mark.nightly)


@contextmanager
def serving(repository: Path) -> Iterator[ServerProcess]:
    """Whatever the tests do to it, the server ends as it should: with 0, unless Triton waits out its exit timeout for a
    request that it has lost sight of, as it does after many cancelled gRPC streams, though the model has answered all.
    """
    with ServerProcess.serving(repository) as server:
        yield server
        all_answered = _has_answered_all(server)
    waited_in_vain = all_answered and any("Exit timeout expired" in line for line in server.log_tail)
    assert server.returncode == (1 if waited_in_vain else 0), "\n".join(server.log_tail[-60:])


def _has_answered_all(server: ServerProcess) -> bool:
    with suppress(httpx.TransportError):
        found = scrape(server)
        return not any(number for (name, _), number in found.items() if name == "inflight_sequences")
    return False


@pytest.fixture(scope="session")
def vllm_chosen(pytestconfig: pytest.Config) -> bool:
    """Whether vLLM is the engine of the servers below, in place of the embedded ones."""
    return bool(pytestconfig.getoption("--engine") == "vllm")


@pytest.fixture(scope="session")
def executor(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Engine arguments of vLLM without a GPU, or of one of several on a GPU."""
    if not pytestconfig.getoption("--with-gpu"):
        return reference_arguments()
    # A cache of compiled graphs for each of pytest's processes, as engines that start together would share one.
    os.environ["VLLM_CACHE_ROOT"] = str(tmp_path_factory.mktemp("vllm_cache"))
    return gpu_arguments()


@pytest.fixture(scope="session")
def random_repository(
    random_checkpoint: Path, vllm_chosen: bool, executor: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The reference engine on random weights, whose text never ends by itself."""
    if vllm_chosen:
        return vllm_repository(
            tmp_path_factory.mktemp("vllm_random") / "repository", model=random_checkpoint, **executor
        )
    return build(tmp_path_factory.mktemp("random") / "repository", "tiny", "--model", str(random_checkpoint))


@pytest.fixture(scope="session")
def tiny_server(random_repository: Path) -> Iterator[ServerProcess]:
    with serving(random_repository) as server:
        yield server


@pytest.fixture(scope="session")
def trained_repository(vllm_chosen: bool, executor: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained tiny checkpoint: model_repository/ as it is checked out, or vLLM's."""
    if not vllm_chosen:
        return model_repository()
    return vllm_repository(tmp_path_factory.mktemp("vllm_trained") / "repository", **executor)


@pytest.fixture(scope="session")
def v31_server(trained_repository: Path) -> Iterator[ServerProcess]:
    """The trained tiny checkpoint with V3.1's chat template."""
    with serving(trained_repository) as server:
        yield server


@pytest.fixture(scope="session")
def r1_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The same weights with R1's template, which begins every answer with reasoning."""
    with serving(build(tmp_path_factory.mktemp("r1") / "repository", "tiny-r1")) as server:
        yield server


@pytest.fixture(scope="session")
def simulated_server(
    pytestconfig: pytest.Config,
    vllm_chosen: bool,
    executor: dict[str, Any],
    random_checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ServerProcess]:
    """The digital twin of a batch-1 deployment: one request at a time, about 158 tokens a second."""
    preset = "h200x8-r1-fp8-min-latency"
    folder = tmp_path_factory.mktemp("simulated") / "repository"
    if vllm_chosen:
        with_gpu = pytestconfig.getoption("--with-gpu")
        paced = executor if with_gpu else filler_arguments(step_s=ONE_PLACE_STEP_S)
        repository = vllm_repository(folder, model=random_checkpoint, max_num_seqs=1, **paced)
    else:
        repository = build(folder, "tiny", "--engine", "simulated", "--preset", preset)
    with serving(repository) as server:
        yield server


@pytest.fixture(scope="session")
def small_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The twin with room for one request, whose metrics are those of a moment ago; it takes a second to load.

    Version 2 streams cumulatively, and model "other" is the same again.
    """
    preset = "h200x8-r1-fp8-min-latency"
    folder = tmp_path_factory.mktemp("small") / "repository"
    model = build(folder, "tiny", "--engine", "simulated", "--preset", preset) / "tensorrt_llm"
    config = model / "config.pbtxt"
    config.write_text(f"{config.read_text()}version_policy {{ all {{}} }}\n")
    change_yaml(model / "1/model.yaml", metrics_period_s=0.1)
    shutil.copytree(model / "1", model / "2")
    shutil.copytree(model, folder / "other")
    (folder / "other/config.pbtxt").write_text(config.read_text().replace('"tensorrt_llm"', '"other"'))
    change_yaml(model / "1/model.yaml", max_inflight=1)
    change_yaml(model / "2/model.yaml", stream_mode="cumulative")
    return folder


@pytest.fixture(scope="session")
def small_server(small_repository: Path) -> Iterator[ServerProcess]:
    with serving(small_repository) as server:
        yield server


@pytest.fixture(scope="session")
def explicit_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The twin on a server that loads and unloads it on demand."""
    repository = build(tmp_path_factory.mktemp("explicit") / "repository", "tiny", "--engine", "simulated")
    explicit = ("--model-control-mode=explicit", "--load-model=tensorrt_llm")
    with ServerProcess.serving(repository, server_args=explicit) as server:
        yield server
    assert server.returncode == 0


@pytest.fixture
def loaded_server(explicit_server: ServerProcess) -> ServerProcess:
    """`explicit_server` with its model loaded and nothing left of an earlier one; the test may unload it."""
    address = f"{explicit_server.http_url}/v2/repository"
    wait_for(lambda: web.post(f"{address}/index").json()[0].get("state") != "UNLOADING")
    web.post(f"{address}/models/tensorrt_llm/load").raise_for_status()
    return explicit_server


@pytest.fixture(scope="session")
def dead_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The twin after its engine has died, which stays and is not ready."""
    folder = tmp_path_factory.mktemp("dying") / "repository"
    repository = twin(folder, engine_options={"fail_after": 20}, on_fatal="unready")
    with serving(repository) as server:
        see_it_die(server)
        yield server


@pytest.fixture(scope="session")
def trtllm_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server of the production path, without a GPU."""
    return standin_repository(tmp_path_factory.mktemp("trtllm") / "repository")


@pytest.fixture(scope="session")
def trtllm_server(trtllm_repository: Path) -> Iterator[ServerProcess]:
    """The production path on the strict stand-in for TensorRT-LLM."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STANDIN_TOKENS_PER_S", "500")  # otherwise all of an answer may leave in one response
        with serving(trtllm_repository) as server:
            yield server


@pytest.fixture(scope="session")
def launchers() -> Path:
    """ssh, Open MPI and Slurm are installed, and mpi4py in this folder."""
    try:
        return install_launchers()
    except HostsError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def hosts(launchers: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts(tmp_path_factory.mktemp("hosts")))
        except HostsError as error:
            pytest.skip(str(error))
        yield hosts


@pytest.fixture
def assert_nothing_is_left(hosts: tuple[Host, Host]) -> Iterator[Callable[[], None]]:
    """Of what was started on the hosts since the test began. Open MPI's own segments stay in /dev/shm where its
    processes are killed."""
    before = [host.processes() for host in hosts]

    def left() -> list[dict[int, str]]:
        now = [host.processes() for host in hosts]
        return [{pid: new[pid] for pid in new.keys() - old.keys()} for old, new in zip(before, now, strict=True)]

    def check() -> None:
        wait_for(lambda: not any(left()), lambda: str(left()))
        assert all("deepseek_triton" not in host.run("ls", "/dev/shm").stdout for host in hosts)

    yield check
    for host in left():
        for pid in host:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def launched(launchers: Path, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """What the hosts run: a repository of two nodes, on stand-ins for the engine and its launcher."""
    return prepare(tmp_path_factory.mktemp("launched"), launchers)


@pytest.fixture(params=SCHEMES)
def tiny(request: pytest.FixtureRequest, tiny_server: ServerProcess) -> Iterator[Client]:
    with Client(url(tiny_server, request.param)) as client:
        yield client


@pytest.fixture(params=SCHEMES)
def simulated(request: pytest.FixtureRequest, simulated_server: ServerProcess) -> Iterator[Client]:
    with Client(url(simulated_server, request.param)) as client:
        yield client


@pytest.fixture(params=SCHEMES)
def trtllm(request: pytest.FixtureRequest, trtllm_server: ServerProcess) -> Iterator[Client]:
    with Client(url(trtllm_server, request.param)) as client:
        yield client
