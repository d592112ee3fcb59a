"""`warm --form`: what is printed can be used as it is, and its numbers follow from what is served."""

import json
import math
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from bench.synthetic_checkpoint import make_checkpoint

from deepseek_triton_tools.cli import main
from deepseek_triton_tools.warming import forms, take_survey
from deepseek_triton_tools.warming.residency import evict

ROOT = Path(__file__).resolve().parents[2]
FORMS = ("init-container", "systemd", "slurm-prolog")
GIB = 2**30
R1_BYTES = 688574839360
AWKWARD = 'a "b" $HOME %n \\t it\'s'


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """R1 for 8 x H200, by its Hugging Face name, which is on no test's machine."""
    folder = tmp_path_factory.mktemp("repository") / "r1"
    assert main(["build", "deepseek-r1", "--gpu", "h200", "--gpus", "8", "--output", str(folder)]) == 0
    return folder


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / AWKWARD / "R1"
    make_checkpoint(folder, size=2 * 10**6)
    return folder


@pytest.fixture
def form(capsys):
    def render(name, source, *options):
        capsys.readouterr()
        assert main(["warm", str(source), "--form", name, *options]) == 0
        return capsys.readouterr().out

    return render


def comments(text):
    """All of them, as one line."""
    return " ".join(line.strip().removeprefix("# ") for line in text.splitlines() if line.strip().startswith("#"))


# Every form


@pytest.mark.parametrize("name", FORMS)
def test_every_number_has_its_reason(form, repository, name):
    text = form(name, repository, "--rate", "2GB")

    assert f"{R1_BYTES:,} bytes (by the catalogue, computed for deepseek-ai/DeepSeek-R1" in comments(text)
    assert f"(as given by --rate) take {math.ceil(R1_BYTES / 2e9)} s" in comments(text)
    assert "assumed" in comments(form(name, repository))
    assert "@@" not in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("name", FORMS)
def test_a_checkpoint_that_is_here_is_counted(form, checkpoint, name):
    size = take_survey([str(checkpoint)]).size

    assert f"{size:,} bytes (by its files)" in comments(form(name, checkpoint))


