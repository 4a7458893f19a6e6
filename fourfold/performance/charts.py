"""SVG charts with colours from the page's CSS: lines and points on logarithmic axes, and sparklines."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 360, 250
LEFT, RIGHT, TOP, BOTTOM = 78, 12, 22, 36
LEAST_GAP, LEAST_HEIGHT = 62, 18  # pixels between the middles of labels, side by side and one above the other
# What a tick may be in its decade, the roundest first.
STEPS = (1, 5, 2, 3, 7, 1.5, 4, 2.5, 6, 8, 9, 1.2, 1.8, 3.5)
PREFIXES = {-9: "n", -6: "µ", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P"}


@dataclass(frozen=True)
class Point:
    """One measurement: its coordinates and its tooltip."""

    x: float
    y: float
    title: str


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis; `low` and `high` are the log10 of its ends.

    The unit takes SI prefixes. An axis without a unit is of a ratio, whose numbers are plain.
    """

    low: float
    high: float
    unit: str

    @classmethod
    def over(cls, values: Sequence[float], unit: str) -> "Axis":
        """Return an axis that holds all values, with a margin."""
        low, high = math.log10(min(values)), math.log10(max(values))
        room = max(0.06 * (high - low), 0.1)
        return cls(low - room, high + room, unit)

    def share(self, value: float) -> float:
        """Return the position of a value on the axis, from 0 to 1."""
        return (math.log10(value) - self.low) / (self.high - self.low)

    def label(self, tick: float) -> str:
        """Return the text of a tick."""
        return quantity(tick, self.unit) if self.unit else f"{tick:.3g}"

    def ticks(self, pixels: float, gap: float) -> list[float]:
        """Return round numbers that are at least `gap` of the axis's `pixels` apart, in ascending order.

        Each kind of number, such as 2, 20 and 200, is there in every decade or in none.
        """
        of_a_decade = pixels / (self.high - self.low)
        stride = max(1, math.ceil(gap / of_a_decade))
        marks: list[float] = []
        for step in STEPS:
            decades = range(math.floor(self.low), math.ceil(self.high) + 1, stride)
            candidates = [step * 10.0**d for d in decades if self.low <= math.log10(step * 10.0**d) <= self.high]
            together = sorted([*marks, *candidates])
            if all(math.log10(b / a) * of_a_decade >= gap for a, b in itertools.pairwise(together)):
                marks = together
        return marks


def quantity(value: float, unit: str) -> str:
    """Format a number with the SI prefix that leaves one to three digits before the point: 12.3 µs."""
    if not value:
        return f"0 {unit}".strip()
    power = 3 * math.floor(math.log10(abs(value)) / 3 + 1e-9)
    power = min(max(power, min(PREFIXES)), max(PREFIXES))
    return f"{value / 10.0**power:.3g} {PREFIXES[power]}{unit}".strip()


def chart(
    series: Mapping[str, Sequence[Point]],
    classes: Mapping[str, str],
    x: tuple[str, str],
    y: tuple[str, str],
    label: str,
    joined: bool = True,
    limits: Sequence[tuple[Point, Point]] = (),
) -> str:
    """Draw series of points on logarithmic axes.

    Args:
        series: the points of each series, by name.
        classes: the CSS class of each series, by name.
        x: the name of the horizontal axis and its unit, "" for a ratio.
        y: those of the vertical axis.
        label: a text description of the chart.
        joined: whether a line connects the points of a series.
        limits: the two ends of each line that marks a ceiling.
    """
    points = [point for of_series in series.values() for point in of_series]
    ends = [end for limit in limits for end in limit]
    if not points:
        return ""
    (x_name, x_unit), (y_name, y_unit) = x, y
    x_axis = Axis.over([p.x for p in (*points, *ends)], x_unit)
    y_axis = Axis.over([p.y for p in (*points, *ends)], y_unit)

    def pixel(point: Point) -> tuple[float, float]:
        return (
            round(LEFT + x_axis.share(point.x) * (WIDTH - LEFT - RIGHT), 1),
            round(HEIGHT - BOTTOM - y_axis.share(point.y) * (HEIGHT - TOP - BOTTOM), 1),
        )

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">']
    for tick in y_axis.ticks(HEIGHT - TOP - BOTTOM, LEAST_HEIGHT):
        _, height = pixel(Point(10**x_axis.low, tick, ""))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height}" y2="{height}"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{height + 4}" text-anchor="end">{escape(y_axis.label(tick))}</text>')
    for tick in x_axis.ticks(WIDTH - LEFT - RIGHT, LEAST_GAP):
        place, _ = pixel(Point(tick, 10**y_axis.low, ""))
        parts.append(f'<line class="grid" x1="{place}" x2="{place}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        text = escape(x_axis.label(tick))
        parts.append(f'<text x="{place}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{text}</text>')
    parts.append(f'<text x="4" y="{TOP - 9}">{escape(y_name)}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(x_name)}</text>')
    for start, end in limits:
        (x1, y1), (x2, y2) = pixel(start), pixel(end)
        title = f"<title>{escape(end.title)}</title>"
        parts.append(f'<line class="limit" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}">{title}</line>')
    for name, of_series in series.items():
        places = [pixel(point) for point in of_series]
        if joined and len(of_series) > 1:
            path = " ".join(f"{x},{y}" for x, y in places)
            parts.append(f'<polyline class="{classes[name]}" points="{path}"/>')
        for (left, top), point in zip(places, of_series):
            title = f"<title>{escape(point.title)}</title>"
            parts.append(f'<circle class="{classes[name]}" cx="{left}" cy="{top}" r="4">{title}</circle>')
    return "".join([*parts, "</svg>"])


def sparkline(values: Sequence[float]) -> str:
    """Draw a value's history, oldest first, scaled from its smallest to its largest."""
    if len(values) < 2:
        return ""
    logs = [math.log(value) for value in values]
    # A minimum span of 10%, so that a change of a few per cent does not fill the whole height.
    span = max(max(logs) - min(logs), 0.1)
    middle = (max(logs) + min(logs)) / 2
    step = 116 / (len(logs) - 1)
    path = " ".join(f"{2 + i * step:.1f},{14 - 24 * (log - middle) / span:.1f}" for i, log in enumerate(logs))
    label = f"{len(values)} runs, {quantity(values[0], 's')} to {quantity(values[-1], 's')}"
    x, y = path.rpartition(" ")[2].split(",")
    return (
        f'<svg class="spark" viewBox="0 0 120 28" role="img" aria-label="{label}"><title>{label}</title>'
        f'<polyline points="{path}"/><circle cx="{x}" cy="{y}" r="2.5"/></svg>'
    )
