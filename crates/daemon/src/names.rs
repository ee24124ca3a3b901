//! State names as DRBD's users know them, and how states are written in the control protocol.

use lockstep_core::state::{ConnState, DiskState, ReplState, Role};

/// A state that has a name.
pub trait Named: Copy + Sized + 'static {
    /// Every value with its name.
    const NAMES: &'static [(Self, &'static str)];

    /// The name.
    fn text(self) -> &'static str;

    /// The value with this name.
    fn from_text(text: &str) -> Option<Self> {
        Self::NAMES
            .iter()
            .find(|(_, name)| *name == text)
            .map(|(value, _)| *value)
    }
}

macro_rules! named {
    ($type:ident { $($variant:ident $name:literal,)* }) => {
        impl Named for $type {
            const NAMES: &'static [(Self, &'static str)] = &[$(($type::$variant, $name),)*];

            fn text(self) -> &'static str {
                match self { $($type::$variant => $name,)* }
            }
        }
    };
}

named!(Role {
    Unknown "Unknown",
    Primary "Primary",
    Secondary "Secondary",
});
named!(ConnState {
    StandAlone "StandAlone",
    Disconnecting "Disconnecting",
    Unconnected "Unconnected",
    Timeout "Timeout",
    BrokenPipe "BrokenPipe",
    NetworkFailure "NetworkFailure",
    ProtocolError "ProtocolError",
    TearDown "TearDown",
    Connecting "Connecting",
    Connected "Connected",
});
named!(ReplState {
    Off "Off",
    Established "Established",
    StartingSyncS "StartingSyncS",
    StartingSyncT "StartingSyncT",
    WfBitmapS "WFBitMapS",
    WfBitmapT "WFBitMapT",
    WfSyncUuid "WFSyncUUID",
    SyncSource "SyncSource",
    SyncTarget "SyncTarget",
    VerifyS "VerifyS",
    VerifyT "VerifyT",
    PausedSyncS "PausedSyncS",
    PausedSyncT "PausedSyncT",
    Ahead "Ahead",
    Behind "Behind",
});
named!(DiskState {
    Diskless "Diskless",
    Attaching "Attaching",
    Detaching "Detaching",
    Failed "Failed",
    Negotiating "Negotiating",
    Inconsistent "Inconsistent",
    Outdated "Outdated",
    DUnknown "DUnknown",
    Consistent "Consistent",
    UpToDate "UpToDate",
});

/// `#[serde(with = "names::by_name")]`: a state as its name.
pub mod by_name {
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serializer};

    use super::Named;

    /// Writes the name.
    pub fn serialize<T: Named, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(value.text())
    }

    /// Reads a name; an unknown one is an error that repeats it.
    pub fn deserialize<'de, T: Named, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
        let text = String::deserialize(from)?;
        T::from_text(&text).ok_or_else(|| D::Error::custom(format!("unknown state '{text}'")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names_lead_back<T: Named + PartialEq + std::fmt::Debug>() {
        for (value, name) in T::NAMES {
            assert_eq!(value.text(), *name);
            assert_eq!(T::from_text(name), Some(*value));
        }
        assert_eq!(T::from_text("uptodate"), None);
    }

    #[test]
    fn every_name_leads_back_to_its_state() {
        names_lead_back::<Role>();
        names_lead_back::<ConnState>();
        names_lead_back::<ReplState>();
        names_lead_back::<DiskState>();
    }
}
