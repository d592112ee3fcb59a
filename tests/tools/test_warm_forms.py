"""`warm form`: what is printed can be used as it is, and its numbers follow from what is served."""

import contextlib
import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from deepseek_triton_build.arithmetic import ENGINE_START_S
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.warming import forms, take_survey
from deepseek_triton_tools.warming.page_cache import evict
from support.cached_checkpoint import write_checkpoint
from support.waiting import PATIENCE_S, wait_for

FORMS = ("init-container", "systemd", "slurm-prolog")
GIB = 2**30
R1_BYTES = 688574839360
AWKWARD = 'a "b" $HOME %n \\t it\'s'


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """R1 for 8 x H200 by its Hugging Face name, which no machine that runs this test has."""
    return Path(built(tmp_path_factory.mktemp("repository") / "r1", "--gpu", "h200", "--gpus", "8"))


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / AWKWARD / "R1"
    write_checkpoint(folder)
    return folder


@pytest.fixture
def form(capsys):
    def render(name, source, *options):
        capsys.readouterr()
        assert main(["warm", "form", name, str(source), *options]) == 0
        return capsys.readouterr().out

    return render


def built(folder, *options):
    assert main(["build", "deepseek-r1", *options, "--output", str(folder)]) == 0
    return str(folder)


def comments(text):
    """All comments, as one line."""
    return " ".join(line.strip().removeprefix("# ") for line in text.splitlines() if line.strip().startswith("#"))


def mounts(pod):
    return pod["initContainers"][0]["volumeMounts"]


@pytest.mark.parametrize("name", FORMS)
def test_every_number_has_its_reason(form, repository, checkpoint, name):
    text = form(name, repository, "--rate", "2GB")
    assert f"{R1_BYTES:,} bytes (by the catalogue, computed for deepseek-ai/DeepSeek-R1" in comments(text)
    assert f"(as given by --rate) take {math.ceil(R1_BYTES / 2e9)} s" in comments(text)
    assert "assumed" in comments(form(name, repository))
    assert "@@" not in text
    size = take_survey([str(checkpoint)]).size
    assert f"{size:,} bytes (by its files)" in comments(form(name, checkpoint))


def test_a_checkpoint_of_unknown_size_or_without_weights_is_refused(tmp_path, capsys):
    cases = {"model: /nowhere/Mine\n": "/nowhere/Mine is neither on this machine nor known by name"}
    cases["model: tiny\ntriton_config:\n  engine: simulated\n"] = "the simulated engine reads no weights"
    for number, (text, said) in enumerate(cases.items()):
        path = tmp_path / str(number) / "model/1/model.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        assert main(["warm", "form", "systemd", str(tmp_path / str(number))]) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert said in line


