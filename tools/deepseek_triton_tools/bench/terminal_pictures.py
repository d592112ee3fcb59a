"""The report's pictures in the terminal, as text."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

from deepseek_triton_tools.bench.report_points import (
    LATENCIES,
    ExpectedPoint,
    FigureOf,
    NamedResult,
    is_wide,
    load_order,
    pareto_front,
    readable,
    share_of,
    short_load,
    spread,
    throughput_per,
)
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.terminal.output_streams import has_style, printable
from deepseek_triton_tools.terminal.tables import is_terminal, width
from deepseek_triton_tools.tool_errors import InstallationError

_WIDTHS = (40, 120)
"""Columns: the least that a picture needs, and the most that it takes."""
_PIPE_WIDTH = 80
_HEIGHT = 20
_LATENCY_HEIGHT = 14
_MARKS = "●▲■◆○△□◇"
_COLORS = (12, 208, 43, 170, 178, 39, 204, 112)
"""Numbers of the terminal's 256 colours."""
_EXPECTED = "★"


def show_pictures(results: Sequence[NamedResult], expected: Sequence[ExpectedPoint] = ()) -> None:
    """Print the pictures, as wide as the terminal, and coloured if it shows colours."""
    for picture in terminal_pictures(results, expected, columns=picture_columns(), is_colored=has_style(sys.stdout)):
        print(picture)


def picture_columns() -> int:
    """Columns of a picture on the standard output."""
    least, most = _WIDTHS
    return min(max(least, width()), most) if is_terminal() else _PIPE_WIDTH


def terminal_pictures(
    results: Sequence[NamedResult], expected: Sequence[ExpectedPoint] = (), *, columns: int, is_colored: bool
) -> Iterator[str]:
    """Yield the Pareto picture, then each latency over the throughput where there are several loads, then the names.
    Nothing where no request was completed.

    :param expected: left out where throughput is per server.
    :raises InstallationError: without plotext.
    """
    if not any(named.measured for named in results):
        return
    share = share_of(results)
    marked = list(zip(results, cycle(_MARKS), cycle(_COLORS)))
    lines = []
    for named, mark, color in marked:
        points = _points(named, lambda figures: figures.user_throughput, throughput_per(share, named.result))
        front = [points[n] for n in pareto_front([(point.x, point.y) for point in points])]
        lines.append(TextLine(mark=mark, color=color, points=points, joined=front))
    if promised := expected if share == "GPU" else ():
        points = [TextPoint(x=point.tps_user, y=point.tps_gpu) for point in promised]
        lines.append(TextLine(mark=_EXPECTED, points=points))
    yield drawn(f"Output tokens/s per {share}, over tokens/s per user", lines, columns, _HEIGHT, is_colored)

    if len({point.load for named in results for point in named.measured}) > 1:
        for latency in LATENCIES:
            lines = []
            for named, mark, color in marked:
                points = _points(named, throughput_per(share, named.result), latency.percentile("p99"))
                lines.append(TextLine(mark=mark, color=color, points=points, joined=points))
            if any(line.points for line in lines):
                title = f"{latency.name} p99, ms, over output tokens/s per {share}"
                yield drawn(title, lines, columns, _LATENCY_HEIGHT, is_colored, may_be_log=True)

    yield "".join(f"  {mark} {printable(named.name)}\n" for named, mark, _ in marked) + "".join(
        f"  {_EXPECTED} expected: {printable(point.name)}\n" for point in promised
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPoint:
    """A point of a picture, and the text beside it."""

    x: float
    y: float
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLine:
    """Points with one mark."""

    mark: str
    color: int | None = None
    points: Sequence[TextPoint]
    joined: Sequence[TextPoint] = ()
    """Those that a line joins, in this order."""


def _points(named: NamedResult, x: FigureOf, y: FigureOf) -> list[TextPoint]:
    """By rising load."""
    return [
        TextPoint(x=at_x.mean, y=at_y.mean, label=short_load(point.load))
        for point in sorted(named.measured, key=lambda point: load_order(point.load))
        if (at_x := spread(point, x)) and (at_y := spread(point, y))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextScale:
    """An axis from `least` to `most`, which is more."""

    least: float
    most: float
    is_log: bool = False

    @classmethod
    def holding(cls, values: Collection[float], *, may_be_log: bool = False) -> TextScale:
        """From 0, unless it is logarithmic because the values are far apart. There is room for a mark at the end."""
        if may_be_log and is_wide(values):
            return cls(least=min(values) / 1.3, most=max(values) * 1.3, is_log=True)
        return cls(least=0.0, most=1.1 * max(values) or 1.0)

    def at(self, value: float) -> float:
        """Where `value` is: 0 at the axis's begin, 1 at its end."""
        scaled = math.log if self.is_log else float
        return (scaled(value) - scaled(self.least)) / (scaled(self.most) - scaled(self.least))

    @property
    def ticks(self) -> list[float]:
        """Round numbers on it: three to six evenly spaced, or 1, 2 and 5 times powers of ten."""
        if self.is_log:
            powers = range(math.floor(math.log10(self.least)), math.ceil(math.log10(self.most)))
            round_numbers = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
            return [number for number in round_numbers if self.least <= number <= self.most]
        length = self.most - self.least
        power = 10.0 ** math.floor(math.log10(length / 5))
        step = next(digit * power for digit in (1, 2, 5, 10) if length / (digit * power) <= 6)
        return [step * n for n in range(math.ceil(self.least / step), math.floor(self.most / step) + 1)]


def drawn(
    title: str, lines: Sequence[TextLine], columns: int, height: int, is_colored: bool, *, may_be_log: bool = False
) -> str:
    """Draw with plotext, which has one figure for the whole process."""
    try:
        import plotext  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise InstallationError(f"the pictures need plotext; {install_extra('bench')}") from error

    points = [point for line in lines for point in line.points]
    x = TextScale.holding([point.x for point in points])
    y = TextScale.holding([point.y for point in points], may_be_log=may_be_log)
    plotext.terminal.limit(False, False)  # else a picture is cut to the terminal that it finds
    figure = plotext.figure
    figure.clear()
    figure.plot_size(columns, height)
    figure.theme("simple")
    figure.legend(False)
    figure.axes(False, side=1)
    figure.title(title if len(title) <= columns else title.partition(", over ")[0])
    for name, scale in (("x", x), ("y", y)):
        ticks = scale.ticks
        figure.ruler(name, 0).lim(0, 1).ticks([scale.at(tick) for tick in ticks], [readable(tick) for tick in ticks])
    for line in lines:
        if len(line.joined) > 1:
            marker = plotext.marker("braille", pixel=plotext.pixel(foreground=line.color))
            places = [x.at(point.x) for point in line.joined], [y.at(point.y) for point in line.joined]
            figure.draw(figure.signal(*places, marker=marker).lines(True))
    taken: set[tuple[int, int]] = set()
    for line in lines:
        for point in line.points:
            column, row = round(x.at(point.x) * columns), round(y.at(point.y) * height)
            cells = {(row, column + n) for n in range(-1, len(point.label) + 2)}
            text = line.mark if cells & taken else line.mark + point.label  # no label covers another
            taken |= cells
            shown = plotext.colorize(text, plotext.pixel(foreground=line.color))
            figure.draw(figure.text(x.at(point.x), y.at(point.y), shown))
    text = str(figure.build().string(colorless=not is_colored))
    return "\n".join(row.rstrip() for row in text.splitlines()) + "\n"
