"""What came of warming a server: as a table for people, and as a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deepseek_triton_tools.terminal.tables import Table, paragraph, show
from deepseek_triton_tools.warming.server.rounds import Round, ShapeResult

SCHEMA = "deepseek-triton/warm-server/1"


@dataclass(frozen=True, kw_only=True)
class Warmth:
    url: str
    model: str
    waited_s: float
    phases_s: Mapping[str, float]
    """Of the wait, as they were seen."""
    load_s: Mapping[str, float]
    """Phases of the load, as the server itself measured them; empty where it does not say."""
    shapes_from: str
    results: Sequence[ShapeResult]
    warmed_s: float
    """From the server's readiness to the last round's end."""
    was_stopped: bool = False
    """By a signal: the results are those of the shapes that were finished by then."""

    @property
    def is_steady(self) -> bool:
        """As far as the server takes the shapes at all."""
        found = {result.status for result in self.results}
        return not self.was_stopped and "steady" in found and found <= {"steady", "left out"}

    @property
    def is_measured(self) -> bool:
        """Whether every shape that was not left out has two rounds to compare."""
        taken = [result for result in self.results if result.status != "left out"]
        return not self.was_stopped and bool(taken) and all(result.can_be_compared for result in taken)

    @property
    def worst(self) -> ShapeResult | None:
        """The shape whose first user was spared the most; None where nobody was spared anything."""
        spared = [result for result in self.results if result.spared_s > 0]
        return max(spared, key=lambda result: result.spared_s, default=None)

    @property
    def spared_s(self) -> float:
        """Over all shapes."""
        return sum(result.spared_s for result in self.results)


def document(warmth: Warmth) -> dict[str, Any]:
    """For --json and the ready file."""
    worst = warmth.worst
    return {
        "schema": SCHEMA,
        "ok": warmth.is_steady,
        "was_stopped": warmth.was_stopped,
        "url": warmth.url,
        "model": warmth.model,
        "waited_s": warmth.waited_s,
        "phases_s": dict(warmth.phases_s),
        "load_s": dict(warmth.load_s),
        "shapes_from": warmth.shapes_from,
        "shapes": [_shape_document(result) for result in warmth.results],
        "warmed_s": warmth.warmed_s,
        "spared": {
            "total_s": warmth.spared_s,
            "worst_s": worst.spared_s if worst else 0.0,
            "worst_shape": asdict(worst.shape) if worst else None,
        },
    }


def _shape_document(result: ShapeResult) -> dict[str, Any]:
    rounds = [asdict(each) for each in result.rounds]
    return {
        **asdict(result.shape),
        "status": result.status,
        "reason": result.reason,
        "spared_s": result.spared_s,
        "rounds": rounds,
    }


def show_warmth(warmth: Warmth) -> None:
    """Print it to stdout."""
    phases = f" ({_phases(warmth.phases_s)})" if warmth.phases_s else ""
    print(paragraph(f"{warmth.model} on {warmth.url} was ready after {duration(warmth.waited_s)}{phases}", ""))
    if warmth.load_s:
        print(paragraph(f"its load, as it says itself: {_phases(warmth.load_s)}"))
    print()
    show(_table(warmth))
    for result in warmth.results:
        if result.reason:
            print(paragraph(f"{result.shape}: {result.status}: {result.reason}", ""))
    print(paragraph(summary(warmth), ""))


def _table(warmth: Warmth) -> Table:
    headings = ("at once", "prompt", "rounds", "first TTFT", "TTFT", "first step", "step", "spared", "now")
    return Table(
        title=f"Shapes, from {warmth.shapes_from}",
        headings=headings,
        rows=[_row(result) for result in warmth.results],
        is_grid=True,
    )


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


def summary(warmth: Warmth) -> str:
    """In one line."""
    state = "stopped" if warmth.was_stopped else "steady" if warmth.is_steady else "not steady"
    return f"{state} after {duration(warmth.warmed_s)}: {_spared(warmth)}{_left_out(warmth)}"


def _spared(warmth: Warmth) -> str:
    if (worst := warmth.worst) is not None:
        return (
            f"the first users are spared {duration(worst.spared_s)} at worst ({worst.shape} prompt tokens), "
            f"{duration(warmth.spared_s)} over all shapes"
        )
    if warmth.is_measured:
        return "its first users waited no longer than later ones will"
    num_compared = sum(result.can_be_compared for result in warmth.results)
    return f"{num_compared} of {len(warmth.results)} shapes have two rounds to compare"


def _left_out(warmth: Warmth) -> str:
    number = sum(result.status == "left out" for result in warmth.results)
    return f"; {number} of {len(warmth.results)} shapes were left out" if number else ""


def _phases(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {duration(each)}" for name, each in seconds.items())


def duration(seconds: float) -> str:
    """With its unit: 8.3 ms, 120 ms, 2.5 s, 3:20 min, 1:00:05 h."""
    if seconds < 0.00995:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"
