"""One measurement: requests to a server or to the engine alone, and the CPU seconds of their processes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gpu.engine_alone import EngineAlone
from gpu.served_engines import cpu_by_role
from gpu.token_streams import Clients, Load, Prompt, StreamTimes, Target, figures

from deepseek_triton_tools.server.server_process import ServerProcess

Measure = Callable[[Load], tuple[list[StreamTimes], dict[str, float]]]
"""The requests' times and CPU seconds by role."""


def through(server: ServerProcess, target: Target, clients: Clients, given: Sequence[Prompt]) -> Measure:
    session = server.pid

    def measure(load: Load) -> tuple[list[StreamTimes], dict[str, float]]:
        before = cpu_by_role(session)
        samples = clients.run(target, load, given)
        after = cpu_by_role(session)
        return samples, {role: after[role] - before[role] for role in after} | {"clients": clients.cpu_seconds}

    return measure


def alone(engine: EngineAlone, given: Sequence[Prompt], *, text: bool = True) -> Measure:
    def measure(load: Load) -> tuple[list[StreamTimes], dict[str, float]]:
        before = cpu_by_role(engine.pid)
        samples = engine.run(load, given, text=text)
        after = cpu_by_role(engine.pid)
        used = {role: after[role] - before[role] for role in after}
        return samples, {"alone": used["server"], "engine": used["engine"]}

    return measure


def record(
    round_number: int, system: str, load: Load, samples: Sequence[StreamTimes], cpu: Mapping[str, float]
) -> dict[str, Any]:
    """A line of runs.jsonl. Requests: milliseconds to the first response and to the last, and responses."""
    found = figures(samples)
    first = min(sample.began_ns for sample in samples)
    return {
        "round": round_number,
        "system": system,
        "load": load.name,
        "streams": load.streams,
        **asdict(found),
        "cpu_us_per_token": {role: seconds * 1e6 / found.tokens for role, seconds in cpu.items()},
        "requests": [
            [
                round((sample.began_ns - first) / 1e6, 2),
                round((sample.arrivals_ns[0] - sample.began_ns) / 1e6, 3) if sample.arrivals_ns else None,
                round((sample.arrivals_ns[-1] - sample.began_ns) / 1e6, 3) if sample.arrivals_ns else None,
                len(sample.arrivals_ns),
            ]
            for sample in samples
        ],
    }


def line(found: dict[str, Any]) -> str:
    cpu = ", ".join(f"{role} {value:.1f}" for role, value in found["cpu_us_per_token"].items())
    return (
        f"{found['system']:17} {found['load']:>15}: {found['tokens_per_second']:9.1f} tok/s, TTFT "
        f"{found['ttft_ms']['p50']:8.1f} (p99 {found['ttft_ms']['p99']:8.1f}), ITL {found['itl_ms']['p50']:6.2f} "
        f"(p99 {found['itl_ms']['p99']:7.2f}) ms, TPOT {found['tpot_ms']['p50']:6.2f} ms; CPU us/token: {cpu}"
        + (f"; ERRORS {found['errors']}" if found["errors"] else "")
    )
