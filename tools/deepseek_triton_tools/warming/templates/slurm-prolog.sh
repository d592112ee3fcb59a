#!/usr/bin/env bash
# Made by deepseek-triton @@{version}: warm form slurm-prolog @@{source}
# Brings @@{checkpoints} into the page cache of a node before a job starts on it.
#
# Name it in Prolog= of slurm.conf: slurmd runs it as root, once on each node of a job and not for every rank. Set PrologFlags=Alloc too: without it, slurmd runs the prolog just before the job's first task on the node, which then waits.
# A prolog that fails drains its node. This one always exits with 0, and its log says what happened. But a prolog that runs longer than PrologTimeout (or PrologEpilogTimeout) is killed, and its node is drained: leave both unset, or set them to @@{prolog_timeout_s} or more.
# @@{timeout_why} The script ends by then, its wait for another job's prolog included; PrologTimeout has @@{spare_s} s more.
# Slurm gives up a batch job that has not started after BatchStartTimeout, its prolog included (10 s unless slurm.conf says more): set that to @@{prolog_timeout_s} or more. With background=yes below, no job waits.
#
# Page cache is charged to the memory cgroup of the process that reads a page first. Here that is slurmd's cgroup and not the job's. A job's --mem need not have room for the checkpoint (@@{size}), but a memory limit of slurmd.service has to. With PrologFlags=RunInJob, or inside a job (srun --ntasks-per-node=1), the job is charged, and its --mem has to have room.
set -u

partitions=""   # only jobs of these partitions are warmed for, separated by spaces; empty: all jobs
background=""   # yes: the job does not wait, and its engine reads itself what is not in the page cache yet
limit=@@{timeout_s}
log="${DEEPSEEK_TRITON_WARM_LOG:-/var/log/deepseek-triton-warm.log}"
lock="${DEEPSEEK_TRITON_WARM_LOCK:-/run/lock/deepseek-triton-warm}"
# Slurm runs prologs without a search path.
export PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
program=@@{program}
@@{environment}
say() { printf '%s %s job %s: %s\n' "$(date -Is)" "$(hostname)" "${SLURM_JOB_ID:-none}" "$1"; }

warm() {
  local left code
  SECONDS=0
  # Two jobs that start on one node take turns. The second finds the files in the page cache, within seconds.
  { exec 9>"$lock"; } || { say "$lock can't be locked: not warmed"; return; }
  flock -w "$limit" 9 || { say "$lock can't be locked in $limit s: not warmed"; return; }
  left=$((limit - SECONDS))  # bash counts SECONDS up
  ((left > 0)) || { say "out of time after $limit s, spent waiting for $lock: not warmed"; return; }
  say "warming"
  timeout --signal=TERM --kill-after=10 "$left" "$program" warm files @@{checkpoints_quoted} 9>&-
  code=$?
  # 0: warm; 3: only a part fits; 124: out of time; 1: a file is missing or damaged; 4: the storage stalled.
  case $code in
    0) say "warm" ;;
    *) say "not all warm (exit code $code): the engine reads the rest itself" ;;
  esac
}

# As a TaskProlog, every rank would run it; only the first rank of a node goes on.
[[ "${SLURM_LOCALID:-0}" == 0 ]] || exit 0
[[ -z "$partitions" || " $partitions " == *" ${SLURM_JOB_PARTITION:-} "* ]] || exit 0
# Write nothing to standard output: Slurm reads the output of some prologs.
{ exec >>"$log"; } 2>/dev/null || exec >&2
exec 2>&1 </dev/null
if [[ "$background" == yes && -z "${DEEPSEEK_TRITON_WARM_DETACHED:-}" ]]; then
  # slurmd kills the process group of a prolog that has ended, and may wait for processes that have its output open. So the background process gets a session of its own, before this script ends.
  [[ -w "$log" ]] || exec >/dev/null 2>&1
  DEEPSEEK_TRITON_WARM_DETACHED=yes setsid bash -c 'bash "$0" &' "$0"
  exit 0
fi
warm
exit 0
