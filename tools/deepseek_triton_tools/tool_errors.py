"""Every error of the tools. The message is one line and says what to do about it.

ToolError
├── RepositoryError
├── InstallationError
├── CheckpointError
├── LockError
├── PortError
└── ServerFailedError
"""

import re
from collections.abc import Iterable

TOKEN_VARIABLE = "DEEPSEEK_TRITON_TOKEN"
TOKEN_ADVICE = f"; --token-file FILE or the variable {TOKEN_VARIABLE} gives a key"
_NAMES = r"(tls\.\w+|metrics_url|timeouts\.\w+|model_name|token)"
# As words only, and before a colon at the beginning only: tls.key is also what Kubernetes calls its file.
_SETTING = re.compile(rf"(?:^|(?<=; )){_NAMES}(?=: )|(?<!\S)(?!model_name|token){_NAMES}(?: \(--\w+\))?(?!\S)")
_OPTIONS = (
    {"tls.ca": "--ca", "tls.certificate": "--cert", "tls.key": "--key", "model_name": "--model"}
    | {"metrics_url": "--metrics-url", "timeouts.total": "--timeout", "timeouts.connect": "--connect-timeout"}
    | {"timeouts.first_token": "--first-token-timeout", "timeouts.between_tokens": "--token-timeout"}
    | {"token": f"--token-file or {TOKEN_VARIABLE}"}
)


class ToolError(Exception):
    """Base of all of them. `exit_code` is what the command line returns."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RepositoryError(ToolError):
    """The folder is not a model repository."""


class InstallationError(ToolError):
    """This machine lacks something that has to be installed."""


class CheckpointError(ToolError):
    """There is no checkpoint in the place that was named, or it can't be read."""


class LockError(ToolError):
    """Files can't be held in memory in the way that was asked for."""


class PortError(ToolError):
    """A port is taken, or can't be listened on."""


class ServerFailedError(ToolError):
    """tritonserver ended, or can't become ready. `exit_code` is tritonserver's own, where it ended."""


def in_options(text: str) -> str:
    """Return an error of the client with the options' names instead of its settings'."""
    return _SETTING.sub(lambda found: _OPTIONS.get(found[1] or found[2], found[0]), text)


def nearest(name: str, names: Iterable[str]) -> str:
    """Ask at the end of a message whether one of `names` was meant: "; did you mean X?". Empty where none is alike."""
    from deepseek_triton_build.text import nearest_name  # here, because only mistakes need it

    near = nearest_name(name, names)
    return f"; did you mean {near}?" if near else ""
