//! The memory plan of an engine, counted before anything is allocated.

use std::fmt;

/// The bytes that an engine will allocate.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct MemoryPlan {
    /// Packed weights and vectors that stay on the device, in its layouts.
    pub weights: u64,
    /// The ring buffer of device slots for streamed weights.
    pub ring: u64,
    /// The KV cache on the device.
    pub kv_cache: u64,
    /// Slots on the device for layers whose keys and values are in host memory.
    pub kv_slots: u64,
    /// Tokens the KV cache holds, over all requests.
    pub kv_tokens: u64,
    /// The request table: token counts, sampling parameters, block tables.
    pub requests: u64,
    /// Intermediate results of a step.
    pub activations: u64,
    /// Scratch memory of ops, and the step's inputs.
    pub workspace: u64,
    /// The draft model that proposes tokens.
    pub draft: Option<Box<Self>>,
    /// Keys and values in host memory. Not part of the total.
    pub kv_host: u64,
    /// Host memory for the pages of requests that are pre-empted. Not part of the total.
    pub swap: u64,
    /// Host memory for pages of the prefix cache. Not part of the total.
    pub prefix_host: u64,
    /// Packed weights of streamed layers, which each step copies to the device. Not part of the total.
    pub streamed: u64,
    /// Host memory for streamed layers: those that are kept in it, and buffers for those that are read from disk. Not part of the
    /// total.
    pub host: u64,
    /// Packed weights that each step reads from disk. Not part of the total.
    pub disk: u64,
    /// Free memory of the device, if the device reports it.
    pub available: Option<u64>,
}

impl MemoryPlan {
    /// All bytes.
    pub fn total(&self) -> u64 {
        let draft = self.draft.as_ref().map_or(0, |draft| draft.total());
        let kv = self.kv_cache.saturating_add(self.kv_slots);
        let parts = [self.weights, self.ring, kv, self.requests, self.activations, self.workspace, draft];
        parts.into_iter().fold(0, u64::saturating_add)
    }

    /// Packed weights of the model, those in host memory included.
    pub fn own_weights(&self) -> u64 {
        self.weights.saturating_add(self.streamed)
    }

    /// Packed weights of all models, those in host memory included.
    pub fn all_weights(&self) -> u64 {
        self.draft.as_ref().map_or(0, |draft| draft.weights).saturating_add(self.own_weights())
    }

    /// The bytes that are missing, if the plan does not fit.
    pub fn missing(&self) -> Option<u64> {
        let missing = self.total().checked_sub(self.available?)?;
        (missing > 0).then_some(missing)
    }

