//! Attributes of ops: plain scalars that are fixed when a call is planned.
//!
//! Every attribute is a number, a flag or a named choice, so that one description serves the text form of programs, the
//! canonical encoding of regions and the C ABI.

use crate::{DType, Error, Result};
use std::fmt;

/// The value of one attribute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AttributeValue {
    /// A real number.
    Real(f32),
    /// A whole number.
    Whole(i64),
    /// A flag.
    Flag(bool),
    /// A named choice.
    Choice(&'static str),
}

impl fmt::Display for AttributeValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // `{:?}` is the shortest text that reads back as the same number, and always has a point or an exponent.
            Self::Real(value) => write!(f, "{value:?}"),
            Self::Whole(value) => write!(f, "{value}"),
            Self::Flag(value) => write!(f, "{value}"),
            Self::Choice(value) => f.write_str(value),
        }
    }
}

/// A type an attribute may have.
pub trait Attribute: Sized {
    /// As a value for printing and encoding.
    fn value(&self) -> AttributeValue;

    /// From the text [`AttributeValue`] prints; `None` if it is no such value.
    fn parse(text: &str) -> Option<Self>;
}

impl Attribute for f32 {
    fn value(&self) -> AttributeValue {
        AttributeValue::Real(*self)
    }

    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }
}

macro_rules! whole_attribute {
    ($($whole:ty),*) => {$(
        impl Attribute for $whole {
            fn value(&self) -> AttributeValue {
                AttributeValue::Whole(i64::from(*self))
            }

            fn parse(text: &str) -> Option<Self> {
                text.parse().ok()
            }
        }
    )*};
}

whole_attribute!(u32, i32);

impl Attribute for bool {
    fn value(&self) -> AttributeValue {
        AttributeValue::Flag(*self)
    }

    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }
}

impl Attribute for DType {
    fn value(&self) -> AttributeValue {
        AttributeValue::Choice(self.name())
    }

    fn parse(text: &str) -> Option<Self> {
        Self::from_name(text)
    }
}

/// The attributes of an op, by name and in a fixed order.
pub trait Attributes: Sized {
    /// The names, in order.
    const NAMES: &'static [&'static str];

    /// Name and value of each, in order.
    fn attributes(&self) -> Vec<(&'static str, AttributeValue)>;

    /// From texts by name. `take` gives the text of an attribute, if there is one.
    ///
    /// # Errors
    /// Names the attribute that is missing or is no value of its type.
    fn from_texts(take: &dyn Fn(&str) -> Option<String>) -> Result<Self>;
}

/// Reads one attribute for [`Attributes::from_texts`].
pub(crate) fn parse_attribute<T: Attribute>(name: &'static str, take: &dyn Fn(&str) -> Option<String>) -> Result<T> {
    let text = take(name).ok_or_else(|| Error::invalid("is missing").at(name))?;
    T::parse(&text).ok_or_else(|| Error::invalid(format!("`{text}` is no value for it")).at(name))
}

/// Declares the attribute struct of an op.
macro_rules! attributes {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }

        impl $crate::op::Attributes for $name {
            const NAMES: &'static [&'static str] = &[$(stringify!($field),)*];

            fn attributes(&self) -> Vec<(&'static str, $crate::op::AttributeValue)> {
                vec![$((stringify!($field), $crate::op::Attribute::value(&self.$field)),)*]
            }

            #[allow(unused_variables, reason = "ops without attributes take nothing")]
            fn from_texts(take: &dyn Fn(&str) -> Option<String>) -> $crate::Result<Self> {
                Ok(Self { $($field: $crate::op::attributes::parse_attribute(stringify!($field), take)?,)* })
            }
        }
    };
}

/// Declares a named choice with fixed numbers, for the C ABI.
macro_rules! choice {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $number:literal $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum $name {
            $($(#[$variant_doc])* $variant = $number,)*
        }

        impl $name {
            /// Every choice, in the order of its number.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name used in programs and messages.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
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
        }
    };
}

pub(crate) use {attributes, choice};
