"""The result of warming a server: as a table for people, and as a JSON document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deepseek_triton_tools.terminal.tables import Table, paragraph, show
from deepseek_triton_tools.warming.server.rounds import Round, ShapeResult

SCHEMA = "deepseek-triton/warm-server/1"


@dataclass(frozen=True, kw_only=True)
class ServerWarmResult:
    url: str
    model: str
    waited_s: float
    """Seconds until the server was ready."""
    phases_s: Mapping[str, float]
    """Phase of the wait -> its seconds, as seen from here."""
    load_s: Mapping[str, float]
    """Phase of the load -> its seconds, as the server itself measured them; empty where it does not publish them."""
    shapes_from: str
    results: Sequence[ShapeResult]
    warmed_s: float
    """Seconds from the server's readiness to the end of the last round."""
    was_stopped: bool = False
    """A signal ended the warm-up; the results are those of the shapes that were finished by then."""

    @property
    def is_steady(self) -> bool:
        """Whether every shape that the server takes is steady, and there is one."""
        found = {result.status for result in self.results}
        return not self.was_stopped and "steady" in found and found <= {"steady", "left out"}

    @property
    def is_measured(self) -> bool:
        """Whether every shape that was not left out has two rounds to compare."""
        taken = [result for result in self.results if result.status != "left out"]
        return not self.was_stopped and bool(taken) and all(result.can_be_compared for result in taken)

    @property
    def worst(self) -> ShapeResult | None:
        """The shape whose first user is spared the longest wait; None where nobody is spared anything."""
        spared = [result for result in self.results if result.spared_s > 0]
        return max(spared, key=lambda result: result.spared_s, default=None)

    @property
    def spared_s(self) -> float:
        """Seconds that first users are spared, over all shapes."""
        return sum(result.spared_s for result in self.results)


def document(result: ServerWarmResult) -> dict[str, Any]:
    """The document of --json and of the ready file."""
    worst = result.worst
    return {
        "schema": SCHEMA,
        "ok": result.is_steady,
        "was_stopped": result.was_stopped,
        "url": result.url,
        "model": result.model,
        "waited_s": result.waited_s,
        "phases_s": dict(result.phases_s),
        "load_s": dict(result.load_s),
        "shapes_from": result.shapes_from,
        "shapes": [_shape_document(each) for each in result.results],
        "warmed_s": result.warmed_s,
        "spared": {
            "total_s": result.spared_s,
            "worst_s": worst.spared_s if worst else 0.0,
            "worst_shape": asdict(worst.shape) if worst else None,
        },
    }


def _shape_document(result: ShapeResult) -> dict[str, Any]:
    return {
        **asdict(result.shape),
        "status": result.status,
        "reason": result.reason,
        "spared_s": result.spared_s,
        "rounds": [asdict(each) for each in result.rounds],
    }


def show_result(result: ServerWarmResult) -> None:
    """Print the result to stdout."""
    phases = f" ({_phases(result.phases_s)})" if result.phases_s else ""
    print(paragraph(f"{result.model} on {result.url} was ready after {duration(result.waited_s)}{phases}", ""))
    if result.load_s:
        print(paragraph(f"its load, as measured by the server: {_phases(result.load_s)}"))
    print()
    headings = ("at once", "prompt", "rounds", "first TTFT", "TTFT", "first step", "step", "spared", "now")
    rows = [_row(each) for each in result.results]
    show(Table(title=f"Shapes, from {result.shapes_from}", headings=headings, rows=rows, is_grid=True))
    for each in result.results:
        if each.reason:
            print(paragraph(f"{each.shape}: {each.status}: {each.reason}", ""))
    print(paragraph(summary(result), ""))


def _row(result: ShapeResult) -> tuple[str, ...]:
    shape, rounds = result.shape, result.rounds
    at_once = str(shape.num_requests)
    if rounds and result.num_requests != shape.num_requests:
        at_once = f"{result.num_requests} of {shape.num_requests}"
    times = _times(result.first, rounds[-1]) if rounds else ("-",) * 4
    spared = duration(result.spared_s) if rounds else "-"
    return (at_once, f"{shape.num_input_tokens:,}", str(len(rounds)), *times, spared, result.status)


def _times(first: Round, last: Round) -> tuple[str, ...]:
    steps = ("-" if each.step_s is None else duration(each.step_s) for each in (first, last))
    return (duration(first.ttft_s), duration(last.ttft_s), *steps)


def summary(result: ServerWarmResult) -> str:
    """The result in one line."""
    state = "stopped" if result.was_stopped else "steady" if result.is_steady else "not steady"
    return f"{state} after {duration(result.warmed_s)}: {_spared(result)}{_left_out(result)}"


def _spared(result: ServerWarmResult) -> str:
    if (worst := result.worst) is not None:
        return (
            f"the first users are spared {duration(worst.spared_s)} at worst ({worst.shape} prompt tokens), "
            f"{duration(result.spared_s)} over all shapes"
        )
    if result.is_measured:
        return "its first users waited no longer than later ones will"
    num_compared = sum(each.can_be_compared for each in result.results)
    return f"{num_compared} of {len(result.results)} shapes have two rounds to compare"


def _left_out(result: ServerWarmResult) -> str:
    number = sum(each.status == "left out" for each in result.results)
    return f"; {number} of {len(result.results)} shapes were left out" if number else ""


def _phases(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {duration(each)}" for name, each in seconds.items())


def duration(seconds: float) -> str:
    """The time with its unit: 8.3 ms, 120 ms, 2.5 s, 3:20 min, 1:00:05 h."""
    if seconds < 0.00995:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"
