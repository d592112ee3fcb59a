"""What stayed behind of requests that were left: shown, and judged. No I/O."""

from collections.abc import Iterator
from dataclasses import dataclass

from bench.abandon_load.leaving import Findings, Sample

_COLUMNS = (
    ("descriptors", "descriptors", "d"),
    ("threads", "threads", "d"),
    ("under way", "under_way", "d"),
    ("objects", "objects", ",d"),
    ("left on server", "left", ".0f"),
    ("traced KiB", "traced_kib", ",.0f"),
    ("RSS MiB", "rss_mib", ",.1f"),
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What may stay."""

    idle_connections: int
    """Each a descriptor, while the client is open."""
    traced_kib: float = 512
    """Growth from quarter 2 to quarter 4; idle connections come and go, and each is some 10 KiB."""
    rss_mib: float = 8
    spare_threads: int = 2
    """gRPC's own pool has one more now and then."""


def table(found: Findings) -> str:
    lines = [" " * 12 + "  ".join(title for title, _, _ in _COLUMNS)]
    for sample in found.samples:
        cells = [format(getattr(sample, name), form).rjust(len(title)) for title, name, form in _COLUMNS]
        lines.append(sample.when.ljust(12) + "  ".join(cells))
    outcomes = ", ".join(f"{how} {count:,}" for how, count in sorted(found.outcomes.items()))
    return "\n".join([*lines, outcomes])


def problems(found: Findings, limits: Limits) -> list[str]:
    return list(_problems(found, limits))


def _problems(found: Findings, limits: Limits) -> Iterator[str]:
    if found.unexpected:
        yield f"{len(found.unexpected)} requests raised what they should not have, the first {found.unexpected[0]}"
    by_when = {sample.when: sample for sample in found.samples}
    before, closed = by_when["before"], by_when["closed"]
    for sample in found.samples:
        if sample.under_way > before.under_way:
            yield f"{sample.when}: {sample.under_way - before.under_way} objects of requests are left"
        if sample.left:
            yield f"{sample.when}: the backend has {sample.left:.0f} requests left"
        if sample.descriptors > before.descriptors + limits.idle_connections + _SPARE_DESCRIPTORS:
            yield f"{sample.when}: {sample.descriptors} descriptors, and {before.descriptors} before"
    if closed.descriptors > before.descriptors:
        yield f"closed: {closed.descriptors} descriptors, and {before.descriptors} before"
    second, last = by_when["quarter 2"], by_when["quarter 4"]
    yield from _growth(second, last, limits)
    for sample, earlier in ((last, second), (closed, before)):
        if sample.threads > earlier.threads + limits.spare_threads:
            yield f"{sample.when}: {sample.threads} threads, and {earlier.threads} in {earlier.when}"


def _growth(second: Sample, last: Sample, limits: Limits) -> Iterator[str]:
    for name, unit, limit in (("traced_kib", "KiB", limits.traced_kib), ("rss_mib", "MiB", limits.rss_mib)):
        growth = getattr(last, name) - getattr(second, name)
        if growth > limit:
            yield f"{name} grew by {growth:,.0f} {unit} from quarter 2 to 4, limit {limit:g}"


_SPARE_DESCRIPTORS = 8
"""gRPC's connection, and its poller's."""
