//! The metadata of a GGUF file: keys with typed values.
//!
//! Values stay in the file and are decoded when they are asked for, because a vocabulary may be most of a small file.

use super::GgufFile;
use super::cursor::{Cursor, Span};
use super::error::{GgufError, GgufProblem, Result};
use crate::weights::quoted::Quoted;
use std::fmt;

/// The type of a value, or of the elements of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum ValueType {
    /// Unsigned, 8 bits.
    U8 = 0,
    /// Signed, 8 bits.
    I8 = 1,
    /// Unsigned, 16 bits.
    U16 = 2,
    /// Signed, 16 bits.
    I16 = 3,
    /// Unsigned, 32 bits.
    U32 = 4,
    /// Signed, 32 bits.
    I32 = 5,
    /// Floating point, 32 bits.
    F32 = 6,
    /// A byte that is 0 or 1.
    Bool = 7,
    /// UTF-8 text.
    String = 8,
    /// Values of one type.
    Array = 9,
    /// Unsigned, 64 bits.
    U64 = 10,
    /// Signed, 64 bits.
    I64 = 11,
    /// Floating point, 64 bits.
    F64 = 12,
}

impl ValueType {
    const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::String,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    /// The type with this number in the file.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u32 == number)
    }

    /// The name used in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::Bool => "bool",
            Self::String => "string",
            Self::Array => "array",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
        }
    }

    /// Bytes of a value; `None` for texts and arrays, which say how long they are.
    const fn size(self) -> Option<usize> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::String | Self::Array => None,
        }
    }
}

/// A decoded value.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Value<'a> {
    /// An unsigned integer of any width.
    Unsigned(u64),
    /// A signed integer of any width.
    Signed(i64),
    /// A 32-bit float.
    F32(f32),
    /// A 64-bit float.
    F64(f64),
    /// A truth value.
    Bool(bool),
    /// A text.
    String(&'a str),
    /// An array.
    Array(ArrayValue<'a>),
}

/// An array whose elements are decoded when they are asked for.
#[derive(Clone, Copy)]
pub struct ArrayValue<'a> {
    element: ValueType,
    count: usize,
    bytes: &'a [u8],
    start: usize,
}

impl<'a> ArrayValue<'a> {
    /// The type of the elements.
    pub fn element_type(&self) -> ValueType {
        self.element
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The elements in order.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let mut cursor = Cursor::new(self.bytes, self.start);
        let element = self.element;
        // Reading cannot fail, because the array was checked when the file was opened; if it does, it ends here.
        (0..self.count).map_while(move |_| decode(element, &mut cursor))
    }
}

impl PartialEq for ArrayValue<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.element == other.element && self.iter().eq(other.iter())
    }
}

impl fmt::Debug for ArrayValue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl fmt::Display for Value<'_> {
    /// The value as a person reads it, shortened when long.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsigned(value) => write!(f, "{value}"),
            Self::Signed(value) => write!(f, "{value}"),
            Self::F32(value) => write!(f, "{value:?}"),
            Self::F64(value) => write!(f, "{value:?}"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::String(value) => write!(f, "{}", Quoted(value)),
            Self::Array(array) => {
                const SHOWN: usize = 4;
                f.write_str("[")?;
                for (index, value) in array.iter().take(SHOWN).enumerate() {
                    write!(f, "{}{value}", if index == 0 { "" } else { ", " })?;
                }
                if array.len() > SHOWN { write!(f, ", .. {} in all]", array.len()) } else { f.write_str("]") }
            }
        }
    }
}

impl Value<'_> {
    /// The value and what it is, for errors.
    pub(super) fn described(&self) -> String {
        let kind = match self {
            Self::Unsigned(_) => "the unsigned integer",
            Self::Signed(_) => "the signed integer",
            Self::F32(_) | Self::F64(_) => "the float",
            Self::Bool(_) => "the truth value",
            Self::String(_) => "the text",
            Self::Array(array) => return format!("the array of {} {self}", array.element.name()),
        };
        format!("{kind} {self}")
    }
}

/// One key and where its value is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) key: Span,
    kind: ValueType,
    value: usize,
}

impl Entry {
    /// Smallest entry: length of an empty key, type, one byte.
    pub(super) const SMALLEST: usize = 8 + 4 + 1;

