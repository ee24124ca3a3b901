//! The wall clock, for bandwidth timetables only.

use std::time::{SystemTime, UNIX_EPOCH};

/// Minute of the week in UTC, Monday 00:00 first.
pub(crate) fn minute_of_week() -> u32 {
    let seconds = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_secs());
    minute_of(seconds)
}

/// The first of January 1970 was a Thursday.
fn minute_of(unix_seconds: u64) -> u32 {
    ((unix_seconds / 60 + 3 * 24 * 60) % (7 * 24 * 60)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weeks_begin_on_monday() {
        // 2024-01-01 00:01 UTC was a Monday.
        assert_eq!(minute_of(1_704_067_260), 1);
        assert_eq!(minute_of(0), 3 * 24 * 60);
    }
}