def test_the_templates_are_in_the_wheel(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for file in forms._TEMPLATES.values():
        assert f"deepseek_triton_tools/warming/templates/{file}" in names


def test_a_checkpoint_of_unknown_size_is_refused(tmp_path, capsys):
    version = tmp_path / "repo/model/1"
    version.mkdir(parents=True)
    (version / "model.yaml").write_text("model: /nowhere/Mine\n")

    assert main(["warm", str(tmp_path / "repo"), "--form", "systemd"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "/nowhere/Mine is neither on this machine nor known by name" in line


def test_what_has_no_weights_is_refused(tmp_path, capsys):
    assert main(["build", "tiny", "--output", str(tmp_path / "tiny")]) == 0
    capsys.readouterr()
    assert main(["warm", str(tmp_path / "tiny"), "--form", "systemd"]) == 1
    assert "nothing to warm" in capsys.readouterr().err


def test_a_folder_of_the_container_is_known_by_the_stamp(form, tmp_path):
    repository = str(tmp_path / "r1")
    assert main(["build", "deepseek-r1", "--gpu", "h200", "--model", "/models/mine", "--output", repository]) == 0

    [mount] = yaml.safe_load(form("init-container", repository))["initContainers"][0]["volumeMounts"]
    assert mount == {"name": "checkpoint-1", "mountPath": "/models/mine", "readOnly": True}


# Kubernetes


def test_the_init_container_has_room_for_what_it_reads(form, repository):
    pod = yaml.safe_load(form("init-container", repository, "--rate", "2GB"))
    [warm], [server] = pod["initContainers"], pod["containers"]

    stamp = json.loads((repository / "tensorrt_llm/deepseek-triton.json").read_text())
    assert warm["image"] == stamp["image"]
    assert warm["args"] == ["deepseek-ai/DeepSeek-R1"]
    assert warm["command"][:2] == ["sh", "-c"]
    assert '"$@" --then true' in warm["command"][2]
    for container in (warm, server):
        memory = container["resources"]["limits"]["memory"]
        assert int(memory.removesuffix("Gi")) * GIB >= R1_BYTES / 0.9
        assert container["resources"]["requests"]["memory"] == memory
        assert container["env"] == [{"name": "HF_HUB_CACHE", "value": "/models/hub"}]
        assert [mount["readOnly"] for mount in container["volumeMounts"]] == [True]
    assert server["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert {volume["name"] for volume in pod["volumes"]} == {"hub"}


@pytest.mark.parametrize("rate", [10**8, 2 * 10**9])
def test_the_startup_probe_waits_for_a_cold_load(form, repository, rate):
    pod = yaml.safe_load(form("init-container", repository, "--rate", str(rate)))

    probe = pod["containers"][0]["startupProbe"]
    assert probe["httpGet"] == {"path": "/v2/health/ready", "port": 8000}
    spare = probe["failureThreshold"] * probe["periodSeconds"] - R1_BYTES / rate
    assert forms.ENGINE_START_S <= spare < forms.ENGINE_START_S + 2 * forms.PERIOD_S


def test_a_checkpoints_own_form_has_an_image_with_python(form, checkpoint):
    pod = yaml.safe_load(form("init-container", checkpoint))

    assert pod["initContainers"][0]["image"] == "python:3.12-slim"
    assert pod["initContainers"][0]["args"] == [str(checkpoint).replace("$", "$$")]
    assert pod["initContainers"][0]["volumeMounts"][0]["mountPath"] == str(checkpoint)
    assert "nvidia.com/gpu" not in pod["containers"][0]["resources"]["limits"]


def test_what_the_init_container_runs_warms(form, checkpoint, tmp_path):
    [warm] = yaml.safe_load(form("init-container", checkpoint))["initContainers"]
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "pip").symlink_to(shutil.which("true"))
    evict_all(checkpoint)
    environment = {**os.environ, "PATH": f"{tools}:{Path(forms._program()).parent}:{os.environ['PATH']}"}
    words = [*warm["command"], *(text.replace("$$", "$") for text in warm["args"])]

    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert is_warm(checkpoint)


def evict_all(folder):
    for path in folder.glob("*.safetensors"):
        evict(path)


def is_warm(folder):
    survey = take_survey([str(folder)])
    return survey.resident in (None, survey.size)


# systemd


def settings(text):
    lines = [line for line in text.splitlines() if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def test_the_unit_is_ready_when_the_files_are_held(form, repository, tmp_path):
    unit = settings(form("systemd", repository, "--rate", "2GB"))

    assert unit["Type"] == "notify"
    assert unit["LimitMEMLOCK"] == "infinity"
    assert unit["Before"] == "tritonserver.service"
    assert unit["RequiresMountsFor"] == f"{tmp_path}/hub"
    assert unit["Environment"] == f"HF_HUB_CACHE={tmp_path}/hub"
    assert unit["ExecStart"].endswith(" warm deepseek-ai/DeepSeek-R1 --hold")
    assert int(unit["TimeoutStartSec"]) >= 2 * R1_BYTES / 2e9


def test_names_that_systemd_would_change_are_written_so_that_it_does_not(form, checkpoint):
    text = form("systemd", checkpoint)

    quoted = str(checkpoint).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    assert f'\nRequiresMountsFor="{quoted}"\n' in text
    dollars = quoted.replace("$", "$$")  # of commands alone
    assert f' warm "{dollars}" --hold\n' in text


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not here")
@pytest.mark.parametrize("kind", ["repository", "checkpoint"])
def test_systemd_takes_the_unit(form, request, tmp_path, kind):
    # Not below /tmp/<name>.service: systemd takes an empty file or a link to nothing for a masked unit.
    path = tmp_path / "units" / "warm-checkpoint.service"
    path.parent.mkdir()
    path.write_text(form("systemd", request.getfixturevalue(kind)))
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True)

    about_it = [line for line in done.stderr.splitlines() if "warm-checkpoint" in line]
    assert (done.returncode, about_it) == (0, [])


# Slurm


@pytest.fixture
def prolog(form, tmp_path):
    """Run the prolog for `source` as slurmd would: without a search path, as the first task of a node."""

    def run(source, **environment):
        script, log = tmp_path / "prolog.sh", tmp_path / "warm.log"
        script.write_text(form("slurm-prolog", source))
        usual = {"DEEPSEEK_TRITON_WARM_LOG": str(log), "DEEPSEEK_TRITON_WARM_LOCK": str(tmp_path / "lock")}
        environment = usual | environment
        done = subprocess.run(["/bin/bash", script], env=environment, capture_output=True, text=True)
        return done, log.read_text() if log.exists() else ""

    return run


def test_the_prolog_is_bash(form, repository, tmp_path):
    (tmp_path / "prolog.sh").write_text(form("slurm-prolog", repository))

    assert subprocess.run(["bash", "-n", tmp_path / "prolog.sh"]).returncode == 0


def test_the_prolog_warms_and_says_so_in_its_log(prolog, checkpoint):
    evict_all(checkpoint)
    done, log = prolog(checkpoint, SLURM_JOB_ID="77")

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert is_warm(checkpoint)
    assert "job 77: warming" in log
    assert log.splitlines()[-1].endswith("job 77: warm")


def test_a_prolog_that_fails_does_not_drain_the_node(prolog, checkpoint):
    first = next(checkpoint.glob("*.safetensors"))
    os.truncate(first, first.stat().st_size - 1)
    done, log = prolog(checkpoint)

    assert (done.returncode, done.stdout) == (0, "")
    assert "not all warm (exit code 1)" in log.splitlines()[-1]
    assert str(first) in log


@pytest.mark.parametrize("where", ["log", "lock"])
def test_a_prolog_that_cannot_write_its_log_or_lock_ends_well(prolog, checkpoint, tmp_path, where):
    name = f"DEEPSEEK_TRITON_WARM_{where.upper()}"
    done, log = prolog(checkpoint, **{name: str(tmp_path / "no folder" / "file")})

    assert (done.returncode, done.stdout) == (0, "")
    assert ("warm" in done.stderr) if where == "log" else ("can't be locked: not warmed" in log)


def test_one_rank_of_a_node_does_it(prolog, checkpoint):
    done, log = prolog(checkpoint, SLURM_LOCALID="3")

    assert (done.returncode, done.stdout, log) == (0, "", "")
