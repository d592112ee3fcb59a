"""A page of tables and plotly's pictures: one HTML file, which needs no network.

A colour is a CSS variable of the page (`var(--series-1)`), which the page's script replaces by the one of the scheme.
What all pictures have in common stands in templates/report.html.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from deepseek_triton_tools.host.whole_file import whole_file
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.text_templates import filled
from deepseek_triton_tools.tool_errors import InstallationError

Json: TypeAlias = dict[str, Any]

_NUM_COLORS = 8
"""The page has that many colours for series; then they begin anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPicture:
    title: str
    alt: str
    """The picture in words, for those who do not see it."""
    figure: Json
    """Plotly's `data` and `layout`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureSection:
    """A part of the page: its pictures side by side, or one at a time, which the reader chooses by its title."""

    title: str
    note: str
    pictures: Sequence[ReportPicture]
    names: Sequence[str] = ()
    """Those of the colours, in their order."""
    is_choice: bool = False


def write_page(
    path: Path, title: str, *, tables: Sequence[str], sections: Sequence[PictureSection], warnings: Sequence[str] = ()
) -> None:
    """Write the page, plotly's script included, in the place of a file that is there, or leave that as it is.

    :param tables: of `html_table`.
    :raises InstallationError: without plotly.
    :raises ToolError: when it can't be written.
    """
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise InstallationError(f"the report's pictures need plotly; {install_extra('bench')}") from error

    figures = [picture.figure for section in sections for picture in section.pictures]
    drawn, number = [], 0
    for section in sections:
        drawn.append(_section(section, number))
        number += len(section.pictures)
    values = {
        "title": escape(title),
        "warnings": "".join(f"<p class=warning>{escape(text)}</p>\n" for text in warnings),
        "tables": "\n".join(tables),
        "sections": "\n".join(drawn),
        "plotly": get_plotlyjs(),
        # "</script>" in a name would end the script.
        "pictures": json.dumps(figures, allow_nan=False).replace("<", "\\u003c"),
    }
    page = filled(__package__, "report.html", values)
    with whole_file(path) as file:
        file.write(page)


def _section(section: PictureSection, first: int) -> str:
    """:param first: the number of its first picture among those of the page."""
    places = [
        f'<div class=picture role=img data-picture={number} style="height: {picture.figure["layout"]["height"]}px" '
        f'aria-label="{escape(picture.alt)}"></div>'
        for number, picture in enumerate(section.pictures, first)
    ]
    if section.is_choice:
        options = "".join(
            f'<option value={number} data-alt="{escape(picture.alt)}">{escape(picture.title)}</option>'
            for number, picture in enumerate(section.pictures, first)
        )
        head = f"<p><label for=run>Run</label> <select id=run>{options}</select></p>"
        figures = f"<figure>{places[0]}</figure>"
    else:
        keys = "".join(
            f'<li style="--color: {series_color(number)}">{escape(name)}</li>'
            for number, name in enumerate(section.names)
        )
        head = f"<ul class=legend>{keys}</ul>" if len(section.names) > 1 else ""
        figures = "".join(
            f"<figure>{f'<figcaption>{escape(picture.title)}</figcaption>' if len(places) > 1 else ''}{place}</figure>"
            for picture, place in zip(section.pictures, places, strict=True)
        )
    return (
        f"<section>\n<h2>{escape(section.title)}</h2>\n<p class=note>{escape(section.note)}</p>\n{head}\n"
        f"<div class=pictures>{figures}</div>\n</section>"
    )


def html_table(title: str, kind: str, headings: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> str:
    """Return a part of the page with a table, of which the first cell of a row is a heading.

    :param kind: a class of its style: facts or figures.
    """
    head = "".join(f"<th scope=col>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        f"<tr><th scope=row>{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n"
        for first, *cells in rows
    )
    return (
        f"<section>\n<h2>{title}</h2>\n{f'<p class=note>{escape(note)}</p>' if note else ''}\n"
        f'<div class=scroll tabindex=0 role=region aria-label="{title}"><table class={kind}>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>\n</section>"
    )


def series_color(number: int) -> str:
    """The colour of the series of this number, from 0."""
    return f"var(--series-{number % _NUM_COLORS + 1})"


def picture_layout(x_title: str, y_title: str, *, height: int) -> Json:
    """Return plotly's `layout` of a picture with axes from 0."""
    return {"height": height, "xaxis": {"title": {"text": x_title}}, "yaxis": {"title": {"text": y_title}}}
