"""The variables of start.sh, which are the defaults of options where they are set."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from deepseek_triton_tools.cli.parsing import port, whole_number
from deepseek_triton_tools.tool_errors import ToolError

exit_timeout = whole_number("a number from 0 to 999999", most=10**6 - 1)
count_or_seconds = whole_number("a number from 0 to 999999999", most=10**9 - 1)

START_VARIABLES: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "http_port": ("HTTP_PORT", port),
    "grpc_port": ("GRPC_PORT", port),
    "metrics_port": ("METRICS_PORT", port),
    "exit_timeout": ("EXIT_TIMEOUT", exit_timeout),
    "ready_within": ("READY_WITHIN", count_or_seconds),
    "max_restarts": ("MAX_RESTARTS", count_or_seconds),
    "ssh_port": ("SSH_PORT", port),
    "address": ("HTTP_ADDRESS", str),
    "ready_file": ("READY_FILE", Path),
    "interface": ("INTERFACE", str),
    "hosts": ("HOSTS", str),
    "ssh_args": ("SSH_ARGS", str),
}
"""Option -> (variable, type of its value)."""


def take_start_variables(args: argparse.Namespace, options: Iterable[str] = START_VARIABLES) -> None:
    """Set those of `options` that the verb has and the command line left out to the values of their variables. Raises
    ToolError when a variable has a wrong value; all of them are named."""
    problems = []
    for option in options:
        variable, parsed = START_VARIABLES[option]
        text = os.environ.get(variable)
        if text and getattr(args, option, text) is None:
            try:
                setattr(args, option, parsed(text))
            except argparse.ArgumentTypeError as error:
                problems.append(f"{variable}: {error}")
    if problems:
        raise ToolError("; ".join(problems), exit_code=2)
