"""`warm form`: an init container, a systemd unit, a Slurm prolog, with the numbers of what is served.

The texts are in templates/, where @@{name} stands for a value. Each number has its reason in the comment above it.
"""

import json
import math
import shlex
import shutil
import sys
from pathlib import Path

from deepseek_triton_build.arithmetic import ASSUMED_RATE, ENGINE_START_S, load_s
from deepseek_triton_build.text import for_comment
from deepseek_triton_tools import text_templates
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.host.host_memory import BUDGET_SHARE
from deepseek_triton_tools.host.units import about, sized
from deepseek_triton_tools.repository.launch_facts import Serving

PERIOD_S = 10
"""Seconds between two probes."""
# Seconds from the prolog's own deadline, when it sends SIGTERM and 10 s later SIGKILL, to PrologTimeout.
PROLOG_SPARE_S = 60
PYTHON_IMAGE = "python:3.12-slim"
WARM_IMAGE = f"YOUR-REGISTRY/deepseek-triton-warm:{__version__}"
_GIB = 2**30
_MOUNTED_CACHE = "/models/hub"


def render(form: str, serving: Serving, *, rate: int | None = None) -> str:
    """Render one of the forms.

    :param form: a key of _FORMS.
    :param rate: bytes a second that the storage delivers. None: a rate is assumed.
    """
    template, values_of = _FORMS[form]
    timeout_s = 2 * load_s(serving.size, rate)
    values = {
        "version": __version__,
        "source": for_comment(serving.source),
        "checkpoints": for_comment(" and ".join(serving.checkpoints)),
        "size": sized(serving.size),
        "timeout_s": str(timeout_s),
        "timeout_why": f"{_load_why(serving, rate)}; twice that is {timeout_s} s.",
        **values_of(serving, rate),
    }
    return text_templates.wrapped(text_templates.filled(__package__, template, values))


def _load_why(serving: Serving, rate: int | None) -> str:
    """A sentence about the time that reading all weights takes, with its reasons."""
    known = "as given by --rate" if rate else "assumed, because nothing was measured: give --rate"
    seconds = load_s(serving.size, rate)
    return (
        f"{serving.size:,} bytes (by {for_comment(serving.size_from)}) at {sized(rate or ASSUMED_RATE)}/s ({known}) "
        f"take {seconds} s, {about(seconds)}"
    )


# --- Kubernetes ---


def init_container(serving: Serving, rate: int | None) -> dict[str, str]:
    memory = math.ceil(serving.size / BUDGET_SHARE / _GIB) + 1
    failures = math.ceil((load_s(serving.size, rate) + ENGINE_START_S) / PERIOD_S)
    mounts = {f"checkpoint-{n}": folder for n, folder in enumerate(serving.mounts, 1)}
    mounts |= {"hub": _MOUNTED_CACHE} if serving.names else {}
    # Kubernetes would replace $(NAME).
    args = [text.replace("$", "$$") for text in serving.checkpoints]
    ranks = ""
    if serving.num_gpus and serving.gpus_of_node:
        left = (memory * _GIB - serving.size) / serving.gpus_of_node
        nodes = -(-serving.num_gpus // serving.gpus_of_node)
        ranks = f": {sized(left)} for each of {serving.gpus_of_node} ranks"
        if nodes > 1:
            ranks += (
                f". This is the pod of one of {nodes} nodes of {serving.gpus_of_node} GPUs, and each needs the whole "
                "checkpoint; only the first runs tritonserver: leave the startupProbe out of the others"
            )
    return {
        "image": json.dumps(WARM_IMAGE),
        "base": for_comment(serving.image or PYTHON_IMAGE),
        "args": json.dumps([*args, "--then", "true"]),
        "environment": f"    env:\n      - {{name: HF_HUB_CACHE, value: {_MOUNTED_CACHE}}}\n" if serving.names else "",
        "mounts": "".join(
            f"      - {{name: {name}, mountPath: {json.dumps(path)}, readOnly: true}}\n"
            for name, path in mounts.items()
        ),
        "volumes": "\n".join(_volume(name, path, serving.mounts.get(path)) for name, path in mounts.items()),
        "memory": f"{memory}Gi",
        "budget_share": str(BUDGET_SHARE),
        "ranks": ranks,
        "gpus": f", nvidia.com/gpu: {serving.gpus_of_node}" if serving.gpus_of_node else "",
        "load_why": _load_why(serving, rate),
        "start": about(ENGINE_START_S),
        "period_s": str(PERIOD_S),
        "failures": str(failures),
    }


def _volume(name: str, path: str, source: str | None) -> str:
    """:param source: the folder's path on this machine; None for the Hugging Face cache."""
    content, claim = "the hub folder of a Hugging Face cache", "huggingface-hub"
    if source is not None:
        content, claim = for_comment(f"the folder that is {source} where this was made"), "deepseek-checkpoint"
    return (
        f"  # {content}; a hostPath or a CSI volume does as well\n"
        f"  - name: {name}\n    persistentVolumeClaim: {{claimName: {claim}, readOnly: true}}"
    )


# --- systemd ---


def systemd(serving: Serving, rate: int | None) -> dict[str, str]:
    mounts = [*serving.mounts.values(), *([serving.hub_cache] if serving.names else [])]
    environment = f"Environment={_unit_word(f'HF_HUB_CACHE={serving.hub_cache}')}\n" if serving.names else ""
    return {
        "mounts": " ".join(_unit_word(mount) for mount in mounts),
        "environment": environment,
        "program": _unit_word(_program()),
        "checkpoints_quoted": " ".join(_unit_word(text).replace("$", "$$") for text in serving.checkpoints),
        # 8 bytes for each page of 4 KiB.
        "tables": sized(math.ceil(serving.size / 512)),
    }


def _unit_word(text: str) -> str:
    """The text as a word of a unit's setting: quoted and escaped as in C, percent signs doubled (systemd.syntax(7))."""
    text = text.replace("%", "%%")
    if all(character.isalnum() or character in "/._-=:@+%$," for character in text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else "".join(f"\\x{b:02x}" for b in c.encode()) for c in escaped) + '"'


def _program() -> str:
    """The path of deepseek-triton on this machine."""
    beside = Path(sys.executable).with_name("deepseek-triton")
    return str(beside) if beside.exists() else shutil.which("deepseek-triton") or "/usr/local/bin/deepseek-triton"


# --- Slurm ---


def slurm_prolog(serving: Serving, rate: int | None) -> dict[str, str]:
    environment = f"export HF_HUB_CACHE={shlex.quote(serving.hub_cache)}\n" if serving.names else ""
    return {
        "environment": environment,
        "program": shlex.quote(_program()),
        "checkpoints_quoted": " ".join(map(shlex.quote, serving.checkpoints)),
        "prolog_timeout_s": str(2 * load_s(serving.size, rate) + PROLOG_SPARE_S),
        "spare_s": str(PROLOG_SPARE_S),
    }


_FORMS = {
    "init-container": ("init-container.yaml", init_container),
    "systemd": ("systemd.service", systemd),
    "slurm-prolog": ("slurm-prolog.sh", slurm_prolog),
}
"""Form -> its template, and the function that gives the template's values."""
