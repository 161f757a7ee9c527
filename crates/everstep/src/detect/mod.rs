//! Samples from elsewhere, for `everstep detect`. Tables (CSV, Parquet) and Prometheus' answers
//! become series, and alarms are scored against known faults.
//!
//! ```text
//!  csv ─┐
//!  parquet ─┼─> Rows ─ table ─> Episode (Series, names of machines, time of its first second) ─ detector ─> alarms ─ judge / alarm_chart
//!  prometheus ─┘
//! ```

pub mod alarm_chart;
pub mod csv;
mod footer;
pub mod judge;
pub mod packing;
pub mod parquet;
pub mod prometheus;
pub mod settings;
pub mod table;
