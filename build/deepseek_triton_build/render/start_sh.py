"""start.sh: runs the repository it lies in, under the supervisor that lies beside the backend."""

from __future__ import annotations

from deepseek_triton_build.arithmetic.load_time import (
    ASSUMED_RATE,
    ENGINE_START_S,
    SMALL_READY_WITHIN_S,
    load_s,
    ready_within_s,
)
from deepseek_triton_build.data.rank_variables import is_engine_variable
from deepseek_triton_build.planning.plan import Plan
from deepseek_triton_build.planning.plan_request import PYTHON_BACKEND
from deepseek_triton_build.render import shell
from deepseek_triton_build.render.vllm_commands import engine_flags, model_of, node_lines
from deepseek_triton_build.text import comment_lines

NAME = "start.sh"
_TAG = "DEEPSEEK_TRITON_LAUNCH"
"""The variable by which the processes of one launch are known."""
EXIT_TIMEOUT_S = 30
"""Seconds that open requests have to finish: tritonserver's own default of --exit-timeout-secs."""
MPIRUN_SPARE_S = 20
"""Seconds that mpirun waits beyond the exit timeout before it kills. The supervisor kills 15 s after the timeout."""
_MAX_RESTARTS = 3
_KEEP_ENVIRONMENT = "SPT_NOENV"

_ENDPOINTS = (("http", 8000), ("grpc", 8001), ("metrics", 8002))
_CLOSED_APIS = "shared-memory,trace,logging"
"""Triton's endpoints that need a key which nobody is told. By them any client could map the host's memory, have files
written and change what is logged."""
_SUPERVISOR = 'python3 "$supervise" run "${options[@]}" --'
_GUARD = 'python3 "$supervise" rank --'


def start_sh(plan: Plan, *, stamp: str) -> str:
    """Return start.sh. It runs TensorRT-LLM and vLLM in a stock Triton container; other engines run where tritonserver
    is."""
    return shell.script(
        stamp,
        _about(plan),
        [
            f"repository={shell.HERE}",
            'supervise="$repository/tensorrt_llm/1/supervise.py"',
            *shell.refusing(NAME),
        ],
        _overlay(plan),
        shell.exports(plan.environment, NAME),
        _process_titles(plan),
        _launch_tag(plan),
        shell.interface() if plan.release is not None else [],
        shell.engine_variables() if plan.release is not None or plan.vllm is not None else [],
        _endpoints(),
        _exit_timeout(),
        _supervisor_options(plan),
        _backend_directory(plan),
        _closed_apis(),
        _server(plan),
        _refused_arguments(),
        _refused_words(plan),
        node_lines(plan, NAME) if plan.vllm is not None else [],
        _start(plan),
        [shell.END_IF_REFUSED],
        _dry_run(plan),
        ['exec "${start[@]}"'],
    )


def _about(plan: Plan) -> list[str]:
    where = "where tritonserver and the engine's packages are installed"
    if plan.image is not None:
        where = f"in {plan.image}, where nothing has to be installed"
    elif plan.vllm is not None:
        where = f"where tritonserver and vLLM {plan.vllm.version} are installed"
    return [
        f"Serves the repository that holds this script, {where}. A supervisor runs the server: it ends a server that "
        "does not become ready in time, restarts a server that was ready and has failed, and leaves no process behind. "
        "See tensorrt_llm/1/supervise.py --help.",
        "Variables change how it runs: HTTP_PORT, GRPC_PORT and METRICS_PORT; HTTP_ADDRESS, GRPC_ADDRESS and "
        "METRICS_ADDRESS (the default is every address of the machine); EXIT_TIMEOUT, READY_WITHIN, MAX_RESTARTS and "
        "READY_FILE, which are explained below. DRY_RUN=1 prints the command and exits. Arguments go to tritonserver.",
    ]


