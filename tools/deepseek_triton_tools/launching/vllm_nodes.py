"""An instance of vLLM over several nodes: each node starts start.sh by itself, and vLLM brings them together."""

from __future__ import annotations

from collections.abc import Iterator

from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.repository.launch_facts import LaunchFacts

MASTER = "MASTER_ADDR"
"""start.sh's variable with the name or address of node 0."""
NODE = "NODE_RANK"
"""start.sh's variable with the number of this node."""
FIRST_NODE = {NODE: "0", MASTER: "192.0.2.1"}
"""An example of both (RFC 5737), with which start.sh can be asked what it would run."""


def needs_master(facts: LaunchFacts) -> bool:
    return facts.nodes > 1 and not facts.uses_mpi


def nodes_by_hand(facts: LaunchFacts, options: LaunchOptions, form: str) -> Iterator[str]:
    """Yield how a form that starts one node is used on each, unless it was told which node this is."""
    if needs_master(facts) and not {MASTER, NODE} <= dict(options.environment).keys():
        commands = [
            f"deepseek-triton launch {form} {facts.source} --env {NODE}={number} --env {MASTER}=ADDRESS"
            for number in range(facts.nodes)
        ]
        yield (
            f"{facts.source} takes {facts.nodes} nodes: run on each of them its own line, with the ADDRESS at which "
            f"the others reach the first: {', '.join(commands)}; or use launch slurm or kubernetes"
        )
