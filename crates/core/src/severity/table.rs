//! The table: classes, and the signs that they are known by.

use super::codes::Codes;
use super::pattern::Pattern;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock};

/// How severe a failure is (Unicron, table 1): what is tried first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Leave the node out and form the world anew.
    Sev1,
    /// Restart the processes where they are.
    Sev2,
    /// Wait for a step: it may pass.
    Sev3,
}

/// Who or what is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// The script, its data or how it was started.
    User,
    /// One process, for no reason that is known.
    Process,
    /// The machine or a device in it.
    Node,
    /// What connects machines.
    Fabric,
    /// What state and data are read from and written to.
    Storage,
    /// Nothing says.
    Unknown,
}

impl Scope {
    /// Whose the failure is, for people.
    #[must_use]
    pub fn whose(self) -> &'static str {
        match self {
            Scope::User => "the script's",
            Scope::Process => "one process's",
            Scope::Node => "the machine's",
            Scope::Fabric => "the network's",
            Scope::Storage => "the storage's",
            Scope::Unknown => "not known whose",
        }
    }
}

/// One kind of failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Class {
    /// Its name, as in `cuda-out-of-memory`.
    pub name: String,
    /// Who is at fault.
    pub scope: Scope,
    /// What is tried first.
    pub severity: Severity,
    /// What happened, for people: half a sentence.
    pub what: String,
    /// What a person can do about it: a sentence.
    pub advice: String,
    /// Mostly follows from a failure somewhere else: never blamed while another one explains it.
    #[serde(default)]
    pub follows: bool,
}

/// Lines that show a class.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// The class.
    pub class: String,
    /// One of these is in a line.
    pub line: Vec<Pattern>,
    /// And none of these is in the same line.
    #[serde(default)]
    pub unless: Vec<Pattern>,
    /// Where such lines come from.
    pub source: String,
}

/// What the numbers of a GPU's driver mean.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Xid {
    /// Its numbers.
    pub codes: Codes,
    /// The class.
    pub class: String,
    /// What the vendor recommends.
    pub action: String,
}

/// All classes, and rules in the order in which they are asked: the first one that fits a text decides.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// Every class that can be said.
    #[serde(rename = "class", default)]
    pub classes: Vec<Class>,
    /// Signs in texts.
    #[serde(rename = "rule", default)]
    pub rules: Vec<Rule>,
    /// Numbers of NVIDIA's driver.
    #[serde(rename = "xid", default)]
    pub xids: Vec<Xid>,
}

/// Why a table cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// It is not what such a file looks like.
    #[error("not a table of failures: {0}")]
    Malformed(String),
    /// A row names a class that is nowhere.
    #[error("{row} names class {class:?}, which is neither in this table nor built in")]
    NoSuchClass {
        /// which row, from 1
        row: String,
        /// the class
        class: String,
    },
    /// A rule would never be met.
    #[error("rule {0} looks for nothing: give at least one line")]
    Empty(usize),
}

impl Table {
    /// The built-in table, as it is written.
    pub const BUILT_IN: &str = include_str!("table.toml");

    /// The built-in table.
    #[must_use]
    pub fn built_in() -> &'static Arc<Table> {
        static TABLE: LazyLock<Arc<Table>> = LazyLock::new(|| {
            // It is part of the program: a test reads it, so this cannot fail for a user.
            let nothing = Table { classes: Vec::new(), rules: Vec::new(), xids: Vec::new() };
            Arc::new(Table::read(Table::BUILT_IN).unwrap_or(nothing))
        });
        &TABLE
    }

    /// The built-in table with a user's rows before it: a class of the same name is replaced, rules are asked first.
    ///
    /// # Errors
    /// A [`TableError`] that names the row.
    pub fn with(&self, written: &str) -> Result<Table, TableError> {
        let own: Table = toml::from_str(written).map_err(|e| TableError::Malformed(e.message().to_owned()))?;
        let replaced: BTreeSet<&str> = own.classes.iter().map(|c| c.name.as_str()).collect();
        let kept = self.classes.iter().filter(|c| !replaced.contains(c.name.as_str()));
        let classes = own.classes.iter().chain(kept).cloned().collect();
        let rules = own.rules.iter().chain(&self.rules).cloned().collect();
        let xids = own.xids.iter().chain(&self.xids).cloned().collect();
        Table { classes, rules, xids }.checked()
    }

    /// Reads a whole table.
    ///
    /// # Errors
    /// A [`TableError`] that names the row.
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

    /// The class of this name.
    #[must_use]
    pub fn class(&self, name: &str) -> Option<&Class> {
        self.classes.iter().find(|c| c.name == name)
    }
}
