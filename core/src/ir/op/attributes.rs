//! Attributes of ops: scalars that are fixed when a call is planned.
//!
//! Every attribute is a number, a flag or a named choice, so that one description serves the text form of programs, the
//! canonical encoding of regions and the C ABI.

use crate::{DType, Error, Result};
use std::fmt;

/// The value of one attribute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AttributeValue {
    /// A floating-point number.
    Real(f32),
    /// An unsigned integer.
    Whole(i64),
    /// A boolean.
    Flag(bool),
    /// A named choice.
    Choice(&'static str),
}

impl fmt::Display for AttributeValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // `{:?}` writes the shortest text that parses to the same number, always with a point or an exponent.
            Self::Real(value) => write!(f, "{value:?}"),
            Self::Whole(value) => write!(f, "{value}"),
            Self::Flag(value) => write!(f, "{value}"),
            Self::Choice(value) => f.write_str(value),
        }
    }
}

/// A type an attribute may have.
pub trait Attribute: Sized {
    /// Converts to a value for printing and encoding.
    fn value(&self) -> AttributeValue;

    /// Parses the text that [`AttributeValue`] prints; `None` if the text is invalid.
    fn parse(text: &str) -> Option<Self>;

    /// The declaration in C, as one of the four-byte words of an op's attributes.
    const IN_C: AttributeInC;

    /// Encodes as a word of the C ABI: the bits of a number, 0 or 1 for a boolean, the number of a choice.
    fn word(&self) -> u32;

    /// Decodes from a word of the C ABI; `None` if the word is invalid.
    fn from_word(word: u32) -> Option<Self>;
}

/// The C declaration of an attribute's type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttributeInC {
    /// The C type, four bytes long.
    pub type_name: &'static str,
    /// The Rust name and the values of a named choice; `None` for other types.
    pub choice: Option<(&'static str, &'static [ChoiceInC])>,
}

/// The name, number and meaning of a value of a named choice.
pub type ChoiceInC = (&'static str, u32, &'static str);

/// An attribute of an op, for generated declarations and documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttributeSpec {
    /// The name.
    pub name: &'static str,
    /// The documentation of its field.
    pub documentation: &'static str,
    /// The declaration in C.
    pub in_c: AttributeInC,
}

impl Attribute for f32 {
    fn value(&self) -> AttributeValue {
        AttributeValue::Real(*self)
    }

    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }

    const IN_C: AttributeInC = AttributeInC { type_name: "float", choice: None };

    fn word(&self) -> u32 {
        self.to_bits()
    }

    fn from_word(word: u32) -> Option<Self> {
        Some(Self::from_bits(word))
    }
}

macro_rules! whole_attribute {
    ($($whole:ty: $in_c:literal),*) => {$(
        impl Attribute for $whole {
            const IN_C: AttributeInC = AttributeInC { type_name: $in_c, choice: None };

            fn word(&self) -> u32 {
                u32::from_ne_bytes(self.to_ne_bytes())
            }

            fn from_word(word: u32) -> Option<Self> {
                Some(Self::from_ne_bytes(word.to_ne_bytes()))
            }

            fn value(&self) -> AttributeValue {
                AttributeValue::Whole(i64::from(*self))
            }

            fn parse(text: &str) -> Option<Self> {
                text.parse().ok()
            }
        }
    )*};
}

whole_attribute!(u32: "uint32_t", i32: "int32_t");

impl Attribute for bool {
    fn value(&self) -> AttributeValue {
        AttributeValue::Flag(*self)
    }

    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }

    const IN_C: AttributeInC = AttributeInC { type_name: "uint32_t", choice: None };

    fn word(&self) -> u32 {
        u32::from(*self)
    }

    fn from_word(word: u32) -> Option<Self> {
        match word {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }
}

impl Attribute for DType {
    fn value(&self) -> AttributeValue {
        AttributeValue::Choice(self.name())
    }

    fn parse(text: &str) -> Option<Self> {
        Self::from_name(text)
    }

    const IN_C: AttributeInC = AttributeInC { type_name: "uint32_t", choice: None };

    fn word(&self) -> u32 {
        *self as u32
    }

    fn from_word(word: u32) -> Option<Self> {
        Self::from_number(word)
    }
}

/// The attributes of an op, in a fixed order.
pub trait Attributes: Sized {
    /// The definition of the op: its documentation, in Markdown.
    const DOCUMENTATION: &'static str;

