"""bench.slurm: bench.sh over several nodes as one Slurm job, with its dataset and its logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepseek_triton_build.render import shell
from deepseek_triton_build.text import comment_lines, is_path

if TYPE_CHECKING:
    from deepseek_triton_build.planning.plan import Plan


def bench_slurm(plan: Plan, model: str, *, stamp: str) -> str:
    """Return the batch script. The directives that every job of this size needs are in it; a cluster's own, such as its
    partition, are for sbatch's command line.

    :param model: a folder or a Hugging Face name.
    """
    about = (
        f"Measures {shell.model_title(plan)} on {plan.num_nodes} nodes: sbatch --partition NAME --account NAME "
        "bench.slurm, from this folder, which all nodes have at the same path. One task makes the dataset if there is "
        "none; then every rank runs bench.sh, whose variables and arguments work here too. IMAGE is the container, for "
        "pyxis; with IMAGE= there is none. DATASET must be below this folder."
    )
    registry, _, image = (plan.image_for("trtllm-bench") or "").partition("/")
    places = ['"$PWD:$PWD"', *_model_mounts(model)]
    lines = [
        "#!/usr/bin/env bash",
        f"# {stamp}",
        *comment_lines(about),
        "#SBATCH --job-name=bench",
        f"#SBATCH --nodes={plan.num_nodes}",
        f"#SBATCH --ntasks-per-node={plan.gpus_per_node}",
        f"#SBATCH --gpus-per-node={plan.gpus_per_node}",
        "#SBATCH --exclusive",
        "#SBATCH --mem=0",
        "#SBATCH --time=02:00:00",
        "#SBATCH --output=bench-%j.log",
        "set -euo pipefail",
        "",
        "if [[ ! -f bench.sh ]]; then",
        '  echo "bench.slurm: expected to be submitted from its own folder, beside bench.sh; got $PWD" >&2',
        "  exit 2",
        "fi",
        "",
        f'image="${{IMAGE-{registry}#{image}}}"',
        "container=()",
        'if [[ -n "$image" ]]; then',
        *shell.indented(_hub_cache(model)),
        *shell.indented(shell.array("places", places)),
        '  mounts="$(IFS=,; echo "${places[*]}")"',
        "  container=(",
        '    --container-image="$image" --no-container-mount-home',
        '    --container-mounts="$mounts" --container-workdir="$PWD"',
        "  )",
        "fi",
        "",
        'if [[ ! -f "${DATASET:-dataset.txt}" ]]; then',
        '  PREPARE=1 srun --nodes=1 --ntasks=1 "${container[@]}" bash bench.sh',
        "fi",
        "",
        *comment_lines("Each rank has a log of its own. That of rank 0 has the figures."),
        'exec srun --mpi=pmix "${container[@]}" --output="bench-%j-%t.log" bash bench.sh "$@"',
    ]
    return "\n".join(lines) + "\n"


def _model_mounts(model: str) -> list[str]:
    if not is_path(model):
        return ['"$HF_HOME:$HF_HOME"']
    return [shell.quoted(f"{model}:{model}")] if model.startswith("/") else []


def _hub_cache(model: str) -> list[str]:
    return [] if is_path(model) else ['export HF_HOME="${HF_HOME:-$HOME/.cache/huggingface}"']
