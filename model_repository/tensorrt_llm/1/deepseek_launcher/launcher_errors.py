"""Every error of the launcher. Its text is one line and says how to fix it.

LauncherError          `exit_code` is what the command line returns
├── UsageError         the command line is wrong, or something that it names is missing or taken: exit code 2
└── StillRunningError  processes that can't be killed
"""

from __future__ import annotations


class LauncherError(Exception):
    exit_code = 1


class UsageError(LauncherError):
    exit_code = 2


class StillRunningError(LauncherError):
    """Processes can't be killed, for example because a driver holds them."""
