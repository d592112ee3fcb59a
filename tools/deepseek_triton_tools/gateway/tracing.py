"""OpenTelemetry: a span for each request, sent as OTLP over HTTP. Imported only where traces are asked for."""

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from deepseek_triton_tools.gateway.observers import MODEL_ROUTES, HandledRequest


class Traces:
    """Opens and ends the spans. A thread of the SDK sends them, and drops them where nobody takes them."""

    def __init__(self, url: str) -> None:
        """`url` is the collector's, to which /v1/traces is added."""
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "deepseek-triton-gateway"}))
        exporter = OTLPSpanExporter(f"{url.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("deepseek_triton_tools.gateway")
        self._propagator = TraceContextTextMapPropagator()
        self._spans: dict[str, Span] = {}

    def begins(self, record: HandledRequest) -> None:
        parent = self._propagator.extract({"traceparent": record.trace_parent})
        span = self._tracer.start_span(record.route, parent, SpanKind.SERVER)
        # Not by request_id: a client may send one twice at a time.
        self._spans[record.upstream_id] = span
        # Triton's --trace-config mode=opentelemetry takes it as the parent of its own span.
        self._propagator.inject(record.upstream_headers, set_span_in_context(span))

    def ends(self, record: HandledRequest) -> None:
        span = self._spans.pop(record.upstream_id)
        operation = MODEL_ROUTES.get(record.route)
        if operation:
            span.update_name(f"{operation} {record.model}")
        known = {
            "http.request.method": "POST" if operation else "",
            "http.route": record.route,
            "http.response.status_code": record.status,
            "error.type": record.error_code,
            "server.address": record.server,
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "deepseek" if operation else "",
            "gen_ai.request.model": record.model,
            "gen_ai.request.stream": record.stream,
            "gen_ai.response.finish_reasons": [record.finish_reason] if record.finish_reason else "",
            "gen_ai.response.time_to_first_chunk": record.ttft_s,
            "gen_ai.usage.input_tokens": record.num_input_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
            "gen_ai.usage.output_tokens": record.num_output_tokens,
            "deepseek_triton.request_id": record.request_id,
            "deepseek_triton.upstream_id": record.upstream_id,
            "deepseek_triton.retries": record.retries,
            "deepseek_triton.client_left": record.client_left,
        }
        span.set_attributes({name: value for name, value in known.items() if value})
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR, record.error_code))
        span.end()

    def close(self) -> None:
        """Send what is left. It waits for the collector, for at most some seconds."""
        self._provider.shutdown()
