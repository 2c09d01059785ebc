//! Checks of behaviour: what no single call with its expected results can show.
//!
//! A case of [`crate::cases`] says what an op computes. A check says how a backend behaves: what it does with bad input, with
//! several streams or threads, when memory runs out, over a whole model. It is a function that is given the [`Subject`] and
//! says how it went; it is named, run in a child process, and reported as a case is, under the id `check/NAME`.

use crate::{
    runner::{Report, Status},
    subject::Subject,
};
use dsrun_core::op::Profile;

/// A check of behaviour.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    /// Its name, in lower case with `_` between words. Behind `check/` it is the id that the check is reported under and run
    /// by, for ever.
    pub id: &'static str,
    /// What must hold, in a line.
    pub about: &'static str,
    /// The profile that asks for it. A backend that is held to this profile fails if the check is [`Status::Unsupported`].
    /// `None` if it concerns every backend and may find nothing to check.
    pub profile: Option<Profile>,
    /// Runs it. It may crash or hang: it runs in a process of its own.
    pub run: fn(&Subject) -> Status,
}

/// Every check.
pub const CHECKS: &[Check] = &[Check {
    id: "device_listing",
    about: "the tested device is listed, under one index and with a name, and open devices have the properties they promise",
    profile: None,
    run: device_listing,
}];

impl Check {
    /// The id it is reported under.
    pub fn full_id(&self) -> String {
        format!("check/{}", self.id)
    }

    /// Runs it.
    pub fn report(&self, subject: &Subject) -> Report {
        Report { id: self.full_id(), status: (self.run)(subject), verdicts: Vec::new() }
    }
}

/// A status of these failures: passed if there are none.
pub fn settle(failures: Vec<String>) -> Status {
    if failures.is_empty() { Status::Passed } else { Status::Failed(failures) }
}

fn device_listing(subject: &Subject) -> Status {
    let devices = match subject.backend().devices() {
        Ok(devices) => devices,
        Err(error) => return Status::Failed(vec![format!("devices cannot be listed: {error}")]),
    };
    let mut failures = Vec::new();
    let named = devices.iter().filter(|device| device.index == subject.index()).count();
    if named != 1 {
        failures.push(format!("device {} is open, and listed {named} times", subject.index()));
    }
    if let Some(device) = devices.iter().find(|device| device.name.trim().is_empty()) {
        failures.push(format!("device {} has no name", device.index));
    }
    let properties = subject.device().properties();
    if !properties.alignment.is_power_of_two() {
        failures.push(format!("the alignment, {}, is no power of two", properties.alignment));
    }
    if properties.dtypes.is_empty() {
        failures.push("the device takes no element type".into());
    }
    settle(failures)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_are_unique_and_plain() {
        let mut seen = HashSet::new();
        for check in CHECKS {
            let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            assert!(!check.id.is_empty() && check.id.chars().all(plain), "{}", check.id);
            assert!(!check.about.is_empty(), "{} says nothing", check.id);
            assert!(seen.insert(check.id), "{} stands twice", check.id);
        }
    }
}
