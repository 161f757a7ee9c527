//! Sends notices of incidents until they arrive. What they say, and how long they are sent, is
//! decided in the core (`notify`).

mod dispatcher;
mod payload;
pub mod routes;

use aws_lc_rs::hmac;
use data_encoding::{BASE64, HEXLOWER};
pub use dispatcher::{Dispatcher, when};
use everstep_core::notify::{Attempts, Fate, Notice, Status};
use routes::Route;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Time limit for one request.
const REQUEST: Duration = Duration::from_secs(10);
const SLACK: &str = "https://slack.com/api";
const PAGERDUTY: &str = "https://events.pagerduty.com/v2/enqueue";
/// Slack's errors for a message that cannot be updated any more.
const NOT_UPDATED: [&str; 3] = ["message_not_found", "cant_update_message", "edit_window_closed"];
/// Slack's errors that pass by themselves: too many requests, and faults of its own.
const SLACK_NOT_NOW: [&str; 6] =
    ["ratelimited", "rate_limited", "internal_error", "fatal_error", "service_unavailable", "request_timeout"];
/// DingTalk's: it is busy, or gets too many messages.
const DINGTALK_NOT_NOW: [i64; 3] = [-1, 130_101, 410_100];

/// Sends one route's notices, in order.
pub struct Sender {
    route: Route,
    client: reqwest::Client,
    /// Slack's identification of the message about an incident: channel and time stamp.
    messages: BTreeMap<String, (String, String)>,
}

/// A notice for a route, with its number.
type Numbered = (u64, Notice);

/// What became of a notice on one route.
struct Settled {
    number: u64,
    fate: Fate,
    /// Why it was given up, for users.
    warning: Option<String>,
}