def _overlay(plan: Plan) -> list[str]:
    if plan.release is None:
        return []
    return [
        *comment_lines(
            "The engine's workers are separate processes. This path gives them the work-arounds for known faults of "
            "the container."
        ),
        'export PYTHONPATH="$repository/tensorrt_llm/1/deepseek_backend/process/overlay${PYTHONPATH:+:$PYTHONPATH}"',
    ]


def _process_titles(plan: Plan) -> list[str]:
    if plan.vllm is None:
        return []
    return [
        *comment_lines(
            "vLLM gives its processes titles by setproctitle, which writes long ones over the environment that the "
            "kernel shows, and so over the launch tag. With this variable it does not."
        ),
        f"export {_KEEP_ENVIRONMENT}=1",
    ]


def _launch_tag(plan: Plan) -> list[str]:
    """Export the launch tag, unless it is set already. All ranks of a Slurm step make the same tag."""
    made = f"  {_TAG}=\"$(od -An -N4 -tx4 /dev/urandom | tr -d ' ')\""
    in_step = [
        f"  if {shell.in_slurm_step(plan)}; then",
        f"    printf -v {_TAG} '%08x' \"$(((${{SLURM_JOB_ID:-0}} * 4096 + ${{SLURM_STEP_ID:-0}}) & 0xffffffff))\"",
        "  else",
        f"  {made}",
        "  fi",
    ]
    return [
        *comment_lines(
            "The launch tag: every process of this launch carries it, and the supervisor ends no process without it. "
            "It is eight hexadecimal digits"
            + (", the same for all ranks of a Slurm step." if _is_for_slurm(plan) else ".")
        ),
        f'if [[ -z "${{{_TAG}:-}}" ]]; then',
        *(in_step if _is_for_slurm(plan) else [made]),
        "fi",
        f"export {_TAG}",
        f'if [[ ! "${_TAG}" =~ ^[0-9a-f]{{8}}$ ]]; then',
        f"  refuse \"expected eight hexadecimal digits as {_TAG}; got '${_TAG}'; unset it, start.sh makes one\"",
        "fi",
    ]


def _is_for_slurm(plan: Plan) -> bool:
    """Whether Slurm can start the ranks. A step of one task tells nothing, because every other job has one too."""
    return plan.release is not None and plan.world_size > 1


def _endpoints() -> list[str]:
    return [
        *comment_lines("Where the server listens. The supervisor asks over HTTP whether the server is ready."),
        *(f'{name}_port="${{{name.upper()}_PORT:-{port}}}"' for name, port in _ENDPOINTS),
        'http_address="${HTTP_ADDRESS:-0.0.0.0}"',
        'grpc_address="${GRPC_ADDRESS:-0.0.0.0}"',
        'metrics_address="${METRICS_ADDRESS:-$http_address}"',
    ]


def _exit_timeout() -> list[str]:
    return [
        *comment_lines(
            "EXIT_TIMEOUT: seconds that open requests have to finish when the server is told to stop. Give whatever "
            "stops this script (docker stop -t, terminationGracePeriodSeconds) at least 20 seconds more."
        ),
        f'exit_timeout="${{EXIT_TIMEOUT:-{EXIT_TIMEOUT_S}}}"',
        'if [[ ! "$exit_timeout" =~ ^(0|[1-9][0-9]{0,5})$ ]]; then',
        "  refuse \"expected whole seconds as EXIT_TIMEOUT; got '$exit_timeout'\"",
        "  exit_timeout=0",
        "fi",
    ]


