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
    ("live", "live", ",.0f"),
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
    "lag: from a token's making to its arrival; chunks: responses with text of a stream, and the least of them; live: "
    "those that came before its last token was made; stub us, server, clients: CPU time a token; MiB: most resident "
    "memory, and what of it is neither file nor shared"
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


def verdicts(case: Case, measured: Mapping[str, Measures]) -> Sequence[tuple[str, bool | None]]:
    """A line for each target, and whether it is met; None where a system that it takes did not run."""
    return [_verdict(target, measured) for target in case.targets]


def _verdict(target: Target, measured: Mapping[str, Measures]) -> tuple[str, bool | None]:
    what = f"{target.system}: {target.measure}" + (f" / {target.versus}'s" if target.versus else "")
    wanted = f"at most {target.at_most:,g}" if target.at_least is None else f"at least {target.at_least:,g}"
    if target.system not in measured or (target.versus and target.versus not in measured):
        return f"{what}, target {wanted}: not measured", None
    number = getattr(measured[target.system], target.measure)
    if target.versus:
        number /= getattr(measured[target.versus], target.measure)
    line = f"{what} is {number:,.4g}, target {wanted}"
    if target.versus and measured[target.versus].undelivered > 0:
        return f"{line}: NOT MET, for {target.versus} did not deliver all", False
    met = _is_met(target, number)
    return f"{line}: {'met' if met else 'NOT MET'}", met


def _is_met(target: Target, number: float) -> bool:
    if target.at_least is not None:
        return number >= target.at_least
    assert target.at_most is not None
    return number <= target.at_most