/// Starts a sender per route, and returns the channels to them. `settled` receives what becomes of
/// each notice on each route.
fn start(routes: Vec<Route>, settled: &mpsc::UnboundedSender<Settled>) -> Vec<mpsc::UnboundedSender<Numbered>> {
    let each = |route: Route| {
        let (notices, mut inbox) = mpsc::unbounded_channel::<Numbered>();
        let settled = settled.clone();
        tokio::spawn(async move {
            let mut sender = Sender::new(route);
            while let Some(notice) = inbox.recv().await {
                let mut waiting = vec![notice];
                while let Ok(next) = inbox.try_recv() {
                    // Only the latest notice about an incident is worth sending.
                    for (number, _) in waiting.extract_if(.., |(_, n)| n.key == next.1.key) {
                        let _ = settled.send(Settled { number, fate: Fate::Replaced, warning: None });
                    }
                    waiting.push(next);
                }
                for (number, notice) in waiting {
                    let (fate, warning) = match sender.insist(&notice).await {
                        Ok(()) => (Fate::Accepted, None),
                        Err(warning) => (Fate::GivenUp, Some(warning)),
                    };
                    let _ = settled.send(Settled { number, fate, warning });
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
    #[error("HTTP {status}: {text}")]
    Status { status: reqwest::StatusCode, text: String },
    /// The service took the request, and says that something is wrong with it.
    #[error("the service answered {said}")]
    Refused {
        said: Value,
        /// It may accept the same request later.
        later: bool,
    },
}

impl SendError {
    /// Returns whether the service would answer the same request in the same way again.
    fn is_final(&self) -> bool {
        match self {
            // Not even an address.
            SendError::Unreachable(e) => e.is_builder(),
            SendError::Status { status, .. } => status.is_client_error() && !matches!(status.as_u16(), 408 | 429),
            SendError::Refused { later, .. } => !later,
        }
    }
}

impl Sender {
    pub fn new(route: Route) -> Self {
        let client = reqwest::Client::builder().timeout(REQUEST).build().unwrap_or_default();
        Sender { route, client, messages: BTreeMap::new() }
    }

    /// Sends one notice, again and again if the service may accept it later.
    ///
    /// # Errors
    /// Explains to users why the notice is not sent any more.
    async fn insist(&mut self, notice: &Notice) -> Result<(), String> {
        let (began, mut attempts) = (Instant::now(), Attempts::default());
        while let Err(why) = self.send(notice).await {
            let (route, Notice { incident, job, .. }) = (self.route.name(), notice);
            if why.is_final() {
                return Err(format!(
                    "the {route} route of --notify rejected the notification of inc-{incident} of job {job}: {why}; \
                     fix the route and test it with everstep notify FILE; the change takes effect when the coordinator \
                     restarts"
                ));
            }
            let Some(pause) = attempts.next_pause(began.elapsed()) else {
                return Err(format!(
                    "giving up on notifying {route} of inc-{incident} of job {job}: {why}; test the route with \
                     everstep notify FILE; a change takes effect when the coordinator restarts"
                ));
            };
            crate::say_warning!("cannot notify {route} of inc-{incident} of job {job}: {why}; trying again");
            tokio::time::sleep(pause).await;
        }
        Ok(())
    }

    /// Sends one notice.
    ///
    /// # Errors
    /// [`SendError`].
    pub async fn send(&mut self, notice: &Notice) -> Result<(), SendError> {
        match self.route.clone() {
            Route::Webhook { url, secret } => {
                let body = payload::webhook(notice).to_string();
                let signature = secret
                    .map(|s| format!("sha256={}", HEXLOWER.encode(hmac::sign(&key(&s), body.as_bytes()).as_ref())));
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
                // An earlier life of the coordinator may have paged somebody. PagerDuty discards
                // what resolves an incident that it does not know.
                if notice.status == Status::Firing && !all {
                    return Ok(());
                }
                let url = url.unwrap_or_else(|| PAGERDUTY.into());
                answer(self.json(&url, &payload::pagerduty(notice, &routing_key))).await.map(drop)
            }
            Route::Dingtalk { url, secret } => {
                let url = secret.map_or(url.clone(), |s| signed(&url, &s, now()));
                let said = answer(self.json(&url, &payload::dingtalk(notice))).await?;
                let code = said["errcode"].as_i64().unwrap_or(0);
                let later = DINGTALK_NOT_NOW.contains(&code);
                if code == 0 { Ok(()) } else { Err(SendError::Refused { said: said["errmsg"].clone(), later }) }
            }
        }
    }

    fn json(&self, url: &str, body: &Value) -> reqwest::RequestBuilder {
        self.client.post(url).header("content-type", "application/json").body(body.to_string())
    }

    /// Posts a message once, and updates it in place afterwards, as long as Slack allows that.
    async fn slack(&mut self, url: &str, token: &str, channel: &str, notice: &Notice) -> Result<(), SendError> {
        if let Some((channel, ts)) = self.messages.get(&notice.key).cloned() {
            let mut body = payload::slack(notice);
            body["channel"] = channel.into();
            body["ts"] = ts.into();
            match self.slack_call(url, "chat.update", token, &body).await {
                Err(SendError::Refused { said, .. }) if said.as_str().is_some_and(|s| NOT_UPDATED.contains(&s)) => {
                    self.messages.remove(&notice.key);
                }
                other => return other.map(drop),
            }
        }
        let mut body = payload::slack(notice);
        body["channel"] = channel.into();
        let said = self.slack_call(url, "chat.postMessage", token, &body).await?;
        let name = |field: &str, otherwise: &str| said[field].as_str().unwrap_or(otherwise).to_owned();
        self.messages.insert(notice.key.clone(), (name("channel", channel), name("ts", "")));
        Ok(())
    }

    async fn slack_call(&self, url: &str, method: &str, token: &str, body: &Value) -> Result<Value, SendError> {
        let said = answer(self.json(&format!("{url}/{method}"), body).bearer_auth(token)).await?;
        if said["ok"] == true {
            return Ok(said);
        }
        let error = said["error"].clone();
        let later = error.as_str().is_none_or(|e| SLACK_NOT_NOW.contains(&e));
        Err(SendError::Refused { said: error, later })
    }
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

fn now() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis()
}

/// Adds DingTalk's signature to the address: base64 of HMAC-SHA256 over time stamp and secret.
fn signed(url: &str, secret: &str, millis: u128) -> String {
    let sign = BASE64.encode(hmac::sign(&key(secret), format!("{millis}\n{secret}").as_bytes()).as_ref());
    let sign: String = form_urlencoded::byte_serialize(sign.as_bytes()).collect();
    let joint = if url.contains('?') { '&' } else { '?' };
    format!("{url}{joint}timestamp={millis}&sign={sign}")
}

/// Returns a notice for testing whether notices arrive.
#[must_use]
pub fn test_notice(status: Status) -> Notice {
    let at = u64::try_from(now()).unwrap_or(0) * 1000;
    Notice {
        key: format!("everstep/test/{at}/0"),
        job: "test".into(),
        run: at,
        incident: 0,
        status,
        node: "none".into(),
        class: "test".into(),
        whose: "none".into(),
        title: "everstep: test notification".into(),
        lines: vec!["This is a test from everstep notify; nothing has happened.".into()],
        opened: at,
        ended: (status == Status::Resolved).then_some(at),
        over: true,
        spans: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// Starts a service that answers its requests with these statuses and bodies. Returns its
    /// address, and the requests: path and body.
    async fn service(answers: Vec<(u16, &'static str)>) -> (String, mpsc::UnboundedReceiver<(String, Value)>) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (taken, requests) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            for (status, answer) in answers {
                let (mut stream, _) = listener.accept().await.unwrap();
                let (mut raw, mut part) = (Vec::new(), [0; 4096]);
                let (head, body) = loop {
                    let n = stream.read(&mut part).await.unwrap();
                    assert_ne!(n, 0, "the request ends early");
                    raw.extend_from_slice(&part[..n]);
                    let text = String::from_utf8_lossy(&raw).into_owned();
                    let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
                    let length = head.lines().find_map(|l| l.strip_prefix("content-length: ")).unwrap();
                    if body.len() >= length.parse::<usize>().unwrap() {
                        break (head.to_owned(), body.to_owned());
                    }
                };
                let path = head.split(' ').nth(1).unwrap().to_owned();
                taken.send((path, serde_json::from_str(&body).unwrap())).unwrap();
                let length = answer.len();
                let answer = format!(
                    "HTTP/1.1 {status} status\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{answer}"
                );
                stream.write_all(answer.as_bytes()).await.unwrap();
                let _ = stream.shutdown().await;
            }
        });
        (url, requests)
    }

    fn bot(url: String) -> Sender {
        let (token, channel) = (Some("t".into()), Some("C1".into()));
        Sender::new(Route::Slack { url: Some(url), token, channel })
    }

    #[tokio::test]
    async fn slack_gets_a_new_message_when_the_first_cannot_be_updated() {
        for error in NOT_UPDATED {
            let gone: &'static str = format!(r#"{{"ok":false,"error":"{error}"}}"#).leak();
            let posted = |ts| -> &'static str { format!(r#"{{"ok":true,"channel":"C2","ts":"{ts}"}}"#).leak() };
            let (url, mut requests) =
                service(vec![(200, posted(1)), (200, gone), (200, posted(2)), (200, posted(2))]).await;
            let (mut sender, notice) = (bot(url), test_notice(Status::Person));
            for _ in 0..3 {
                sender.send(&notice).await.unwrap();
            }
            let mut seen = Vec::new();
            while let Ok((path, body)) = requests.try_recv() {
                seen.push((path, body["channel"].clone(), body["ts"].clone()));
            }
            let of = |method: &str, channel: &str, ts: Value| (format!("/chat.{method}"), json!(channel), ts);
            let expected = [
                of("postMessage", "C1", Value::Null),
                of("update", "C2", json!("1")),
                of("postMessage", "C1", Value::Null),
                of("update", "C2", json!("2")),
            ];
            assert_eq!(seen, expected);
        }
    }

    #[tokio::test]
    async fn what_a_service_refuses_for_good_is_not_sent_again() {
        let refusals = [(400, "no"), (404, ""), (200, r#"{"ok":false,"error":"channel_not_found"}"#)];
        for refusal in refusals {
            let (url, mut requests) = service(vec![refusal, (200, r#"{"ok":true,"ts":"1"}"#)]).await;
            let (mut sender, notice) = (bot(url), test_notice(Status::Person));
            let warning = sender.insist(&notice).await.unwrap_err();
            assert!(warning.contains("slack route") && warning.contains("inc-0 of job test"), "{warning}");
            assert!(requests.try_recv().is_ok() && requests.try_recv().is_err(), "one attempt");
            // The route goes on.
            assert_eq!(sender.insist(&notice).await, Ok(()));
        }
    }

    #[tokio::test]
    async fn what_a_service_may_accept_later_is_sent_again() {
        let notice = test_notice(Status::Person);
        for answer in [(408, ""), (429, ""), (200, r#"{"ok":false,"error":"ratelimited"}"#)] {
            let (url, _requests) = service(vec![answer]).await;
            let why = bot(url).send(&notice).await.unwrap_err();
            assert!(!why.is_final(), "{answer:?}");
        }
        let (url, _requests) = service(vec![(503, ""), (200, r#"{"ok":true,"ts":"1"}"#)]).await;
        assert_eq!(bot(url).insist(&notice).await, Ok(()));
    }

    #[tokio::test]
    async fn an_address_that_is_none_is_refused() {
        let mut sender = Sender::new(Route::Webhook { url: "example.org/hook".into(), secret: None });
        assert!(sender.insist(&test_notice(Status::Person)).await.is_err());
    }

    #[tokio::test]
    async fn dingtalk_says_itself_whether_it_is_only_busy() {
        let answers = [(r#"{"errcode":130101,"errmsg":"send too fast"}"#, false), (r#"{"errcode":310000}"#, true)];
        for (answer, is_final) in answers {
            let (url, _requests) = service(vec![(200, answer)]).await;
            let why = Sender::new(Route::Dingtalk { url, secret: None }).send(&test_notice(Status::Person)).await;
            assert_eq!(why.unwrap_err().is_final(), is_final, "{answer}");
        }
    }

    #[tokio::test]
    async fn pagerduty_is_told_of_the_end_of_what_an_earlier_coordinator_may_have_reported() {
        let (url, mut requests) = service(vec![(202, "{}")]).await;
        let mut sender = Sender::new(Route::Pagerduty { routing_key: "k".into(), url: Some(url), all: false });
        sender.send(&test_notice(Status::Firing)).await.unwrap();
        sender.send(&test_notice(Status::Resolved)).await.unwrap();
        assert_eq!(requests.try_recv().unwrap().1["event_action"], "resolve");
    }

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
