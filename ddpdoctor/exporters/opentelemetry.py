"""OpenTelemetry: a trace with a span for the run and one for each rank; findings are events."""

from __future__ import annotations

import time
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ..render.safe_text import moment
from ..report.findings import Report, Severity
from ..storage.run_folder import write_private
from .dispatch import ExportError
from .figures import FINDING_COLUMNS, finding_rows

TIMEOUT_S = 10


def export(report: Report, target: str) -> str:
    """Send the trace to the OTLP endpoint `target` (`http://host:4318/v1/traces`), or write it to
    a file of that name, a span in each line."""
    exporter = _sender(target) if "://" in target else None
    spans = _spans(report)
    if exporter is None:
        path = Path(target) if Path(target).suffix else Path(f"{target}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, "".join(f"{s.to_json(indent=None)}\n" for s in spans).encode())
        return str(path)
    if exporter.export(spans) is not SpanExportResult.SUCCESS:
        raise ExportError(f"{target} did not accept the trace")
    return target


def _sender(target: str) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as error:
        raise ExportError("type pip install opentelemetry-exporter-otlp-proto-http") from error
    return OTLPSpanExporter(endpoint=target, timeout=TIMEOUT_S)


def _spans(report: Report) -> tuple[ReadableSpan, ...]:
    memory = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource.create({"service.name": "ddpdoctor"}))
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracer = provider.get_tracer("ddpdoctor", report.tool.version)
    run = report.run
    begin = _nanoseconds(run.started_at) or time.time_ns()
    end = max(_nanoseconds(run.ended_at), begin)
    root = tracer.start_span(
        "training run",
        start_time=begin,
        attributes={
            "ddpdoctor.command": " ".join(run.command),
            "ddpdoctor.outcome": run.outcome,
            "ddpdoctor.world_size": run.world_size,
            "ddpdoctor.torch": run.torch,
        },
    )
    for row in finding_rows(report):
        named = {f"ddpdoctor.{c}": v for c, v in zip(FINDING_COLUMNS, row, strict=True)}
        root.add_event("finding", named, timestamp=end)
    if report.worst() is Severity.ERROR:
        root.set_status(trace.StatusCode.ERROR)
    times = {row.rank: row for row in report.ledger}
    for rank in report.ranks:
        spent = times.get(rank.rank)
        accounts = spent.accounts if spent else {}
        span = tracer.start_span(
            f"rank {rank.rank}",
            context=trace.set_span_in_context(root),
            start_time=begin,
            attributes={
                "ddpdoctor.rank": rank.rank,
                "ddpdoctor.state": rank.state,
                **({} if rank.steps is None else {"ddpdoctor.steps": rank.steps}),
                **{f"ddpdoctor.seconds.{name}": s for name, s in accounts.items()},
            },
        )
        span.end(begin + int(1e9 * spent.wall_s) if spent else end)
    root.end(end)
    spans: tuple[ReadableSpan, ...] = memory.get_finished_spans()
    return spans


def _nanoseconds(text: str | None) -> int:
    """A moment of a report since the epoch; 0 where it is none."""
    known = moment(text)
    return int(known.timestamp() * 1e9) if known else 0
