//! The one error type of the hardware-abstraction layer.
//!
//! An error carries a machine-readable [`Code`], which crosses the C ABI as an integer, and names the op, the argument and the
//! field at fault, so that a test can assert them and a person can act on them.

use std::fmt;

/// The kind of a failure. The numbers are fixed because they cross the C ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Code {
    /// An argument is wrong; the caller can correct it.
    InvalidArgument = 1,
    /// Device or host memory ran out.
    OutOfMemory = 2,
    /// The backend does not support an op, element type, shape or feature.
    Unsupported = 3,
    /// The call is valid but not in the present state, for example an allocation during capture.
    FailedPrecondition = 4,
    /// The device, driver or library is missing.
    Unavailable = 5,
    /// A named wait timed out.
    Timeout = 6,
    /// The device is lost; from now on only destroying objects succeeds.
    DeviceLost = 7,
    /// A collective failed or a peer has exited.
    Communication = 8,
    /// A backend panicked; the object that was in use is poisoned.
    Panic = 9,
    /// A plugin was built for another version of the ABI.
    AbiMismatch = 10,
    /// A bug in dsrun or in a backend.
    Internal = 11,
}

impl Code {
    /// Every code, in the order of its number.
    pub const ALL: [Self; 11] = [
        Self::InvalidArgument,
        Self::OutOfMemory,
        Self::Unsupported,
        Self::FailedPrecondition,
        Self::Unavailable,
        Self::Timeout,
        Self::DeviceLost,
        Self::Communication,
        Self::Panic,
        Self::AbiMismatch,
        Self::Internal,
    ];

    /// The code with this number, if it exists.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|code| *code as u32 == number)
    }

    /// The name that messages use.
    pub fn name(self) -> &'static str {
        match self {
            Self::InvalidArgument => "invalid argument",
            Self::OutOfMemory => "out of memory",
            Self::Unsupported => "unsupported",
            Self::FailedPrecondition => "failed precondition",
            Self::Unavailable => "unavailable",
            Self::Timeout => "timeout",
            Self::DeviceLost => "device lost",
            Self::Communication => "communication error",
            Self::Panic => "backend panicked",
            Self::AbiMismatch => "ABI mismatch",
            Self::Internal => "internal error",
        }
    }
}

/// An error of the hardware-abstraction layer: a code, a message, and the op, argument and field at fault.
///
/// Its contents are boxed, so that `Result<T, Error>` stays one pointer wide.
#[derive(Clone, PartialEq, Eq)]
pub struct Error(Box<Details>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Details {
    code: Code,
    op: Option<String>,
    argument: Option<String>,
    field: Option<String>,
    message: String,
}

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error with a code and a message.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self(Box::new(Details { code, op: None, argument: None, field: None, message: message.into() }))
    }

    /// An error about a wrong argument.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, message)
    }

    /// An error about something the backend does not support.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(Code::Unsupported, message)
    }

    /// An error about a bug, such as a state that validation rules out.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(Code::Internal, message)
    }

    /// Names the op at fault, unless the error already names one.
    #[must_use]
    pub fn in_op(mut self, op: &str) -> Self {
        self.0.op.get_or_insert_with(|| op.to_owned());
        self
    }

    /// Names the argument (operand, result or parameter) at fault, unless the error already names one.
    #[must_use]
    pub fn at(mut self, argument: &str) -> Self {
        self.0.argument.get_or_insert_with(|| argument.to_owned());
        self
    }

    /// Names the field of the argument at fault (`dtype`, `shape[1]`, ..), unless the error already names one.
    #[must_use]
    pub fn field(mut self, field: impl Into<String>) -> Self {
        self.0.field.get_or_insert_with(|| field.into());
        self
    }

    /// Appends the place to the message, for errors that already name op and argument.
    #[must_use]
    pub(crate) fn note(mut self, place: &str) -> Self {
        self.0.message.push_str(&format!(" ({place})"));
        self
    }

    /// The kind of failure.
    pub fn code(&self) -> Code {
        self.0.code
    }

    /// The op at fault, if known.
    pub fn op(&self) -> Option<&str> {
        self.0.op.as_deref()
    }

    /// The argument at fault, if known.
    pub fn argument(&self) -> Option<&str> {
        self.0.argument.as_deref()
    }

    /// The field of the argument at fault, if known.
    pub fn field_name(&self) -> Option<&str> {
        self.0.field.as_deref()
    }

    /// The message, without code, op, argument and field.
    pub fn message(&self) -> &str {
        &self.0.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Details { code, op, argument, field, message } = &*self.0;
        let place: Vec<&str> = [op, argument, field].into_iter().flatten().map(String::as_str).collect();
        if !place.is_empty() {
            write!(f, "{}: ", place.join("."))?;
        }
        write!(f, "{message}")?;
        if *code != Code::InvalidArgument {
            write!(f, " ({})", code.name())?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error({:?}: {self})", self.0.code)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_keeps_the_innermost_names() {
        let error = Error::invalid("is 3, must be 2").field("rank").at("x").in_op("linear").at("y");
        assert_eq!(error.to_string(), "linear.x.rank: is 3, must be 2");
        assert_eq!(
            (error.op(), error.argument(), error.field_name()),
            (Some("linear"), Some("x"), Some("rank"))
        );
    }

    #[test]
    fn code_numbers_round_trip_and_are_dense() {
        for (index, code) in Code::ALL.into_iter().enumerate() {
            assert_eq!(code as usize, index + 1);
            assert_eq!(Code::from_number(code as u32), Some(code));
        }
        assert_eq!(Code::from_number(0), None);
        assert_eq!(Code::from_number(12), None);
    }
}
