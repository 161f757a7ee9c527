"""A real HTTP server that accepts notices like the services do, and makes their checks."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

WEBHOOK_SECRET, DINGTALK_SECRET, SLACK_TOKEN, ROUTING_KEY = "w-secret", "SECding", "xoxb-1", "R" * 32


class Receivers:
    """``taken[path]``: the bodies received there, in order.

    ``wrong``: what a service would have refused, and why.
    """

    def __init__(self, fail_first: int = 0) -> None:
        self.taken: dict[str, list[Any]] = {}
        self.wrong: list[str] = []
        self.fail_first = fail_first
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                status, answer = outer.take(self.path, dict(self.headers), body)
                out = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(out)))
                self.end_headers()
                self.wfile.write(out)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, path: str, headers: dict[str, str], raw: bytes) -> tuple[int, Any]:
        with self.lock:
            if self.fail_first > 0:
                self.fail_first -= 1
                return 503, {"error": "not now"}
            where, _, query = path.partition("?")
            body = json.loads(raw)
            lower = {k.lower(): v for k, v in headers.items()}
            if lower.get("content-type") != "application/json":
                self.wrong.append(f"{where}: no JSON")
            check = getattr(self, "_" + where.strip("/").replace("/", "_").replace(".", "_"), None)
            why = check(body, lower, urllib.parse.parse_qs(query), raw) if check else None
            if why:
                self.wrong.append(f"{where}: {why}: {body}")
            self.taken.setdefault(where, []).append(body)
            if where.startswith("/api/chat."):
                return 200, {"ok": why is None, "error": why, "channel": "C1", "ts": "1700000000.000100"}
            return (400, {"errcode": 1, "errmsg": why}) if why else (200, {"errcode": 0, "status": "success"})

    def _hook(self, body: Any, headers: dict[str, str], _query: Any, raw: bytes) -> str | None:
        wanted = "sha256=" + hmac.new(WEBHOOK_SECRET.encode(), raw, hashlib.sha256).hexdigest()
        if headers.get("x-everstep-signature") != wanted:
            return "the signature is another one"
        return _alertmanager_v4(body)

    def _from_alertmanager(self, body: Any, *_: Any) -> str | None:
        return _alertmanager_v4(body)

    def _slack(self, body: Any, *_: Any) -> str | None:
        texts = [b["text"]["text"] for b in body["blocks"]]
        return None if body["text"] and all(0 < len(t) <= 3000 for t in texts) else "no_text"

    def _api_chat_postMessage(self, body: Any, headers: dict[str, str], *_: Any) -> str | None:
        if headers.get("authorization") != f"Bearer {SLACK_TOKEN}":
            return "invalid_auth"
        return None if body["channel"] == "C1" and body["text"] else "channel_not_found"

    def _api_chat_update(self, body: Any, headers: dict[str, str], *_: Any) -> str | None:
        if headers.get("authorization") != f"Bearer {SLACK_TOKEN}":
            return "invalid_auth"
        return None if body.get("ts") == "1700000000.000100" else "message_not_found"

    def _pagerduty(self, body: Any, *_: Any) -> str | None:
        if (
            body["routing_key"] != ROUTING_KEY
            or body["event_action"] not in ("trigger", "resolve")
            or not 0 < len(body["dedup_key"]) <= 255
        ):
            return "invalid event"
        if body["event_action"] == "trigger":
            payload = body["payload"]
            if (
                not payload["summary"]
                or not payload["source"]
                or payload["severity"] not in ("critical", "error", "warning", "info")
            ):
                return "invalid payload"
        return None

    def _ding(self, body: Any, _headers: Any, query: dict[str, list[str]], _raw: bytes) -> str | None:
        stamp = query.get("timestamp", [""])[0]
        sign = base64.b64encode(
            hmac.new(DINGTALK_SECRET.encode(), f"{stamp}\n{DINGTALK_SECRET}".encode(), hashlib.sha256).digest()
        ).decode()
        if query.get("sign", [""])[0] != sign:
            return "sign not match"
        return (
            None
            if body["msgtype"] == "markdown" and body["markdown"]["title"] and body["markdown"]["text"]
            else "empty"
        )

    def _v1_traces(self, body: Any, *_: Any) -> str | None:
        """Parses like a collector: OpenTelemetry's own schema, with ids in hexadecimal."""
        spans = [
            span for resource in body["resourceSpans"] for scope in resource["scopeSpans"] for span in scope["spans"]
        ]
        for span in spans:
            for name in ("traceId", "spanId", "parentSpanId"):
                if name in span:
                    span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
        try:
            read = ParseDict(body, ExportTraceServiceRequest()).resource_spans[0].scope_spans[0].spans
        except ParseError as exc:
            return str(exc)
        root, *stages = read
        whole = all(
            len(s.trace_id) == 16 and len(s.span_id) == 8 and s.start_time_unix_nano <= s.end_time_unix_nano
            for s in read
        )
        inside = all(
            s.parent_span_id == root.span_id
            and root.start_time_unix_nano <= s.start_time_unix_nano
            and s.end_time_unix_nano <= root.end_time_unix_nano
            for s in stages
        )
        return None if whole and inside and len({s.span_id for s in read}) == len(read) else "no tree of spans"

    def close(self) -> None:
        self.server.shutdown()


def _alertmanager_v4(body: Any) -> str | None:
    """Checks the fields that receivers of Alertmanager's webhook read.

    See its documentation, `<webhook_config>`.
    """
    top = {
        "version",
        "groupKey",
        "truncatedAlerts",
        "status",
        "receiver",
        "groupLabels",
        "commonLabels",
        "commonAnnotations",
        "externalURL",
        "alerts",
    }
    each = {"status", "labels", "annotations", "startsAt", "endsAt", "generatorURL", "fingerprint"}
    if set(body) != top or body["version"] != "4" or body["status"] not in ("firing", "resolved"):
        return f"not version 4: {set(body) ^ top}"
    if any(set(a) != each for a in body["alerts"]):
        return "an alert has other fields"
    strings = [v for a in body["alerts"] for v in {**a["labels"], **a["annotations"]}.values()]
    return None if body["alerts"] and all(isinstance(v, str) for v in strings) else "labels are strings"
