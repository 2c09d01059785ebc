//! Edits of GGUF files that keep their structure: nearly all random edits fail the first check.

use dsrun_test_support::fuzz::{Random, edit_bytes};

/// Numbers that metadata may have.
const NUMBERS: [u64; 12] = [0, 1, 2, 3, 8, 32, 0xFF, 0x7FFF_FFFF, 0xFFFF_FFFF, 1 << 40, 1 << 63, u64::MAX];
const TEXT: u32 = 8;
const ARRAY: u32 = 9;

/// A metadata value.
#[derive(Clone)]
enum Value {
    /// A number or a truth value, as its bytes.
    Number(Vec<u8>),
    Text(Vec<u8>),
    Array(u32, Vec<Self>),
}

#[derive(Clone)]
struct Tensor {
    name: Vec<u8>,
    shape: Vec<u64>,
    kind: u32,
    offset: u64,
}

/// A file in its parts.
struct File {
    version: u32,
    metadata: Vec<(Vec<u8>, u32, Value)>,
    tensors: Vec<Tensor>,
    data: Vec<u8>,
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn take(&mut self, count: usize) -> Option<Vec<u8>> {
        let taken = self.bytes.get(self.at..self.at.checked_add(count)?)?.to_vec();
        self.at += count;
        Some(taken)
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn text(&mut self) -> Option<Vec<u8>> {
        let length = usize::try_from(self.u64()?).ok()?;
        self.take(length)
    }

    fn value(&mut self, kind: u32) -> Option<Value> {
        Some(match kind {
            0 | 1 | 7 => Value::Number(self.take(1)?),
            2 | 3 => Value::Number(self.take(2)?),
            4..=6 => Value::Number(self.take(4)?),
            10..=12 => Value::Number(self.take(8)?),
            TEXT => Value::Text(self.text()?),
            ARRAY => {
                let (kind, count) = (self.u32()?, self.u64()?);
                if kind == ARRAY || count > self.bytes.len() as u64 {
                    return None;
                }
                Value::Array(kind, (0..count).map(|_| self.value(kind)).collect::<Option<_>>()?)
            }
            _ => return None,
        })
    }
}

impl Value {
    fn write(&self, file: &mut Vec<u8>) {
        match self {
            Self::Number(bytes) => file.extend(bytes),
            Self::Text(text) => write_text(text, file),
            Self::Array(kind, items) => {
                file.extend(kind.to_le_bytes());
                file.extend((items.len() as u64).to_le_bytes());
                items.iter().for_each(|item| item.write(file));
            }
        }
    }

    fn edit(&mut self, random: &mut Random, words: &[Vec<u8>]) {
        match self {
            Self::Number(bytes) => {
                let number = NUMBERS[random.below(NUMBERS.len())].to_le_bytes();
                let width = bytes.len();
                bytes.copy_from_slice(&number[..width]);
            }
            Self::Text(text) => edit_bytes(random, text, &[], words),
            Self::Array(_, items) => {
                let at = random.below(items.len() + 1);
                match (random.below(4), items.get(at).cloned()) {
                    (0, Some(_)) => drop(items.remove(at)),
                    (1, Some(item)) => drop(items.splice(at..at, vec![item; 1 + random.below(50)])),
                    (2, _) => items.truncate(at),
                    _ => {
                        if let Some(item) = items.get_mut(at) {
                            item.edit(random, words);
                        }
                    }
                }
            }
        }
    }
}

fn write_text(text: &[u8], file: &mut Vec<u8>) {
    file.extend((text.len() as u64).to_le_bytes());
    file.extend(text);
}

impl File {
    fn read(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader { bytes, at: 0 };
        (reader.take(4)? == b"GGUF").then_some(())?;
        let (version, tensors, keys) = (reader.u32()?, reader.u64()?, reader.u64()?);
        let entry = |reader: &mut Reader<'_>| {
            let (key, kind) = (reader.text()?, reader.u32()?);
            Some((key, kind, reader.value(kind)?))
        };
        let most = bytes.len() as u64;
        let metadata = (0..keys.min(most)).map(|_| entry(&mut reader)).collect::<Option<_>>()?;
        let tensor = |reader: &mut Reader<'_>| {
            let name = reader.text()?;
            let shape = (0..reader.u32()?.min(8)).map(|_| reader.u64()).collect::<Option<_>>()?;
            Some(Tensor { name, shape, kind: reader.u32()?, offset: reader.u64()? })
        };
        let tensors = (0..tensors.min(most)).map(|_| tensor(&mut reader)).collect::<Option<_>>()?;
        let data = bytes.get(reader.at.next_multiple_of(32)..).unwrap_or_default().to_vec();
        Some(Self { version, metadata, tensors, data })
    }

    fn write(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(self.version.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, kind, value) in &self.metadata {
            write_text(key, &mut file);
            file.extend(kind.to_le_bytes());
            value.write(&mut file);
        }
        for tensor in &self.tensors {
            write_text(&tensor.name, &mut file);
            file.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().for_each(|size| file.extend(size.to_le_bytes()));
            file.extend(tensor.kind.to_le_bytes());
            file.extend(tensor.offset.to_le_bytes());
        }
        file.resize(file.len().next_multiple_of(32), 0);
        file.extend(&self.data);
        file
    }
}

/// Edits one part of a file: a metadata entry, or a tensor.
pub(crate) fn edit(random: &mut Random, input: &mut Vec<u8>, other: &[u8]) {
    let Some(mut file) = File::read(input) else { return };
    let words: Vec<Vec<u8>> = file.metadata.iter().map(|(key, ..)| key.clone()).collect();
    let at = random.below(file.metadata.len() + 1);
    match random.below(10) {
        0..5 => {
            if let Some((.., value)) = file.metadata.get_mut(at) {
                value.edit(random, &words);
            }
        }
        5 if at < file.metadata.len() => drop(file.metadata.remove(at)),
        6 => {
            let donor = File::read(other);
            let entries = donor.map(|donor| donor.metadata).unwrap_or_default();
            if let Some(entry) = random.of(&entries).cloned() {
                let of_key = file.metadata.iter_mut().find(|(key, ..)| *key == entry.0);
                match of_key {
                    Some(place) => *place = entry,
                    None => file.metadata.insert(at, entry),
                }
            }
        }
        7 => {
            if let (Some((key, ..)), Some(word)) = (file.metadata.get_mut(at), random.of(&words)) {
                key.clone_from(word);
            }
        }
        _ => {
            let at = random.below(file.tensors.len());
            let number = NUMBERS[random.below(NUMBERS.len())];
            if let Some(tensor) = file.tensors.get_mut(at) {
                match random.below(5) {
                    0 => tensor.offset = number,
                    1 => tensor.kind = random.below(40) as u32,
                    2 => tensor.shape.push(number),
                    3 => drop(tensor.shape.pop()),
                    _ => {
                        let size = random.below(tensor.shape.len());
                        tensor.shape.get_mut(size).into_iter().for_each(|size| *size = number);
                    }
                }
            }
        }
    }
    *input = file.write();
}
