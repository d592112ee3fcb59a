"""bench.slurm: a batch script that makes the dataset where there is none, and runs bench.sh over all nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepseek_triton_build.render import shell
from deepseek_triton_build.render.trtllm_commands import can_prepare
from deepseek_triton_build.text import comment_lines, enroot_image, is_path

if TYPE_CHECKING:
    from deepseek_triton_build.planning.plan import Plan
    from deepseek_triton_build.render.trtllm_commands import TrtllmArguments

_NAME = "bench.slurm"


def bench_slurm(plan: Plan, args: TrtllmArguments, *, stamp: str) -> str:
    """Return bench.slurm, for a plan of several nodes."""
    nodes, each, world = plan.num_nodes, plan.gpus_per_node, plan.world_size
    about = [
        f"Measures {shell.model_title(plan)} with trtllm-bench on {nodes} nodes of {each} GPUs, as a job of Slurm. "
        "Submit it in its own folder, or name that as FOLDER:",
        "sbatch --partition=PARTITION --account=ACCOUNT --time=02:00:00 bench.slurm",
        "Further arguments go to trtllm-bench throughput, and DATASET, NUM_REQUESTS and CONCURRENCY are bench.sh's. "
        f"{'The dataset is made when there is none. ' if can_prepare(plan) else ''}LOGS is the folder of the logs, one "
        "for each rank, and of the figures as JSON; it is this folder unless you set it. IMAGE is the container, or "
        "none; MOUNTS are further folders in it, as in /data:/data,/models:/models. The folder and the checkpoint are "
        "at the same path on every node.",
        "--exclusive and --mem=0 take all of a node: its page cache counts as the job's memory, and each node reads "
        "the whole checkpoint. --no-requeue: a benchmark that lost a node starts again when you say so.",
    ]
    directives = [
        "--job-name=bench",
        f"--nodes={nodes}",
        f"--ntasks-per-node={each}",
        f"--gpus-per-node={each}",
        "--exclusive",
        "--mem=0",
        "--no-requeue",
        "--output=bench_%j.out",
    ]
    folder = [
        *comment_lines("Slurm runs a copy of this script, which can't tell its folder."),
        'here="$(readlink -m -- "${FOLDER:-${SLURM_SUBMIT_DIR:-$PWD}}")"',
        'if [[ ! -f "$here/bench.sh" ]]; then',
        f'  echo "{_NAME}: expected bench.sh in $here, found none; submit from the folder of both, or set FOLDER" >&2',
        "  exit 2",
        "fi",
        'export DATASET="$(readlink -m -- "${DATASET:-$here/dataset.txt}")"',
        'logs="$(readlink -m -- "${LOGS:-$here}")"',
        'mkdir -p -- "$logs"',
    ]
    return shell.script(
        stamp,
        about,
        folder,
        _container(plan, args),
        _dataset(plan),
        [
            *comment_lines(
                "--mpi=pmix: the ranks find each other by Slurm. --kill-on-bad-exit: when a rank has ended, the others "
                "would wait for it for ever. --cpu-bind=none: otherwise all threads of the engine share the one core "
                "of their rank. --export=ALL: passes the variables on even if sbatch was told to export none. %j is "
                "the job and %t the rank; rank 0 prints the figures."
            ),
            *shell.command(
                [f"exec srun --nodes={nodes} --ntasks={world} --ntasks-per-node={each} --mpi=pmix"],
                ["--kill-on-bad-exit=1 --cpu-bind=none --export=ALL"],
                ['--output="$logs/bench_%j_%t.srun.out"'],
                ['"${container[@]}" bash "$here/bench.sh"'],
                ['--report_json "$logs/bench_${SLURM_JOB_ID:-0}.json"', '"$@"'],
            ),
        ],
        directives=[f"#SBATCH {directive}" for directive in directives],
    )


def _container(plan: Plan, args: TrtllmArguments) -> list[str]:
    """Set the array `container` to srun's options for pyxis; to none if IMAGE says so."""
    image = enroot_image(plan.image_for("trtllm-bench") or "")
    model = f"mounts+=({shell.quoted(f'{args.model}:{args.model}:ro')})" if is_path(args.model) else ""
    return [
        *comment_lines(
            "--no-container-mount-home: Python packages in the user's home would hide the container's. The hub's cache "
            "is mounted where HF_HOME or HF_HUB_CACHE says where it is."
        ),
        'mounts=("$here:$here" "$logs:$logs" "${DATASET%/*}:${DATASET%/*}")',
        *([model] if model else []),
        'for folder in "${HF_HOME:-}" "${HF_HUB_CACHE:-}"; do',
        '  if [[ -n "$folder" ]]; then mounts+=("$folder:$folder"); fi',
        "done",
        'if [[ -n "${MOUNTS:-}" ]]; then mounts+=("$MOUNTS"); fi',
        f'image="${{IMAGE:-{image}}}"',
        "container=()",
        'if [[ "$image" != none ]]; then',
        '  if [[ "$here$logs$DATASET" =~ [[:space:],:] ]]; then',
        f'    echo "{_NAME}: $here, $logs, $DATASET: expected no blank, comma or colon, because pyxis mounts no such '
        'path (NVIDIA/pyxis#133); move the folder, or set IMAGE=none" >&2',
        "    exit 2",
        "  fi",
        "  printf -v mounted '%s,' \"${mounts[@]}\"",
        '  container=(--container-image="$image" --container-mounts="${mounted%,}" --no-container-mount-home)',
        "fi",
    ]


def _dataset(plan: Plan) -> list[str]:
    """Have one process make the dataset, because the ranks would each make one."""
    if not can_prepare(plan):
        return []
    return [
        'if [[ ! -f "$DATASET" ]]; then',
        "  srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --mpi=none --export=ALL,PREPARE=1 \\",
        '    "${container[@]}" bash "$here/bench.sh"',
        "fi",
    ]