    /// Reads and checks an entry, leaving its value in the file.
    pub(super) fn read(cursor: &mut Cursor<'_>, bytes: &[u8], index: usize) -> Result<Self, GgufProblem> {
        let key = cursor.text(&format_args!("the name of metadata key {index}"))?;
        let name = key.text(bytes);
        let kind = read_type(cursor, name)?;
        let value = cursor.at();
        skip(kind, cursor, name)?;
        Ok(Self { key, kind, value })
    }
}

fn read_type(cursor: &mut Cursor<'_>, key: &str) -> Result<ValueType, GgufProblem> {
    let offset = cursor.at();
    let number = cursor.u32(&format_args!("the value type of metadata key {}", Quoted(key)))?;
    ValueType::from_number(number).ok_or_else(|| GgufProblem::ValueType {
        key: key.to_owned(),
        number,
        offset,
    })
}

/// Goes past a value and checks it.
fn skip(kind: ValueType, cursor: &mut Cursor<'_>, key: &str) -> Result<(), GgufProblem> {
    let what = format_args!("the value of metadata key {}", Quoted(key));
    match kind {
        ValueType::Array => {
            let element = read_type(cursor, key)?;
            if element == ValueType::Array {
                return Err(GgufProblem::NestedArray { key: key.to_owned() });
            }
            let count = cursor.u64(&what)?;
            let elements = format_args!("{} elements of metadata key {}", element.name(), Quoted(key));
            let smallest = element.size().unwrap_or(8);
            let count = cursor.room_for(count, smallest, &elements)?;
            match element {
                ValueType::Bool | ValueType::String => {
                    (0..count).try_for_each(|_| skip(element, cursor, key))?;
                }
                // Cannot overflow: there is room for this many.
                _ => drop(cursor.take((count * smallest) as u64, &what)?),
            }
        }
        ValueType::String => drop(cursor.text(&what)?),
        ValueType::Bool => {
            let offset = cursor.at();
            if let Some(&value) = cursor.take(1, &what)?.first()
                && value > 1
            {
                return Err(GgufProblem::Bool { key: key.to_owned(), value, offset });
            }
        }
        _ => drop(cursor.take(kind.size().unwrap_or(0) as u64, &what)?),
    }
    Ok(())
}

/// The value at the cursor, which has been checked before.
fn decode<'a>(kind: ValueType, cursor: &mut Cursor<'a>) -> Option<Value<'a>> {
    let what = &"a value that was there before";
    if kind == ValueType::Array {
        let element = ValueType::from_number(cursor.u32(what).ok()?)?;
        let count = cursor.u64(what).ok()?;
        let count = cursor.room_for(count, element.size().unwrap_or(8), what).ok()?;
        let (start, bytes) = (cursor.at(), cursor.all());
        return Some(Value::Array(ArrayValue { element, count, bytes, start }));
    }
    if kind == ValueType::String {
        let text = cursor.text(what).ok()?;
        return Some(Value::String(text.text(cursor.all())));
    }
    let bytes = cursor.take(kind.size()? as u64, what).ok()?;
    Some(match (kind, bytes) {
        (ValueType::Bool, &[a]) => Value::Bool(a != 0),
        (ValueType::U8, &[a]) => Value::Unsigned(a.into()),
        (ValueType::I8, &[a]) => Value::Signed((a as i8).into()),
        (ValueType::U16, &[a, b]) => Value::Unsigned(u16::from_le_bytes([a, b]).into()),
        (ValueType::I16, &[a, b]) => Value::Signed(i16::from_le_bytes([a, b]).into()),
        (ValueType::U32, &[a, b, c, d]) => Value::Unsigned(u32::from_le_bytes([a, b, c, d]).into()),
        (ValueType::I32, &[a, b, c, d]) => Value::Signed(i32::from_le_bytes([a, b, c, d]).into()),
        (ValueType::F32, &[a, b, c, d]) => Value::F32(f32::from_le_bytes([a, b, c, d])),
        (ValueType::U64, bytes) => Value::Unsigned(u64::from_le_bytes(bytes.try_into().ok()?)),
        (ValueType::I64, bytes) => Value::Signed(i64::from_le_bytes(bytes.try_into().ok()?)),
        (ValueType::F64, bytes) => Value::F64(f64::from_le_bytes(bytes.try_into().ok()?)),
        _ => return None,
    })
}

