"""`launch`: what is refused, what is run and what is printed, stop and list."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deepseek_launcher.server_processes import DEFAULT_EXIT_TIMEOUT_S, PATIENCE_S
from deepseek_triton_build.text import plain
from deepseek_triton_tools.cli.launch import FORMS
from deepseek_triton_tools.cli.launch_arguments import FORMS as FORM_NAMES
from deepseek_triton_tools.cli.launch_options import FORM_OPTIONS, OTHERS
from deepseek_triton_tools.cli.main import _parser, main
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.repository.launch_facts import facts_of
from support.recording import become_by, recording

ROOT = Path(__file__).resolve().parents[2]
BUILDS = {
    "r1": ["deepseek-r1", "--gpu", "h200", "--gpus", "8"],
    "r1x2": ["deepseek-r1", "--gpu", "h100", "--gpus", "16", "--model", "/models/DeepSeek-R1"],
    "tiny": ["tiny"],
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    for name, options in BUILDS.items():
        assert main(["build", *options, "--output", str(folder / name)]) == 0
    return folder


@pytest.fixture
def refusal(built, monkeypatch, capsys):
    """The one line with which a command line is refused."""
    monkeypatch.chdir(built)

    def run(*argv, code=2):
        capsys.readouterr()
        assert main(["launch", *argv]) == code
        captured = capsys.readouterr()
        [line] = captured.err.splitlines()
        assert (captured.out, line[:24]) == ("", "deepseek-triton launch: ")
        return line

    return run


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["r1"], "name a form: --with local, docker, mpirun, slurm, kubernetes"),
        (["r1", "--with", "docker", "--dry-run", "--submit"], "expected --dry-run or --submit, got both"),
        (["r1", "--with", "docker", "--recipe", "image"], "expected --recipe or --with, got both"),
        (["r1", "tiny", "--with", "docker"], "expected one folder, got r1, tiny"),
        (["r1", "--with", "docker", "--hosts", "a,b"], "--hosts is not for docker but for mpirun"),
        (["r1", "--with", "local", "--image", "x"], "--image is not for local but for docker, slurm, kubernetes"),
        (["r1", "--with", "slurm", "--now"], "--now is not for slurm but for launch stop"),
        (["r1", "--recipe", "image", "--partition", "x"], "--partition is not for --recipe but for slurm"),
        (["r1", "--recipe", "image", "--", "--x"], "ARGS after -- is not for --recipe"),
        (["tiny", "--recipe", "wheel"], "a recipe is for TensorRT-LLM"),
        (["r1", "--with", "docker", "--grpc-port", "8000"], "need a port each, got 8000, 8000, 8002"),
        (["r1", "--with", "docker", "--env", "HTTP_PORT=1"], "--env HTTP_PORT: say it with --http-port"),
        (["r1x2", "--with", "local"], "takes 2 nodes: use launch mpirun, slurm or kubernetes"),
        (["r1x2", "--with", "docker"], "takes 2 nodes, and docker starts one container: use launch ssh-setup"),
        (["r1", "--with", "mpirun", "--hosts", "a"], "takes one node: use launch local or docker"),
        (["r1x2", "--with", "mpirun"], "name the 2 nodes, this one first: --hosts node1,node2"),
        (["r1x2", "--with", "mpirun", "--ssh-setup", "--submit"], "expected --ssh-setup or --submit, got both"),
        (["r1", "--with", "docker", "--", "--http-port=1"], "expected HTTP_PORT to be set"),
        (["stop"], "launch stop takes what to stop"),
        (["stop", "--all", "1a2b3c4d"], "launch stop takes what to stop"),
        (["stop", "--all", "--with", "docker", "--http-port", "1"], "--http-port is not for launch stop"),
        (["stop", "r9", "1A2B3C4D"], "r9 is neither a folder here nor an ID of eight hexadecimal digits"),
        (["r1", "--with", "kubernetes", "--address", "::1"], "--address is not for kubernetes but for local, docker"),
        (["r1", "--with", "docker", "--env", "HTTP_ADDRESS=::1"], "--env HTTP_ADDRESS: say it with --address"),
        (["r1", "--with", "docker", "--env", "X=\udcff", "--dry-run"], "expected paths and values in UTF-8, got"),
        (["r1", "--with", "docker", "--env", "DEEPSEEK_TRITON_LAUNCH=x", "--dry-run"], "expected eight hexadecimal"),
        (["r1", "--with", "docker", "--exit-timeout", "1000000"], "--exit-timeout: expected a number from 0 to 999999"),
        (["r1", "--with", "kubernetes", "--exit-timeout", "1000000"], "--exit-timeout: expected a number from 0 to"),
        (["r1", "--with", "kubernetes", "--ready-within", "9" * 20], "--ready-within: expected a number from 0 to"),
        (
            ["r1", "--with", "kubernetes", "--env", "HF_TOKEN=x"],
            "--env HF_TOKEN: everybody who sees the pods",
        ),
        (["r1", "--with", "kubernetes", "--", "--http-port=9"], "start.sh: expected HTTP_PORT to be set"),
        (["r1x2", "--with", "kubernetes", "--", "a b"], "start.sh: expected a path or value without spaces"),
        (["stop", "r1", "--with", "docker"], "--with is not for launch stop"),
        (["list", "--with", "docker"], "--with is not for launch list"),
        (["stop", ""], "an empty text is neither a folder here nor an ID"),
        (["list", "x"], "launch list takes no names, got x"),
        (["list", "--all"], "--all is not for launch list but for launch stop"),
    ],
)
def test_what_can_not_be_is_refused(refusal, argv, expected):
    assert expected in refusal(*argv)


@pytest.mark.parametrize(
    "option",
    [
        *("--ready-file", "--interface", "--image", "--name", "--gpus", "--cache-dir", "--network", "--restart"),
        *("--host-file", "--partition", "--python", "--namespace", "--claim", "--measured"),
    ],
)
def test_the_value_of_a_variable_that_is_not_set_is_refused(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["launch", "r1", "--with", "docker", "--dry-run", option, ""])
    assert f"argument {option}: expected " in capsys.readouterr().err


@pytest.mark.parametrize("image", ["a b", "--privileged"])
def test_an_image_that_docker_would_take_for_something_else_is_refused(image, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["launch", "r1", "--with", "docker", "--dry-run", f"--image={image}"])
    assert "argument --image: expected an image's name" in capsys.readouterr().err


def test_a_path_of_the_server_is_not_this_machines(built, capsys):
    argv = ["launch", str(built / "r1"), "--with", "docker", "--dry-run", "--env", "PATH=/opt/mine"]
    assert main(argv) == 0
    assert "--env PATH=/opt/mine" in capsys.readouterr().out


def test_without_bash_it_says_so(refusal, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "bash can't be run" in refusal("r1", "--with", "docker", "--dry-run", code=126)


def test_all_that_is_wrong_is_said_at_once(refusal):
    line = refusal("r1", "--with", "docker", "--hosts", "a", "--dry-run", "--submit", "--env", "EXIT_TIMEOUT=1")
    assert line.count("; ") == 2


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("nowhere", "nowhere is no folder; launch runs what deepseek-triton build writes"),
        ("", "the repository's name is empty"),
        (".", "has no start.sh; launch runs what deepseek-triton build writes"),
        ("r1/tensorrt_llm", "is one model of a repository: name"),
        ("bare", "has no model's folder beside its start.sh"),
        ("old", "was written before there was a launch"),
        ("unstamped", "has no deepseek-triton.json that can be read"),
        ("damaged", "has no deepseek-triton.json that can be read"),
        ("modeless", "modeless/start.sh can't be executed: chmod +x it"),
        ("unreadable", "unreadable/start.sh: can't be read: "),
        ("newer", "newer: its deepseek-triton.json names no GPU that this version of deepseek-triton knows"),
        ("n" * 5000, "is no folder; launch runs what deepseek-triton build writes"),
    ],
)
def test_a_folder_of_another_kind_is_refused(refusal, built, folder, expected):
    (built / "bare").mkdir(exist_ok=True)
    (built / "bare/start.sh").write_text("")
    for name in ("old", "unstamped", "damaged", "modeless"):
        shutil.copytree(built / "tiny", built / name, dirs_exist_ok=True)
    (built / "old/start.sh").write_text("exec tritonserver\n")
    [stamp] = (built / "unstamped").glob("*/deepseek-triton.json")
    stamp.unlink()
    (built / "damaged" / stamp.relative_to(built / "unstamped")).write_text("{")
    (built / "modeless/start.sh").chmod(0o644)
    shutil.rmtree(built / "unreadable", ignore_errors=True)
    shutil.copytree(built / "tiny", built / "unreadable")
    (built / "unreadable/start.sh").unlink()
    (built / "unreadable/start.sh").symlink_to("/proc/self/mem")  # root could read one without permission
    shutil.copytree(built / "r1", built / "newer", dirs_exist_ok=True)
    [stamp] = (built / "newer").glob("*/deepseek-triton.json")
    stamp.write_text(stamp.read_text().replace('"h200"', '"h900"'))

    assert expected in refusal(folder, "--with", "docker", code=1)


def test_a_start_sh_in_another_encoding_is_one(built, tmp_path, capsys):
    shutil.copytree(built / "r1", tmp_path / "edited")
    with (tmp_path / "edited/start.sh").open("ab") as script:
        script.write("# für uns\n".encode("latin-1"))

    assert main(["launch", str(tmp_path / "edited"), "--with", "docker", "--dry-run"]) == 0
    assert "/edited/start.sh\n" in capsys.readouterr().out


def test_a_world_of_another_size_is_refused(refusal, built, tmp_path):
    folder = tmp_path / "edited"
    shutil.copytree(built / "r1x2", folder)
    model_yaml = folder / "tensorrt_llm/1/model.yaml"
    model_yaml.write_text(model_yaml.read_text().replace("tensor_parallel_size: 16", "tensor_parallel_size: 8"))

    assert "model.yaml asks for 8 ranks, start.sh starts 16" in refusal(str(folder), "--with", "slurm", code=1)


def test_a_variable_of_start_sh_is_the_default(built, monkeypatch, capsys):
    monkeypatch.setenv("HTTP_PORT", "9000")
    monkeypatch.setenv("EXIT_TIMEOUT", "60")
    assert main(["launch", str(built / "r1"), "--with", "docker", "--dry-run", "--exit-timeout", "90"]) == 0

    out = capsys.readouterr().out
    assert "--env HTTP_PORT=9000" in out
    assert "--env EXIT_TIMEOUT=90" in out


@pytest.mark.parametrize("value", ["http", "9" * 5000])
def test_a_variable_of_start_sh_that_is_none_is_refused(refusal, monkeypatch, value):
    monkeypatch.setenv("HTTP_PORT", value)
    line = refusal("r1", "--with", "docker")
    assert f"HTTP_PORT: expected a number from 1 to 65535, got {plain(value)}" in line


@pytest.mark.parametrize(
    ("form", "repository", "more", "program"),
    [
        ("docker", "r1", [], "docker"),
        ("mpirun", "r1x2", ["--hosts", "a,b", "--submit"], "mpirun"),
        ("slurm", "r1", ["--submit"], "sbatch"),
        ("kubernetes", "r1", ["--submit"], "kubectl"),
    ],
)
def test_a_program_that_is_not_here_is_named(refusal, monkeypatch, tmp_path, form, repository, more, program):
    monkeypatch.setenv("PATH", str(tmp_path))
    expected = f"{program} is not on PATH: run it where it is"
    assert expected in refusal(repository, "--with", form, *more, code=1)


def test_what_the_engine_needs_is_named_together(refusal, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    line = refusal("r1", "--with", "local", code=1)
    assert "not on PATH: mpirun, trtllm-llmapi-launch, tritonserver; run it in nvcr.io/nvidia/tritonserver:" in line


def test_every_option_belongs_to_something():
    [verbs] = [action for action in _parser()._actions if action.dest == "verb"]
    given = {action.dest for action in verbs.choices["launch"]._actions}

    known = frozenset({"what", "names", "form", "help"}).union(*FORM_OPTIONS.values(), *OTHERS.values())
    server = {"http_port", "grpc_port", "metrics_port", "exit_timeout", "ready_within", "max_restarts", "ready_file"}
    assert given - known == server | {"interface", "env", "dry_run", "submit"}
    assert frozenset().union(*FORM_OPTIONS.values()) <= given
    assert list(FORMS) == list(FORM_NAMES) == list(FORM_OPTIONS)


def test_what_follows_two_dashes_is_the_servers(built, monkeypatch, capsys):
    monkeypatch.chdir(built)
    argv = ["launch", "r1", "--with", "docker", "--dry-run", "--", "--log-verbose", "1", "--", "--with"]
    assert main(argv) == 0
    assert "/r1/start.sh --log-verbose 1 -- --with\n" in capsys.readouterr().out


def test_help_is_quick_to_import():
    program = (
        "import sys\nfrom deepseek_triton_tools.cli.main import main\n"
        "try:\n    main(['launch', '--help'])\nexcept SystemExit:\n"
        "    print(sorted({'httpx', 'rich', 'yaml', 'deepseek_triton_build'} & set(sys.modules)))"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == "[]"


def test_the_templates_are_in_the_wheel(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for file in ("slurm.sh", "ssh-setup.sh", "recipe-image.sh", "recipe-wheel.sh"):
        assert f"deepseek_triton_tools/launching/templates/{file}" in names


def test_facts_of_what_was_built(built):
    one, two, tiny = (facts_of(str(built / name)) for name in BUILDS)

    assert (one.nodes, one.ranks_per_node, one.gpus_per_node, one.gpu, one.sm) == (1, 8, 8, "h200", 90)
    assert (two.nodes, two.ranks_per_node, two.mounts) == (2, 8, {"/models/DeepSeek-R1": "/models/DeepSeek-R1"})
    assert (tiny.world_size, tiny.gpus_per_node, tiny.image, tiny.serving) == (1, 0, None, None)
    assert one.ready_within_s == two.ready_within_s == 5280
    assert one.shm_bytes == 9 * 2**30


# Recipes


@pytest.mark.parametrize("kind", ["image", "wheel"])
def test_a_recipe_runs_with_the_release_and_the_gpu_of_the_plan(built, capsys, tmp_path, kind):
    assert main(["launch", str(built / "r1"), "--recipe", kind]) == 0
    text = capsys.readouterr().out
    assert "@@" not in text
    programs = {name: recording(tmp_path / "bin", name) for name in ("docker", "git-lfs", "make")}
    git = recording(tmp_path / "bin", "git", after="if 'clone' in sys.argv: os.makedirs(sys.argv[-1])")
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "JOBS": "3"}

    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    clone, *others = [call["args"] for call in git.calls]
    assert clone[:3] == ["clone", "--branch", "v1.2.1"]
    assert ["lfs", "pull"] in others
    assert ["submodule", "update", "--init", "--recursive"] in others
    if kind == "image":
        assert programs["make"].args[:3] == ["-C", "docker", "tritonrelease_build"]
        assert {"CUDA_ARCHS=90-real", "BUILD_WHEEL_OPTS=-j 3"} < set(programs["make"].args)
    else:
        run, build = [call["args"] for call in programs["docker"].calls]
        assert run[-4:] == ["--cuda_architectures", "90-real", "-j", "3"]
        assert "nvcr.io/nvidia/tensorrt-llm/devel:1.2.1" in run
        assert build[0] == "build"


# Stop and list


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["list", "--json"], ["list", "--json"]),
        (["stop", "1a2b3c4d", "--now"], ["stop", "1a2b3c4d", "--now"]),
        (["stop", "--now", "1a2b3c4d", "5e6f7a8b"], ["stop", "1a2b3c4d", "5e6f7a8b", "--now"]),
        (["stop", "--all"], ["stop", "--all"]),
        (["stop", "./r1", "1a2b3c4d"], ["stop", "--repository", "{cwd}/r1", "1a2b3c4d"]),
        (["stop", "gone/r1"], ["stop", "--repository", "{cwd}/gone/r1"]),
    ],
)
def test_stop_and_list_are_the_supervisors(argv, expected, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    python, supervisor, *words = become_by(monkeypatch, "launch", *argv)

    assert (python, Path(supervisor).name) == (sys.executable, "supervise.py")
    assert words == [word.format(cwd=tmp_path) for word in expected]


LIST = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "launch", "list", "--json"]


def test_list_says_what_runs(tmp_path):
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "DEEPSEEK_TRITON_LAUNCH": "1a2b3c4d"}
    with subprocess.Popen(["sleep", "1000"], env=environment) as marked:
        try:
            done = subprocess.run(LIST, capture_output=True, text=True, check=True)
        finally:
            marked.kill()

    [launch] = [launch for launch in json.loads(done.stdout) if launch["id"] == "1a2b3c4d"]
    assert (launch["state"], launch["processes"]) == ("no supervisor", 1)


def test_a_reader_of_the_list_may_leave():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(LIST, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)

    assert (done.returncode, done.stderr) == (0, b"")


def test_all_of_it_waits_as_long_as_the_supervisor(built):
    """The supervisor, in a stock container, has none of these modules."""
    times = LaunchOptions().stop_times

    assert times.supervisor_kill_s == DEFAULT_EXIT_TIMEOUT_S + PATIENCE_S
    assert f'exit_timeout="${{EXIT_TIMEOUT:-{times.exit_timeout_s}}}"' in (built / "r1/start.sh").read_text()
    assert f"exit_timeout + {times.mpirun_kill_s - times.exit_timeout_s}))" in (built / "r1/start.sh").read_text()
    assert times.exit_timeout_s < times.supervisor_kill_s < times.mpirun_kill_s < times.docker_stop_timeout_s
