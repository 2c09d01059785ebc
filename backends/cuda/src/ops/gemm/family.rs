//! The interface of a GEMM kernel family.

use crate::{
    arch::DeviceSpec,
    ops::gemm::problem::{Problem, ProductPlan},
};
use dsrun_core::Result;

/// A family of GEMM kernels.
pub(super) trait Family: Sync {
    /// The family's row in the table of the documentation.
    fn description(&self) -> Description;

    /// Whether the family supports a problem and is faster for it than all later families in [`super::select`]'s list.
    fn supports(&self, problem: &Problem<'_>, device: &DeviceSpec) -> bool;

    /// The kernels and launches for a problem that the family supports.
    fn plan(&self, problem: &Problem<'_>, device: &DeviceSpec) -> Result<ProductPlan>;
}

/// A row of the table of families in the documentation.
pub(super) struct Description {
    /// The entry point of its kernel, or the name of the library.
    pub(super) kernel: &'static str,
    /// The numbers of rows for which it is used.
    pub(super) rows: String,
    /// The devices that it runs on.
    pub(super) devices: &'static str,
    /// The element types, formats and alignment that it requires.
    pub(super) operands: &'static str,
    /// What the launch computes besides the product and a bias: norms and epilogues.
    pub(super) fused: String,
    /// The method, in a few words.
    pub(super) method: &'static str,
}
