"""start.sh: runs the repository it lies in."""

from __future__ import annotations

from deepseek_triton_build.planning.plan import Plan
from deepseek_triton_build.render import shell
from deepseek_triton_build.render.text import comment

NAME = "start.sh"


def start_sh(plan: Plan, *, stamp: str) -> str:
    """For TensorRT-LLM, in a stock Triton container with nothing installed; else wherever tritonserver is."""
    where = "where tritonserver and the engine's packages are installed"
    if plan.release is not None:
        where = f"in {plan.image}, with nothing installed"
    about = [
        f"Serves the repository this script lies in, {where}.",
        "HTTP_PORT, GRPC_PORT and METRICS_PORT move the ports; further arguments go to tritonserver, which listens on "
        "every address of the machine unless told otherwise (--http-address, --grpc-address, --metrics-address).",
    ]
    ports = [f'--{name}-port "${{{name.upper()}_PORT:-{port}}}"' for name, port in _PORTS]
    return shell.script(
        stamp,
        about,
        [f"repository={shell.HERE}", *(_overlay() if plan.release is not None else [])],
        shell.exports(plan.environment),
        shell.on_every_node(plan, NAME),
        [
            *(_ranks_comment() if plan.release is not None else []),
            *shell.command(
                ["exec", *shell.triton_launcher(plan), "tritonserver"],
                ['--model-repository "$repository"'],
                ports,
                ['"$@"'],
            ),
        ],
    )


_PORTS = (("http", 8000), ("grpc", 8001), ("metrics", 8002))


def _overlay() -> list[str]:
    return [
        *comment(
            "The engine's workers are processes of their own; this gives them the work-arounds for the container's "
            "known faults."
        ),
        'export PYTHONPATH="$repository/tensorrt_llm/1/deepseek_backend/overlay${PYTHONPATH:+:$PYTHONPATH}"',
    ]


def _ranks_comment() -> list[str]:
    return comment(
        "One MPI rank for each GPU: rank 0 runs tritonserver, all of them run the engine's workers. Plain tritonserver "
        "can't spawn workers by itself (MPI_ERR_SPAWN)."
    )
