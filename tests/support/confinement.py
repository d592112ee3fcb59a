"""Runs a program as a hardened pod does: no rights, a user who owns nothing, and only /tmp and /dev/shm to write to."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.mounting import NOBODY

HERE = Path("/srv")
"""Where the program finds its folder: /tmp is a new one."""
_CONFINED = f"""\
set -euo pipefail
mount --make-rprivate /
mount --bind "$1" {HERE}
# Every mount becomes read-only, but for the kernel's own and those that a pod may write to.
while read -r _ _ _ _ point _; do
  case $point in
    /proc | /proc/* | /dev/pts | /dev/shm | /dev/mqueue | /sys/*) ;;
    *) if [[ -e $point ]]; then mount -o remount,bind,ro "$point"; fi ;;  # others lie below a later mount
  esac
done < /proc/self/mountinfo
mount -t tmpfs -o mode=1777 tmpfs /tmp
shift
exec "$@"
"""


def confined(
    folder: Path, command: Sequence[str | Path], *, is_root: bool = False, kept: Sequence[str] = ()
) -> list[str]:
    """Return the command that runs `command` so, with `folder` at HERE. Skips the test where that is not allowed.

    Whoever is not root owns what root owns here (a user namespace), because the tests' Python may be root's own.

    :param kept: capabilities that root keeps, such as +dac_override.
    """
    if os.geteuid() or shutil.which("setpriv") is None:
        pytest.skip("only root can take rights away here, with setpriv")
    if Path(sys.prefix).is_relative_to("/tmp"):
        pytest.skip("this Python lies in /tmp, of which a confined program sees a new one")
    sets = ",".join(["-all", *kept])
    as_user = ["unshare", "--user", f"--map-user={NOBODY}", f"--map-group={NOBODY}", "setpriv"]
    as_root = ["setpriv", f"--bounding-set={sets}", f"--inh-caps={sets}", "--ambient-caps=-all"]
    who = [*(as_root if is_root else as_user), "--no-new-privs"]
    return ["unshare", "--mount", "bash", "-c", _CONFINED, "bash", str(folder), *who, *map(str, command)]