@pytest.mark.parametrize("rate", [10**8, 2 * 10**9])
def test_the_init_container_has_room_and_time_for_what_it_reads(form, repository, rate):
    pod = yaml.safe_load(form("init-container", repository, "--rate", str(rate)))
    [warm], [server] = pod["initContainers"], pod["containers"]
    words = "deepseek-triton warm files deepseek-ai/DeepSeek-R1 --then true"
    assert [*warm["command"], *warm["args"]] == words.split()
    for container in (warm, server):
        memory = container["resources"]["limits"]["memory"]
        assert int(memory.removesuffix("Gi")) * GIB >= R1_BYTES / 0.9
        assert container["resources"]["requests"]["memory"] == memory
        assert container["env"] == [{"name": "HF_HUB_CACHE", "value": "/models/hub"}]
        assert [mount["readOnly"] for mount in container["volumeMounts"]] == [True]
    assert server["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert {volume["name"] for volume in pod["volumes"]} == {"hub"}
    probe = server["startupProbe"]
    assert probe["httpGet"] == {"path": "/v2/health/ready", "port": 8000}
    spare = probe["failureThreshold"] * probe["periodSeconds"] - R1_BYTES / rate
    assert ENGINE_START_S <= spare < ENGINE_START_S + 2 * forms.PERIOD_S


def test_the_image_is_to_be_replaced_by_one_that_is_made_as_the_comment_says(form, repository, checkpoint):
    stamp = json.loads((repository / "tensorrt_llm/deepseek-triton.json").read_text())
    for source, base in ((repository, stamp["image"]), (checkpoint, "python:3.12-slim")):
        text = form("init-container", source)
        [warm] = yaml.safe_load(text)["initContainers"]
        lines = [line.strip().removeprefix("#").strip() for line in text.splitlines()]
        assert warm["image"].startswith("YOUR-REGISTRY/")
        assert "REPLACE" in comments(text)
        assert f"FROM {base}" in lines
        assert f"COPY deepseek_triton-{__version__}-py3-none-any.whl /tmp/" in lines  # as hatchling names it
    assert warm["args"] == [str(checkpoint).replace("$", "$$"), "--then", "true"]
    assert warm["volumeMounts"][0]["mountPath"] == str(checkpoint)
    assert "nvidia.com/gpu" not in yaml.safe_load(text)["containers"][0]["resources"]["limits"]


def is_readable_in_a_pod(pod, folder):
    """Whether the path of each file leads through mounts only, with links followed."""
    places = [Path(mount["mountPath"]) for mount in mounts(pod)]
    paths = [each for path in folder.iterdir() for each in (path, Path(os.path.normpath(folder / os.readlink(path))))]
    return all(any(path.is_relative_to(place) for place in places) for path in paths)


@pytest.mark.slow
def test_what_is_mounted(form, checkpoint, tmp_path):
    # A folder of the container is known by the stamp.
    repository = built(tmp_path / "r1", "--gpu", "h200", "--model", "/models/mine")
    [mount] = mounts(yaml.safe_load(form("init-container", repository)))
    assert mount == {"name": "checkpoint-1", "mountPath": "/models/mine", "readOnly": True}
    # A snapshot of a Hugging Face cache has links to blobs, which are mounted with it.
    model = "/cache/models--deepseek-ai--DeepSeek-R1"
    repository = built(tmp_path / "cached", "--gpu", "h200", "--model", f"{model}/snapshots/0123abc")
    [mount] = mounts(yaml.safe_load(form("init-container", repository)))
    assert mount["mountPath"] == model
    model = tmp_path / "cache" / "models--deepseek-ai--Mine"
    snapshot = model / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    shutil.copytree(checkpoint, model / "blobs")
    for path in checkpoint.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    pod = yaml.safe_load(form("init-container", snapshot))
    [mount] = mounts(pod)
    assert (mount["mountPath"], pod["initContainers"][0]["args"][0]) == (str(model), str(snapshot))
    assert is_readable_in_a_pod(pod, snapshot)
    assert settings(form("systemd", snapshot))["RequiresMountsFor"].strip('"') == str(model)
    # So are folders that other links lead to.
    for is_relative in (True, False):
        linked = tmp_path / f"linked {is_relative}"
        linked.mkdir()
        for path in checkpoint.iterdir():
            (linked / path.name).symlink_to(os.path.relpath(path, linked) if is_relative else path)
        pod = yaml.safe_load(form("init-container", linked))
        assert len(pod["volumes"]) == 2
        assert is_readable_in_a_pod(pod, linked)


@pytest.mark.slow
def test_the_pod_has_the_gpus_of_one_node(form, tmp_path):
    for gpu, gpus, of_node in (("h100", 16, 8), ("h200", 8, 8), ("gb200", 4, 4)):
        text = form("init-container", built(tmp_path / gpu, "--gpu", gpu, "--gpus", str(gpus)))
        limits = yaml.safe_load(text)["containers"][0]["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == of_node
        assert f"for each of {of_node} ranks" in comments(text)
        assert (f"{gpus // of_node} nodes of {of_node}" in comments(text)) == (gpus > of_node)


def evict_all(folder):
    for path in folder.glob("*.safetensors"):
        evict(path)


def is_warm(folder):
    survey = take_survey([str(folder)])
    return survey.resident in (None, survey.size)


def settings(text):
    lines = [line for line in text.splitlines() if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def test_the_unit_is_ready_when_the_files_are_held(form, repository, checkpoint, tmp_path):
    unit = settings(form("systemd", repository, "--rate", "2GB"))
    assert unit["Type"] == "notify"
    assert unit["LimitMEMLOCK"] == "infinity"
    assert unit["Before"] == "tritonserver.service"
    assert unit["RequiresMountsFor"].strip('"') == f"{tmp_path}/hub"
    assert unit["Environment"].strip('"') == f"HF_HUB_CACHE={tmp_path}/hub"
    assert unit["ExecStart"].endswith(" warm files deepseek-ai/DeepSeek-R1 --hold")
    assert int(unit["TimeoutStartSec"]) >= 2 * R1_BYTES / 2e9
    text = form("systemd", checkpoint)  # names that systemd would change are written so that it does not
    quoted = str(checkpoint).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    assert f'\nRequiresMountsFor="{quoted}"\n' in text
    dollars = quoted.replace("$", "$$")  # of commands alone
    assert f' warm files "{dollars}" --hold\n' in text


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not here")
def test_systemd_takes_the_unit(form, repository, checkpoint, tmp_path):
    # Not below /tmp/<name>.service: systemd takes an empty file or a link to nothing for a masked unit.
    path = tmp_path / "units" / "warm-checkpoint.service"
    path.parent.mkdir()
    for source in (repository, checkpoint):
        path.write_text(form("systemd", source))
        done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True)
        about_it = [line for line in done.stderr.splitlines() if "warm-checkpoint" in line]
        assert (done.returncode, about_it) == (0, [])


@pytest.fixture
def prolog(form, tmp_path):
    """Run the prolog for `source` as slurmd would: without a search path, as the first task of a node."""

    def run(source, change=lambda text: text, **environment):
        script, log = tmp_path / "prolog.sh", tmp_path / "warm.log"
        # A small checkpoint has two seconds, in which Python may not even start on a machine with other work.
        script.write_text(change(with_limit(int(PATIENCE_S))(form("slurm-prolog", source))))
        usual = {"DEEPSEEK_TRITON_WARM_LOG": str(log), "DEEPSEEK_TRITON_WARM_LOCK": str(tmp_path / "lock")}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        argv = ["/bin/bash", script]
        with subprocess.Popen(argv, env=usual | environment, start_new_session=True, **pipes) as process:
            out, err = process.communicate()
            with contextlib.suppress(ProcessLookupError):  # as slurmd does with what a prolog has left
                os.killpg(process.pid, signal.SIGKILL)
        done = subprocess.CompletedProcess(script, process.returncode, out, err)
        return done, log.read_text() if log.exists() else ""

    return run


@pytest.mark.slow
def test_the_prolog_warms_and_says_so_in_its_log(prolog, checkpoint):
    evict_all(checkpoint)
    done, log = prolog(checkpoint, SLURM_LOCALID="3")  # only one rank of a node warms
    assert (done.returncode, done.stdout, log) == (0, "", "")
    done, log = prolog(checkpoint, SLURM_JOB_ID="77")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert is_warm(checkpoint)
    assert "job 77: warming" in log
    assert log.splitlines()[-1].endswith("job 77: warm")
    first = next(checkpoint.glob("*.safetensors"))
    os.truncate(first, first.stat().st_size - 1)
    done, log = prolog(checkpoint)  # a failure does not drain the node
    assert (done.returncode, done.stdout) == (0, "")
    assert "not all warm (exit code 1)" in log.splitlines()[-1]
    assert str(first) in log


@pytest.mark.slow
def test_a_prolog_that_cannot_write_its_log_or_lock_ends_well(prolog, checkpoint, tmp_path):
    nowhere = str(tmp_path / "no folder" / "file")
    done, _ = prolog(checkpoint, DEEPSEEK_TRITON_WARM_LOG=nowhere)
    assert (done.returncode, done.stdout, "warm" in done.stderr) == (0, "", True)
    done, log = prolog(checkpoint, DEEPSEEK_TRITON_WARM_LOCK=nowhere)
    assert (done.returncode, done.stdout, "can't be locked: not warmed" in log) == (0, "", True)


@pytest.mark.slow
def test_a_warm_up_in_the_background_outlives_its_prolog(prolog, checkpoint, tmp_path):
    evict_all(checkpoint)

    def in_background(text):
        late = text.replace('say "warming"', 'say "warming"; sleep 0.5')
        return late.replace('background=""', "background=yes")

    done, log = prolog(checkpoint, in_background, SLURM_JOB_ID="78")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "job 78: warm\n" not in log  # the job did not wait
    wait_for(lambda: "job 78: warm\n" in (tmp_path / "warm.log").read_text(), (tmp_path / "warm.log").read_text)
    assert is_warm(checkpoint)


def with_limit(seconds):
    def change(text):
        limit = next(line for line in text.splitlines() if line.startswith("limit="))
        return text.replace(limit, f"limit={seconds}")

    return change


@pytest.mark.slow
def test_waiting_for_the_lock_shortens_the_time_to_read(prolog, checkpoint, tmp_path):
    def change(text):
        # It becomes free at the last moment: the time that flock took, as bash counts it.
        return with_limit(5)(text).replace('flock -w "$limit" 9', 'flock -w "$limit" 9 && ((SECONDS += 5))')

    with (tmp_path / "lock").open("w") as lock:
        done, log = prolog(checkpoint, change)
        assert (done.returncode, "warming" in log) == (0, False)
        assert "out of time after 5 s" in log.splitlines()[-1]
        fcntl.flock(lock, fcntl.LOCK_EX)
        done, log = prolog(checkpoint, with_limit(1))
    assert done.returncode == 0
    assert "can't be locked in 1 s: not warmed" in log.splitlines()[-1]


def test_the_prolog_names_the_settings_of_slurm_conf(form, repository):
    text = form("slurm-prolog", repository, "--rate", "2GB")
    [limit] = [int(line.partition("=")[2]) for line in text.splitlines() if line.startswith("limit=")]
    assert limit == 2 * math.ceil(R1_BYTES / 2e9)
    for option in ("PrologTimeout", "PrologEpilogTimeout", "BatchStartTimeout"):
        assert option in comments(text)
    assert f"set them to {limit + forms.PROLOG_SPARE_S} or more" in comments(text)
    for option in ("PrologFlags=Alloc", "PrologFlags=RunInJob"):
        assert option in comments(text)
    assert "whatever happens" not in comments(text)
