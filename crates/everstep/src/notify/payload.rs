//! Notices in the formats of each service.

use chrono::{DateTime, SecondsFormat};
use data_encoding::HEXLOWER;
use everstep_core::notify::{Notice, Status};
use serde_json::{Value, json};

/// Formats a time as in RFC 3339.
fn time(micros: u64) -> String {
    let at = i64::try_from(micros).ok().and_then(DateTime::from_timestamp_micros).unwrap_or_default();
    at.to_rfc3339_opts(SecondsFormat::Millis, true)
}

fn labels(of: &Notice) -> Value {
    let severity = if of.status == Status::Person { "critical" } else { "warning" };
    // The severity changes when a person is needed. Labels identify an alert in Alertmanager, so
    // [`alert`] sets a constant one and puts the need into an annotation.
    json!({"alertname": "EverstepIncident", "job": of.job, "incident": format!("inc-{}", of.incident), "key": of.key, "class": of.class, "node": of.node, "severity": severity})
}

/// Returns an alert: the labels that identify it, and its annotations.
fn alert(of: &Notice) -> Value {
    let mut labels = labels(of);
    // Identifying labels must stay the same until the alert is resolved.
    labels["severity"] = "warning".into();
    json!({
        "labels": labels,
        "annotations": {"summary": of.title, "description": of.lines.join("\n"), "needs_person": (of.status == Status::Person).to_string()},
        "startsAt": time(of.opened),
    })
}

/// Alertmanager waits before it reports a new group (`group_wait`, 30 s by default), and never
/// reports an alert that has ended by then. In microseconds.
const SHOWN_FOR: u64 = 40_000_000;

/// Returns the alert for Alertmanager's API (`POST /api/v2/alerts`). There, a resolved alert ends a
/// little later than in fact, so that it is reported at all.
pub fn alertmanager(of: &Notice, now: u64) -> Value {
    let mut alert = alert(of);
    if of.status == Status::Resolved {
        alert["endsAt"] = time(now + SHOWN_FOR).into();
    }
    json!([alert])
}

/// Returns what Alertmanager sends to webhooks (version 4).
pub fn webhook(of: &Notice) -> Value {
    let status = if of.status == Status::Resolved { "resolved" } else { "firing" };
    let ended = of.ended.filter(|_| of.status == Status::Resolved).map_or("0001-01-01T00:00:00Z".into(), time);
    let annotations = alert(of)["annotations"].clone();
    json!({
        "version": "4", "groupKey": of.key, "truncatedAlerts": 0, "status": status, "receiver": "everstep",
        "groupLabels": {"job": of.job}, "commonLabels": labels(of), "commonAnnotations": annotations, "externalURL": "",
        "alerts": [{
            "status": status, "labels": labels(of), "annotations": annotations, "startsAt": time(of.opened), "endsAt": ended,
            "generatorURL": "", "fingerprint": format!("{:016x}", everstep_checkpoint::arena::job_hash(&of.key)),
        }],
    })
}

/// Returns Slack's blocks, with a text for clients that do not show them.
pub fn slack(of: &Notice) -> Value {
    let sign = match of.status {
        Status::Firing => ":large_yellow_circle:",
        Status::Person => ":red_circle:",
        Status::Resolved => ":large_green_circle:",
    };
    let told = of.lines.join("\n").replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let told: String = told.chars().take(2900).collect();
    json!({
        "text": of.title,
        "blocks": [
            {"type": "section", "text": {"type": "mrkdwn", "text": format!("{sign} *{}*", of.title)}},
            {"type": "section", "text": {"type": "mrkdwn", "text": format!("```{told}```")}},
        ],
    })
}

/// Returns an event for PagerDuty's Events API v2.
pub fn pagerduty(of: &Notice, routing_key: &str) -> Value {
    let key: String = of.key.chars().take(255).collect();
    if of.status == Status::Resolved {
        return json!({"routing_key": routing_key, "event_action": "resolve", "dedup_key": key});
    }
    let severity = if of.status == Status::Person { "critical" } else { "warning" };
    let summary: String = of.title.chars().take(1024).collect();
    json!({
        "routing_key": routing_key, "event_action": "trigger", "dedup_key": key,
        "payload": {
            "summary": summary, "source": of.node, "severity": severity, "timestamp": time(of.opened), "component": of.job,
            "group": of.job, "class": of.class, "custom_details": {"explain": of.lines},
        },
    })
}

/// Returns a Markdown message for DingTalk's robots.
pub fn dingtalk(of: &Notice) -> Value {
    let text = format!("#### {}\n\n{}", of.title, of.lines.iter().map(|l| format!("> {l}\n\n")).collect::<String>());
    json!({"msgtype": "markdown", "markdown": {"title": of.title, "text": text}})
}

/// Returns a trace in OpenTelemetry's JSON protocol (OTLP 1.x, `ExportTraceServiceRequest`): the
/// incident, and each of its stages within it. Ids are derived from the incident's key, so sending
/// it twice yields the same trace.
pub fn trace(of: &Notice) -> Value {
    let id = |part: &str, bytes: usize| {
        let hash = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, format!("{}/{part}", of.key).as_bytes());
        HEXLOWER.encode(hash.as_ref().get(..bytes).unwrap_or_default())
    };
    let said = |name: &str, value: &str| json!({"key": name, "value": {"stringValue": value}});
    let (trace, root) = (id("trace", 16), id("incident", 8));
    let nanos = |micros: u64| (u128::from(micros) * 1000).to_string();
    let begin = of.spans.iter().map(|(_, begin, _)| *begin).min().unwrap_or(of.opened).min(of.opened);
    let end = of.spans.iter().map(|(_, _, end)| *end).chain(of.ended).max().unwrap_or(of.opened).max(of.opened);
    let attributes = [
        said("everstep.job", &of.job),
        said("everstep.incident", &format!("inc-{}", of.incident)),
        said("everstep.node", &of.node),
        said("everstep.class", &of.class),
        said("everstep.explain", &of.lines.join("\n")),
    ];
    // 2 is an error: the job did not recover.
    let status = if of.status == Status::Resolved { 1 } else { 2 };
    let mut spans = vec![json!({
        "traceId": trace, "spanId": root, "name": format!("incident {}", of.class), "kind": 1,
        "startTimeUnixNano": nanos(begin), "endTimeUnixNano": nanos(end), "attributes": attributes,
        "status": {"code": status, "message": if status == 2 { of.title.as_str() } else { "" }},
    })];
    spans.extend(of.spans.iter().map(|(name, begin, end)| {
        json!({
            "traceId": trace, "spanId": id(name, 8), "parentSpanId": root, "name": name, "kind": 1,
            "startTimeUnixNano": nanos(*begin), "endTimeUnixNano": nanos(*end),
        })
    }));
    let scope = json!({"name": "everstep", "version": env!("CARGO_PKG_VERSION")});
    json!({"resourceSpans": [{
        "resource": {"attributes": [said("service.name", "everstep")]},
        "scopeSpans": [{"scope": scope, "spans": spans}],
    }]})
}