def _supervisor_options(plan: Plan) -> list[str]:
    ports = [f'--{name}-port "${name}_port"' for name, _ in _ENDPOINTS]
    deadline, why = _ready_within(plan)
    restarts = "The pauses between restarts grow."
    if is_one_of_several := plan.vllm is not None and plan.num_nodes > 1:
        restarts = "The default is 0, because the other nodes have to be started again, too."
    options = [
        '--repository "$repository"',
        *([f"--ranks {plan.world_size} --ranks-per-node {plan.gpus_per_node}"] if plan.release is not None else []),
        " ".join(ports),
        '--http-address "$http_address"',
        f'--ready-within "${{READY_WITHIN:-{deadline}}}"',
        '--exit-timeout "$exit_timeout"',
        f'--max-restarts "${{MAX_RESTARTS:-{0 if is_one_of_several else _MAX_RESTARTS}}}"',
    ]
    return [
        *comment_lines(f"READY_WITHIN: seconds within which the server has to be ready; 0 means no limit. {why}"),
        *comment_lines(f"MAX_RESTARTS: how often a server that was ready and failed is restarted. {restarts}"),
        *comment_lines("READY_FILE: path of a file that exists while the server is ready."),
        *shell.array("options", options),
        'if [[ -n "${READY_FILE:-}" ]]; then options+=(--ready-file "$READY_FILE"); fi',
    ]


def _ready_within(plan: Plan) -> tuple[int, str]:
    """Return the seconds a start may take, and how they were computed."""
    if plan.checkpoint is None:
        return (
            SMALL_READY_WITHIN_S,
            f"{SMALL_READY_WITHIN_S} s are assumed for a small model, which takes a few seconds.",
        )
    size, whole = plan.checkpoint.weight_bytes, ready_within_s(plan.checkpoint.weight_bytes)
    rate = ASSUMED_RATE // 10**6
    return whole, (
        f"{size:,} bytes of weights ({plan.checkpoint.bytes_status}) at {rate} MB/s, which users report for a first "
        f"load from a slow disk, take {load_s(size):,} s. {ENGINE_START_S:,} s more are assumed for kernels and CUDA "
        f"graphs. Rounded up to whole minutes, that is {whole:,} s."
    )


def _backend_directory(plan: Plan) -> list[str]:
    """Make a backend directory that has the repository's own backend too, where there is one."""
    name = plan.request.backend_name
    if name == PYTHON_BACKEND:
        return []
    return [
        *comment_lines(
            f'config.pbtxt names the backend "{name}", which lies in this repository. Triton looks for it in its '
            "backend directory, beside the Python backend that it needs."
        ),
        f'backends="${{TMPDIR:-/tmp}}/deepseek_triton_${{{_TAG}}}_backends"',
        'mkdir -p "$backends"',
        'ln -sfn /opt/tritonserver/backends/* "$backends"',
        f'ln -sfn "$repository/tensorrt_llm/backends/{name}" "$backends/{name}"',
    ]


def _closed_apis() -> list[str]:
    options = ("--http-restricted-api", "--grpc-restricted-protocol")
    return [
        *comment_lines(
            f"The endpoints {_CLOSED_APIS} are closed: by them any client could map the host's shared memory, have "
            "files written and change what is logged. They want a header with this key, which nobody is told. Whoever "
            f"needs one gives {' or '.join(options)} as an argument, with a key of their own, and it takes the place "
            "of this one."
        ),
        "key=\"$(od -An -N16 -tx4 /dev/urandom | tr -d ' ')\"",
        "closed=()",
        f"for option in {' '.join(options)}; do",
        f'  if [[ " $*" != *" $option"* ]]; then closed+=("$option={_CLOSED_APIS}:closed=$key"); fi',
        "done",
    ]


def _server(plan: Plan) -> list[str]:
    has_own = plan.request.backend_name != PYTHON_BACKEND
    return [
        *comment_lines(
            "The Python backend's shared memory is named after the launch tag, so that what a killed server leaves in "
            "/dev/shm can be found and removed."
        ),
        *shell.array(
            "server",
            [
                'tritonserver --model-repository "$repository"',
                *(f'--{name}-address "${name}_address" --{name}-port "${name}_port"' for name, _ in _ENDPOINTS),
                '--exit-timeout-secs "$exit_timeout"',
                f'"--backend-config=python,shm-region-prefix-name=deepseek_triton_${{{_TAG}}}_"',
                *(['--backend-directory "$backends"'] if has_own else []),
                '"${closed[@]}"',
                '"$@"',
            ],
        ),
    ]


