"""A small canvas for SVG: shapes, text and curves in the colours of a theme, with numbers rounded so that files stay
stable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

LIGHT = {
    "ink": "#1f2430",
    "soft": "#5b6472",
    "line": "#c3c9d4",
    "paper": "#ffffff",
    "fill": "#eef1f7",
    "stable": "#5b7db1",
    "canary": "#e08a1e",
    "good": "#2e8b57",
    "bad": "#c8443c",
    "accent": "#4051b5",
}
DARK = {
    "ink": "#e3e6ee",
    "soft": "#a3abba",
    "line": "#4c5464",
    "paper": "#1e2129",
    "fill": "#2b303c",
    "stable": "#7fa3dc",
    "canary": "#f0a94b",
    "good": "#5cc08a",
    "bad": "#ef7a72",
    "accent": "#8f9df0",
}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

Point = tuple[float, float]


@dataclass
class Canvas:
    """A picture of ``width`` x ``height`` units; colours are names of the theme."""

    width: float
    height: float
    title: str
    parts: list[str] = field(default_factory=list)

    def rect(
        self, x: float, y: float, w: float, h: float, *, fill: str = "fill", stroke: str = "line", r: float = 4
    ) -> None:
        self.parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}" rx="{_n(r)}" fill="{{{fill}}}" '
            f'stroke="{{{stroke}}}"/>'
        )

    def dot(self, x: float, y: float, r: float, *, fill: str, stroke: str = "none", width: float = 1.5) -> None:
        self.parts.append(
            f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(r)}" fill="{_colour(fill)}" stroke="{_colour(stroke)}" '
            f'stroke-width="{_n(width)}"/>'
        )

    def line(
        self, points: Sequence[Point], *, stroke: str = "line", width: float = 1.5, dash: str = "", arrow: bool = False
    ) -> None:
        path = "M" + " L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        extra = (f' stroke-dasharray="{dash}"' if dash else "") + (f' marker-end="url(#{stroke})"' if arrow else "")
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{{{stroke}}}" stroke-width="{_n(width)}" '
            f'stroke-linejoin="round"{extra}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 13,
        fill: str = "ink",
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" fill="{{{fill}}}" '
            f'text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        *lines: str,
        fill: str = "fill",
        stroke: str = "line",
        ink: str = "ink",
    ) -> None:
        """A rectangle with centred lines, the first of them bold."""
        self.rect(x, y, w, h, fill=fill, stroke=stroke)
        top = y + h / 2 - (len(lines) - 1) * 8 + 4.5
        for i, line in enumerate(lines):
            self.text(
                x + w / 2,
                top + i * 16,
                line,
                anchor="middle",
                bold=i == 0,
                size=13 if i == 0 else 11.5,
                fill=ink if i == 0 else "soft",
            )

    def svg(self, theme: dict[str, str]) -> str:
        """The picture in one theme's colours."""
        markers = "".join(
            f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse">'
            f'<path d="M0 0 L10 5 L0 10 z" fill="{{{name}}}"/></marker>'
            for name in ("line", "soft", "ink", "good", "bad", "canary", "stable", "accent")
            if any(f"url(#{name})" in part for part in self.parts)
        )
        body = "\n".join(self.parts)
        for name, colour in theme.items():
            body, markers = body.replace(f"{{{name}}}", colour), markers.replace(f"{{{name}}}", colour)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(self.width)} {_n(self.height)}" '
            f'font-family="{FONT}" role="img">\n'
            f"<title>{escape(self.title)}</title>\n"
            + (f"<defs>{markers}</defs>\n" if markers else "")
            + body
            + "\n</svg>\n"
        )


@dataclass(frozen=True, slots=True)
class Axes:
    """Where data lie on a canvas: ``x`` and ``y`` are (low, high) in data, ``left``... in units of the canvas."""

    left: float
    top: float
    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> Point:
        """The place of a data point; beyond the axes it is cut off."""
        across = (min(max(x, self.x[0]), self.x[1]) - self.x[0]) / (self.x[1] - self.x[0])
        up = (min(max(y, self.y[0]), self.y[1]) - self.y[0]) / (self.y[1] - self.y[0])
        return self.left + across * self.width, self.top + (1 - up) * self.height

    def draw(
        self, canvas: Canvas, *, xs: Sequence[float], ys: Sequence[tuple[float, str]], xlabel: str, ylabel: str
    ) -> None:
        """Frame, ticks and labels."""
        for value, text in ys:
            _, y = self.at(self.x[0], value)
            canvas.line([(self.left, y), (self.left + self.width, y)], width=0.6)
            canvas.text(self.left - 6, y + 4, text, size=11, fill="soft", anchor="end")
        for value in xs:
            x, _ = self.at(value, self.y[0])
            canvas.text(x, self.top + self.height + 16, f"{value:,.0f}", size=11, fill="soft", anchor="middle")
        canvas.line(
            [
                (self.left, self.top),
                (self.left, self.top + self.height),
                (self.left + self.width, self.top + self.height),
            ],
            stroke="soft",
            width=1,
        )
        canvas.text(
            self.left + self.width / 2, self.top + self.height + 34, xlabel, size=12, fill="soft", anchor="middle"
        )
        canvas.text(self.left, self.top - 8, ylabel, size=12, fill="soft")


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _colour(name: str) -> str:
    return name if name == "none" else f"{{{name}}}"
