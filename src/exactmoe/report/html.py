"""One HTML file that needs nothing else: text, tables, and pictures inside."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

_STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em;
  color: #1a1a1a; background: #fff; }
h1 { font-size: 1.6em; } h2 { font-size: 1.2em; margin-top: 2em; }
figure { margin: 1em 0; } img { max-width: 100%; height: auto; }
table { border-collapse: collapse; margin: 1em 0; display: block; overflow-x: auto; }
th, td { border: 1px solid #ccc; padding: 0.25em 0.7em; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
td.bad { background: #ffd9d9; font-weight: bold; }
"""


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        heading: its title.
        text: paragraphs.
        head: column titles of its table.
        rows: cells of its table; numbers stand right, and a cell that begins with "DIFFER" stands
            out.
        picture: a PNG, or None.
        caption: says what the picture shows, also to those who do not see it.
    """

    heading: str
    text: Sequence[str] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = field(default=())
    picture: bytes | None = None
    caption: str = ""


def page(title: str, sections: Sequence[Section]) -> str:
    """The whole file as text. Whatever is given is shown as it is; none of it is HTML."""
    body = "\n".join(_section(section) for section in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.heading)}</h2>"]
    parts += [f"<p>{escape(text)}</p>" for text in section.text]
    if section.picture is not None:
        data = base64.b64encode(section.picture).decode("ascii")
        caption = escape(section.caption)
        parts.append(f'<figure><img src="data:image/png;base64,{data}" alt="{caption}">')
        parts.append(f"<figcaption>{caption}</figcaption></figure>")
    if section.head:
        head = "".join(f"<th>{escape(name)}</th>" for name in section.head)
        rows = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in section.rows)
        parts.append(f"<table>\n<tr>{head}</tr>\n{rows}\n</table>")
    return "\n".join(parts)


def _cell(value: object) -> str:
    if isinstance(value, int | float):
        return f'<td class="number">{value:,}</td>'
    text = str(value)
    mark = ' class="bad"' if text.startswith("DIFFER") else ""
    return f"<td{mark}>{escape(text)}</td>"
