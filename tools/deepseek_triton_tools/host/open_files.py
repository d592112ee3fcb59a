"""How many files and connections this process may have open."""

from __future__ import annotations

import resource


def allow_open_files(wanted: int) -> None:
    """Raise the soft limit on open files, as far as the hard limit allows it. The usual soft limit of 1,024 is low only
    for old programs that use select(2)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
