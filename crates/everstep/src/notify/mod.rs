//! Sends notices of incidents until they arrive. What they say is decided in the core (`notify`).

mod desk;
mod payload;
pub mod routes;

pub use desk::{Desk, when};
use everstep_core::notify::{Notice, Status};
use ring::hmac;
use routes::Route;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc;

/// Time limit for one request.
const REQUEST: Duration = Duration::from_secs(10);
/// First and longest pause between attempts. Attempts for one notice end after `PATIENCE`.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));
const PATIENCE: Duration = Duration::from_hours(1);
const SLACK: &str = "https://slack.com/api";
const PAGERDUTY: &str = "https://events.pagerduty.com/v2/enqueue";

/// Sends one route's notices, in order.
pub struct Sender {
    route: Route,
    client: reqwest::Client,
    /// Slack's identification of the message about an incident: channel and time stamp.
    messages: BTreeMap<String, (String, String)>,
    /// Incidents that were reported to PagerDuty.
    paged: Vec<String>,
}

/// Starts a sender per route, and returns the channels to them. `under_way` counts the notices that
/// have not arrived yet.
fn start(routes: Vec<Route>, under_way: &Arc<AtomicUsize>) -> Vec<mpsc::UnboundedSender<Notice>> {
    let each = |route: Route| {
        let (notices, mut inbox) = mpsc::unbounded_channel::<Notice>();
        let under_way = under_way.clone();
        tokio::spawn(async move {
            let mut sender = Sender::new(route);
            while let Some(notice) = inbox.recv().await {
                let mut waiting = vec![notice];
                while let Ok(next) = inbox.try_recv() {
                    // Only the latest notice about an incident is worth sending.
                    let before = waiting.len();
                    waiting.retain(|n| n.key != next.key);
                    under_way.fetch_sub(before - waiting.len(), Ordering::Relaxed);
                    waiting.push(next);
                }
                for notice in waiting {
                    sender.insist(&notice).await;
                    under_way.fetch_sub(1, Ordering::Relaxed);
                }
            }
        });
        notices
    };
    routes.into_iter().map(each).collect()
}

/// Why a notice has not arrived.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    #[error(transparent)]
    Unreachable(reqwest::Error),
    #[error("it answers {status}: {text}")]
    Status { status: reqwest::StatusCode, text: String },
    /// The service took the request, and says that something is wrong with it.
    #[error("it answers {0}")]
    Refused(Value),
}

impl Sender {
    pub fn new(route: Route) -> Self {
        let client = reqwest::Client::builder().timeout(REQUEST).build().unwrap_or_default();
        Sender { route, client, messages: BTreeMap::new(), paged: Vec::new() }
    }

    async fn insist(&mut self, notice: &Notice) {
        let (began, mut pause) = (tokio::time::Instant::now(), RETRY.0);
        while let Err(why) = self.send(notice).await {
            crate::say!("{} was not told of {}: {why}", self.route.name(), notice.key);
            if began.elapsed() >= PATIENCE {
                return;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RETRY.1);
        }
    }

    /// Sends one notice.
    ///
    /// # Errors
    /// [`SendError`].
    pub async fn send(&mut self, notice: &Notice) -> Result<(), SendError> {
        match self.route.clone() {
            Route::Webhook { url, secret } => {
                let body = payload::webhook(notice).to_string();
                let signature =
                    secret.map(|s| format!("sha256={}", hex(hmac::sign(&key(&s), body.as_bytes()).as_ref())));
                let request = self.client.post(url).header("content-type", "application/json").body(body);
                let request = match signature {
                    Some(signature) => request.header("x-everstep-signature", signature),
                    None => request,
                };
                answer(request).await.map(drop)
            }
            Route::Alertmanager { url } => {
                let url = format!("{}/api/v2/alerts", url.trim_end_matches('/'));
                let now = u64::try_from(now() * 1000).unwrap_or(u64::MAX);
                answer(self.json(&url, &payload::alertmanager(notice, now))).await.map(drop)
            }
            Route::Otlp { url, headers } => {
                if !notice.over {
                    return Ok(());
                }
                let url = format!("{}/v1/traces", url.trim_end_matches('/'));
                let request = self.json(&url, &payload::trace(notice));
                let request = headers.iter().fold(request, |request, (name, value)| request.header(name, value));
                answer(request).await.map(drop)
            }
            Route::Slack { url: Some(url), token: None, .. } => {
                answer(self.json(&url, &payload::slack(notice))).await.map(drop)
            }
            Route::Slack { url, token, channel } => {
                let url = url.unwrap_or_else(|| SLACK.into());
                self.slack(&url, &token.unwrap_or_default(), &channel.unwrap_or_default(), notice).await
            }
            Route::Pagerduty { routing_key, url, all } => {
                let known = self.paged.contains(&notice.key);
                let wanted = match notice.status {
                    Status::Person => true,
                    Status::Firing => all,
                    Status::Resolved => known,
                };
                if !wanted {
                    return Ok(());
                }
                let url = url.unwrap_or_else(|| PAGERDUTY.into());
                answer(self.json(&url, &payload::pagerduty(notice, &routing_key))).await?;
                self.paged.push(notice.key.clone());
                Ok(())
            }
            Route::Dingtalk { url, secret } => {
                let url = secret.map_or(url.clone(), |s| signed(&url, &s, now()));
                let said = answer(self.json(&url, &payload::dingtalk(notice))).await?;
                refused(&said, said["errcode"].as_i64().is_none_or(|code| code == 0), "errmsg")
            }
        }
    }

