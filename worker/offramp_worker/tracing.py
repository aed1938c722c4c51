"""OpenTelemetry traces of inference requests: off unless ``OTEL_TRACES_EXPORTER`` is ``otlp``, and then in the packages
of the extra ``tracing``.

The variable is OpenTelemetry's own, so that ``spec.worker.env`` may set it like the others.

A request's spans are made once its reply has gone out, from times that were noted on the way: `infer` (child of the
client's span, by W3C ``traceparent``) with `queue` and `execute` in it. Everything else, such as where to send them and
which to sample, the SDK takes from its own ``OTEL_*`` variables.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from offramp_core.errors import InvalidArgumentError
from offramp_worker.engine.queue.tickets import Ticket
from offramp_worker.http.bodies import Headers

CONTEXT_HEADERS = (b"traceparent", b"tracestate")
MAX_STATE_BYTES = 512


def context_of(headers: Headers) -> dict[str, str]:
    """The W3C trace context of a request's headers; what is not ASCII or too long is left out."""
    found = {name.decode(): value for name, value in headers if name in CONTEXT_HEADERS}
    return {name: value.decode() for name, value in found.items() if value.isascii() and len(value) <= MAX_STATE_BYTES}


class Tracing:
    """Makes spans. Called by the event loop; they are sent by a thread of the SDK."""

    def __init__(self, *, service: str, instance: str, version: str, processor: Any = None) -> None:
        """``processor`` replaces the batches that go to the OTLP endpoint.

        Raises
        ------
        InvalidArgumentError
            The packages are not installed.
        """
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            if processor is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                processor = BatchSpanProcessor(OTLPSpanExporter())
        except ImportError as error:
            raise InvalidArgumentError(
                f"OTEL_TRACES_EXPORTER is 'otlp', which needs packages that are not installed ({error.name}); "
                "install offramp[tracing] or leave the variable out"
            ) from error
        resource = Resource.create(
            {"service.name": service, "service.instance.id": instance, "service.version": version}
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("offramp.worker", version)
        self._trace, self._propagator = trace, TraceContextTextMapPropagator()

    def answered(self, ticket: Ticket, *, context: Mapping[str, str], model: str, code: str, error: bool) -> None:
        """The reply to a request has gone out."""
        ended = time.time_ns()
        began = _nanoseconds(ticket.wall_time)
        span = self._begin(
            f"infer {model}",
            context,
            began,
            {
                "offramp.model": model,
                "offramp.rows": len(ticket.x),
                "offramp.exit": _joined(ticket.exits),
                "offramp.arm": _joined(ticket.arms),
                "offramp.config": _joined(ticket.configs),
                "offramp.audited": any(ticket.audited),
                "offramp.cached": ticket.cached,
                "offramp.status": code,
            },
        )
        inside = self._trace.set_span_in_context(span)
        if math.isfinite(ticket.began_at):
            run = _nanoseconds(ticket.wall_time + ticket.began_at - ticket.admitted)
            self._tracer.start_span("queue", inside, start_time=began).end(run)
            rows = {"offramp.batch.rows": ticket.batch_rows}
            self._tracer.start_span("execute", inside, start_time=run, attributes=rows).end(max(run, ended))
        self._end(span, ended, error=error, code=code)

    def refused(self, *, context: Mapping[str, str], code: str) -> None:
        """A request was answered without having been taken."""
        now = time.time_ns()
        self._end(self._begin("infer", context, now, {"offramp.status": code}), now, error=True, code=code)

    def close(self) -> None:
        """Send what waits. Blocks for seconds where nobody takes it."""
        self._provider.shutdown()

    def _begin(self, name: str, context: Mapping[str, str], at: int, attributes: Mapping[str, Any]) -> Any:
        parent = self._propagator.extract(dict(context))
        return self._tracer.start_span(
            name, parent, kind=self._trace.SpanKind.SERVER, start_time=at, attributes=dict(attributes)
        )

    def _end(self, span: Any, at: int, *, error: bool, code: str) -> None:
        if error:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, code))
        span.end(at)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _joined(values: list[str]) -> str:
    """What rows have in common, or all that occur."""
    return ",".join(sorted(set(values)))
