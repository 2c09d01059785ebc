//! A table of GPUs by name, for building kernels on machines without the GPU.

use super::{OLDEST_CAPABILITY, written};
use dsrun_core::{Error, Result};

/// Properties of a GPU that need not be present.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KnownGpu {
    pub(crate) name: String,
    /// Compute capability, major times ten plus minor.
    pub(crate) capability: u32,
    /// Multiprocessors.
    pub(crate) sm_count: usize,
    /// Bytes of memory, if known.
    pub(crate) memory: Option<u64>,
}

/// Names, compute capabilities, numbers of SMs and GiB of whole cards; MIG instances have fewer.
const KNOWN: [(&str, u32, usize, u64); 14] = [
    ("a10", 86, 72, 24),
    ("a100", 80, 108, 80),
    ("a100-40gb", 80, 108, 40),
    ("a40", 86, 84, 48),
    ("b200", 100, 148, 180),
    ("gh200", 90, 132, 96),
    ("h100", 90, 132, 80),
    ("h100-nvl", 90, 132, 94),
    ("h100-pcie", 90, 114, 80),
    ("h200", 90, 132, 141),
    ("l4", 89, 58, 24),
    ("l40s", 89, 142, 48),
    ("rtx-4090", 89, 128, 24),
    ("t4", 75, 40, 16),
];

impl KnownGpu {
    /// A GPU by its name, or by architecture and number of SMs, such as `sm_90:132`.
    ///
    /// # Errors
    /// If the name is unknown or incomplete.
    pub(crate) fn named(name: &str) -> Result<Self> {
        let plain = name.trim().to_lowercase().replace([' ', '_'], "-");
        let plain = plain.strip_prefix("nvidia-").unwrap_or(&plain);
        if let Some((known, capability, sm_count, memory)) = KNOWN.iter().find(|part| part.0 == plain) {
            let name = known.to_uppercase();
            return Ok(Self {
                name,
                capability: *capability,
                sm_count: *sm_count,
                memory: Some(memory << 30),
            });
        }
        let wrong = |message: String| Err(Error::invalid(message).at("device"));
        let (architecture, sm_count) = match plain.split_once(':') {
            Some((architecture, sm_count)) => (architecture, Some(sm_count)),
            None => (plain, None),
        };
        let Some(capability) = capability(architecture) else {
            let known = KNOWN.map(|part| part.0).join(", ");
            return wrong(format!(
                "{name:?} is not known; known are {known}; any other by its architecture and the number of its \
                 multiprocessors, such as sm_90:132"
            ));
        };
        if capability < OLDEST_CAPABILITY {
            return wrong(format!("{name:?} has compute capability {}, 7.5 is needed", written(capability)));
        }
        match sm_count.map(str::parse) {
            Some(Ok(sm_count @ 1..=4096)) => {
                let name = format!(
                    "a GPU of compute capability {} with {sm_count} multiprocessors",
                    written(capability)
                );
                Ok(Self { name, capability, sm_count, memory: None })
            }
            Some(_) => wrong(format!("{name:?} has no number of multiprocessors after the colon")),
            None => {
                let alike: Vec<&str> =
                    KNOWN.iter().filter(|part| part.1 == capability).map(|part| part.0).collect();
                let alike = match alike[..] {
                    [] => String::new(),
                    _ => format!(", or name one of {}", alike.join(", ")),
                };
                wrong(format!(
                    "{name:?} says too little: kernels are cut to the number of multiprocessors too. Say how many there are, \
                     such as {name}:132{alike}"
                ))
            }
        }
    }
}

/// Parses a compute capability in the notation `sm_90a` or `9.0`. The variant suffix is ignored.
fn capability(text: &str) -> Option<u32> {
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?;
    match text.strip_prefix("sm-") {
        Some(number) if number.len() <= 4 => digits(number.trim_end_matches(['a', 'f'])),
        Some(_) => None,
        None => {
            let (major, minor) = text.split_once('.')?;
            let (major, minor): (u32, u32) = (digits(major)?, digits(minor)?);
            (major < 100 && minor < 10).then_some(major * 10 + minor)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("h200", 90, 132, Some(141))]
    #[case("NVIDIA H200", 90, 132, Some(141))]
    #[case("H100 PCIe", 90, 114, Some(80))]
    #[case("sm_90a:132", 90, 132, None)]
    #[case("sm_120:170", 120, 170, None)]
    #[case("8.6:28", 86, 28, None)]
    fn a_gpu_has_a_name_or_an_architecture_and_multiprocessors(
        #[case] name: &str,
        #[case] capability: u32,
        #[case] sm_count: usize,
        #[case] memory: Option<u64>,
    ) {
        let part = KnownGpu::named(name).unwrap();
        assert_eq!((part.capability, part.sm_count), (capability, sm_count));
        assert_eq!(part.memory.map(|bytes| bytes >> 30), memory);
    }

    #[rstest]
    #[case("h300", "known are a10, a100")]
    #[case("", "known are")]
    #[case("sm_", "known are")]
    #[case("sm_90a", "such as sm_90a:132, or name one of gh200, h100, h100-nvl, h100-pcie, h200")]
    #[case("12.1", "such as 12.1:132")]
    #[case("sm_90:many", "no number of multiprocessors")]
    #[case("sm_90:0", "no number of multiprocessors")]
    #[case("7.0:80", "7.5 is needed")]
    #[case("sm_999999:1", "known are")]
    fn what_says_too_little_is_told_what_is_missing(#[case] name: &str, #[case] expected: &str) {
        let error = KnownGpu::named(name).unwrap_err();
        assert!(error.message().contains(expected), "{error}");
    }
}