def _refused_arguments() -> list[str]:
    settings = [f"{name}-{what}" for what in ("port", "address") for name, _ in _ENDPOINTS]
    variables = {f"--{setting}": setting.replace("-", "_").upper() for setting in settings}
    variables["--exit-timeout-secs"] = "EXIT_TIMEOUT"
    return [
        *comment_lines(
            "The supervisor needs these settings too, so they are variables and not arguments of tritonserver."
        ),
        'for argument in "$@"; do',
        '  case "${argument%%=*}" in',
        *(f"    {option}) variable={variable} ;;" for option, variable in variables.items()),
        "    --allow-http)",
        '      refuse "expected HTTP to stay on, because the supervisor asks over it; leave $argument out"',
        "      continue",
        "      ;;",
        "    *) continue ;;",
        "  esac",
        '  refuse "expected $variable to be set, because the supervisor needs it too; got the argument $argument"',
        "done",
    ]


def _refused_words(plan: Plan) -> list[str]:
    if plan.release is None:
        return []
    launch = shell.entry_point(plan)
    return [
        *comment_lines(
            f"{launch} splits its command at spaces, because it uses the variable $task_with_command without quotes "
            "(NVIDIA/TensorRT-LLM tensorrt_llm/llmapi/trtllm-llmapi-launch@020c89e6; later versions use an array). For "
            "the repository's own path, the guard of rank 0 makes a link without spaces."
        ),
        'for word in "${server[@]}"; do',
        '  if [[ -z "$word" || "$word" =~ [[:space:]] && "$word" != "$repository" ]]; then',
        "    printf -v word '%q' \"$word\"",
        f'    refuse "expected a value without spaces and not empty, because {launch} splits words; got $word"',
        "  fi",
        "done",
    ]


def _start(plan: Plan) -> list[str]:
    """Set the array `start` to the whole command."""
    if plan.release is None:
        alone = [
            *comment_lines("The guard ends the server when the supervisor is killed."),
            *shell.array("start", [_SUPERVISOR, _GUARD, '"${server[@]}"']),
        ]
        return alone if plan.num_nodes == 1 else _start_node(plan, alone)
    launched = f'{shell.entry_point(plan)} "${{server[@]}}"'
    mpirun = [
        *shell.mpirun_lines(plan, _mpirun_options(plan), [_TAG]),
        *(['options+=(--hosts "$(IFS=,; echo "${hosts[*]}")")'] if plan.num_nodes > 1 else []),
        *shell.array("start", [_SUPERVISOR, '"${ranks[@]}"', _GUARD, launched]),
    ]
    if not _is_for_slurm(plan):
        return [*_ranks_comment(plan), *mpirun]
    return [
        *_ranks_comment(plan),
        f"if {shell.in_slurm_step(plan)}; then",
        '  if [[ -n "${INTERFACE:-}" ]]; then',
        '    export OMPI_MCA_btl_tcp_if_include="${OMPI_MCA_btl_tcp_if_include:-$INTERFACE}"',
        "  fi",
        f"  start=({_GUARD} {launched})",
        "else",
        *shell.indented(mpirun),
        "fi",
    ]


def _start_node(plan: Plan, alone: list[str]) -> list[str]:
    """Set `start` to the command of this node: the server on node 0, and vLLM's own program without a server elsewhere.

    Under Slurm the supervisor has started this script on every node.
    """
    flags = engine_flags(plan)
    model = (
        f'"$repository/tensorrt_llm/1/{plan.variant.model}"'
        if plan.carries_checkpoint
        else shell.quoted(model_of(plan))
    )
    engine = [f"vllm serve {model}", *(" ".join(flag.words) for flag in flags), '"${node[@]}"']
    return [
        'if [[ "$node_rank" != 0 ]]; then',
        *shell.indented(comment_lines("The GPUs of this node work for node 0; nothing listens here.")),
        *shell.indented(shell.array("start", [_GUARD, *engine])),
        f"elif {_in_vllm_step(plan)}; then",
        f'  start=({_GUARD} "${{server[@]}}")',
        "else",
        *shell.indented(alone),
        "fi",
    ]


