"""Faults under load: kills, freezes, full disks, broken networks, at random moments, each with its promise checked.

    python tests/reliability/faults.py [--injections N] [--only NAME ...] [--seed S] [--list] [--out FOLDER]

Two tritonservers and two gateways run under the soak's load, in namespaces of their own (mounts and network). Faults
strike one server, the gateways, or what they stand on. After each, everything must come back and answer rightly. The
history of all requests is checked: outside of a fault as in the soak; during one, a request may also end as the fault's
row allows. A request that goes straight to the other server may not be touched. Nothing may be left in the end. Exits
with 1 otherwise.

Writes the verdict to tests/reliability/records/ with --record. Run by hand from the repository's root, on Linux with
util-linux and iproute2; faults for which the machine lacks something are skipped by name.
"""

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from bench._served import default_folder

from deepseek_backend.errors import describe
from reliability.battlefield import HOSTS, VICTIM_HOST, Battlefield, FieldError, battlefield
from reliability.fault_table import FAULTS, Fault
from reliability.fault_verdict import CLIENTS, Injection, judge
from reliability.jobs import SERVER
from reliability.soak import ClientShare, client_processes

_INSIDE = "DEEPSEEK_TRITON_FAULTS_INSIDE"
_MOST_PROBLEMS = 5
"""Faults that did not go or heal as they should, after which the rest would show nothing new."""
_QUIET_S = (0.0, 2.5)
"""Between two faults, from and to: some follow at once, and after others come requests that meet none."""


def enter_namespaces(folder: Path) -> None:
    """Run this program again in namespaces of its own, or, if this is it, mount what the faults fill."""
    if os.environ.get(_INSIDE) is None:
        unshare = shutil.which("unshare")
        if unshare is None:
            raise SystemExit("this needs unshare, of util-linux")
        as_user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        command = [unshare, *as_user, "--mount", "--net", sys.executable, *sys.argv, "--out", str(folder)]
        os.execve(unshare, command, {**os.environ, _INSIDE: "1"})
    for name, size in (("/dev/shm", "512m"), (folder / "small" / "log", "64m")):
        Path(name).mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(name)], check=True)
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n127.0.0.1 {VICTIM_HOST}\n")
    subprocess.run(["mount", "--bind", str(hosts), str(HOSTS)], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 16), hard))


@contextmanager
def load(arguments: argparse.Namespace, war: Battlefield) -> Any:
    """Keep clients asking until the block ends. Yield their progress."""
    shares = [
        ClientShare(
            urls={**war.urls, SERVER: server.http_url}, grpc_address=f"127.0.0.1:{server.grpc_port}",
            models={"gateway": war.model, "pair": war.model}, engine="simulated", seed=arguments.seed,
            first=first, step=CLIENTS, end=1 << 40, until_s=None, concurrency=arguments.concurrency,
            records=arguments.out / "clients" / f"{first}.jsonl.gz",
        )
        for first, server in enumerate((war.victim, war.bystander))
    ]  # fmt: skip
    with client_processes(shares) as (processes, progress, stop):
        yield progress
        stop.set()
        for process in processes:
            process.join(400)
            if process.exitcode != 0:
                raise FieldError(f"a client process ended with {process.exitcode}")


def campaign(arguments: argparse.Namespace, war: Battlefield, faults: Sequence[Fault]) -> list[Injection]:
    """Inject faults, each as often as the others but in a random order, until a problem or the number is reached."""
    chance = random.Random(arguments.seed)
    injections: list[Injection] = []
    order: list[Fault] = []
    while len(injections) < arguments.injections:
        if not order:
            order = chance.sample(faults, len(faults))
        fault = order.pop()
        time.sleep(chance.uniform(*_QUIET_S))
        injection = Injection(fault=fault.name, began_s=time.monotonic())
        injections.append(injection)
        for action in (lambda fault=fault: fault.inject(war, chance), war.recover):
            try:
                action()
            except Exception as error:  # whatever it is, the campaign's verdict has it
                injection.problem += f"{describe(error)}; "
                print(f"{fault.name}: {injection.problem}", flush=True)
        injection.healed_s = time.monotonic()
        print(f"{len(injections):5} {fault.name:36} {injection.healed_s - injection.began_s:6.1f} s", flush=True)
        if sum(1 for each in injections if each.problem) >= _MOST_PROBLEMS:
            print(f"ended after {_MOST_PROBLEMS} problems", flush=True)
            break
    return injections


def run(arguments: argparse.Namespace) -> int:
    chosen = [fault for fault in FAULTS if not arguments.only or fault.name in arguments.only]
    skipped = {fault.name: lacks for fault in chosen if (lacks := fault.missing())}
    for name, lacks in skipped.items():
        print(f"skipped: {name}: it needs {lacks}")
    faults = [fault for fault in chosen if fault.name not in skipped]
    began = time.monotonic()
    with battlefield(arguments.out, arguments.out / "small") as war:
        with load(arguments, war) as progress:
            injections = campaign(arguments, war, faults)
        left = war.left()
    facts = {
        "seed": arguments.seed,
        "jobs": list(progress),
        "seconds": round(time.monotonic() - began),
        "skipped": skipped,
        "left": left,
        "torn": war.num_torn,
        "injections": [asdict(injection) for injection in injections],
    }
    (arguments.out / "run.json").write_text(json.dumps(facts) + "\n")
    return judge(arguments.out, record=arguments.record)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--injections", type=int, default=len(FAULTS), metavar="N", help="default: each fault once")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these faults; --list shows them")
    parser.add_argument("--list", action="store_true", help="show the faults and their promises, and end")
    parser.add_argument("--concurrency", type=int, default=16, metavar="N", help="jobs of each client (default: 16)")
    parser.add_argument("--seed", type=int, default=1, help="decides requests, order and moments (default: 1)")
    parser.add_argument("--record", action="store_true", help="write the verdict to tests/reliability/records/")
    parser.add_argument("--out", type=Path, help="a new folder for raw samples (default: one in ~/.cache)")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.only) - {fault.name for fault in FAULTS}:
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}; --list shows the faults")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.list:
        for fault in FAULTS:
            print(f"{fault.name:36} {fault.promise}")
        return 0
    arguments.out = arguments.out or default_folder("faults")
    arguments.out.mkdir(parents=True, exist_ok=True)
    enter_namespaces(arguments.out.resolve())
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
