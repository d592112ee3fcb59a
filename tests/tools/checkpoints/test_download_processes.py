"""Downloads in processes of their own: killed, with a full disk, two at once, and what the command line says."""

import os
import resource
import signal
import subprocess
import sys

import pytest

from deepseek_triton_tools.repository.hub_cache import unfinished_downloads
from support.hub_server import COMMIT, MODEL, Fault, one_tensor
from support.waiting import wait_for

SHARD = "model.safetensors"
FILES = {SHARD: one_tensor(500 * 1024), "config.json": b"{}"}


def start(hub, folder, *options, **settings):
    program = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "checkpoint", "download", MODEL]
    environment = os.environ | {"HF_ENDPOINT": hub.url.rstrip("/"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*program, "--to", str(folder), *options], env=environment, **pipes, **settings)


def partial_bytes(folder):
    return sum(path.stat().st_size for path in unfinished_downloads(folder))


@pytest.mark.slow
def test_a_killed_download_asks_only_for_what_is_missing(hub, folder, checkpoint):
    hub.faults[SHARD].append(Fault(hold_after=300_000))
    with start(hub, folder) as killed:
        wait_for(lambda: partial_bytes(folder) >= 200_000 and (folder / "config.json").exists())
        killed.kill()
    left = partial_bytes(folder)
    assert not (folder / SHARD).exists()
    with start(hub, folder, "--jobs", "1", "--rate-limit", "1GB", "--exclude", "*.md") as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert hub.asked(SHARD) == [0, left]
    assert hub.asked("config.json") == [0]
    assert (folder / SHARD).read_bytes() == FILES[SHARD]
    assert out == f"{folder}: 2 files of {MODEL}, 500 KiB, verified; {out.split('; ')[1]}; commit {COMMIT}\n"
    assert unfinished_downloads(folder) == []
    # What was downloaded can be verified.
    checkpoint("verify", folder)
    (folder / "config.json").write_text("[]")
    assert "config.json: its sha256 is" in checkpoint("verify", folder, code=1).out


@pytest.mark.slow
def test_of_two_at_once_one_downloads_and_the_other_waits_for_it(hub, folder):
    hub.always[SHARD] = Fault(hold_after=100_000)
    with start(hub, folder) as first:
        wait_for(lambda: hub.sent[SHARD] >= 100_000)
        with start(hub, folder) as second:
            assert f"waits for process {first.pid} on " in second.stderr.readline()
            hub.release.set()
            assert "all was there" in second.communicate()[0]
        first.communicate()
    assert (first.returncode, second.returncode) == (0, 0)
    assert hub.sent[SHARD] == len(FILES[SHARD])


@pytest.mark.slow
def test_a_full_disk_or_ctrl_c_says_how_it_goes_on_and_what_came_is_kept(hub, folder):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    with start(hub, folder, preexec_fn=limit) as process:
        _, err = process.communicate()
    assert process.returncode == 1
    assert f"{folder}: File too large; make room and start it again" in err
    assert partial_bytes(folder) > 100_000

    sent = hub.sent[SHARD]
    hub.faults[SHARD].append(Fault(hold_after=250_000))
    with start(hub, folder) as process:
        wait_for(lambda: hub.sent[SHARD] > sent)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == 130
    assert err == "interrupted: start it again, and it continues\n"
    assert not list(folder.rglob("*.lock"))

    with start(hub, folder) as again:
        again.communicate()
    assert again.returncode == 0
    assert hub.asked(SHARD)[-1] > 100_000


# In this process


def test_a_variants_name_stands_for_its_checkpoint(hub, folder, checkpoint, monkeypatch):
    # huggingface_hub reads HF_ENDPOINT only when it is imported.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url.rstrip("/"))
    for options, model in (([], "deepseek-ai/DeepSeek-R1"), (["--precision", "nvfp4"], "nvidia/DeepSeek-R1-FP4")):
        said = checkpoint("download", "deepseek-r1", "--to", folder, *options, code=1).err
        assert f"{model}: {hub.url.rstrip('/')} has no such model" in said


def test_a_wrong_command_line_is_explained(checkpoint):
    cases = {
        ("deepseek-r9",): "unknown variant 'deepseek-r9'",
        ("deepseek-v3", "--precision", "fp4"): "published as fp8 (deepseek-ai/DeepSeek-V3), w4a16 (",
        ("a/b", "--precision", "fp8"): "OWNER/NAME is one already",
        ("a/b@v1", "--revision", "v2"): "a/b@v1 has a revision already",
        ("a/b/c",): "expected a name of `deepseek-triton variants` or OWNER/NAME, got a/b/c",
    }
    for words, expected in cases.items():
        assert expected in checkpoint("download", *words, code=2).err
    assert "tiny is not on the hub" in checkpoint("download", "tiny", code=1).err