    /// The names of the attributes, in order.
    const NAMES: &'static [&'static str];

    /// Each attribute with its documentation and its declaration in C, in the order of [`Self::NAMES`].
    const SPECS: &'static [AttributeSpec];

    /// The name and value of each attribute, in order.
    fn attributes(&self) -> Vec<(&'static str, AttributeValue)>;

    /// Parses the attributes; `take` gives the text of an attribute, if there is one.
    ///
    /// # Errors
    /// Names the attribute that is missing or invalid.
    fn from_texts(take: &dyn Fn(&str) -> Option<String>) -> Result<Self>;

    /// Encodes the attributes as the words of the C ABI, in the order of [`Self::NAMES`].
    fn words(&self) -> Vec<u32>;

    /// Decodes the attributes from the words of the C ABI.
    ///
    /// # Errors
    /// If the number of words is not that of [`Self::NAMES`], or a word is invalid; names the attribute.
    fn from_words(words: &[u32]) -> Result<Self>;
}

/// Decodes the first word for [`Attributes::from_words`], and advances to the next.
pub(crate) fn word_attribute<T: Attribute>(name: &'static str, words: &mut &[u32]) -> Result<T> {
    let (word, rest) = words.split_first().ok_or_else(|| Error::invalid("is missing").at(name))?;
    *words = rest;
    T::from_word(*word)
        .ok_or_else(|| Error::invalid(format!("is {word}, which is not a valid value")).at(name))
}

/// Parses one attribute for [`Attributes::from_texts`].
pub(crate) fn parse_attribute<T: Attribute>(
    name: &'static str,
    take: &dyn Fn(&str) -> Option<String>,
) -> Result<T> {
    let text = take(name).ok_or_else(|| Error::invalid("is missing").at(name))?;
    T::parse(&text).ok_or_else(|| Error::invalid(format!("is `{text}`, which is not a valid value")).at(name))
}

/// Declares the attribute struct of an op.
macro_rules! attributes {
    ($(#[doc = $doc:literal])* $name:ident { $($(#[doc = $field_doc:literal])* $field:ident: $type:ty,)* }) => {
        $(#[doc = $doc])*
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub struct $name {
            $($(#[doc = $field_doc])* pub $field: $type,)*
        }

        impl $crate::op::Attributes for $name {
            const DOCUMENTATION: &'static str = concat!($($doc, "\n",)*);

            const NAMES: &'static [&'static str] = &[$(stringify!($field),)*];

            const SPECS: &'static [$crate::op::AttributeSpec] = &[$($crate::op::AttributeSpec {
                name: stringify!($field),
                documentation: concat!($($field_doc,)*),
                in_c: <$type as $crate::op::Attribute>::IN_C,
            },)*];

            fn attributes(&self) -> Vec<(&'static str, $crate::op::AttributeValue)> {
                vec![$((stringify!($field), $crate::op::Attribute::value(&self.$field)),)*]
            }

            #[allow(unused_variables, reason = "an op without attributes takes no text")]
            fn from_texts(take: &dyn Fn(&str) -> Option<String>) -> $crate::Result<Self> {
                Ok(Self { $($field: $crate::op::attributes::parse_attribute(stringify!($field), take)?,)* })
            }

            fn words(&self) -> Vec<u32> {
                vec![$($crate::op::Attribute::word(&self.$field),)*]
            }

            fn from_words(words: &[u32]) -> $crate::Result<Self> {
                let expected = <Self as $crate::op::Attributes>::NAMES.len();
                if words.len() != expected {
                    let message = format!("are {} words, must be {expected} words", words.len());
                    return Err($crate::Error::invalid(message).at("attributes"));
                }
                #[allow(unused_mut, unused_variables, reason = "an op without attributes reads no word")]
                let mut rest = words;
                Ok(Self { $($field: $crate::op::attributes::word_attribute(stringify!($field), &mut rest)?,)* })
            }
        }
    };
}

/// Declares a named choice with fixed numbers, for the C ABI.
macro_rules! choice {
    ($(#[$doc:meta])* $name:ident { $($(#[doc = $variant_doc:literal])* $variant:ident = $number:literal $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum $name {
            $($(#[doc = $variant_doc])* $variant = $number,)*
        }

        impl $name {
            /// Every choice, in the order of its number.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name that programs and messages use.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }

            /// The documentation of the choice.
            pub const fn documentation(self) -> &'static str {
                match self {
                    $(Self::$variant => concat!($($variant_doc,)*),)*
                }
            }

            /// The choice of this name.
            pub fn from_name(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|choice| choice.name() == name)
            }
        }

        impl $crate::op::Attribute for $name {
            fn value(&self) -> $crate::op::AttributeValue {
                $crate::op::AttributeValue::Choice(self.name())
            }

            fn parse(text: &str) -> Option<Self> {
                Self::from_name(text)
            }

            const IN_C: $crate::op::AttributeInC = $crate::op::AttributeInC {
                type_name: "uint32_t",
                choice: Some((stringify!($name), &[$(($text, $number, concat!($($variant_doc,)*)),)*])),
            };

            fn word(&self) -> u32 {
                *self as u32
            }

            fn from_word(word: u32) -> Option<Self> {
                Self::ALL.iter().copied().find(|choice| *choice as u32 == word)
            }
        }
    };
}

pub(crate) use {attributes, choice};
