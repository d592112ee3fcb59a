"""`deepseek-triton completion`: a script that completes the command line, made by shtab."""

import argparse

from deepseek_triton_tools.cli.parsing import VerbParser, option
from deepseek_triton_tools.terminal.output_streams import to_reader


def add_options(verb: VerbParser) -> None:
    verb.runs(
        _completion,
        "deepseek-triton completion bash > ~/.local/share/bash-completion/completions/deepseek-triton",
        "deepseek-triton completion zsh > ~/.zfunc/_deepseek-triton",
    )
    option(verb, "shell", "the shell that the script is for", choices=("bash", "zsh", "tcsh"))


def _completion(args: argparse.Namespace) -> int:
    import shtab  # the extra `tools` has it

    from deepseek_triton_tools.cli.main import VERBS, program_parser

    script = shtab.complete(program_parser(VERBS), args.shell)
    with to_reader():
        print(script)
    return 0
