//! The items of groups, shared by tests that run the same ones: making them takes longer than running most.

use dsrun_conformance::suite::{Group, Item, SEED};
use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, OnceLock},
};

/// The items of a group with `drawn` random cases. Those of the `kept` groups that were made last stay in memory. A test always passes
/// the same `drawn` and `kept`.
pub(crate) fn items_of(group: Group, drawn: usize, kept: usize) -> Arc<Vec<Item>> {
    type Made = Arc<OnceLock<Arc<Vec<Item>>>>;
    static LAST: Mutex<VecDeque<(String, Made)>> = Mutex::new(VecDeque::new());
    let made = {
        let mut last = LAST.lock().expect("no test panics while it holds this");
        let name = group.name();
        if let Some((_, made)) = last.iter().find(|(known, _)| *known == name) {
            made.clone()
        } else {
            last.truncate(kept - 1);
            let made = Made::default();
            last.push_front((name, made.clone()));
            made
        }
    };
    made.get_or_init(|| Arc::new(group.items(SEED, drawn))).clone()
}
