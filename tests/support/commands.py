"""The command line in the process of the test, which saves the start of a Python."""

import io
import subprocess
from contextlib import redirect_stderr, redirect_stdout

from deepseek_triton_tools.cli.main import main


def run_command(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `deepseek-triton WORDS`. A usage error is exit code 2, as for the shell."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else 1
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())
