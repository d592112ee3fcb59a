"""A campaign, guided by coverage, against one parser or all in turn: `python -m reliability.fuzz.run --target NAME`.

It needs atheris (the dependency group `fuzz`). Inputs that reach something new are kept in --corpus and are where the
next campaign begins; an input that finds a defect is written to --found, and is to be committed to corpus/NAME when
the defect is mended. Each input has --input-s seconds and --memory-mib of memory.

  python -m reliability.fuzz.run --target client_http --seconds 600 --seed 1
  python -m reliability.fuzz.run --seconds 60            # every target, one after the other
"""

import argparse
import contextlib
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_INSTRUMENTED = [
    *(
        "deepseek_triton_build",
        "deepseek_triton_client",
        "deepseek_triton_tools",
        "deepseek_backend",
        "deepseek_launcher",
    ),
    *("h11", "starlette"),
]
"""Packages whose branches guide the campaign."""
_DICTIONARY_MOST = 60
"""Characters of a word of libFuzzer's dictionary."""


def main() -> int:
    arguments = _arguments()
    if arguments.target and not arguments.all_in_turn:
        _campaign(arguments)
        return 0
    from reliability.fuzz.targets import TARGETS

    results = [_one_of_several(arguments, name) for name in arguments.names or TARGETS]
    print(json.dumps({"seed": arguments.seed, "seconds": arguments.seconds, "targets": results}, indent=1))
    return int(any(result["found"] for result in results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", dest="names", action="append", help="its name in targets.py (default: all)")
    parser.add_argument("--seconds", type=int, default=60, metavar="N", help="for each target (default: 60)")
    parser.add_argument("--seed", type=int, default=1, help="decides the mutations (default: 1)")
    parser.add_argument("--input-s", type=int, default=5, metavar="N", help="most seconds of an input (default: 5)")
    parser.add_argument("--memory-mib", type=int, default=4096, metavar="N", help="most memory (default: 4096)")
    parser.add_argument("--max-bytes", type=int, default=1 << 16, metavar="N", help="of an input (default: 65536)")
    cache = Path.home() / ".cache/deepseek-triton/fuzz"
    parser.add_argument("--corpus", type=Path, default=cache / "corpus", help=f"(default: {cache}/corpus)")
    parser.add_argument("--found", type=Path, default=cache / "found", help=f"(default: {cache}/found)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.target = arguments.names[0] if arguments.child else None
    arguments.all_in_turn = not arguments.child
    return arguments


def _one_of_several(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """Run a target in a process of its own, which a crash or the limit of memory may end."""
    found, began = arguments.found / name, time.monotonic()
    before = set(found.glob("*"))
    command = [sys.executable, "-m", "reliability.fuzz.run", "--child", "--target", name]
    for option in ("seconds", "seed", "input_s", "memory_mib", "max_bytes", "corpus", "found"):
        command += [f"--{option.replace('_', '-')}", str(getattr(arguments, option))]
    done = subprocess.run(command, capture_output=True, check=False)
    log = done.stderr.decode(errors="replace")
    runs = [int(number) for number in re.findall(r"^#(\d+)\s", log, re.MULTILINE)]
    features = [int(number) for number in re.findall(r"\bft: (\d+)", log)]
    new = sorted(path.name for path in set(found.glob("*")) - before)
    result = {
        "name": name,
        "inputs": max(runs, default=0),
        "features": max(features, default=0),
        "seconds": round(time.monotonic() - began),
        "found": new,
    }
    print(json.dumps(result), file=sys.stderr, flush=True)
    if new or done.returncode:
        print(log[-3000:], file=sys.stderr, flush=True)
    return result


def _campaign(arguments: argparse.Namespace) -> None:
    import atheris

    with atheris.instrument_imports(include=_INSTRUMENTED):
        from reliability.fuzz.targets import TARGETS, inputs_of
    from reliability.fuzz.mutation import NAMES, TEXTS, mutated

    target = TARGETS[arguments.target]
    kept, found = arguments.corpus / arguments.target, arguments.found / arguments.target
    kept.mkdir(parents=True, exist_ok=True)
    found.mkdir(parents=True, exist_ok=True)
    bytes_ = arguments.memory_mib << 20
    resource.setrlimit(resource.RLIMIT_AS, (bytes_, bytes_))

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        """Half of the mutants are libFuzzer's own, which follow its dictionary and what comparisons have shown."""
        rng = random.Random(seed)
        mutant = mutated(bytes(data), rng) if rng.random() < 0.5 else atheris.Mutate(data, max_size)
        return bytes(mutant[:max_size])

    def run(data: bytes) -> None:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            target.run(data)

    with tempfile.TemporaryDirectory() as folder:
        words = {text for text in (*NAMES, *TEXTS) if text and text.isascii() and len(text) <= _DICTIONARY_MOST}
        dictionary = Path(folder, "words")
        quoted = (word.replace("\\", "\\\\").replace('"', '\\"').replace("\0", "\\x00") for word in sorted(words))
        dictionary.write_text("".join(f'"{word}"\n' for word in quoted if word.isprintable()))
        seeds = Path(folder, "seeds")
        seeds.mkdir()
        for number, content in enumerate(inputs_of(arguments.target)):
            Path(seeds, str(number)).write_bytes(content)
        options = [
            *(f"-max_total_time={arguments.seconds}", f"-seed={arguments.seed}", f"-timeout={arguments.input_s}"),
            *(f"-max_len={arguments.max_bytes}", f"-dict={dictionary}", f"-artifact_prefix={found}/"),
            *("-rss_limit_mb=0", "-print_final_stats=1"),
        ]
        atheris.Setup([sys.argv[0], *options, str(kept), str(seeds)], run, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
