"""Contexts to HTML. Templates format and never compute; everything they are given is escaped."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from offramp_core.control.conditions import format_seconds
from offramp_core.evidence.words import e_value
from offramp_operator.explain.tones import state_tone
from offramp_operator.explain.why import NO_READING
from offramp_operator.explain.words import duration, share
from offramp_operator.web.charts import evidence_chart, goal_bar, latency_chart, network_chart, signed_seconds
from offramp_operator.web.curves import CurvePoint
from offramp_operator.web.pages import OverviewPage, ServicePage

HERE = Path(__file__).parent
TABLE_POINTS = 16
SERVICE_SECTIONS = ("head", "rollout", "network", "latency", "why", "history", "state", "events")
Sections = Mapping[str, str]


def thinned(curve: Sequence[CurvePoint]) -> Sequence[CurvePoint]:
    """Few enough points for a table; the newest is one of them."""
    step = -(-len(curve) // TABLE_POINTS) or 1
    return curve[::-1][::step][::-1]


def static_files() -> dict[str, bytes]:
    """Every file a page refers to, read once."""
    return {path.name: path.read_bytes() for path in sorted((HERE / "static").iterdir())}


class Renderer:
    """Renders pages section by section, so that what is live is what was loaded. May be used from several threads."""

    def __init__(self) -> None:
        digests = {name: hashlib.sha256(content).hexdigest()[:12] for name, content in static_files().items()}
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.globals.update(
            static=lambda name: f"/static/{name}?{digests[name]}",
            tone=state_tone,
            thinned=thinned,
            share=share,
            duration=duration,
            e_value=e_value,
            no_reading=NO_READING,
            format_seconds=format_seconds,
            signed_seconds=signed_seconds,
            goal_bar=goal_bar,
            evidence_chart=evidence_chart,
            latency_chart=latency_chart,
            network_chart=network_chart,
        )

    def overview(self, page: OverviewPage, *, fresh: str) -> Sections:
        """Sections of the overview by id."""
        summary = f"{page.degraded} degraded, {page.progressing} progressing, {page.healthy} healthy"
        return {
            "services": self._part("overview_services.html", page=page),
            "announce": _plain(summary),
            "fresh": _plain(fresh),
        }

    def search(self, page: OverviewPage) -> Sections:
        """The search form, which is never replaced while somebody types."""
        return {"search": self._part("overview_search.html", page=page)}

    def service(self, page: ServicePage, *, fresh: str) -> Sections:
        """Sections of a service's page by id."""
        live = page.row.rollout
        rollout = f"; {live.name} {live.phase} at {live.weight} %" if live is not None else ""
        return {
            **{name: self._part(f"service_{name}.html", page=page) for name in SERVICE_SECTIONS},
            "announce": _plain(f"{page.row.name} is {page.row.verdict}{rollout}"),
            "fresh": _plain(fresh),
        }

    def message(self, heading: str, message: str, command: str = "") -> Sections:
        """A page that only says something."""
        content = self._part("message.html", heading=heading, message=message, command=command)
        return {"message": content, "announce": "", "fresh": ""}

    def page(
        self, sections: Sections, *, title: str, since: str, crumbs: Sequence[str] = (), live: str = "", api: str = ""
    ) -> str:
        """A whole document around sections."""
        safe = {name: Markup(html) for name, html in sections.items()}  # noqa: S704 - rendered by this class
        return self._environment.get_template("base.html").render(
            sections=safe,
            announce=safe["announce"],
            fresh=safe["fresh"],
            title=title,
            crumbs=crumbs,
            live=live,
            api=api,
            since=since,
        )

    def _part(self, template: str, **context: object) -> str:
        return self._environment.get_template(template).render(**context)


def _plain(text: str) -> str:
    return str(Markup.escape(text))
