"""Every error of the tools. The text is one line and says what to do about it.

ToolError                     `exit_code` is what the command line returns
├── RepositoryError           the folder is no model repository
├── InstallationError         this machine lacks something that has to be installed
├── CheckpointError           no checkpoint is where it was looked for
├── LockError                 files can't be kept in memory in the way that was asked for
├── PortError                 a port is taken, or can't be listened on
└── ServerFailedError         tritonserver ended, or can't become ready; exit_code is its own
"""

from __future__ import annotations


class ToolError(Exception):
    """Base of what a command can fail with."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RepositoryError(ToolError):
    """The folder is no model repository."""


class InstallationError(ToolError):
    """This machine lacks something that has to be installed."""


class CheckpointError(ToolError):
    """No checkpoint is where it was looked for, or it can't be looked at."""


class LockError(ToolError):
    """Files can't be kept in memory in the way that was asked for."""


class PortError(ToolError):
    """A port is taken, or can't be listened on."""


class ServerFailedError(ToolError):
    """tritonserver ended, or can't become ready."""
