"""Parts of the command line that several verbs share: the parser, types of values, the options of a plan."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

Handler = Callable[[argparse.Namespace], int]


class VerbParser(argparse.ArgumentParser):
    """A parser whose help may end in names that are looked up when it is shown, and which can take words where argparse
    by itself does not: it fills `*` with what comes before the next option."""

    names: Callable[[], str] | None = None
    words: str | None = None
    """Where further words go that are behind an option, as a list."""
    rest: str | None = None
    """Where what follows `--` goes, as a list."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = list(args or ())
        if self.rest is None:
            return super().parse_known_args(given, namespace)
        at = given.index("--") if "--" in given else len(given)
        known, unknown = super().parse_known_args(given[:at], namespace)
        setattr(known, self.rest, given[at + 1 :])
        if self.words is not None:
            setattr(known, self.words, [*getattr(known, self.words), *(w for w in unknown if not w.startswith("-"))])
            unknown = [word for word in unknown if word.startswith("-")]
        return known, unknown

    def format_help(self) -> str:
        text = super().format_help()
        if self.names is None:
            return text
        try:
            return f"{text}\n{self.names()}"
        except ModuleNotFoundError:
            return f"{text}\nwith the names, and all else it needs: pip install 'deepseek-triton[tools]'\n"


Verbs: TypeAlias = "argparse._SubParsersAction[VerbParser]"


def add_verb(verbs: Verbs, name: str, handler: Handler, summary: str, examples: str) -> VerbParser:
    verb = verbs.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"examples:\n  {examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verb.set_defaults(handler=handler, parser=verb)
    return verb


def add_plan_options(verb: VerbParser) -> None:
    """Everything that shapes a plan; plan_request.py reads it."""
    verb.names = known_names
    verb.add_argument("variant", metavar="VARIANT", help="what to serve: a name, or a known Hugging Face name")
    verb.add_argument("--gpu", metavar="GPU", help="the GPU it will run on")
    verb.add_argument("--gpus", type=positive, metavar="N", help="GPUs of one instance (default: as published)")
    verb.add_argument("--precision", metavar="NAME", help="of the weights (default: fp4 on Blackwell if there is one)")
    verb.add_argument("--profile", metavar="NAME", help="what it is tuned for (default: balanced)")
    target = verb.add_mutually_exclusive_group()
    target.add_argument("--trtllm", metavar="RELEASE", help="TensorRT-LLM release it is for (default: 1.2.1)")
    target.add_argument("--image", metavar="TAG", help="Triton container it is for, such as 26.07, instead")
    work = verb.add_argument_group("workload")
    work.add_argument("--isl", type=positive, metavar="TOKENS", help="the longest input")
    work.add_argument("--osl", type=positive, metavar="TOKENS", help="the longest output")
    work.add_argument("--concurrency", type=positive, metavar="N", help="requests at once, over all GPUs")
    _add_overrides(verb.add_argument_group("instead of what the profile chooses"))
    engine = verb.add_argument_group("checkpoint and engine")
    engine.add_argument("--model", metavar="PATH", help="the checkpoint's folder (default: its Hugging Face name)")
    engine.add_argument("--engine", metavar="NAME", help="tensorrt_llm, transformers or simulated")
    engine.add_argument("--preset", metavar="NAME", help="for --engine simulated: the deployment whose pace it keeps")


def _add_overrides(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--mtp", type=number, metavar="N", help="draft tokens a step, 0 for none")
    group.add_argument("--relaxed-acceptance", action="store_true", help="accept likely drafts while R1 thinks")
    group.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), help="auto is the checkpoint's own")
    group.add_argument("--pp", type=positive, default=1, metavar="N", help="pipeline stages (default: 1)")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any LLM argument of the release, or triton_config.*; the value is YAML; may be repeated",
    )
    group.add_argument("--allow-unpublished", action="store_true", help="plan what fits though nobody published it")


def known_names() -> str:
    """What the options take, from the catalogue: read when help is shown, and not before."""
    from deepseek_triton_build.data.catalog import PRECISION_ALIASES, PRECISIONS, gpus, variants
    from deepseek_triton_build.data.catalog.profiles import profiles
    from deepseek_triton_build.data.releases import RELEASES, containers

    aliases = {precision: alias for alias, precision in PRECISION_ALIASES.items()}
    precisions = [f"{name} ({aliases[name]})" if name in aliases else name for name in PRECISIONS]
    tags = [tag for tag, container in containers().items() if container.trtllm in RELEASES]
    rows: dict[str, Iterable[str]] = {
        "VARIANT": variants(),
        "--gpu": gpus(),
        "--precision": precisions,
        "--profile": profiles(),
        "--trtllm": RELEASES,
        "--image": tags,
    }
    return "names:\n" + "".join(f"  {option:<12} {', '.join(names)}\n" for option, names in rows.items())


