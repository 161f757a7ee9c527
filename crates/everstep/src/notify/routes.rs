//! The routes of notices, as a user writes them (`--notify FILE`, TOML).

use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// One destination of notices.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum Route {
    /// Anything that accepts Alertmanager's webhook payload (version 4).
    Webhook {
        /// Address of the receiver.
        url: String,
        /// Key to sign the body with: `X-Everstep-Signature: sha256=…`.
        secret: Option<String>,
    },
    /// Alertmanager itself (`/api/v2/alerts`).
    Alertmanager {
        /// Its address, such as `http://127.0.0.1:9093`.
        url: String,
    },
    /// Slack: an incoming webhook, or a bot's token and a channel. The bot updates its message in
    /// place.
    Slack {
        /// Address of the incoming webhook; with a token, of the API if it is not Slack's own.
        url: Option<String>,
        /// Token of a bot that may write to the channel.
        token: Option<String>,
        /// Id of the channel.
        channel: Option<String>,
    },
    /// PagerDuty, Events API v2: only what needs a person, unless `all`.
    Pagerduty {
        /// The integration's key.
        routing_key: String,
        /// Address of the API, if it is not PagerDuty's own.
        url: Option<String>,
        /// Also report incidents that the job recovers from.
        #[serde(default)]
        all: bool,
    },
    /// DingTalk: a group's robot.
    Dingtalk {
        /// Address of the robot, including its access token.
        url: String,
        /// Secret, if the robot requires signatures.
        secret: Option<String>,
    },
    /// OpenTelemetry: a trace of each finished incident, over HTTP (`/v1/traces`).
    Otlp {
        /// Address of the collector, such as `http://127.0.0.1:4318`.
        url: String,
        /// More headers that the collector requires, such as a token.
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
    /// Returns the kind of route for logs, without secrets.
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

/// Why a user's file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RoutesError {
    #[error("cannot read --notify {}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    /// The file is not TOML, or has an unknown or missing field.
    #[error("--notify {}: {}", path.display(), source.message())]
    Parse { path: PathBuf, source: Box<toml::de::Error> },
    #[error(
        "--notify {}: no [[route]] in it; write, for example: [[route]] kind = \"webhook\" url = \"http://…\"",
        path.display()
    )]
    NoRoute { path: PathBuf },
    #[error(
        "--notify {}: slack wants the url of an incoming webhook, or a token and a channel",
        path.display()
    )]
    Slack { path: PathBuf },
}

/// Reads a user's file.
///
/// # Errors
/// Fails if the file cannot be read, is malformed, or has no usable route.
pub fn read(path: &Path) -> Result<Vec<Route>, RoutesError> {
    let place = || path.to_owned();
    let text = crate::user_file::read(path).map_err(|source| RoutesError::Io { path: place(), source })?;
    let routes: Routes =
        toml::from_str(&text).map_err(|e| RoutesError::Parse { path: place(), source: Box::new(e) })?;
    if routes.route.is_empty() {
        return Err(RoutesError::NoRoute { path: place() });
    }
    for route in &routes.route {
        if let Route::Slack { url, token, channel } = route
            && (url.is_none() && token.is_none() || token.is_some() != channel.is_some())
        {
            return Err(RoutesError::Slack { path: place() });
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
            read(&path).unwrap_err().to_string()
        };
        assert!(said("").contains("no [[route]]"));
        assert!(said("[[route]]\nkind = \"slack\"").contains("slack wants"));
        assert!(said("[[route]]\nkind = \"mail\"").contains("mail"));
        std::fs::write(&path, "[[route]]\nkind = \"webhook\"\nurl = \"http://h\"").unwrap();
        assert_eq!(read(&path).unwrap(), [Route::Webhook { url: "http://h".into(), secret: None }]);
    }
}
