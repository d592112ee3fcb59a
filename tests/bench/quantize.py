"""How fast `checkpoint quantize --to w4afp8` is beside the disk, in how much memory, and whether kills change a byte.

    python tests/bench/quantize.py FOLDER [--layers 5] [--experts 160] [--rounds 2] [--kills 10] [--devices cpu,cuda:4]

Makes an R1-shaped checkpoint in FOLDER (synthetic_checkpoint.py; 20 GB by default, and as much room is needed for two
outputs). In each round, by turns, with nothing of the files in the page cache:

    copy       what the disk takes at best: reads the checkpoint, writes as many bytes as the output has, and waits
               until they are on the disk
    cpu, cuda  `deepseek-triton checkpoint quantize --to w4afp8` on the device; cuda:4 with four workers

Then the conversion is killed (SIGKILL, alone or with its workers) at random moments and started again, and its bytes
are compared. Rates are bytes of the checkpoint a second. Run it by hand, with nothing else on the machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools"), str(ROOT / "build"), str(ROOT / "client")]

from bench.synthetic_checkpoint import CONFIG, make_checkpoint  # noqa: E402

from deepseek_triton_tools.warming.pagecache.residency import evict  # noqa: E402
from support.small_checkpoint import write_act_scales  # noqa: E402

CLI = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "checkpoint", "quantize"]
PUBLISHED_BYTES = 688_574_839_360
_PIECE = 2**24
_POLL_S = 0.05


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.safetensors"))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in files(folder))


def copy(source: Path, output: Path, num_bytes: int) -> float:
    """Seconds to read the checkpoint and to write so many of its bytes to the disk, in one file after another."""
    output.mkdir()
    begin_s, written = time.monotonic(), 0
    for path in files(source):
        with path.open("rb", buffering=0) as reader, (output / path.name).open("wb", buffering=0) as writer:
            share = num_bytes * path.stat().st_size // size_of(source)
            while piece := reader.read(_PIECE):
                written += writer.write(memoryview(piece)[: max(0, share - writer.tell())])
            os.fsync(writer.fileno())
    assert written > 0.99 * num_bytes
    return time.monotonic() - begin_s


def command(source: Path, scales: Path, output: Path, name: str) -> list[str]:
    """The command for a device, such as cpu, or cuda:4 with four workers."""
    device, _, workers = name.partition(":")
    options = ["--to", "w4afp8", "--act-scales", scales, "--output", output, "--device", device]
    return [*CLI, str(source), *map(str, options), *(["--workers", workers] if workers else [])]


class Memory:
    """The largest sum of what a process and its children hold for themselves, in bytes, looked at 20 times a second."""

    def __init__(self, pid: int) -> None:
        self.most = self.most_of_one = 0
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_S):
            held = [*map(_private_bytes, _family(self._pid))]
            self.most = max(self.most, sum(held))
            self.most_of_one = max(self.most_of_one, *held, 0)


def _family(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from _family(int(child))


def _private_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


def convert(words: list[str]) -> tuple[float, Memory]:
    """Seconds, and the memory."""
    begin_s = time.monotonic()
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        memory = Memory(process.pid)
        _, said = process.communicate()
        memory.stop()
    if process.returncode:
        raise SystemExit(said)
    return time.monotonic() - begin_s, memory


def killed(words: list[str], output: Path, expected_s: float, times: int, rng: random.Random) -> None:
    """Kill the conversion so many times, at random moments after files have been begun, and let it end then."""
    for number in range(times):
        with subprocess.Popen(words, start_new_session=True, stderr=subprocess.DEVNULL) as process:
            time.sleep(rng.uniform(0.02, 1.2 / times) * expected_s)
            ended = process.poll() is not None
            with_workers = rng.random() < 0.5
            if not ended:
                (os.killpg if with_workers else os.kill)(process.pid, signal.SIGKILL)
        who = "it and its workers" if with_workers else "it alone"
        state = "had ended before" if ended else f"killed {who}"
        print(f"kill {number + 1}: {state}; {len(files(output))} files are there", flush=True)
    convert(words)


def digests(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--experts", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--devices", default="cpu", help="such as cpu, or cpu,cuda:2,cuda:4")
    parser.add_argument("--output", type=Path, help="keeps every sample as JSON")
    args = parser.parse_args()
    source, scales = args.folder / "r1", args.folder / "act_scales.safetensors"
    fewer = {"num_hidden_layers": args.layers, "n_routed_experts": args.experts, "num_nextn_predict_layers": 0}
    if not (source / "config.json").exists():
        make_checkpoint(source, size=None, num_shards=5, fewer=fewer)
        write_act_scales(scales, {**CONFIG, **fewer})
    devices = args.devices.split(",")
    samples: dict[str, list[float]] = {name: [] for name in ("copy", *devices)}
    made: dict[str, dict[str, str]] = {}
    num_bytes = 0  # of the output; the first round begins with a device
    for number in range(args.rounds):
        for name in [*devices, "copy"] if number % 2 == 0 else ["copy", *devices]:
            output = args.folder / "output"
            shutil.rmtree(output, ignore_errors=True)
            for path in files(source):
                evict(path)
            if name == "copy":
                seconds, note = copy(source, output, num_bytes), ""
            else:
                seconds, memory = convert(command(source, scales, output, name))
                num_bytes = size_of(output)
                note = (
                    f", at most {memory.most / 1e6:,.0f} MB of memory, {memory.most_of_one / 1e6:,.0f} MB in a process"
                )
                if number == 0:
                    made[name] = digests(output)
            rate = size_of(source) / seconds
            samples[name].append(rate)
            print(f"round {number + 1}: {name} {seconds:.1f} s, {rate / 1e6:,.0f} MB/s{note}", flush=True)
    if args.output:
        args.output.write_text(json.dumps(samples))
    disk = statistics.median(samples["copy"])
    for name in devices:
        rate = statistics.median(samples[name])
        reckoned = PUBLISHED_BYTES / rate / 60
        print(f"{name}: {rate / 1e6:,.0f} MB/s, {rate / disk:.2f} of the copy's; 689 GB in {reckoned:,.0f} minutes")
    assert len({json.dumps(one) for one in made.values()}) == 1, "the devices do not make the same bytes"
    if args.kills:
        output = args.folder / "output"
        shutil.rmtree(output, ignore_errors=True)
        words = command(source, scales, output, devices[0])
        killed(words, output, size_of(source) / statistics.median(samples[devices[0]]), args.kills, random.Random(24))
        same = digests(output) == made[devices[0]]
        print("the same bytes after the kills" if same else "OTHER BYTES after the kills")
        raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
