//! One table (SPEC U4): a sign → its class → how severe it is → what is done. The table is data (`table.toml`, replaceable
//! row by row with `--failure-table`); here it is read and asked.

mod codes;
pub mod kernel;
mod pattern;
mod table;
mod text;
mod verdict;

pub use codes::Codes;
pub use pattern::Pattern;
pub use table::{Class, Rule, Scope, Severity, Table, TableError, Xid};
pub use text::Found;
pub use verdict::Verdict;