/// The metadata of a file.
#[derive(Clone, Copy, Debug)]
pub struct Metadata<'a> {
    pub(super) file: &'a GgufFile,
}

impl<'a> Metadata<'a> {
    /// How many keys there are.
    pub fn len(self) -> usize {
        self.file.header.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// All keys and values, in the order of the file.
    pub fn iter(self) -> impl Iterator<Item = (&'a str, Value<'a>)> {
        let bytes = self.file.bytes.as_slice();
        self.file
            .header
            .entries
            .iter()
            .filter_map(move |entry| Some((entry.key.text(bytes), value(entry, bytes)?)))
    }

    /// The value of a key, if it is there.
    pub fn value(self, key: &str) -> Option<Value<'a>> {
        let bytes = self.file.bytes.as_slice();
        value(self.file.header.entry(bytes, key)?, bytes)
    }

    /// The value of a key as a certain type; `None` if there is no such key.
    ///
    /// Integers are accepted in any width that they fit into.
    ///
    /// # Errors
    /// If the value is of another type or out of range.
    pub fn get<T: FromValue<'a>>(self, key: &str) -> Result<Option<T>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let converted = T::from_value(value).ok_or_else(|| {
            let problem = GgufProblem::WrongType {
                key: key.to_owned(),
                expected: T::EXPECTED,
                found: value.described(),
            };
            GgufError::new(&self.file.path, problem)
        });
        converted.map(Some)
    }

    /// The value of a key as a certain type.
    ///
    /// # Errors
    /// As [`Self::get`], and if there is no such key.
    pub fn require<T: FromValue<'a>>(self, key: &str) -> Result<T> {
        let missing = || GgufError::new(&self.file.path, GgufProblem::MissingKey(key.to_owned()));
        self.get(key)?.ok_or_else(missing)
    }
}

pub(super) fn value<'a>(entry: &Entry, bytes: &'a [u8]) -> Option<Value<'a>> {
    decode(entry.kind, &mut Cursor::new(bytes, entry.value))
}

/// What a metadata value can be read as.
pub trait FromValue<'a>: Sized {
    /// What is needed, for messages.
    const EXPECTED: &'static str;

    /// The value, unless it is of another type or out of range.
    fn from_value(value: Value<'a>) -> Option<Self>;
}

/// `FromValue` for a type and, element by element, for vectors of it.
macro_rules! from_value {
    ($($type:ty, $one:literal, $many:literal, $value:ident => $convert:expr;)*) => {$(
        impl<'a> FromValue<'a> for $type {
            const EXPECTED: &'static str = $one;

            fn from_value($value: Value<'a>) -> Option<Self> {
                $convert
            }
        }

        impl<'a> FromValue<'a> for Vec<$type> {
            const EXPECTED: &'static str = $many;

            fn from_value(value: Value<'a>) -> Option<Self> {
                let Value::Array(array) = value else { return None };
                let mut elements = Self::with_capacity(array.len());
                for element in array.iter() {
                    elements.push(FromValue::from_value(element)?);
                }
                (elements.len() == array.len()).then_some(elements)
            }
        }
    )*};
}

from_value! {
    u32, "an integer from 0 to 4294967295", "an array of integers from 0 to 4294967295",
        value => integer(value)?.try_into().ok();
    i32, "an integer from -2147483648 to 2147483647", "an array of integers from -2147483648 to 2147483647",
        value => integer(value)?.try_into().ok();
    u64, "an integer that is not negative", "an array of integers that are not negative",
        value => integer(value)?.try_into().ok();
    i64, "an integer", "an array of integers", value => integer(value)?.try_into().ok();
    usize, "a size", "an array of sizes", value => integer(value)?.try_into().ok();
    f32, "a float", "an array of floats", value => match value {
        Value::F32(value) => Some(value),
        Value::F64(value) => Some(value as f32),
        _ => None,
    };
    bool, "a truth value", "an array of truth values", value => match value {
        Value::Bool(value) => Some(value),
        _ => None,
    };
    &'a str, "a text", "an array of texts", value => match value {
        Value::String(value) => Some(value),
        _ => None,
    };
    String, "a text", "an array of texts", value => <&str>::from_value(value).map(str::to_owned);
}

fn integer(value: Value<'_>) -> Option<i128> {
    match value {
        Value::Unsigned(value) => Some(value.into()),
        Value::Signed(value) => Some(value.into()),
        _ => None,
    }
}
