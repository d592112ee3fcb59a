"""A Slurm cluster of two nodes on the hosts of hosts.py: munge and slurmd run on both, slurmctld on the first.

Written for the 22.05 of Debian 12.
"""

import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from support.hosts import Host
from support.waiting import wait_for

DAEMONS = ("slurmd", "slurmctld", "munged")

RANKS_PER_NODE = 8
"""Number of CPUs and of GPUs that Slurm is told a node has."""

_CONF = """\
ClusterName=two
SlurmctldHost=node1
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=node[1-2] CPUs={ranks} RealMemory=1000 Gres=gpu:{ranks}
PartitionName=main Nodes=ALL Default=YES State=UP
"""

_MPI_CONF = "PMIxCliTmpDirBase=/run\n"
"""Not /tmp: the hosts share it, and the folder is named after the job, so both would use the same one."""

_START_DAEMONS = """\
set -e
libraries="$(dirname "$(readlink -f /usr/lib/*/libpmix.so.2)")"
cp -a "$libraries" /run/pmix
ln -s libpmix.so.2 /run/pmix/libpmix.so
mount --bind /run/pmix "$libraries"
mkdir /run/munge
cd "$1"
munged --key-file="$1/munge.key" --pid-file=/run/munge/pid --log-file=/run/munge/log --seed-file=/run/munge/seed
if [ "$2" = node1 ]; then slurmctld -L "$1/slurmctld.log"; fi
slurmd -L "$1/slurmd-$2.log"
"""
"""Debian's mpi/pmix plugin loads libpmix.so. Only libpmix-dev brings that file, together with a compiler's tools, so it
is linked here."""


class Slurm:
    """A call runs a command on node1, and returns its output."""

    def __init__(self, hosts: tuple[Host, Host], folder: Path) -> None:
        self._hosts = hosts
        self._folder = folder

    def start(self) -> None:
        """:raises AssertionError: with the daemons' logs, when the nodes don't come up."""
        _write_conf(self._hosts[0].etc / "slurm", self._folder)
        for host in self._hosts:
            done = host.run("bash", "-c", _START_DAEMONS, "bash", str(self._folder), host.name)
            assert done.returncode == 0, done.stdout + done.stderr
        wait_for(lambda: self("sinfo", "--noheader", "--format=%T %D").split() == ["idle", "2"], self.explain)

    def stop(self) -> None:
        """End the daemons, so that the hosts are as they were before."""
        for host in self._hosts:
            for daemon in DAEMONS:
                host.end(daemon)

    def __call__(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        done = self._hosts[0].run(*command, env=env)
        assert done.returncode == 0, f"{command}: {done.stderr}\n{self.explain()}"
        return done.stdout

    def state(self, job: str) -> tuple[str, str]:
        """Return state, and exit code with signal, such as COMPLETED and 0:0."""
        shown = self("scontrol", "--oneliner", "show", "job", job)
        return _field("JobState", shown), _field("ExitCode", shown)

    def goes_on(self, job: str) -> bool:
        return self.state(job)[0] in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")

    def wait(self, job: str) -> tuple[str, str]:
        """Wait for its end, and return its state."""
        wait_for(lambda: not self.goes_on(job), self.explain)
        return self.state(job)

    def explain(self, *logs: Path) -> str:
        """Return the last part of the job's log and of the daemons' logs."""
        existing = [log for log in [*logs, *sorted(self._folder.glob("slurm*.log"))] if log.exists()]
        return "\n".join(f"{log}:\n{log.read_text()[-2000:]}" for log in existing)


def _write_conf(etc: Path, folder: Path) -> None:
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    (etc / "slurm.conf").write_text(_CONF.format(folder=folder, ranks=RANKS_PER_NODE))
    for number in range(RANKS_PER_NODE):
        (folder / f"gpu{number}").touch()
    (etc / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{RANKS_PER_NODE - 1}]\n")
    (etc / "mpi.conf").write_text(_MPI_CONF)


def _field(name: str, shown: str) -> str:
    match = re.search(rf"\b{name}=(\S+)", shown)
    assert match, shown
    return match[1]
