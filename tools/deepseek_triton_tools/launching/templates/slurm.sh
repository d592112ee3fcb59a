#!/usr/bin/env bash
# Made by deepseek-triton @@{version}: launch slurm @@{source}
#SBATCH @@{directives}
#
# tritonserver answers on the first node, port @@{port}; `squeue -j JOBID -o %B` shows which node that is. --output is the log of all ranks.
# To stop the job in order: scancel --batch --signal=TERM JOBID. Open requests get all but 5 s of @@{exit_timeout_s} s (EXIT_TIMEOUT), at least half, and after @@{kill_s} s the supervisor kills what is left. Plain scancel tells every rank too, but Slurm kills them after KillWait, which is 30 s unless slurm.conf says more.
# --signal: SIGTERM also comes at the end of the job's time, @@{grace_s} s before it or up to 60 s earlier. Only the batch script gets it@@{becomes}. At preemption it comes only with preempt_send_user_signal in SlurmctldParameters.
# --requeue: after a node has failed, the job starts again on other nodes. When the server fails, the supervisor starts it again within the job. --open-mode=append keeps the log.
# @@{memory_why}
#
#if starts_alone
# Every node needs the repository and the checkpoint at the same path. start.sh runs the supervisor.
#else
# Every node needs the repository and the checkpoint at the same path. The first node also needs @@{python}, 3.10 or newer, @@{python_why}.
#end
set -euo pipefail

export @@{exports}
# This tag marks all processes of the launch, also those of the other ranks on this node.
tag="$(od -An -N4 -tx4 /dev/urandom | tr -d ' ')"
# The supervisor uses the names to say on which node a rank is missing.
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd, -)" || hosts=""

#if needs_master
# vLLM's nodes meet at the first one. srun's number of a process is the number of its node.
@@{master}="${hosts%%,*}"
export @@{master}

#end
#if folders
# Mounted folders must exist. Compiled kernels are kept there, for this image and this GPU only.
@@{folders}

#end
# --kill-on-bad-exit: when a rank has ended, the others would wait for it for ever. --label: each line of the log begins with its rank. --cpu-bind=none: otherwise all threads of the engine share the one core of their rank. --export=ALL: passes the variables on even if sbatch was told to export none. --no-container-mount-home: Python packages in the user's home would hide the container's.
#if several_ranks
DEEPSEEK_TRITON_LAUNCH="$tag" exec @@{supervisor} ${hosts:+--hosts "$hosts"} \
  -- @@{ranks}
#end
#if starts_alone
DEEPSEEK_TRITON_LAUNCH="$tag" exec @@{start}
#end
#if waits
#include slurm-one-rank.sh
#end
