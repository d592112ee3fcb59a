"""How fast a cold checkpoint comes into the page cache: `deepseek-triton warm` beside vmtouch, cat and fio.

    python tests/bench/warm.py [--folder FOLDER] [--size 5GB] [--rounds N] [--jobs N] [--output FOLDER]

Makes a synthetic checkpoint in DeepSeek's shard layout (synthetic_checkpoint.py) unless --folder holds one. In every
round each contender reads all of its shards once, in an order that turns with the round. Before each, the files are
evicted, and the run is only begun when the kernel says that not a page of them is left; after it the resident bytes are
asked again. Whole processes are timed, from fork to exit, Python's start too.

    ours          deepseek-triton warm, as it comes
    ours --jobs 1 one thread, for processor time beside vmtouch's one
    vmtouch       vmtouch -t
    cat           cat of all files into /dev/null, as many at once as ours has jobs
    fio           buffered sequential read (psync, 1 MiB), a job for each thread that ours has, the files dealt out

Then, warm: the same command again, vmtouch again, and cat again.

What isn't installed is left out, and said. Processor time is user and system of the process and its children; memory is
its largest resident set. On a virtual machine "cold" says nothing about the host's own cache: it is the same for all.
Prints medians and ratios; --output keeps every sample as JSON. Run by hand, with nothing else on the machine.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench._harness import turned
from bench.synthetic_checkpoint import make_checkpoint

from deepseek_triton_tools.cli.parsing import positive, size
from deepseek_triton_tools.warming.page_cache import evict
from support.page_cache import resident_bytes

GIB = 2**30
_OUTPUT = Path.home() / ".cache" / "deepseek-triton" / "bench" / "warm"


@dataclass(frozen=True, kw_only=True)
class Sample:
    contender: str
    state: str
    """cold or warm, before it."""
    round: int
    seconds: float
    cpu_s: float
    memory: int
    """Bytes, the largest resident set of the process or one of its children."""
    resident: int
    """Bytes of the files after it."""


def main() -> int:
    arguments = _parse_arguments()
    output = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="warm-bench-", dir=output))
    if not list(folder.glob("*.safetensors")):
        print(f"making a checkpoint of {arguments.size / 1e9:.1f} GB in {folder}", flush=True)
        make_checkpoint(folder, size=arguments.size)
    files = sorted(folder.glob("*.safetensors"))
    try:
        samples = _measure(files, folder, arguments.rounds, arguments.jobs)
    finally:
        if not arguments.folder:
            shutil.rmtree(folder)
    size = samples[0].resident
    document = {"machine": platform.platform(), "cores": os.cpu_count(), "bytes": size}
    rows = [asdict(sample) for sample in samples]
    (output / "samples.json").write_text(json.dumps(document | {"samples": rows}, indent=1))
    _report(samples, size)
    print(f"samples: {output / 'samples.json'}")
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a checkpoint that is there, or where to make one and leave it")
    parser.add_argument("--size", type=size, default=5 * 10**9, help="of the one that is made (default: 5GB)")
    parser.add_argument("--rounds", type=positive, default=7, help="default: 7")
    parser.add_argument("--jobs", type=positive, default=4, help="of ours, cat and fio (default: 4)")
    parser.add_argument("--output", type=Path, default=_OUTPUT, help=f"where the samples go (default: {_OUTPUT})")
    return parser.parse_args()


def _measure(files: Sequence[Path], folder: Path, rounds: int, jobs: int) -> list[Sample]:
    contenders = _contenders(files, folder, jobs)
    samples = []
    for number in range(rounds):
        for name in turned(list(contenders), number):
            samples.append(_run(name, contenders[name], files, number, cold=True))
        for name in [name for name in ("ours", "vmtouch", "cat") if name in contenders]:
            samples.append(_run(name, contenders[name], files, number, cold=False))
        print(f"round {number + 1} of {rounds}", flush=True)
    return samples


def _contenders(files: Sequence[Path], folder: Path, jobs: int) -> dict[str, list[str]]:
    """Name -> command."""
    names = [str(path) for path in files]
    ours = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "warm", "files", str(folder)]
    parallel = f'printf "%s\\0" "$@" | xargs -0 -P {jobs} -n 1 cat > /dev/null'
    commands = {
        "ours": [*ours, "--jobs", str(jobs)],
        "ours --jobs 1": [*ours, "--jobs", "1"],
        "vmtouch": ["vmtouch", "-q", "-t", *names],
        "cat": ["sh", "-c", parallel, "cat", *names],
        "fio": ["fio", *_fio_arguments(names, jobs)],
    }
    missing = [name for name, command in commands.items() if not shutil.which(command[0])]
    for name in missing:
        print(f"{name} is not installed: left out (apt install {name})", flush=True)
    return {name: command for name, command in commands.items() if name not in missing}


def _fio_arguments(names: Sequence[str], jobs: int) -> list[str]:
    """Each job reads its files whole, one after the other; none drops them first (invalidate), nor keeps rereading."""
    common = [
        "--thread",
        "--readonly",
        "--rw=read",
        "--bs=1M",
        "--ioengine=psync",
        "--invalidate=0",
        "--output=/dev/null",
    ]
    parts = [names[number::jobs] for number in range(jobs)]
    dealt = [
        [f"--name=job{n}", f"--filename={':'.join(part)}", "--file_service_type=sequential"]
        for n, part in enumerate(parts)
        if part
    ]
    return [*common, *(argument for job in dealt for argument in job)]


def _run(name: str, command: Sequence[str], files: Sequence[Path], number: int, *, cold: bool) -> Sample:
    if cold:
        _evict(files)
    with tempfile.TemporaryFile() as output:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        said = output.read().decode(errors="replace")
    if process.returncode:
        raise SystemExit(f"{name} failed with {process.returncode}: {said[-2000:]}")
    return Sample(
        contender=name,
        state="cold" if cold else "warm",
        round=number,
        seconds=seconds,
        cpu_s=usage.ru_utime + usage.ru_stime,
        memory=usage.ru_maxrss * 1024,
        resident=_resident(files),
    )


def _evict(files: Sequence[Path]) -> None:
    for path in files:
        evict(path)
    if left := _resident(files):
        raise SystemExit(f"{left:,} bytes are still in the page cache: something else uses the files")


def _resident(files: Sequence[Path]) -> int:
    parts = [resident_bytes(path) for path in files]
    if None in parts:
        raise SystemExit("the kernel does not say what is resident here: be the files' owner, on a plain file system")
    return sum(part for part in parts if part is not None)


def _report(samples: Sequence[Sample], size: int) -> None:
    gib = size / GIB
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.contender, sample.state), []).append(sample)

    def median(name: str, state: str, of: Callable[[Sample], float]) -> float:
        return statistics.median(of(sample) for sample in groups[name, state])

    print(f"\n{gib:.2f} GiB; medians of {len(groups['ours', 'cold'])} rounds")
    print(f"{'':18} {'':5} {'GiB/s':>8} {'low-high':>12} {'CPU s/GiB':>10} {'MiB':>6} {'resident':>9}")
    for (name, state), group in groups.items():
        rates = [gib / sample.seconds for sample in group]
        print(
            f"{name:18} {state:5} {statistics.median(rates):8.2f} {min(rates):5.2f}-{max(rates):<6.2f} "
            f"{median(name, state, lambda s: s.cpu_s) / gib:10.3f} {max(s.memory for s in group) / 2**20:6.0f} "
            f"{min(s.resident for s in group) / size:9.1%}"
        )
    others = [name for name in ("vmtouch", "cat", "fio") if (name, "cold") in groups]
    seconds = {name: median(name, "cold", lambda s: s.seconds) for name in ("ours", *others)}
    best = min(others, key=lambda name: seconds[name])
    print(f"\nrate of ours / {best}, the best of the others: {seconds[best] / seconds['ours']:.2f} (target 0.95)")
    again = [f"{name} {median(name, state, lambda s: s.seconds):.3f} s" for name, state in groups if state == "warm"]
    print(f"again, from the cache: {', '.join(again)}; cat from the disk: {seconds['cat']:.3f} s")


if __name__ == "__main__":
    sys.exit(main())
