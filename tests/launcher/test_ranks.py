"""Several ranks under one supervisor, started by a small launcher and by Open MPI's own."""

import os
import shutil
import signal
import socket
import sys

import pytest

from deepseek_launcher.rank import event_line
from support.supervising import PYTHON, SUPERVISE, rank_of
from support.waiting import wait_for

HOST = socket.gethostname()
LAUNCHER = """\
for rank in $RANKS; do OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE=3 "$@" 2>&1 | sed -u "s/^/[1,$rank]<stdout>:/" &
done
wait
"""
PREFETCH = "[TRT-LLM] [I] Prefetching 641.3GB checkpoint files."
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--tag-output", "-n", "3", "-x", "DEEPSEEK_TRITON_LAUNCH"]


def by_hand(*command):
    return ["bash", "-c", LAUNCHER, "-", *rank_of(*command)]


def by_mpirun(*command):
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun on this machine: tests/live/install_launchers.sh installs one")
    return [*MPIRUN, *rank_of(*command)]


@pytest.mark.parametrize("launcher", [by_hand, by_mpirun])
def test_a_rank_that_ends_is_named_with_its_phase_and_the_rest_ends(supervise, launcher):
    """The events of a rank pass the launcher."""
    script = f"echo '{PREFETCH}'; [[ $DEEPSEEK_TRITON_RANK = 1 ]] && exit 7; sleep 1000"
    command = launcher("bash", "-c", script)
    running = supervise(*command, options=["--ranks", "3"], environment={"RANKS": "0 1 2"})

    assert running.wait() == 7
    assert f"rank 1 on {HOST} ended with exit code 7 (phase: prefetching the checkpoint)" in running.said
    assert not running.others()


def test_a_kill_among_mpiruns_ranks_leaves_nothing(supervise):
    script = "setsid sleep 1000 & (setsid sleep 1001 &); echo up; wait"
    launches = {
        victim: supervise(*by_mpirun("bash", "-c", script), options=["--ranks", "3"])
        for victim in ("mpirun", "run", "rank", "rank and mpirun")
    }
    for victim, running in launches.items():
        wait_for(lambda: running.out.count("up") == 3)  # noqa: B023
        pids = {"mpirun": running.named("mpirun"), "run": running.process.pid, "rank": running.ranks()[-1]}
        for name in victim.split(" and "):
            os.kill(pids[name], signal.SIGKILL)

    for victim, running in launches.items():
        wait_for(lambda: not running.others())  # noqa: B023
        assert running.wait() != 0, victim


CHATTER = """\
import os, sys
sys.path.insert(0, sys.argv[1])
from deepseek_launcher.rank import event_line
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
for number in range(60):
    os.write(2, b"x" * 150 + b"\\n")
for number in range(60):
    os.write(2, event_line(rank, "alive!", "0123abcd", number=number, much="a" * 100).encode() + b"\\n")
"""


def test_what_ranks_write_at_the_same_time_stays_whole(supervise):
    """mpirun cuts a line where its read ends, and puts another rank's output behind."""
    command = [*by_mpirun()[: -len(rank_of())], *PYTHON, "-c", CHATTER, str(SUPERVISE.parent)]
    running = supervise(*command, options=["--ranks", "3"])

    assert running.wait() == 0
    expected = {
        f"[1,{rank}]<stderr>:{event_line(rank, 'alive!', '0123abcd', number=number, much='a' * 100)}"
        for rank in range(3)
        for number in range(60)
    }
    assert set(running.out.splitlines()) == expected | {f"[1,{rank}]<stderr>:{'x' * 150}" for rank in range(3)}
    assert running.out.count("\n") == 3 * 120


def test_a_rank_that_is_killed_or_told_to_stop_ends_them_all(supervise):
    killed, stopped = (
        supervise(*by_hand("sleep", "1000"), options=["--ranks", "3"], environment={"RANKS": "0 1 2"}) for _ in range(2)
    )
    for running in (killed, stopped):
        wait_for(lambda: running.out.count('"started"') == 3)  # noqa: B023
    os.kill(killed.ranks()[0], signal.SIGKILL)
    stopped.process.terminate()
    assert killed.wait() != 0
    assert stopped.wait() == 0
    assert f"on {HOST} ended by signal 9" in killed.said
    assert not [*killed.others(), *stopped.others()]


def test_over_the_deadline_ranks_are_named_with_host_and_phase(supervise):
    """One of four ranks never starts and one is slow. Ten seconds: the others start Python on a busy machine, too."""
    fast = "echo '[TRT-LLM] [I] Creating CUDA graph instances for 8 batch sizes.'"
    slow = "echo 'Loading weights:  10%|#'"
    script = f"if [[ $DEEPSEEK_TRITON_RANK = 2 ]]; then {slow}; else {fast}; fi; sleep 1000"
    options = ["--ranks", "4", "--ranks-per-node", "2", "--hosts", "node1,node2", "--ready-within", "10"]
    running = supervise(*by_hand("bash", "-c", script), options=options, environment={"RANKS": "0 1 2"})

    assert running.wait() == 4
    words = f"not ready within 10 s: rank 3 on node2 never started; rank 2 on {HOST}: loading weights for"
    assert words in running.said
    assert not running.others()


def test_a_lost_node_is_the_cause_whatever_the_ranks_write_at_their_end(supervise):
    """On a busy machine tritonserver, told to end by mpirun, writes its tables and an error after mpirun's words."""
    late = "echo '  Remote daemon: [[1,0],1] on node node2'; seq 1000; echo 'error: creating server: Internal - failed'"
    running = supervise("bash", "-c", f"{late}; exit 205", options=["--ranks", "2"])

    assert running.wait() == 205
    assert "exit code 205: mpirun has lost the connection to node2" in running.said


def test_nodes_with_different_files_are_stopped_at_once(supervise, tmp_path):
    for rank in range(3):
        model = tmp_path / f"node{rank}/model"
        model.mkdir(parents=True)
        (model / "config.pbtxt").write_text("max_batch_size: 8" if rank == 1 else "")
    served = '--model-repository "$2/node$OMPI_COMM_WORLD_RANK"'
    script = f'exec "$0" "$1" rank -- bash -c "sleep 1000" tritonserver {served}'
    launcher = ["bash", "-c", LAUNCHER, "-", "bash", "-c", script, sys.executable, str(SUPERVISE), str(tmp_path)]
    running = supervise(*launcher, options=["--ranks", "3"], environment={"RANKS": "0 1 2"})

    assert running.wait() == 1
    assert f"the model repository on {HOST} is not that of rank 0" in running.said
    assert "sleep" not in running.said
