#!/usr/bin/env bash
# Made by deepseek-triton @@{version}: warm form slurm-prolog @@{source}
# Brings @@{checkpoints} into the page cache of a node before a job starts on it.
#
# Prolog= of slurm.conf: slurmd runs it as root, once on each node of a job and not for every rank. Say PrologFlags=Alloc too: without it slurmd runs it just before the first task of the job on the node, which then waits.
# A prolog that fails drains its node. This one ends with 0 whatever becomes of the files, and says what happened in its log; but one that lasts longer than PrologTimeout (or PrologEpilogTimeout) is killed, and its node drained: leave both unset, or set them to @@{prolog_timeout_s} or more.
# @@{timeout_why} All of it ends by then, the wait for another job's prolog among it; PrologTimeout has @@{spare_s} s more.
# A batch job that has not started after BatchStartTimeout (10 s unless slurm.conf says more), its prolog included, is given up: set that to @@{prolog_timeout_s} or more. Or let no job wait: background=yes below.
#
# Page cache is charged to the memory cgroup of whoever reads a page first. Here that is slurmd's own, not the job's, so that a job's --mem need not hold the checkpoint (@@{size}); a memory limit on slurmd.service has to. With PrologFlags=RunInJob, or inside a job (srun --ntasks-per-node=1), it is charged to the job, whose --mem then has to.
set -u

partitions=""   # for jobs of these partitions only, separated by spaces; empty: of all
background=""   # yes: the job does not wait; its engine reads meanwhile what is not there yet
limit=@@{timeout_s}
log="${DEEPSEEK_TRITON_WARM_LOG:-/var/log/deepseek-triton-warm.log}"
lock="${DEEPSEEK_TRITON_WARM_LOCK:-/run/lock/deepseek-triton-warm}"
# Prologs are run without a search path.
export PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
program=@@{program}
@@{environment}
say() { printf '%s %s job %s: %s\n' "$(date -Is)" "$(hostname)" "${SLURM_JOB_ID:-none}" "$1"; }

warm() {
  local left code
  SECONDS=0
  # Two jobs that start on one node take turns; the second finds the files there, in seconds.
  { exec 9>"$lock"; } || { say "$lock can't be locked: not warmed"; return; }
  flock -w "$limit" 9 || { say "$lock can't be locked in $limit s: not warmed"; return; }
  left=$((limit - SECONDS))  # bash counts them
  ((left > 0)) || { say "out of time after $limit s, spent waiting for $lock: not warmed"; return; }
  say "warming"
  timeout --signal=TERM --kill-after=10 "$left" "$program" warm files @@{checkpoints_quoted} 9>&-
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
if [[ "$background" == yes && -z "${DEEPSEEK_TRITON_WARM_DETACHED:-}" ]]; then
  # slurmd kills the process group of a prolog that has ended, and may wait for what has its output open. What is waited for here is in a session of its own before this script ends.
  [[ -w "$log" ]] || exec >/dev/null 2>&1
  DEEPSEEK_TRITON_WARM_DETACHED=yes setsid bash -c 'bash "$0" &' "$0"
  exit 0
fi
warm
exit 0
