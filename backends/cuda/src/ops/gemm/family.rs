//! The interface of a family of kernels for products.

use crate::{
    arch::DeviceSpec,
    ops::gemm::problem::{Problem, ProductPlan},
};
use dsrun_core::Result;

/// A family of kernels for products.
pub(super) trait Family: Sync {
    /// What the book says of the family.
    fn description(&self) -> Description;

    /// Whether the kernels take a problem, at a size at which they are faster than the families after this one in the list.
    fn supports(&self, problem: &Problem<'_>, device: &DeviceSpec) -> bool;

    /// The kernels and launches for a problem that the family supports.
    fn plan(&self, problem: &Problem<'_>, device: &DeviceSpec) -> Result<ProductPlan>;
}

/// What the book says of a family.
pub(super) struct Description {
    /// The entry point of its kernel, or the library that has it.
    pub(super) kernel: &'static str,
    /// Rows of activations it is used for.
    pub(super) rows: String,
    /// Devices it runs on.
    pub(super) devices: &'static str,
    /// Element types, formats and alignment it needs.
    pub(super) operands: &'static str,
    /// What belongs to the same launch beside the product and a bias.
    pub(super) fused: String,
    /// How it works.
    pub(super) method: &'static str,
}
