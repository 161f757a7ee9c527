//! Where notices go, as a user writes it down (`--notify FILE`, TOML).

use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// One place that notices go to.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum Route {
    /// Anything that takes Alertmanager's webhook payload (version 4).
    Webhook {
        /// where
        url: String,
        /// signs the body: `X-Everstep-Signature: sha256=…`
        secret: Option<String>,
    },
    /// Alertmanager itself (`/api/v2/alerts`).
    Alertmanager {
        /// its address, as in `http://127.0.0.1:9093`
        url: String,
    },
    /// Slack: an incoming webhook, or a bot's token and a channel, whose message is updated in place.
    Slack {
        /// of the incoming webhook; with a token, of the API if it is not Slack's own
        url: Option<String>,
        /// of a bot that may write to the channel
        token: Option<String>,
        /// its id
        channel: Option<String>,
    },
    /// PagerDuty, Events API v2: only what needs a person, unless `all`.
    Pagerduty {
        /// the integration's key
        routing_key: String,
        /// if it is not PagerDuty's own
        url: Option<String>,
        /// also what recovers by itself
        #[serde(default)]
        all: bool,
    },
    /// DingTalk: a group's robot.
    Dingtalk {
        /// with its access token
        url: String,
        /// if the robot wants signatures
        secret: Option<String>,
    },
    /// OpenTelemetry: a trace of each incident that is over, over HTTP (`/v1/traces`).
    Otlp {
        /// of the collector, as in `http://127.0.0.1:4318`
        url: String,
        /// what the collector wants beside, such as its token
        #[serde(default)]
        headers: BTreeMap<String, String>,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Routes {
    #[serde(default)]
    route: Vec<Route>,
}

impl Route {
    /// For logs: its kind, without what is secret.
    pub fn name(&self) -> &'static str {
        match self {
            Route::Webhook { .. } => "webhook",
            Route::Alertmanager { .. } => "alertmanager",
            Route::Slack { .. } => "slack",
            Route::Pagerduty { .. } => "pagerduty",
            Route::Dingtalk { .. } => "dingtalk",
            Route::Otlp { .. } => "otlp",
        }
    }
}

/// Reads a user's file.
///
/// # Errors
/// A sentence that says what is wrong with it.
pub fn read(path: &Path) -> Result<Vec<Route>, String> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("cannot read --notify {}: {e}", path.display()))?;
    let of = |why: String| format!("--notify {}: {why}", path.display());
    let routes: Routes = toml::from_str(&text).map_err(|e| of(e.message().to_owned()))?;
    if routes.route.is_empty() {
        return Err(of(
            "no [[route]] in it; write, for example: [[route]] kind = \"webhook\" url = \"http://…\"".into()
        ));
    }
    for route in &routes.route {
        if let Route::Slack { url, token, channel } = route
            && (url.is_none() && token.is_none() || token.is_some() != channel.is_some())
        {
            return Err(of("slack wants the url of an incoming webhook, or a token and a channel".into()));
        }
    }
    Ok(routes.route)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_used_says_why() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify.toml");
        let said = |text: &str| {
            std::fs::write(&path, text).unwrap();
            read(&path).unwrap_err()
        };
        assert!(said("").contains("no [[route]]"));
        assert!(said("[[route]]\nkind = \"slack\"").contains("slack wants"));
        assert!(said("[[route]]\nkind = \"mail\"").contains("mail"));
        std::fs::write(&path, "[[route]]\nkind = \"webhook\"\nurl = \"http://h\"").unwrap();
        assert_eq!(read(&path), Ok(vec![Route::Webhook { url: "http://h".into(), secret: None }]));
    }
}