def about_option(given: str, parser: argparse.ArgumentParser, whole: argparse.ArgumentParser) -> str:
    """Where an option that this verb hasn't got belongs, or which one it may be a slip of."""
    name = given.partition("=")[0]
    others = [verb for verb, other in _verbs(whole).items() if name in _options(other)]
    if others:
        return f"; {name} is an option of {' and '.join(others)}"
    nearest = difflib.get_close_matches(name, _options(parser), n=1, cutoff=_ALIKE)
    return f"; did you mean {nearest[0]}?" if nearest else ""


_ALIKE = 0.7
"""Dashes alone make any two options alike."""


def _verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    [verbs] = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(verbs)


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings]


def add_json(verb: VerbParser | argparse._ArgumentGroup) -> None:
    verb.add_argument("--json", action="store_true", help="one JSON document instead (docs/generator.md)")


MOST_DIGITS = 20
"""More than any number here has; int() takes 4,300."""
_LONGEST_NAME = 255
"""Of a file, in bytes, on every file system of Linux."""


def add_tritonserver(verb: VerbParser) -> None:
    verb.add_argument(
        "--tritonserver",
        type=path,
        metavar="PATH",
        help="the server binary (default: from PATH, then NVIDIA's container, then the nvidia-pytriton wheel)",
    )


def words(text: str) -> str:
    if text.strip():
        return text
    raise argparse.ArgumentTypeError("expected a value, got nothing: is a variable not set?")


def path(text: str) -> Path:
    """Of an empty text pathlib makes the folder that this is run in, and it raises of a name that can't be one."""
    parsed = Path(words(text))
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in parsed.parts):
        raise argparse.ArgumentTypeError(f"expected a path, got a name of more than {_LONGEST_NAME} bytes in it")
    return parsed


def _whole(text: str, what: str, least: int = 0, most: int = 10**MOST_DIGITS) -> int:
    if text.isdecimal() and len(text) <= MOST_DIGITS and least <= int(text) <= most:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")


def number(text: str) -> int:
    return _whole(text, "a whole number")


def positive(text: str) -> int:
    return _whole(text, "a whole number from 1", least=1)


def seconds(text: str) -> int:
    return _whole(text, "a whole number of seconds")


def port(text: str) -> int:
    return _whole(text, "a number from 1 to 65535", least=1, most=65535)


def port_or_auto(text: str) -> int | str:
    return text if text == "auto" else _whole(text, "a number from 1 to 65535 or auto", least=1, most=65535)


def duration(text: str) -> float:
    """Seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return seconds


def size(text: str) -> int:
    """Bytes: "64GiB" and "64G" are binary, as in du; "64GB" is decimal; a number by itself counts bytes."""
    match = re.fullmatch(r"(\d*\.?\d+) ?([a-z]*)", text.strip(), re.IGNORECASE)
    unit = match and _SIZES.get(match[2].lower())
    if match and unit and len(match[1]) <= MOST_DIGITS and (num_bytes := int(float(match[1]) * unit)) > 0:
        return num_bytes
    raise argparse.ArgumentTypeError(
        "expected a size such as 64GiB (2^30 bytes each), 500GB (10^9), 1.5T (binary) or a number of bytes, "
        f"got {text!r}"
    )


_PREFIXES = "kmgtp"
_SIZES: Mapping[str, int] = {
    "": 1,
    "b": 1,
    **{f"{prefix}{end}": 1024**n for n, prefix in enumerate(_PREFIXES, 1) for end in ("", "ib")},
    **{f"{prefix}b": 1000**n for n, prefix in enumerate(_PREFIXES, 1)},
}


def share(text: str) -> tuple[int, int]:
    """ "2/8": this process's number from 1, and how many there are."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match and 1 <= int(match[1]) <= int(match[2]):
        return int(match[1]), int(match[2])
    raise argparse.ArgumentTypeError(f"expected K/N, such as 2/8 with K from 1 to N, got {text!r}")


def numbers(text: str) -> tuple[int, ...]:
    """ "1,8,64"."""
    try:
        return tuple(positive(part.strip()) for part in text.split(","))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected whole numbers from 1, separated by commas, got {text!r}") from None


def hold_mode(text: str) -> str:
    if text in ("auto", "lock", "watch"):
        return text
    raise argparse.ArgumentTypeError(
        f"expected --hold by itself, or =auto, =lock or =watch right after it, got {text!r}"
    )
