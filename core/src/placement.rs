//! How values are distributed over the axes of the device mesh.

use crate::op::MeshAxis;
use std::fmt;

/// The distribution of a value over one mesh axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Every rank holds the whole value.
    #[default]
    Replicated,
    /// Each rank holds an equal slice of this dimension.
    Sharded(usize),
    /// Each rank holds a summand; the value is their sum.
    Partial,
}

/// The distribution of a value over every mesh axis. A value is replicated until a pass places it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Placements([Placement; MeshAxis::ALL.len()]);

impl Placements {
    /// The placement over an axis.
    pub fn get(&self, axis: MeshAxis) -> Placement {
        self.0[axis as usize]
    }

    /// Sets the placement over an axis.
    pub fn set(&mut self, axis: MeshAxis, placement: Placement) {
        self.0[axis as usize] = placement;
    }

    /// The axes over which the value is not replicated.
    pub fn placed(&self) -> impl Iterator<Item = (MeshAxis, Placement)> + '_ {
        let all = MeshAxis::ALL.iter().map(|axis| (*axis, self.get(*axis)));
        all.filter(|(_, placement)| *placement != Placement::Replicated)
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replicated => f.write_str("replicated"),
            Self::Sharded(dimension) => write!(f, "sharded({dimension})"),
            Self::Partial => f.write_str("partial"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_start_replicated_and_remember_each_axis() {
        let mut placements = Placements::default();
        assert_eq!(placements.placed().count(), 0);
        placements.set(MeshAxis::Tensor, Placement::Sharded(1));
        placements.set(MeshAxis::Expert, Placement::Partial);
        let placed: Vec<_> = placements.placed().collect();
        assert_eq!(
            placed,
            [(MeshAxis::Tensor, Placement::Sharded(1)), (MeshAxis::Expert, Placement::Partial)]
        );
    }
}
