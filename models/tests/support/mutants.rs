//! Mutants: edits of a file that can be written as a line of text.

use std::fmt;
use std::str::FromStr;

/// One edit. Positions are those of the file as the edits before left it, and are brought inside it.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Edit {
    /// Overwrites bytes.
    Set { at: usize, bytes: Vec<u8> },
    /// Inserts bytes.
    Insert { at: usize, bytes: Vec<u8> },
    /// Removes bytes.
    Remove { at: usize, count: usize },
    /// Overwrites bytes with others of the file.
    Copy { from: usize, to: usize, count: usize },
}

/// Edits that are made one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mutant(Vec<Edit>);

impl Mutant {
    /// A mutant of a file of `length` bytes: one to three edits, more often in its front, where the header is.
    pub(crate) fn from_seed(seed: u64, length: usize) -> Self {
        let mut state = seed;
        let mut below = |limit: usize| {
            // SplitMix64.
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut word = (state ^ state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            word = (word ^ word >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
            ((word ^ word >> 31) % limit.max(1) as u64) as usize
        };
        let count = 1 + below(3);
        let edits = (0..count).map(|_| {
            let limit = if below(4) == 0 { length } else { length / 2 };
            let at = below(limit);
            let interesting: &[&[u8]] = &[
                &[0],
                &[0xFF],
                &[0x80],
                &[0; 8],
                &[0xFF; 8],
                &[0, 0, 0, 0x80],
                b"9",
                b"-",
                b"\"",
                b"{",
                b"]",
                b",",
            ];
            match below(6) {
                0 => Edit::Set { at, bytes: vec![below(256) as u8] },
                1 | 2 => Edit::Set { at, bytes: interesting[below(interesting.len())].to_vec() },
                3 => Edit::Insert { at, bytes: interesting[below(interesting.len())].to_vec() },
                4 => Edit::Remove { at, count: 1 + below(16) },
                _ => Edit::Copy { from: below(length), to: at, count: 1 + below(32) },
            }
        });
        Self(edits.collect())
    }

    /// The mutant of a file.
    pub(crate) fn apply(&self, file: &[u8]) -> Vec<u8> {
        let mut file = file.to_vec();
        for edit in &self.0 {
            let inside =
                |at: usize, count: usize| at.min(file.len())..at.saturating_add(count).min(file.len());
            match edit {
                Edit::Set { at, bytes } => {
                    let place = inside(*at, bytes.len());
                    let bytes = &bytes[..place.len()];
                    file[place].copy_from_slice(bytes);
                }
                Edit::Insert { at, bytes } => drop(file.splice(inside(*at, 0), bytes.iter().copied())),
                Edit::Remove { at, count } => drop(file.drain(inside(*at, *count))),
                Edit::Copy { from, to, count } => {
                    let (source, target) = (inside(*from, *count), inside(*to, *count));
                    let count = source.len().min(target.len());
                    file.copy_within(source.start..source.start + count, target.start);
                }
            }
        }
        file
    }
}

impl fmt::Display for Mutant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        for (index, edit) in self.0.iter().enumerate() {
            f.write_str(if index == 0 { "" } else { "; " })?;
            match edit {
                Edit::Set { at, bytes } => write!(f, "set {at} {}", hex(bytes))?,
                Edit::Insert { at, bytes } => write!(f, "insert {at} {}", hex(bytes))?,
                Edit::Remove { at, count } => write!(f, "remove {at} {count}")?,
                Edit::Copy { from, to, count } => write!(f, "copy {from} {to} {count}")?,
            }
        }
        Ok(())
    }
}

impl FromStr for Mutant {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        line.split("; ")
            .map(parse_edit)
            .collect::<Option<_>>()
            .map(Self)
            .ok_or_else(|| format!("no mutant: {line}"))
    }
}

fn parse_edit(text: &str) -> Option<Edit> {
    let words: Vec<&str> = text.split(' ').collect();
    let number = |text: &str| text.parse().ok();
    let bytes = |hex: &str| {
        let pairs = hex.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).ok());
        pairs.map(|pair| u8::from_str_radix(pair?, 16).ok()).collect::<Option<Vec<u8>>>()
    };
    Some(match words.as_slice() {
        ["set", at, hex] => Edit::Set { at: number(at)?, bytes: bytes(hex)? },
        ["insert", at, hex] => Edit::Insert { at: number(at)?, bytes: bytes(hex)? },
        ["remove", at, count] => Edit::Remove { at: number(at)?, count: number(count)? },
        ["copy", from, to, count] => {
            Edit::Copy { from: number(from)?, to: number(to)?, count: number(count)? }
        }
        _ => return None,
    })
}
