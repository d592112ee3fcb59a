"""Which process the stub may end, and how it notices that its server has been told to exit."""

import importlib
import os
import shutil
import signal
import socket
import sys
import types

import pytest

from deepseek_backend import triton_process as module
from deepseek_backend.triton_process import ExitWatch, end_server, exit_timeout_s, own_regions, parent_server
from deepseek_backend.watcher import ServerAbove

PID = 4711
CATCHES_SIGTERM, CATCHES_NOTHING = "0000000100004002", "0000000100000000"
WAITS, SLEEPS, RUNS = "futex_do_wait", "hrtimer_nanosleep", "0"


class FakeProc:
    """A fake /proc with the files that are read, and a clock."""

    def __init__(self, folder):
        self.folder = folder
        self.now = 100.0

    def write(self, pid, name, text):
        path = self.folder / str(pid) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def server(self, wchan, caught=CATCHES_SIGTERM):
        self.write(PID, "wchan", wchan)
        self.write(PID, "status", f"Name:\ttritonserver\nSigCgt:\t{caught}\n")

    def link(self, pid, name, target):
        path = self.folder / str(pid) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    def sockets(self, *states, inode=10):
        """Files of the process, as many as there are states: "0A" listens, "01" is connected."""
        rows = [f"{n}: 0100007F:1F40 00000000:0000 {s} 0:0 00:0 0 0 0 {inode + n}" for n, s in enumerate(states)]
        self.write(PID, "net/tcp", "\n".join(["  sl  local_address rem_address   st", *rows]))
        shutil.rmtree(self.folder / str(PID) / "fd", ignore_errors=True)
        self.link(PID, "fd/0", "/dev/null")
        for number in range(len(states)):
            self.link(PID, f"fd/{number + 3}", f"socket:[{inode + number}]")

    def command_line(self, *arguments, pid=PID):
        self.write(pid, "cmdline", "".join(f"{argument}\0" for argument in ("a-program", *arguments)))


@pytest.fixture
def proc(tmp_path, monkeypatch):
    fake = FakeProc(tmp_path)
    monkeypatch.setattr(module, "PROC", tmp_path)
    monkeypatch.setattr(module.time, "monotonic", lambda: fake.now)
    return fake


def watching():
    handler = signal.getsignal(signal.SIGTERM)
    made = ExitWatch(PID)
    yield made
    made.close()
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(params=["/usr/bin/tritonserver", ""], ids=["exe", "exe can't be read"])
def watch(request, proc):
    """It watches the program tritonserver. Its name is cut and may be that of a link."""
    proc.write(PID, "comm", "r1-server\n" if request.param else "tritonserver\n")
    if request.param:
        proc.link(PID, "exe", request.param)
    yield from watching()


@pytest.fixture
def watch_of_front_end(proc):
    proc.write(PID, "comm", "python3\n")
    proc.link(PID, "exe", "/usr/bin/python3.12")
    yield from watching()


def looks(proc, watch, *wchans, period_s=1.0, caught=CATCHES_SIGTERM):
    seen = []
    for wchan in wchans:
        proc.server(wchan, caught)
        seen.append(watch.is_exiting())
        proc.now += period_s
    return seen


STUB = "triton_python_b"
MAPS_TRITON = "7f0-7f1 r-xp 00000000 08:01 42 /opt/tritonserver/lib/libtritonserver.so\n"
MAPS_WHEEL = "7f0-7f1 r-xp 00000000 08:01 42 /site-packages/nvidia_pytriton.libs/libtritonserver-717102f0.so\n"
MAPS_OTHER = "7f0-7f1 r-xp 00000000 08:01 42 /opt/libtritonserver/lib/libtritonclient.so\n"


PARENTS = [  # names of this process and its parent, what the parent maps, and whether it is a server
    (STUB, "tritonserver", MAPS_TRITON, True),
    (STUB, "r1-server", MAPS_TRITON, True),
    (STUB, "python3", MAPS_WHEEL, True),
    (STUB, "tritonserver", "", True),
    (STUB, "python3", "", False),
    (STUB, "systemd", MAPS_OTHER, False),
    ("python", "tritonserver", MAPS_TRITON, False),
]


def test_a_parent_is_a_server_when_it_has_triton_inside(proc):
    for own, parent, maps, found in PARENTS:
        proc.write(os.getpid(), "comm", f"{own}\n")
        proc.write(os.getppid(), "comm", f"{parent}\n")
        proc.write(os.getppid(), "maps", "7f0-7f1 r-xp 00000000 08:01 42 /usr/lib/libc.so.6\n" + maps)
        assert parent_server() == (os.getppid() if found else None), (own, parent)


def test_what_is_off_without_a_server_is_said_in_the_log(monkeypatch, caplog):
    """By model.py, which asks for it. These tests run under no server."""
    name = "triton_python_backend_utils"
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    model = importlib.import_module("model")
    del sys.modules["model"]
    assert model.TritonPythonModel()._watched_server() == ServerAbove()
    (said,) = caplog.messages
    assert f"process {os.getppid()} " in said


def test_nothing_but_the_own_server_is_ever_ended():
    assert parent_server() is None, "these tests run under no tritonserver"
    for pid in (os.getppid(), os.getpid(), 1):
        with pytest.raises(ValueError, match="is not the tritonserver"):
            end_server(pid)


