"""start.sh runs for real, with programs on PATH that record how they were called."""

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from deepseek_triton_build import EnvironmentVariable, PlanRequest, format_files, make_plan, write_repository
from deepseek_triton_build.arithmetic import ENGINE_START_S, ready_within_s
from deepseek_triton_build.catalog import RELEASES
from support.scripts import files_of, forwarded_by, parameters_of, script_runner

R1 = PlanRequest(variant="deepseek-r1", gpu="h200", num_gpus=8)
TWO_NODES = PlanRequest(variant="deepseek-v3", gpu="h100", num_gpus=16)
TINY = PlanRequest(variant="tiny")
SIMULATED = PlanRequest(variant="tiny", engine="simulated", preset="h200x8-r1-fp8-min-latency")
KINDS = {
    "one-node": R1,
    "two-nodes": TWO_NODES,
    "trays-of-four": PlanRequest(variant="deepseek-r1", gpu="gb200", num_gpus=8),
    "reference": TINY,
    "simulated": SIMULATED,
    "vllm": replace(R1, engine="vllm"),
    "vllm-data-parallel": replace(R1, engine="vllm", parallel="dp"),
    "vllm-two-nodes": replace(TWO_NODES, engine="vllm"),
    "vllm-tiny": PlanRequest(variant="tiny", engine="vllm", gpu="h200", num_gpus=2),
    **{f"r1-{release}": replace(R1, release=release) for release in RELEASES},
}
LAUNCH = "0123abcd"
KEY = re.compile(r"(?<=:closed=)[0-9a-f]{32}")
"""The key of the closed endpoints, which is another one in each run."""
CLOSED = [
    f"{option}=shared-memory,trace,logging:closed=KEY"
    for option in ("--http-restricted-api", "--grpc-restricted-protocol")
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    script = script_runner(tmp_path_factory.mktemp("start"))

    def run_one(request, *arguments, **variables):
        ran = script(make_plan(request), "triton", *arguments, **variables)
        return ran._replace(argv=[KEY.sub("KEY", word) for word in ran.argv], output=KEY.sub("KEY", ran.output))

    return run_one


def parts_of(argv):
    """Split a command into the supervisor's options, the words that start the ranks, and the command of each guard.

    Without the two words that close endpoints, which are in every such command.
    """
    supervisor, ranks, guarded = split(argv, "--", times=2)
    assert supervisor[0] == "python3"
    assert supervisor[1].endswith("/tensorrt_llm/1/supervise.py")
    assert supervisor[2] == "run"
    assert ranks[-3:] == ["python3", supervisor[1], "rank"]
    guarded = [KEY.sub("KEY", word) for word in guarded]
    assert [word for word in guarded if word in CLOSED] == CLOSED
    return options_of(supervisor[3:]), ranks[:-3], [word for word in guarded if word not in CLOSED]


def split(words, separator, times):
    """Split `words` at the first `times` separators."""
    parts = []
    for _ in range(times):
        place = words.index(separator)
        parts.append(words[:place])
        words = words[place + 1 :]
    return [*parts, words]


def options_of(words):
    names, values = words[::2], words[1::2]
    assert all(name.startswith("--") for name in names)
    assert len(set(names)) == len(names)
    return dict(zip(names, values, strict=True))


def commands_of(output):
    """Return the variables and the words of the command that DRY_RUN=1 printed."""
    assert output.endswith("\n")
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {output}"], capture_output=True, text=True, check=True)
    words = done.stdout.split("\0")[:-1]
    assert words[0] == "env"
    count = next(place for place, word in enumerate(words[1:]) if "=" not in word)
    return dict(word.split("=", 1) for word in words[1 : count + 1]), words[count + 1 :]


def refusals(result):
    assert result.code == 2
    assert result.argv == []
    lines = result.error.splitlines()
    assert all(line.startswith("start.sh: expected ") for line in lines)
    return lines


# Every kind


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_printed_is_what_is_run(run, kind):
    """A shell that gets the printed command starts the same words in the same environment."""
    variables = {"DEEPSEEK_TRITON_LAUNCH": LAUNCH, "HOSTS": "a,b", "SSH_ARGS": "-i it's", "INTERFACE": "eth0"}
    variables |= {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"} if kind == "vllm-two-nodes" else {}
    result = run(KINDS[kind], "--log-verbose", "1", **variables)
    printed = run(KINDS[kind], "--log-verbose", "1", DRY_RUN="1", **variables)

    assert (printed.code, printed.error, printed.argv) == (0, "", [])
    environment, command = commands_of(printed.output)
    assert command == result.argv
    assert environment.items() <= result.environment.items()
    assert environment["DEEPSEEK_TRITON_LAUNCH"] == LAUNCH
    assert ("PYTHONPATH" in environment) == (make_plan(KINDS[kind]).release is not None)
    assert max(map(len, printed.output.splitlines())) < 400


def test_a_dry_run_needs_neither_mpirun_nor_python(tmp_path):
    """Only the tools that the shell code uses are on PATH."""
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "env", "dirname", "readlink", "od", "tr", "sort", "grep"):
        (tmp_path / "bin" / tool).symlink_to(f"/usr/bin/{tool}")
    write_repository(format_files("triton", make_plan(TWO_NODES), version="1.0"), tmp_path / "r")
    environment = {"PATH": str(tmp_path / "bin"), "DRY_RUN": "1", "HOSTS": "a,b"}
    done = subprocess.run([tmp_path / "r/start.sh"], env=environment, capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")
    assert commands_of(done.stdout)[1][0] == "python3"
    done = subprocess.run([tmp_path / "r/start.sh"], env=environment | {"DRY_RUN": ""}, capture_output=True, text=True)
    assert done.returncode == 127
    assert ": python3 mpirun trtllm-llmapi-launch tritonserver; " in done.stderr


@pytest.mark.slow
def test_the_backend_that_the_model_names_is_found(run, tmp_path):
    """Triton has one backend directory. The link that stands for its own is broken here: there is no Triton. The one to
    its own vLLM backend, which its vLLM containers have, gives way."""
    (tmp_path / f"deepseek_triton_{LAUNCH}_backends").mkdir()
    (tmp_path / "their own").mkdir()
    (tmp_path / f"deepseek_triton_{LAUNCH}_backends/vllm").symlink_to(tmp_path / "their own")
    variables = {"DEEPSEEK_TRITON_LAUNCH": LAUNCH, "TMPDIR": str(tmp_path)}
    for _ in range(2):  # as ranks of one launch do
        result = run(replace(TINY, engine="vllm", gpu="h200", backend_name="vllm"), **variables)

    assert list((tmp_path / "their own").iterdir()) == []
    folder = Path(result.argv[result.argv.index("--backend-directory") + 1])
    assert folder == tmp_path / f"deepseek_triton_{LAUNCH}_backends"
    model = Path(result.argv[result.argv.index("--model-repository") + 1]) / "tensorrt_llm"
    assert (folder / "vllm/model.py").samefile(model / "backends/vllm/model.py")
    assert "--backend-directory" not in run(TINY).argv


def test_who_restricts_endpoints_leaves_the_others_closed(run):
    option = "--http-restricted-api"
    for given, left in [
        ((f"{option}=inference:k=v",), "shared-memory,trace,logging"),
        ((option, "inference,trace:logging=v", f"{option}=shared-memory:k=v"), "logging"),
        ((option, "trace,logging,shared-memory:k=v"), ""),
    ]:
        expected = [f"{option}={left}:closed=KEY"] if left else []
        assert [word for word in run(R1, *given).argv if ":closed=" in word] == [*expected, CLOSED[1]]


def test_every_launch_has_a_tag_and_a_key_of_its_own(tmp_path):
    """Nobody can know the key of closed endpoints."""
    script = script_runner(tmp_path)
    one, two = (script(make_plan(TINY), "triton") for _ in range(2))
    tags = [ran.environment["DEEPSEEK_TRITON_LAUNCH"] for ran in (one, two)]

    assert KEY.findall(" ".join(one.argv))[0] != KEY.findall(" ".join(two.argv))[0]
    assert tags[0] != tags[1]
    assert all(len(tag) == 8 and int(tag, 16) >= 0 for tag in tags)


# TensorRT-LLM on one node


def test_one_node(run):
    result = run(R1, "--log-verbose", "1", DEEPSEEK_TRITON_LAUNCH=LAUNCH)
    options, ranks, guarded = parts_of(result.argv)

    repository = options["--repository"]
    assert Path(repository, "tensorrt_llm/config.pbtxt").is_file()
    assert Path(repository, "tensorrt_llm/1/supervise.py").is_file()
    ports = {"--http-port": "8000", "--grpc-port": "8001", "--metrics-port": "8002", "--http-address": "0.0.0.0"}
    waits = {"--ready-within": "5280", "--exit-timeout": "30", "--max-restarts": "3"}
    assert options == {"--repository": repository, "--ranks": "8", "--ranks-per-node": "8"} | ports | waits
    assert ranks == [
        *["mpirun", "--allow-run-as-root", "--bind-to", "none", "--tag-output"],
        *["-mca", "odls_base_sigkill_timeout", "50", "-n", "8"],
    ]
    assert guarded[:2] == ["trtllm-llmapi-launch", "tritonserver"]
    *given, shared_memory, user, value = guarded[2:]
    addresses = dict.fromkeys(("--grpc-address", "--metrics-address"), "0.0.0.0")
    expected = {"--model-repository": repository, "--exit-timeout-secs": "30"} | ports | addresses
    assert options_of(given) == expected
    assert shared_memory == f"--backend-config=python,shm-region-prefix-name=deepseek_triton_{LAUNCH}_"
    assert (user, value) == ("--log-verbose", "1")
    assert result.environment["PYTHONPATH"] == f"{repository}/tensorrt_llm/1/deepseek_backend/process/overlay"


def test_supervisor_and_server_get_the_same_settings(run):
    variables = {"HTTP_PORT": "1", "GRPC_PORT": "2", "METRICS_PORT": "3", "HTTP_ADDRESS": "10.0.0.7"}
    more = {"EXIT_TIMEOUT": "90", "READY_WITHIN": "7", "MAX_RESTARTS": "0", "READY_FILE": "/run/my ready"}
    options, ranks, guarded = parts_of(run(R1, **variables, **more, GRPC_ADDRESS="::1").argv)
    server = options_of(guarded[2:-1])

    for option in ("--http-port", "--grpc-port", "--metrics-port", "--http-address"):
        assert options[option] == server[option]
    assert (server["--grpc-address"], server["--metrics-address"]) == ("::1", "10.0.0.7")
    assert options["--exit-timeout"] == server["--exit-timeout-secs"] == "90"
    assert parameters_of(ranks)["odls_base_sigkill_timeout"] == "110"
    assert (options["--ready-within"], options["--max-restarts"]) == ("7", "0")
    assert options["--ready-file"] == "/run/my ready"


@pytest.mark.slow
def test_the_deadline_equals_the_arithmetic_in_the_comment(run):
    plan = make_plan(R1)
    size = plan.checkpoint.weight_bytes
    script = files_of(plan, "triton")["start.sh"]
    text = " ".join(line.removeprefix("# ") for line in script.splitlines())

    assert f"{size:,} bytes of weights (computed) at 200 MB/s" in text
    assert parts_of(run(R1).argv)[0]["--ready-within"] == str(ready_within_s(size))
    assert 0 <= ready_within_s(size) - size / 200e6 - ENGINE_START_S < 61
    assert parts_of(run(TINY).argv)[0]["--ready-within"] == "600"


@pytest.mark.slow
def test_the_parameters_of_mpirun(run):
    waits, both = {"odls_base_sigkill_timeout": "50"}, ("btl_tcp_if_include", "oob_tcp_if_include")
    ssh = {"SSH_PORT": "2233", "SSH_ARGS": "-i /keys/id"}
    # Each orted of several nodes waits twice the parameter before it kills. A restart would find the GPUs in use.
    for request, variables, expected in [
        (R1, {}, waits),
        (R1, {"INTERFACE": "lo"}, waits | dict.fromkeys(both, "lo")),
        (TWO_NODES, {}, {}),
        (TWO_NODES, {"INTERFACE": "ib0"} | ssh, dict.fromkeys(both, "ib0") | {"plm_rsh_args": "-p 2233 -i /keys/id"}),
        (TWO_NODES, {"INTERFACE": "eth0", f"OMPI_MCA_{both[0]}": "ib0"}, {both[1]: "eth0"}),  # the user's own stays
    ]:
        result = run(request, HOSTS="a,b", **variables)
        assert parameters_of(parts_of(result.argv)[1]) == expected


def test_the_interface_is_set_for_the_ranks_except_where_the_user_set_another(run):
    result = run(TWO_NODES, HOSTS="a,b", INTERFACE="eth0", NCCL_SOCKET_IFNAME="^docker0")

    assert result.environment["NCCL_SOCKET_IFNAME"] == "^docker0"
    assert result.environment["GLOO_SOCKET_IFNAME"] == "eth0"
    assert {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} <= set(forwarded_by(result.argv))
    assert {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}.isdisjoint(run(R1).environment)


def test_slurms_rank_variables_are_removed_in_a_shell_of_a_job(run):
    environment = run(R1, SLURM_PROCID="0", SLURM_NTASKS="1", SLURM_STEP_NUM_TASKS="1", SLURM_JOB_ID="7").environment

    assert {"SLURM_PROCID", "SLURM_NTASKS"}.isdisjoint(environment)
    assert environment["SLURM_JOB_ID"] == "7"  # by which mpirun finds the allocation


# Several nodes


def test_two_nodes(run):
    variables = {"SSH_PORT": "2233", "HF_HOME": "/hf", "DEEPSEEK_TRITON_LAUNCH": LAUNCH}
    result = run(TWO_NODES, HOSTS="node1, node2", **variables)
    options, ranks, guarded = parts_of(result.argv)

    assert (options["--ranks"], options["--ranks-per-node"], options["--hosts"]) == ("16", "8", "node1,node2")
    assert ranks[0] == "mpirun"
    assert ranks[ranks.index("-H") + 1] == "node1:8,node2:8"
    assert ranks[-2:] == ["-n", "16"]
    assert {"PATH", "PYTHONPATH", "HF_HOME", "DEEPSEEK_TRITON_LAUNCH"} <= set(forwarded_by(ranks))
    assert "HF_TOKEN" not in forwarded_by(ranks)  # mpirun warns of a name that is not set
    assert guarded[:2] == ["trtllm-llmapi-launch", "tritonserver"]
    [line] = refusals(run(TWO_NODES, HOSTS="a"))
    assert line == "start.sh: expected 2 different nodes, as in HOSTS=node1,node2; got a"


# Slurm


@pytest.mark.parametrize(("request_", "tasks"), [(R1, "8"), (TWO_NODES, "16")], ids=["one-node", "two-nodes"])
def test_under_slurm_every_rank_is_a_guard(run, request_, tasks):
    step = {"SLURM_STEP_NUM_TASKS": tasks, "SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3"}
    first, second = (run(request_, INTERFACE="ib0", **step) for _ in range(2))

    assert first.argv[2:6] == ["rank", "--", "trtllm-llmapi-launch", "tritonserver"]
    assert first.argv == second.argv
    assert first.environment["DEEPSEEK_TRITON_LAUNCH"] == f"{1234 * 4096:08x}"
    assert first.environment["SLURM_PROCID"] == "3"
    tagged = run(request_, **step, DEEPSEEK_TRITON_LAUNCH=LAUNCH)
    assert tagged.environment["DEEPSEEK_TRITON_LAUNCH"] == LAUNCH
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include"):
        assert first.environment[name] == "ib0"


# The other engines


@pytest.mark.slow
def test_other_engines_have_one_guard_and_no_mpi(run):
    for request in (TINY, SIMULATED):
        options, ranks, guarded = parts_of(run(request, "a b", "", HTTP_PORT="9").argv)
        assert ranks == []
        assert guarded[0] == "tritonserver"
        assert guarded[-2:] == ["a b", ""]
        assert options["--http-port"] == options_of(guarded[1:-3])["--http-port"] == "9"
        assert "--ranks" not in options


# Odd values and refusals


@pytest.mark.slow
@pytest.mark.parametrize(
    "value", ["a b", "it's", 'say "x"', "$HOME`id`", "a;exit 3", "a\\b", "a\nb", "*", "", "ü"], ids=repr
)
def test_an_odd_value_reaches_the_server_and_the_printed_command_unchanged(run, value):
    assert run(TINY, "--log-file", value).argv[-2:] == ["--log-file", value]
    assert commands_of(run(TINY, "--log-file", value, DRY_RUN="1").output)[1][-2:] == ["--log-file", value]
    assert parts_of(run(TINY, READY_FILE=value).argv)[0].get("--ready-file", "") == value


def test_an_odd_value_of_a_variable_is_printed_unchanged(tmp_path):
    run = script_runner(tmp_path)
    values = {"ONE": "$HOME `id`", "TWO": "a'b", "THREE": "x y"}
    variables = tuple(EnvironmentVariable(name=name, value=text, reason="because") for name, text in values.items())

    printed = run(replace(make_plan(R1), environment=variables), "triton", DRY_RUN="1").output
    assert values.items() <= commands_of(printed)[0].items()


SET_BY = {
    "--http-port=9": "HTTP_PORT",
    "--http-port": "HTTP_PORT",
    "--grpc-port=9": "GRPC_PORT",
    "--metrics-port=9": "METRICS_PORT",
    "--http-address=::": "HTTP_ADDRESS",
    "--grpc-address=::": "GRPC_ADDRESS",
    "--metrics-address=::": "METRICS_ADDRESS",
    "--exit-timeout-secs=3": "EXIT_TIMEOUT",
    "--allow-http=false": "HTTP",
}


@pytest.mark.parametrize("request_", [R1, TINY], ids=["tensorrt-llm", "reference"])
def test_settings_that_the_supervisor_needs_are_refused_as_arguments(run, request_):
    lines = refusals(run(request_, *SET_BY, "9"))

    assert [line.removeprefix("start.sh: expected ").split(" to ")[0] for line in lines] == list(SET_BY.values())
    assert [argument for argument, line in zip(SET_BY, lines, strict=True) if argument not in line] == []


def test_arguments_with_a_similar_beginning_are_passed_on(run):
    similar = ["--http-thread-count=4", "--grpc-keepalive-time=1", "--exit-on-error=false"]
    assert run(R1, *similar).argv[-3:] == similar


def test_words_that_the_launcher_would_split_are_refused(run):
    for value in ("a b", "a\tb", "a\nb", ""):
        [line] = refusals(run(R1, "--log-file", value))
        assert "trtllm-llmapi-launch splits words" in line


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["my r1", "it's", '"', "$HOME `id`", "a;b", "ü", "-n *"])
def test_the_repository_may_lie_in_any_folder(tmp_path, folder):
    """The guard of rank 0 makes a link for a path that the launcher or Triton's Python backend would split."""
    run = script_runner(tmp_path, folder)
    repository = str(tmp_path / folder / "triton")
    for request in (TWO_NODES, TINY):
        options, _, guarded = parts_of(run(make_plan(request), "triton", HOSTS="a,b").argv)
        assert options["--repository"] == repository
        assert guarded[guarded.index("--model-repository") + 1] == repository


def test_all_refusals_are_printed_at_once(run):
    wrong = {"EXIT_TIMEOUT": "soon", "DEEPSEEK_TRITON_LAUNCH": "../x", "HOSTS": "a"}
    lines = refusals(run(TWO_NODES, "--http-port=1", "a b", CLOSED[0].replace("trace", "health"), **wrong))

    assert [line.removeprefix("start.sh: expected ").split()[0] for line in lines] == [
        *["eight", "whole", "--http-restricted-api", "HTTP_PORT", "a", "2"]
    ]


def test_a_variable_that_is_no_such_number_is_refused(run):
    """The shell computes with the value, and would run a command inside an array index."""
    assert parts_of(run(R1, EXIT_TIMEOUT="").argv)[0]["--exit-timeout"] == "30"
    for value in ("08", "-1", "1.5", "1+1", "a[$(id)]", "9999999"):
        assert refusals(run(R1, EXIT_TIMEOUT=value)) == [
            f"start.sh: expected whole seconds as EXIT_TIMEOUT; got '{value}'"
        ]
    others = {"HTTP_PORT": "x", "GRPC_PORT": "0", "METRICS_PORT": "65536", "READY_WITHIN": "-1", "MAX_RESTARTS": "1.5"}
    ends = [f" as {name}; got '{value}'" for name, value in others.items()]
    assert [line[line.index(" as ") :] for line in refusals(run(R1, **others))] == ends


# Where the script lies


@pytest.mark.slow
def test_a_script_finds_its_own_folder(tmp_path):
    (tmp_path / "elsewhere/folder").mkdir(parents=True)
    for name in ("folder", "-folder"):
        write_repository(format_files("triton", make_plan(TINY), version="1.0"), tmp_path / name)
    (tmp_path / "link.sh").symlink_to("folder/start.sh")
    for cwd, command, folder in [
        (".", "folder/start.sh", "folder"),
        (".", "link.sh", "folder"),
        (".", "-folder/start.sh", "-folder"),
        ("folder", "start.sh", "folder"),
    ]:
        environment = {"PATH": os.environ["PATH"], "DRY_RUN": "1", "CDPATH": "elsewhere"}
        done = subprocess.run(
            ["bash", "--", command], cwd=tmp_path / cwd, env=environment, capture_output=True, text=True, check=True
        )
        assert parts_of(commands_of(done.stdout)[1])[0]["--repository"] == str(tmp_path / folder)
