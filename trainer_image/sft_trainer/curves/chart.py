"""Pure: lines over optimizer steps as an SVG file."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import fmean
from typing import Any
from xml.etree import ElementTree

_SERIES = re.compile(r"\bserie-(\d+)\b")
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")
MAX_POINTS = 600
"""More points than this on a line are more than a picture of 800 pixels can show."""


@dataclass(frozen=True)
class Line:
    """``points`` are (step, value), in the order of their steps."""

    name: str
    points: Sequence[tuple[int, float]]
    dots: bool = False
    """Mark each point, for lines of few."""
    dashes: str = ""
    """As SVG's ``stroke-dasharray``; a line without gaps when empty."""
    width: float = 1.6
    colour: str = ""
    """As CSS writes it; one of its own when empty."""


def draw(title: str, lines: Sequence[Line]) -> bytes:
    """The chart of ``lines``; the same lines give the same bytes."""
    # Only those who draw pay for it.
    import pygal
    from pygal.style import Style

    chart = pygal.XY(
        title=title,
        x_title="optimizer step",
        y_title="loss per trained token",
        width=800,
        height=420,
        margin=12,
        margin_bottom=20,
        include_x_axis=True,
        dots_size=3,
        legend_at_bottom=True,
        legend_box_size=10,
        truncate_legend=-1,
        js=[],
        style=Style(
            background="white",
            plot_background="white",
            foreground="#444444",
            foreground_strong="#222222",
            foreground_subtle="#dddddd",
            guide_stroke_color="#dddddd",
            guide_stroke_dasharray="none",
            major_guide_stroke_color="#dddddd",
            major_guide_stroke_dasharray="none",
            colors=tuple(line.colour or colour for line, colour in zip(lines, cycle(_COLOURS), strict=False)),
            opacity="1",
            font_family="sans-serif",
            title_font_size=16,
            legend_font_size=13,
            label_font_size=11,
            major_label_font_size=11,
        ),
    )
    chart.uuid = "curve"
    for line in lines:
        chart.add(line.name, thinned(line.points, MAX_POINTS), show_dots=line.dots)
    picture = chart.render_tree()
    for group in picture.iter("g"):
        if (match := _SERIES.search(group.get("class", ""))) is not None:
            line = lines[int(match[1])]
            for path in group.iter("path"):
                # On the line itself: the style sheet's own width is nearer to it than that of a series.
                path.set("style", f"stroke-width:{line.width};stroke-dasharray:{line.dashes or 'none'}")
    return _still(picture)


def thinned(points: Sequence[tuple[int, float]], limit: int) -> list[tuple[float, float]]:
    """At most ``limit`` points: the means of as many neighbours as it takes."""
    together = -(-len(points) // limit)
    groups = (points[start : start + together] for start in range(0, len(points), together or 1))
    return [(fmean(step for step, _ in group), fmean(value for _, value in group)) for group in groups]


def _still(picture: Any) -> bytes:
    """The SVG without its maker's remarks (which hold a date and addresses), and without the scripts of a web page."""
    for parent in list(picture.iter()):
        for child in list(parent):
            if callable(child.tag) or child.tag.endswith("script"):
                parent.remove(child)
    return b"<?xml version='1.0' encoding='utf-8'?>\n" + ElementTree.tostring(picture) + b"\n"
