//! The failure table: classes, and the signs that identify them.

use super::codes::Codes;
use super::pattern::Pattern;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock};

/// How severe a failure is (Unicron, table 1): what is tried first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Exclude the node and form a new world.
    Sev1,
    /// Restart the processes where they are.
    Sev2,
    /// Wait for a step: the problem may pass.
    Sev3,
}

/// What is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// The script, its data, or how it was started.
    User,
    /// One process, for no known reason.
    Process,
    /// The machine or a device in it.
    Node,
    /// The network between machines.
    Fabric,
    /// The storage for state and data.
    Storage,
    /// There is no evidence.
    Unknown,
}

impl Scope {
    /// Returns what is at fault, in a word or two.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Scope::User => "script",
            Scope::Process => "process",
            Scope::Node => "machine",
            Scope::Fabric => "network",
            Scope::Storage => "storage",
            Scope::Unknown => "cause unknown",
        }
    }
}

/// One kind of failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Class {
    /// Name of the class, as in `cuda-out-of-memory`.
    pub name: String,
    /// What is at fault.
    pub scope: Scope,
    /// What is tried first.
    pub severity: Severity,
    /// What happened, for people: half a sentence.
    pub what: String,
    /// What a person can do about it: a sentence.
    pub advice: String,
    /// Whether it is usually a consequence of a failure elsewhere; it is not blamed if another
    /// failure explains it.
    #[serde(default)]
    pub follows: bool,
}

/// Lines that show a class.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// The class.
    pub class: String,
    /// Patterns of which a line must match at least one.
    pub line: Vec<Pattern>,
    /// Patterns of which the same line must match none.
    #[serde(default)]
    pub unless: Vec<Pattern>,
    /// Where such lines come from.
    pub source: String,
}

/// The meaning of a GPU driver's error numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Xid {
    /// The error numbers.
    pub codes: Codes,
    /// The class.
    pub class: String,
    /// The action that the vendor recommends.
    pub action: String,
}

/// All classes, and the rules in the order in which they are tried: the first one that matches a
/// text decides.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// All classes.
    #[serde(rename = "class", default)]
    pub classes: Vec<Class>,
    /// Rules for texts.
    #[serde(rename = "rule", default)]
    pub rules: Vec<Rule>,
    /// Error numbers of NVIDIA's driver.
    #[serde(rename = "xid", default)]
    pub xids: Vec<Xid>,
}

/// Why a table is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// The text does not have the format of a failure table.
    #[error("not a table of failures: {0}")]
    Malformed(String),
    /// A row names a class that is not defined.
    #[error("{row} names class {class:?}, which is neither in this table nor built in")]
    NoSuchClass {
        /// The row, numbered from 1.
        row: String,
        /// The class.
        class: String,
    },
    /// A rule would never match.
    #[error("rule {0} looks for nothing: give at least one line")]
    Empty(usize),
}

impl Table {
    /// The text of the built-in table.
    pub const BUILT_IN: &str = include_str!("table.toml");

    /// Returns the built-in table.
    #[must_use]
    pub fn built_in() -> &'static Arc<Table> {
        static TABLE: LazyLock<Arc<Table>> = LazyLock::new(|| {
            // The text is part of the program and a test reads it, so this cannot fail for a user.
            let nothing = Table { classes: Vec::new(), rules: Vec::new(), xids: Vec::new() };
            Arc::new(Table::read(Table::BUILT_IN).unwrap_or(nothing))
        });
        &TABLE
    }

    /// Returns this table with a user's rows before its own: a class with the same name is
    /// replaced, and the user's rules are tried first.
    ///
    /// # Errors
    /// Returns a [`TableError`], which names the row unless the syntax is wrong.
    pub fn with(&self, written: &str) -> Result<Table, TableError> {
        let own: Table = toml::from_str(written).map_err(|e| TableError::Malformed(e.message().to_owned()))?;
        let replaced: BTreeSet<&str> = own.classes.iter().map(|c| c.name.as_str()).collect();
        let kept = self.classes.iter().filter(|c| !replaced.contains(c.name.as_str()));
        let classes = own.classes.iter().chain(kept).cloned().collect();
        let rules = own.rules.iter().chain(&self.rules).cloned().collect();
        let xids = own.xids.iter().chain(&self.xids).cloned().collect();
        Table { classes, rules, xids }.checked()
    }

    /// Parses a whole table.
    ///
    /// # Errors
    /// Returns a [`TableError`], which names the row unless the syntax is wrong.
    pub fn read(written: &str) -> Result<Table, TableError> {
        let table: Table = toml::from_str(written).map_err(|e| TableError::Malformed(e.message().to_owned()))?;
        table.checked()
    }

    fn checked(self) -> Result<Table, TableError> {
        for (i, rule) in self.rules.iter().enumerate() {
            if rule.line.is_empty() {
                return Err(TableError::Empty(i + 1));
            }
        }
        let rules = self.rules.iter().enumerate().map(|(i, r)| (format!("rule {}", i + 1), &r.class));
        let xids = self.xids.iter().enumerate().map(|(i, x)| (format!("xid {}", i + 1), &x.class));
        if let Some((row, class)) = rules.chain(xids).find(|(_, class)| self.class(class).is_none()) {
            return Err(TableError::NoSuchClass { row, class: class.clone() });
        }
        Ok(self)
    }

    /// Returns the class with this name.
    #[must_use]
    pub fn class(&self, name: &str) -> Option<&Class> {
        self.classes.iter().find(|c| c.name == name)
    }
}
