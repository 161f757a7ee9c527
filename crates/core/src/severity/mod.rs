//! One table (SPEC U4) that maps a sign to its class, its severity and the action taken. The table
//! is data (`table.toml`; `--failure-table` replaces single rows); this module reads and queries
//! it.

mod codes;
pub mod kernel;
mod pattern;
mod table;
mod text;
mod verdict;

pub use codes::Codes;
pub use pattern::Pattern;
pub use table::{Class, Rule, Scope, Severity, Table, TableError, Xid};
pub use text::{Found, in_backward};
pub use verdict::Verdict;
