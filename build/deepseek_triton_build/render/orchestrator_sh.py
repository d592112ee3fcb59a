"""The orchestrator of trtllm-serve: orchestrator.sh and disagg_config.yaml."""

from __future__ import annotations

from deepseek_triton_build.data.planned_settings import Setting
from deepseek_triton_build.planning.disaggregated import DisaggregatedPlan
from deepseek_triton_build.planning.orchestrator_settings import REQUEST_TIMEOUT_S, server_ports
from deepseek_triton_build.render import shell
from deepseek_triton_build.render.yaml_text import yaml_lines
from deepseek_triton_build.text import comment_lines

CONFIG_NAME = "disagg_config.yaml"
SCRIPT_NAME = "orchestrator.sh"


def orchestrator_sh(plan: DisaggregatedPlan, *, stamp: str) -> str:
    """Return orchestrator.sh, which starts the server that clients ask."""
    about = (
        f"Joins the context and generation servers of {shell.model_title(plan.context)} with trtllm-serve, in "
        f"{plan.context.image_for('trtllm-serve')}. It needs no GPU. {CONFIG_NAME} says where the servers are. Further "
        "arguments go to trtllm-serve disaggregated."
    )
    ports = server_ports(plan.num_context, plan.num_generation)
    starts = [f"PORT={port} {side}/serve.sh" for side, numbers in ports.items() for port in numbers]
    servers = (
        f"The servers are started by themselves: {', '.join(starts)}; HOST=0.0.0.0 beside PORT for other machines."
    )
    timeouts = (
        "START_TIMEOUT: seconds to wait until all servers are ready; a first load takes up to an hour. "
        "REQUEST_TIMEOUT: seconds that a request may take. trtllm-serve's own 180 is too short for both."
    )
    command = shell.command(
        ["exec", "trtllm-serve", "disaggregated"],
        ["-c", f'"$here/{CONFIG_NAME}"'],
        ["-t", f'"${{START_TIMEOUT:-{plan.start_timeout_s}}}"'],
        ["-r", f'"${{REQUEST_TIMEOUT:-{REQUEST_TIMEOUT_S}}}"'],
        ['"$@"'],
    )
    return shell.script(stamp, [about, servers], [f"here={shell.HERE}"], [*comment_lines(timeouts), *command])


def disagg_config(settings: tuple[Setting, ...], *, stamp: str) -> str:
    """Return disagg_config.yaml."""
    return "\n".join([f"# {stamp}", *yaml_lines(settings)]) + "\n"