    /// Options that reduce the largest part of the plan.
    pub(crate) fn remedy(&self) -> &'static str {
        let beside_weights = self.total() - self.weights;
        if self.ring > 0 && self.kv_cache <= self.total() / 2 {
            return "layers are streamed already: a larger --gpu-memory, --quantize w8a16 or w4a16, a smaller --context, or fewer requests \
                    side by side";
        }
        const LESS_CACHE: &str = "a smaller --context, fewer --kv-tokens, or fewer requests side by side need less KV cache; where the \
                                  backend can, --kv-in host keeps it in host memory";
        if self.missing().is_some_and(|missing| missing <= self.kv_cache / 2) && self.kv_slots == 0 {
            return LESS_CACHE;
        }
        if self.available.is_some_and(|available| self.weights > available) || self.weights > beside_weights {
            "--dtype bf16, --quantize w8a16 or w4a16, a quantised file, or a smaller model need less memory for weights; --weights-in host streams them"
        } else if self.kv_slots > beside_weights / 2 {
            "a smaller --context, fewer --kv-tokens, or fewer requests side by side need smaller slots for KV cache in host memory"
        } else if self.kv_cache > beside_weights / 2 {
            LESS_CACHE
        } else {
            "fewer --step-tokens, or fewer requests side by side, need less memory for a step"
        }
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kv = match self.kv_host {
            0 => format!("KV cache ({} tokens)", self.kv_tokens),
            _ => "KV cache, on the device".to_owned(),
        };
        let mut rows = vec![
            ("weights".to_owned(), self.weights),
            ("ring of streamed layers".to_owned(), self.ring),
            (kv, self.kv_cache),
            ("slots for KV cache in host memory".to_owned(), self.kv_slots),
            ("request table".to_owned(), self.requests),
            ("activations".to_owned(), self.activations),
            ("workspace and inputs".to_owned(), self.workspace),
        ];
        if let Some(draft) = &self.draft {
            let cache = format!("draft model's KV cache ({} tokens)", draft.kv_tokens);
            rows.push((cache, draft.kv_cache));
            rows.push(("draft model, all else".to_owned(), draft.total().saturating_sub(draft.kv_cache)));
        }
        rows.push(("total".to_owned(), self.total()));
        rows.retain(|(name, bytes)| *bytes > 0 || !(name.starts_with("ring") || name.starts_with("slots")));
        let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        for (name, bytes) in rows {
            writeln!(f, "  {name:width$} {:>10}", Bytes(bytes).to_string())?;
        }
        if self.streamed > 0 {
            writeln!(f, "  {:width$} {:>10}", "host, for weights", Bytes(self.host).to_string())?;
        }
        if self.disk > 0 {
            writeln!(f, "  {:width$} {:>10}", "disk, read each step", Bytes(self.disk).to_string())?;
        }
        if self.kv_host > 0 {
            writeln!(f, "  {:width$} {:>10}", "host, for the KV cache", Bytes(self.kv_host).to_string())?;
            writeln!(f, "  {:width$} {:>10}", "tokens of the KV cache", self.kv_tokens)?;
        }
        if self.swap > 0 {
            writeln!(f, "  {:width$} {:>10}", "host, for swapping", Bytes(self.swap).to_string())?;
        }
        if self.prefix_host > 0 {
            writeln!(f, "  {:width$} {:>10}", "host, for prefixes", Bytes(self.prefix_host).to_string())?;
        }
        match self.available {
            Some(available) => {
                write!(f, "  {:width$} {:>10}", "device has free", Bytes(available).to_string())
            }
            None => write!(f, "  the device does not report its free memory"),
        }
    }
}

/// A number of bytes, displayed in binary units.
#[derive(Clone, Copy, Debug)]
pub struct Bytes(
    /// The number.
    pub u64,
);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1000.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        if unit == 0 { write!(f, "{} B", self.0) } else { write!(f, "{value:.1} {}", UNITS[unit]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(0, "0 B")]
    #[case(999, "999 B")]
    #[case(1000, "1.0 KiB")]
    #[case(98_362_432, "93.8 MiB")]
    #[case(u64::MAX, "16777216.0 TiB")]
    fn bytes_are_shown_in_binary_units(#[case] bytes: u64, #[case] expected: &str) {
        assert_eq!(Bytes(bytes).to_string(), expected);
    }

    #[rstest]
    #[case(90, 5, 5, "for weights")]
    // A smaller cache does not help if not even the weights fit.
    #[case(90, 500, 5, "for weights")]
    #[case(20, 90, 5, "KV cache")]
    // A cache of half the size is enough, though weights are the largest part.
    #[case(33, 30, 2, "KV cache")]
    #[case(20, 5, 90, "for a step")]
    fn the_remedy_reduces_the_largest_part(
        #[case] weights: u64,
        #[case] kv_cache: u64,
        #[case] activations: u64,
        #[case] about: &str,
    ) {
        let plan =
            MemoryPlan { weights, kv_cache, activations, available: Some(50), ..MemoryPlan::default() };
        assert!(plan.missing().is_some() && plan.remedy().contains(about), "{}", plan.remedy());
    }

    #[test]
    fn missing_bytes_are_those_above_the_available_ones() {
        let plan = MemoryPlan { weights: 10, kv_cache: 5, ..MemoryPlan::default() };
        assert_eq!(plan.missing(), None);
        assert_eq!(MemoryPlan { available: Some(15), ..plan.clone() }.missing(), None);
        assert_eq!(MemoryPlan { available: Some(12), ..plan }.missing(), Some(3));
    }

    #[test]
    fn a_draft_model_is_counted_and_shown() {
        let draft = MemoryPlan { weights: 3, kv_cache: 2, kv_tokens: 64, ..MemoryPlan::default() };
        let plan = MemoryPlan { weights: 10, draft: Some(Box::new(draft)), ..MemoryPlan::default() };
        assert_eq!((plan.total(), plan.all_weights()), (15, 13));
        let shown = plan.to_string();
        assert!(shown.contains("draft model's KV cache (64 tokens)        2 B"), "{shown}");
        assert!(shown.contains("draft model, all else"), "{shown}");
    }
}
