"""The options of `deepseek-triton probe`."""

from __future__ import annotations

import argparse

from deepseek_triton_tools.cli.client_options import add_server_options
from deepseek_triton_tools.cli.parsing import Verbs, add_verb, duration


def add_probe(verbs: Verbs) -> None:
    verb = add_verb(
        verbs,
        "probe",
        _probe,
        "ask once how a server is: one line, and an exit code for Kubernetes, Slurm and scripts",
        "deepseek-triton probe ready http://localhost:8000\n"
        "  deepseek-triton probe generate grpc://node1:8001 --deadline 60\n"
        "  until deepseek-triton probe ready http://node1:8000; do sleep 10; done\n\n"
        "live: the server answers. ready: the model can be called. generate: it makes a token; of one that refuses\n"
        "because it is full, the metrics are asked whether it makes tokens for others.\n"
        "exit codes: 0 yes; 1 it answers, and the answer is no; 2 the command line; 3 nobody answers there;\n"
        "4 no answer within the deadline.",
    )
    verb.add_argument("question", choices=("live", "ready", "generate"), metavar="live|ready|generate")
    verb.add_argument("url", metavar="URL", help="http://, https://, grpc:// or grpcs:// address")
    verb.add_argument("--deadline", type=duration, metavar="S", help="seconds for all of it (default: 5, generate: 30)")
    verb.add_argument("--metrics-url", metavar="URL", help="its metrics, for generate (default: its port 8002)")
    verb.add_argument("-q", "--quiet", action="store_true", help="the exit code alone, without the line")
    add_server_options(verb.add_argument_group("server"))


def _probe(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.cli.probe import probe

    return probe(args)
