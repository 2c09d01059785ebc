//! A kernel before it is compiled: its source, entry point and constants.

use std::fmt;

/// A kernel: a source, an entry point, and the constants it is compiled with.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KernelSpec {
    /// The path of the source below `kernels/`.
    pub unit: &'static str,
    /// The name of the kernel.
    pub entry: &'static str,
    /// Names and values of constants.
    pub defines: Vec<(&'static str, String)>,
    /// Bytes of dynamic shared memory.
    pub shared: usize,
    /// Whether its blocks wait for each other, so that all must be resident at once (cooperative launch).
    pub together: bool,
}

impl KernelSpec {
    pub(crate) fn new<const N: usize>(
        unit: &'static str,
        entry: &'static str,
        defines: [(&'static str, &dyn fmt::Display); N],
    ) -> Self {
        Self::of(unit, entry, defines.into_iter().map(|(name, value)| (name, value.to_string())).collect())
    }

    /// Same as [`KernelSpec::new`], for constants that are already formatted.
    pub(crate) fn of(unit: &'static str, entry: &'static str, defines: Vec<(&'static str, String)>) -> Self {
        Self { unit, entry, defines, shared: 0, together: false }
    }

    /// The same kernel with a cooperative launch, because its blocks wait for each other.
    #[must_use]
    pub(crate) fn launched_together(mut self) -> Self {
        self.together = true;
        self
    }

    /// The same kernel with this many bytes of dynamic shared memory.
    #[must_use]
    pub(crate) fn with_shared(mut self, bytes: usize) -> Self {
        self.shared = bytes;
        self
    }
}

impl fmt::Display for KernelSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.entry, self.unit)?;
        self.defines.iter().try_for_each(|(name, value)| write!(f, " {name}={value}"))
    }
}