TIMEOUTS = {
    (): 30,
    ("--exit-timeout-secs=5",): 5,
    ("--exit-timeout-secs", "5", "--http-port=1"): 5,
    ("--exit-t=7",): 7,
    ("--exit-timeout-secs=5", "--exit-timeout-secs", "9"): 9,
    ("--exit-on-error=1", "--exit-timeout-seconds=8"): 30,
    ("--exit-timeout-secs=soon",): 30,
    ("--exit-timeout-secs",): 30,
}


def test_the_exit_timeout_is_read_as_tritonserver_reads_it(proc):
    assert exit_timeout_s(PID) == 30, "the server can't be read"
    for arguments, expected in TIMEOUTS.items():
        proc.command_line(*arguments)
        assert exit_timeout_s(PID) == expected, arguments


NO, YES = False, True
LOOKS = [  # what the main thread does at each look, and whether the server is exiting
    ([WAITS, SLEEPS, SLEEPS], [NO, NO, YES]),
    ([WAITS, SLEEPS, RUNS, SLEEPS], [NO, NO, NO, YES]),  # a look while the thread runs says nothing
    ([WAITS, SLEEPS] * 5, [NO] * 10),  # single sleeps
    ([SLEEPS] * 3, [NO] * 3),  # it still loads
    ([WAITS, SLEEPS, SLEEPS, WAITS, WAITS], [NO, NO, YES, YES, YES]),
    (["0"] * 4, [NO] * 4),  # a kernel that shows no wchan
    ([""] * 4, [NO] * 4),
]


@pytest.mark.parametrize(("wchans", "expected"), LOOKS)
def test_an_exit_is_noticed_at_the_second_look(proc, watch, wchans, expected):
    assert not watch.is_exiting(), "a server that is gone is no error"
    assert looks(proc, watch, *wchans) == expected


def test_looks_in_quick_succession_count_as_one_and_a_server_that_still_loads_is_not_exiting(proc, watch):
    assert not any(looks(proc, watch, WAITS, SLEEPS, SLEEPS, SLEEPS, caught=CATCHES_NOTHING))
    assert looks(proc, watch, WAITS, *[SLEEPS] * 5, period_s=0.125) == [False] * 5 + [True]


LISTENS, CONNECTED = "0A", "01"


def looks_at_ports(proc, watch, *states, period_s=1.0):
    seen = []
    for number, state in enumerate(states):
        proc.sockets(*state, inode=10 * number)
        seen.append(watch.is_exiting())
        proc.now += period_s
    return seen


def test_a_front_end_that_no_longer_listens_is_exiting(proc, watch_of_front_end):
    listening = [[LISTENS, CONNECTED]] * 4
    assert looks_at_ports(proc, watch_of_front_end, *listening, [CONNECTED], [CONNECTED]) == [False] * 5 + [True]


STATES = [
    [[CONNECTED]] * 9,  # it never listened
    [[LISTENS], [CONNECTED]] * 9,  # it tried for free ports
    [[LISTENS]] * 5 + [[]] + [[LISTENS]] * 5,  # it opened another port
    [[LISTENS, LISTENS]] * 5 + [[LISTENS]] * 5,  # it closed one of two ports
]


@pytest.mark.parametrize("states", STATES)
def test_a_front_end_that_may_listen_again_is_not_exiting(proc, watch_of_front_end, states):
    assert not any(looks_at_ports(proc, watch_of_front_end, *states))
    proc.sockets(LISTENS)  # what its main thread waits for is no sign
    assert not any(looks(proc, watch_of_front_end, WAITS, *[SLEEPS] * 9))


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_listening_port_is_found_in_the_real_proc(family, address):
    process = module.PROC / str(os.getpid())
    try:
        listener = socket.create_server((address, 0), family=family)
    except OSError:
        pytest.skip("this machine has no such address")
    with listener:
        path = process / "fd" / str(listener.fileno())
        assert path in module._listening(process)
    assert path not in module._listening(process)


def test_a_sigterm_to_this_process_counts_and_one_to_a_child_does_not(proc, watch):
    child = os.fork()
    if not child:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    os.waitpid(child, 0)
    assert not watch.is_exiting()
    assert not watch.is_exiting()
    os.kill(os.getpid(), signal.SIGTERM)
    assert watch.is_exiting()
    assert watch.is_exiting()


def test_closing_lets_go_of_the_signal(proc):
    handler = signal.getsignal(signal.SIGTERM)
    watch = ExitWatch(PID)
    watch.close()
    watch.close()
    assert signal.set_wakeup_fd(-1) == -1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    signal.signal(signal.SIGTERM, handler)


def test_a_pipe_for_signals_that_somebody_else_has_is_left_alone(proc):
    reading, writing = os.pipe2(os.O_NONBLOCK)
    handler = signal.getsignal(signal.SIGTERM)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        watch = ExitWatch(PID)
        assert not watch.is_exiting()
        watch.close()
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        assert signal.set_wakeup_fd(-1) == writing
        os.close(reading)
        os.close(writing)


def test_the_shared_memory_of_this_stub_is_what_is_both_named_and_mapped(proc, monkeypatch):
    mapped = "7f0-7f1 rw-s 00000000 00:1a 42 /dev/shm/{}\n"
    maps = "7f2-7f3 rw-p 00000000 00:00 0 \n" + mapped.format("triton_ours") + mapped.format("nccl-AbC")
    proc.write("self", "maps", maps)
    proc.command_line("/repo/m/1/model.py", "triton_ours", "1048576", "triton_gone", "", pid=os.getpid())
    assert [str(path) for path in own_regions()] == ["/dev/shm/triton_ours"]
