#!/usr/bin/env bash
# Made by deepseek-triton @@{version}: launch slurm @@{source}
@@{directives}
#
# tritonserver answers on the first node, port @@{port}: squeue -j JOBID -o %B says which it is. The log of all ranks is --output's.
# To stop it in order: scancel --batch --signal=TERM JOBID. Open requests get @@{exit_timeout_s} s (EXIT_TIMEOUT), after @@{kill_s} s the supervisor kills what is left. Plain scancel tells every rank as well, but Slurm kills them KillWait later, 30 s unless slurm.conf says more.
# --signal: the same at the end of the job's time, @@{grace_s} s before it, or up to 60 s earlier; the batch script alone gets it, which is the supervisor by then. At preemption only with preempt_send_user_signal in SlurmctldParameters.
# --requeue: after a node's failure the job starts anew elsewhere; what fails by itself is started again by the supervisor, within the job. --open-mode=append keeps the log.
# @@{memory_why}
#
@@{supervision}
set -euo pipefail

@@{exports}
# By this the processes of the launch are known, also on this node's other ranks.
DEEPSEEK_TRITON_LAUNCH="$(od -An -N4 -tx4 /dev/urandom | tr -d ' ')"
export DEEPSEEK_TRITON_LAUNCH
# To say on which node a rank is missing.
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd, -)" || hosts=""

@@{prepare}# --kill-on-bad-exit: the others wait for ever for a rank that is gone. --label: whose line it is. --cpu-bind=none: the engine's threads would share the one core of their rank. --export=ALL: also where sbatch was told to export nothing. --no-container-mount-home: Python packages of one's own would hide the container's.
exec @@{command}
