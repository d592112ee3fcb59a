"""How the medians are shown, and whether they keep to the targets. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from bench.client_load.cases import PAIRS, Case, Target
from bench.client_load.measures import Measures

_COLUMNS = (
    ("requests/s", "requests_per_s", ",.0f"),
    ("chunks/request", "chunks_per_request", ",.1f"),
    ("CPU ms/request", "cpu_ms_per_request", ",.3f"),
    ("CPU ms/1,000 chunks", "cpu_ms_per_1000_chunks", ",.1f"),
    ("cores", "cores", ".2f"),
    ("others", "others", ".2f"),
)
_NAME = 27
LEGEND = (
    "chunks: responses with text; CPU: of the client's whole process; cores: that over wall time, and others: likewise "
    "what ran on the machine besides client and server, which is best near 0"
)


def head() -> str:
    return " " * _NAME + "  ".join(title for title, _, _ in _COLUMNS) + "  CPU / raw"


def row(name: str, measures: Measures, ratio: float = math.nan) -> str:
    cells = [_cell(getattr(measures, field), form).rjust(len(title)) for title, field, form in _COLUMNS]
    return name.ljust(_NAME) + "  ".join([*cells, _cell(ratio, ".2f").rjust(len("CPU / raw"))])


def _cell(number: float, form: str) -> str:
    return "-" if math.isnan(number) else format(number, form)


def cpu_over_raw(case: Case, name: str, measured: Mapping[str, Measures]) -> float:
    """Of ours, beside the library by itself: per chunk of streams, per request of whole answers."""
    raw = dict(PAIRS).get(name)
    if raw not in measured:
        return math.nan
    field = "cpu_ms_per_1000_chunks" if case.verb == "stream" else "cpu_ms_per_request"
    return float(getattr(measured[name], field) / getattr(measured[raw], field))


def import_rows(milliseconds: Mapping[str, float]) -> list[str]:
    return [f"{name.ljust(_NAME)}  {number:8.1f} ms" for name, number in milliseconds.items()]


def verdicts(targets: Sequence[Target], measured: Mapping[str, Mapping[str, float]]) -> list[tuple[str, bool | None]]:
    """A line for each target, and whether it is met; None where one of the two did not run.

    `measured` is contender -> measure -> median.
    """
    return [_verdict(target, measured) for target in targets]


def _verdict(target: Target, measured: Mapping[str, Mapping[str, float]]) -> tuple[str, bool | None]:
    between = "more than" if target.at_most_more is not None else "over"
    what = f"{target.contender}: {target.measure} {between} {target.versus}'s"
    limit, wanted = _limit(target)
    if target.contender not in measured or target.versus not in measured:
        return f"{what}, target {wanted}: not measured", None
    ours, theirs = (measured[name][target.measure] for name in (target.contender, target.versus))
    number = ours - theirs if target.at_most_more is not None else ours / theirs
    met = number >= limit if target.at_least is not None else number <= limit
    return f"{what} is {number:,.3g}, target {wanted}: {'met' if met else 'MISSED'}", met


def _limit(target: Target) -> tuple[float, str]:
    if target.at_least is not None:
        return target.at_least, f"at least {target.at_least:g}"
    limit = target.at_most if target.at_most is not None else target.at_most_more
    assert limit is not None, "a target has a limit"
    return limit, f"at most {limit:g}"
