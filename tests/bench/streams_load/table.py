"""How the medians are shown, and whether they keep to the targets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from bench.streams_load.cases import Case, Target
from bench.streams_load.measures import Measures

_COLUMNS = (
    ("tokens/s", "tokens_per_s", ",.0f"),
    ("total s", "total_s", ".2f"),
    ("x ideal", "over_ideal", ".3f"),
    ("TTFT ms", "ttft_ms", ",.1f"),
    ("p99", "ttft_p99_ms", ",.1f"),
    ("lag ms", "lag_ms", ",.2f"),
    ("p99", "lag_p99_ms", ",.1f"),
    ("max", "lag_max_ms", ",.1f"),
    ("chunks", "chunks_median", ",.0f"),
    ("least", "chunks_min", ",.0f"),
    ("stub us", "stub_cpu", ",.1f"),
    ("server", "server_cpu", ",.1f"),
    ("clients", "client_cpu", ",.1f"),
    ("stub MiB", "stub_rss_mib", ",.0f"),
    ("anon", "stub_anon_mib", ",.0f"),
    ("server MiB", "server_rss_mib", ",.0f"),
    ("anon", "server_anon_mib", ",.0f"),
    ("undelivered", "undelivered", ",.0f"),
)
LEGEND = (
    "lag: from a token's making to its arrival; stub us, server, clients: CPU time a token; MiB: most resident memory, "
    "and what of it is neither file nor shared"
)


def row(name: str, measures: Measures) -> str:
    cells = [_cell(getattr(measures, field), form).rjust(_width(title)) for title, field, form in _COLUMNS]
    return f"{name:17}" + " ".join(cells)


def head() -> str:
    return " " * 17 + " ".join(title.rjust(_width(title)) for title, _, _ in _COLUMNS)


def _cell(number: float, form: str) -> str:
    return "-" if math.isnan(number) else format(number, form)


def _width(title: str) -> int:
    return max(7, len(title))


def verdicts(case: Case, measured: Mapping[str, Measures]) -> Sequence[tuple[str, bool]]:
    """A line for each target that these systems can tell of, and whether it is met."""
    found = []
    for target in case.targets:
        if target.system in measured and (not target.versus or target.versus in measured):
            found.append(_verdict(target, measured))
    return found


def _verdict(target: Target, measured: Mapping[str, Measures]) -> tuple[str, bool]:
    number = getattr(measured[target.system], target.measure)
    what = f"{target.system}: {target.measure}"
    if target.versus:
        number /= getattr(measured[target.versus], target.measure)
        what += f" / {target.versus}'s"
    if target.at_least is not None:
        wanted, met = f"at least {target.at_least:,g}", number >= target.at_least
    else:
        assert target.at_most is not None
        wanted, met = f"at most {target.at_most:,g}", number <= target.at_most
    return f"{what} is {number:,.4g}, target {wanted}: {'met' if met else 'NOT MET'}", met