def _in_vllm_step(plan: Plan) -> str:
    """Return the condition that the supervisor runs elsewhere and has started this script on each node by Slurm."""
    return f'[[ "${{SLURM_STEP_NUM_TASKS:-}}" == {plan.num_nodes} ]]'


def _ranks_comment(plan: Plan) -> list[str]:
    lines = comment_lines(
        "There is one MPI rank for each GPU. Rank 0 runs tritonserver, and all ranks run the engine's workers, because "
        "plain tritonserver can't spawn workers by itself (MPI_ERR_SPAWN). Each rank has a guard, which reports to the "
        "supervisor and ends all processes of the rank. --tag-output puts the rank before each line of output."
    )
    if plan.num_nodes > 1:
        lines += shell.nodes_comment(plan, NAME)
        return lines + comment_lines(
            "mpirun's odls_base_sigkill_timeout keeps its default of 1 s. When a rank fails, mpirun waits twice this "
            "time before it kills the other ranks, which hold the GPUs of their nodes until then. The supervisor, not "
            "mpirun, stops a launch in order."
        )
    lines += comment_lines(
        "odls_base_sigkill_timeout: seconds that mpirun waits before SIGTERM, and again before SIGKILL, when something "
        "other than the supervisor tells mpirun to stop, as systemd does with a whole control group. The default is "
        "1 s (Open MPI 4: orte/mca/odls/base/odls_base_frame.c and odls_base_default_fns.c). Open MPI 5 ignores it and "
        "waits 0.25 s (PRRTE 3.0: src/mca/odls/base/odls_base_default_fns.c)."
    )
    if _is_for_slurm(plan):
        lines += comment_lines(
            f"Under Slurm, every rank runs this script: srun --mpi=pmix --ntasks {plan.world_size} ./{NAME}"
        )
    return lines


def _mpirun_options(plan: Plan) -> list[str]:
    if plan.num_nodes > 1:
        return ["--tag-output"]
    return ["--tag-output", "-mca", "odls_base_sigkill_timeout", f'"$((exit_timeout + {MPIRUN_SPARE_S}))"']


def _dry_run(plan: Plan) -> list[str]:
    own = [variable.name for variable in plan.environment if not is_engine_variable(variable.name)]
    names = [_TAG, *own] if plan.release is None else [_TAG, "PYTHONPATH", *own, '"${engine[@]}"']
    if plan.vllm is not None:
        names = [_TAG, _KEEP_ENVIRONMENT, *own, '"${engine[@]}"', *(["MASTER_ADDR"] if plan.num_nodes > 1 else [])]
    names += ["OMPI_MCA_btl_tcp_if_include"] if _is_for_slurm(plan) else []
    programs = ["python3", "tritonserver"]
    if plan.release is not None:
        programs[1:1] = ["mpirun", shell.entry_point(plan)]
    return [
        *comment_lines(
            "Print one command, to be read or pasted. Each variable, program and long option begins a line."
        ),
        'if [[ "${DRY_RUN:-}" == 1 ]]; then',
        "  quote() {",
        '    if [[ "$1" =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then quoted="$1"; else quoted="${1@Q}"; fi',
        "  }",
        "  printf 'env'",
        f"  exported=({' '.join(names)})",
        '  for name in "${exported[@]}"; do',
        '    if [[ -v $name ]]; then quote "${!name}" && printf \' \\\\\\n  %s=%s\' "$name" "$quoted"; fi',
        "  done",
        '  for word in "${start[@]}"; do',
        '    quote "$word"',
        '    case "$word" in',
        f"      {' | '.join(programs)} | --?*) printf ' \\\\\\n  %s' \"$quoted\" ;;",
        "      *) printf ' %s' \"$quoted\" ;;",
        "    esac",
        "  done",
        "  echo",
        "  exit 0",
        "fi",
    ]
