"""Variables that are set for the engine where `launch` runs: each form hands them on, with their values unchanged."""

import subprocess
from itertools import pairwise

import pytest
import yaml

from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.launching.containers import KERNELS_MOUNT

SET = {
    "TRTLLM_DG_ENABLED": "0",
    "PYTORCH_ALLOC_CONF": "max_split_size_mb:8192",
    "NCCL_DEBUG_SUBSYS": """it's "a,b"  $HOME `id` $(id) \\ """,
}
PATHS = {"CUDA_HOME": "/opt/cuda 12", "NCCL_TOPO_FILE": "/etc/topo.xml"}
OTHERS = {"CUDA_VISIBLE_DEVICES": "0", "HF_TOKEN": "hf_not_to_be_seen", "MINE": "1"}
OTHERS["TRITON_CACHE_DIR"] = "/home/me/.triton"
HOSTS = ["--hosts", "localhost,node2"]
FORMS = {
    "local": ("r1", [], False),
    "mpirun": ("r1x2", HOSTS, False),
    "slurm": ("r1x2", [], True),
    "slurm without a container": ("r1x2", ["--no-container"], False),
    "docker": ("r1", [], True),
    "ssh-setup": ("r1x2", HOSTS, True),
    "kubernetes": ("r1x2", ["--image", "mine"], True),
}
"""Form -> repository, options, and whether the server runs in a container."""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    for name, gpus in (("r1", ["h200", "--gpus", "8"]), ("r1x2", ["h100", "--gpus", "16"])):
        assert main(["build", "deepseek-r1", "--gpu", *gpus, "--output", str(folder / name)]) == 0
    return folder


@pytest.fixture
def launched(built, tmp_path, monkeypatch, capsys):
    """Gives what a form prints, and what is complained of."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name, value in (SET | PATHS | OTHERS).items():
        monkeypatch.setenv(name, value)

    def run(form, *options):
        repository, more, _ = FORMS[form]
        verb = form.split()[0]
        dry = [] if verb == "ssh-setup" else ["--dry-run"]
        capsys.readouterr()
        assert main(["launch", verb, str(built / repository), *dry, *more, *options]) == 0
        return capsys.readouterr()

    return run


def in_shell(script):
    """Run `script` in an almost empty environment, and return what it prints between zero bytes."""
    environment = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def server_variables(form, text):
    """Return the variables that the text sets for the server."""
    if form == "kubernetes":
        documents = {document["kind"]: document for document in yaml.safe_load_all(text)}
        group = documents["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
        pods = [group[name]["spec"]["containers"][0]["env"] for name in ("leaderTemplate", "workerTemplate")]
        leader, worker = ({entry["name"]: entry["value"].replace("$$", "$") for entry in pod} for pod in pods)
        assert {name: worker.get(name) for name in SET} == {name: leader.get(name) for name in SET}
        return leader
    if form == "docker":
        words = in_shell(f"{text.rpartition('exec ')[0]} printf '%s\\0' \"${{command[@]}}\"")
        settings = [word for option, word in pairwise(words) if option == "--env"]
    elif form == "ssh-setup":
        [line] = [line for line in text.splitlines() if line.startswith("  local variables=(")]
        settings = in_shell(f"port=1 ssh_args=; {line.removeprefix('  local ')}; printf '%s\\0' \"${{variables[@]}}\"")
    else:
        exports = [line for line in text.splitlines() if line.startswith("export ") and "=" in line]
        settings = in_shell("\n".join([*exports, "env -0"]))
    return dict(setting.split("=", 1) for setting in settings if "=" in setting)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_hands_them_on(launched, form):
    text, said = launched(form)
    variables = server_variables(form, text)
    assert SET.items() <= variables.items()
    assert not {"CUDA_VISIBLE_DEVICES", "HF_TOKEN", "MINE"} & variables.keys()
    assert OTHERS["HF_TOKEN"] not in text
    if FORMS[form][2]:  # in a container
        assert not PATHS.keys() & variables.keys()
        assert variables.get("TRITON_CACHE_DIR", KERNELS_MOUNT).startswith(KERNELS_MOUNT)
        notes = [line for line in said.splitlines() if " is left out, because " in line]
        assert [line.split()[1] for line in notes] == list(PATHS)
        assert "note: CUDA_HOME is left out, because /opt/cuda 12 is a path of this machine" in notes[0]
    else:
        assert PATHS.items() <= variables.items()
    if form == "slurm":  # they win over the image's
        [names] = [word.partition("=")[2] for word in text.split() if word.startswith("--container-env=")]
        assert set(names.split(",")) == set(SET)
    text, said = launched(form, "--env", "TRTLLM_DG_ENABLED=1", "--env", "CUDA_HOME=/usr/local/cuda")
    variables = server_variables(form, text)  # an option wins over them
    assert (variables["TRTLLM_DG_ENABLED"], variables["CUDA_HOME"]) == ("1", "/usr/local/cuda")
    assert "CUDA_HOME is left out" not in said
