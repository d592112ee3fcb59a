#!/usr/bin/env bash
# Made by deepseek-triton @@{version}: warm @@{source} --form slurm-prolog
# Brings @@{checkpoints} into the page cache of a node before a job starts on it.
#
# Prolog= of slurm.conf: slurmd runs it as root, once on each node of a job and not for every rank. A prolog that fails
# drains its node, so this one ends with 0 whatever happens, and says what happened in its log.
# @@{timeout_why}
# A batch job that has not started after BatchStartTimeout (10 s unless slurm.conf says more), its prolog included, is given up: set that to @@{timeout_s} or more, or warm in the background ("warm &" in the last line but one).
#
# Page cache is charged to the memory cgroup of whoever reads a page first. Here that is slurmd's own, not the job's, so that a job's --mem need not hold the checkpoint (@@{size}); a memory limit on slurmd.service has to. Run inside a job instead (srun --ntasks-per-node=1), it is charged to the job.
set -u

partitions=""   # for jobs of these partitions only, separated by spaces; empty: of all
log="${DEEPSEEK_TRITON_WARM_LOG:-/var/log/deepseek-triton-warm.log}"
lock="${DEEPSEEK_TRITON_WARM_LOCK:-/run/lock/deepseek-triton-warm}"
# Prologs are run without a search path.
export PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
program=@@{program}
@@{environment}
say() { printf '%s %s job %s: %s\n' "$(date -Is)" "$(hostname)" "${SLURM_JOB_ID:-none}" "$1"; }

warm() {
  # Two jobs that start on one node take turns; the second finds the files there, in seconds.
  exec 9>"$lock" && flock -w @@{timeout_s} 9 || { say "$lock can't be locked: not warmed"; return; }
  say "warming"
  timeout --signal=TERM --kill-after=10 @@{timeout_s} "$program" warm @@{checkpoints_quoted} 9>&-
  code=$?
  # 0 warm, 3 as far as it fits, 124 out of time; docs/warm.md has the others.
  case $code in
    0) say "warm" ;;
    *) say "not all warm (exit code $code): the engine reads the rest itself" ;;
  esac
}

# As a TaskProlog it would be run by every rank: the first of a node does it.
[[ "${SLURM_LOCALID:-0}" == 0 ]] || exit 0
[[ -z "$partitions" || " $partitions " == *" ${SLURM_JOB_PARTITION:-} "* ]] || exit 0
# Nothing on standard output, which Slurm reads of some prologs.
{ exec >>"$log"; } 2>/dev/null || exec >&2
exec 2>&1 </dev/null
warm
exit 0
