"""Every error of the launcher. The text is one line and says what to do about it.

LauncherError          `exit_code` is what the command line returns
├── UsageError         the command line, or a port that is taken: exit code 2
└── StillRunningError  processes that can't be killed
"""

from __future__ import annotations


class LauncherError(Exception):
    """Base of what a command can fail with."""

    exit_code = 1


class UsageError(LauncherError):
    """The command line can't be right, or what it names is not there or taken."""

    exit_code = 2


class StillRunningError(LauncherError):
    """Processes that can't be killed, as when a driver holds them."""