    fn json(&self, url: &str, body: &Value) -> reqwest::RequestBuilder {
        self.client.post(url).header("content-type", "application/json").body(body.to_string())
    }

    /// Posts a message once, and updates it in place afterwards.
    async fn slack(&mut self, url: &str, token: &str, channel: &str, notice: &Notice) -> Result<(), SendError> {
        let mut body = payload::slack(notice);
        let known = self.messages.get(&notice.key).cloned();
        let method = if known.is_some() { "chat.update" } else { "chat.postMessage" };
        let (channel, ts) = known.unwrap_or_else(|| (channel.into(), String::new()));
        body["channel"] = channel.clone().into();
        if !ts.is_empty() {
            body["ts"] = ts.into();
        }
        let said = answer(self.json(&format!("{url}/{method}"), &body).bearer_auth(token)).await?;
        refused(&said, said["ok"] == true, "error")?;
        let name = |field: &str, otherwise: &str| said[field].as_str().unwrap_or(otherwise).to_owned();
        self.messages.insert(notice.key.clone(), (name("channel", &channel), name("ts", "")));
        Ok(())
    }
}

fn refused(said: &Value, well: bool, field: &str) -> Result<(), SendError> {
    if well { Ok(()) } else { Err(SendError::Refused(said[field].clone())) }
}

async fn answer(request: reqwest::RequestBuilder) -> Result<Value, SendError> {
    let response = request.send().await.map_err(|e| SendError::Unreachable(e.without_url()))?;
    let status = response.status();
    let text = response.text().await.unwrap_or_default();
    if !status.is_success() {
        return Err(SendError::Status { status, text: text.chars().take(200).collect() });
    }
    Ok(serde_json::from_str(&text).unwrap_or(json!({})))
}

fn key(secret: &str) -> hmac::Key {
    hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn now() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis()
}

/// Adds DingTalk's signature to the address: base64 of HMAC-SHA256 over time stamp and secret.
fn signed(url: &str, secret: &str, millis: u128) -> String {
    use base64::Engine;
    let sign = hmac::sign(&key(secret), format!("{millis}\n{secret}").as_bytes());
    let sign = base64::engine::general_purpose::STANDARD.encode(sign.as_ref());
    let escaped: String = sign
        .chars()
        .map(|c| match c {
            '+' => "%2B".into(),
            '/' => "%2F".into(),
            '=' => "%3D".into(),
            c => c.to_string(),
        })
        .collect();
    let joint = if url.contains('?') { '&' } else { '?' };
    format!("{url}{joint}timestamp={millis}&sign={escaped}")
}

/// Returns a notice for testing whether notices arrive.
#[must_use]
pub fn test_notice(status: Status) -> Notice {
    let at = u64::try_from(now()).unwrap_or(0) * 1000;
    Notice {
        key: format!("everstep/test/{at}/0"),
        job: "test".into(),
        incident: 0,
        status,
        node: "none".into(),
        class: "test".into(),
        whose: "nobody's".into(),
        title: "everstep: notices arrive here".into(),
        lines: vec!["Nothing has happened: everstep notify has sent this.".into()],
        opened: at,
        ended: (status == Status::Resolved).then_some(at),
        over: true,
        spans: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dingtalk_wants_its_own_kind_of_signature() {
        // Identical to the results of Python's hmac, base64 and urllib.parse.quote_plus.
        let url = signed("https://oapi.dingtalk.com/robot/send?access_token=x", "SECabc", 1_700_000_000_000);
        assert!(
            url.starts_with("https://oapi.dingtalk.com/robot/send?access_token=x&timestamp=1700000000000&sign="),
            "{url}"
        );
        let sign = url.rsplit_once("sign=").unwrap().1;
        assert!(sign.ends_with("%3D") && !sign.contains(['+', '/', '=']), "{sign}");
    }
}
