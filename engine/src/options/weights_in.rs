//! The option `weights-in`: where the weights of layers are kept.

use std::{fmt, path::PathBuf, str::FromStr};

/// Where the weights of layers are kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum WeightsIn {
    /// On the device if they fit; otherwise in host memory, if the device has its own memory.
    #[default]
    Auto,
    /// On the device.
    Device,
    /// In host memory, except for the layers that fit on the device beside the KV cache and the ring buffer for streamed layers.
    Host,
    /// As with [`Self::Host`], but layers that do not fit into host memory are read from a file in this folder for every step. The
    /// file is written when the model is first loaded.
    Disk(PathBuf),
}

/// What a folder is introduced by, and what people with such a disk may write.
const DISK: [&str; 2] = ["disk:", "nvme:"];

impl WeightsIn {
    /// Whether weights leave the device although they may fit.
    pub(crate) fn is_off_device(&self) -> bool {
        matches!(self, Self::Host | Self::Disk(_))
    }
}

impl fmt::Display for WeightsIn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Device => f.write_str("device"),
            Self::Host => f.write_str("host"),
            Self::Disk(folder) => write!(f, "{}{}", DISK[0], folder.display()),
        }
    }
}

impl FromStr for WeightsIn {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let folder = DISK.iter().find_map(|prefix| text.strip_prefix(prefix));
        match (text, folder) {
            ("auto", _) => Ok(Self::Auto),
            ("device", _) => Ok(Self::Device),
            ("host", _) => Ok(Self::Host),
            (_, Some("")) => Err("`disk:` needs a folder, such as disk:/var/tmp/weights".to_owned()),
            (_, Some(folder)) => Ok(Self::Disk(folder.into())),
            _ => Err(format!("`{text}` is none of auto, device, host and disk:FOLDER")),
        }
    }
}

impl TryFrom<String> for WeightsIn {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<WeightsIn> for String {
    fn from(place: WeightsIn) -> Self {
        place.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("auto", Ok(WeightsIn::Auto))]
    #[case("disk:/a b", Ok(WeightsIn::Disk("/a b".into())))]
    #[case("nvme:x", Ok(WeightsIn::Disk("x".into())))]
    #[case("disk:", Err("needs a folder"))]
    #[case("disk", Err("`disk` is none of auto"))]
    #[case("Host", Err("`Host` is none of auto"))]
    fn places_are_read_and_written(#[case] text: &str, #[case] expected: Result<WeightsIn, &str>) {
        match (text.parse::<WeightsIn>(), expected) {
            (Ok(found), Ok(expected)) => {
                assert_eq!(found, expected);
                assert_eq!(found.to_string().parse(), Ok(found));
            }
            (Err(found), Err(expected)) => assert!(found.contains(expected), "{found}"),
            (found, expected) => panic!("{found:?} instead of {expected:?}"),
        }
    }
}
