//! Lengths of time on the command line.

use std::time::Duration;

/// Parses a number of seconds, or numbers with units, such as `500ms`, `90m` or `1h 30m`.
///
/// # Errors
/// If it is neither, not above zero, or above `longest`.
pub fn parse(text: &str, longest: Duration) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().and_then(|s| Duration::try_from_secs_f64(s).ok());
    let found = seconds.or_else(|| humantime::parse_duration(text).ok());
    found.filter(|d| !d.is_zero() && *d <= longest).ok_or_else(|| {
        let longest = humantime::format_duration(longest);
        format!("{text:?} is not a duration; write it like 2s, 500ms or 90m, and at most {longest}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_seconds_or_have_units() {
        let parsed = |text| parse(text, Duration::from_hours(240)).ok();
        assert_eq!(parsed("500ms"), Some(Duration::from_millis(500)));
        assert_eq!(parsed("2"), Some(Duration::from_secs(2)));
        assert_eq!(parsed("0.5"), Some(Duration::from_millis(500)));
        assert_eq!(parsed("1.5h"), Some(Duration::from_mins(90)));
        assert_eq!(parsed("1h 30m"), Some(Duration::from_mins(90)));
        assert_eq!(parsed("7d"), Some(Duration::from_hours(168)));
        for wrong in ["soon", "-1s", "-1", "0", "0s", "11d", "inf", "nan", "1e300", "", "99999999999999999999y"] {
            assert_eq!(parsed(wrong), None, "{wrong}");
        }
    }
}
