//! The formats of panels, and the block type of each.

use super::panel::{Block, Bytes, Nibbles};
use dsrun_core::{BlockFormat, DType, Error, GroupBits, GroupOffset, Result, WeightFormat};

/// The type of the blocks of a panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PanelFormat {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q4K,
    Q6K,
    Q8_0,
    Nibbles,
    Bytes,
    Int8,
}

/// Evaluates an expression with `$block` standing for the block type of a format.
macro_rules! with_block {
    ($format:expr, $block:ident => $body:expr) => {
        match $format {
            PanelFormat::F32 => {
                type $block = crate::packed::panel::F32;
                $body
            }
            PanelFormat::F16 => {
                type $block = crate::packed::panel::F16;
                $body
            }
            PanelFormat::BF16 => {
                type $block = crate::packed::panel::BF16;
                $body
            }
            PanelFormat::Q4_0 => {
                type $block = crate::packed::panel::Q4_0;
                $body
            }
            PanelFormat::Q4_1 => {
                type $block = crate::packed::panel::Q4_1;
                $body
            }
            PanelFormat::Q4K => {
                type $block = crate::packed::panel::Q4K;
                $body
            }
            PanelFormat::Q6K => {
                type $block = crate::packed::panel::Q6K;
                $body
            }
            PanelFormat::Q8_0 => {
                type $block = crate::packed::panel::Q8_0;
                $body
            }
            PanelFormat::Nibbles => {
                type $block = crate::packed::panel::Nibbles;
                $body
            }
            PanelFormat::Bytes => {
                type $block = crate::packed::panel::Bytes;
                $body
            }
            PanelFormat::Int8 => {
                type $block = crate::packed::panel::Int8;
                $body
            }
        }
    };
}

/// [`with_block`] for formats of integers; `$otherwise` for the others.
macro_rules! with_integers {
    ($format:expr, $block:ident => $body:expr, else $otherwise:expr) => {
        match $format {
            PanelFormat::F32 | PanelFormat::F16 | PanelFormat::BF16 => $otherwise,
            PanelFormat::Q4_0 => {
                type $block = crate::packed::panel::Q4_0;
                $body
            }
            PanelFormat::Q4_1 => {
                type $block = crate::packed::panel::Q4_1;
                $body
            }
            PanelFormat::Q4K => {
                type $block = crate::packed::panel::Q4K;
                $body
            }
            PanelFormat::Q6K => {
                type $block = crate::packed::panel::Q6K;
                $body
            }
            PanelFormat::Q8_0 => {
                type $block = crate::packed::panel::Q8_0;
                $body
            }
            PanelFormat::Nibbles => {
                type $block = crate::packed::panel::Nibbles;
                $body
            }
            PanelFormat::Bytes => {
                type $block = crate::packed::panel::Bytes;
                $body
            }
            PanelFormat::Int8 => {
                type $block = crate::packed::panel::Int8;
                $body
            }
        }
    };
}

impl PanelFormat {
    /// The panel format for rows of `columns` elements. Weight formats without a block type here are unpacked to integers and
    /// scales, or decoded to f32 where their groups are not whole numbers of blocks.
    pub(super) fn new(format: WeightFormat, columns: usize) -> Result<Self> {
        let group = format.group(columns);
        let whole = |length: usize| group.is_multiple_of(length) && columns.is_multiple_of(length);
        match format {
            WeightFormat::Dense(DType::F32) => Ok(Self::F32),
            WeightFormat::Dense(DType::F16) => Ok(Self::F16),
            WeightFormat::Dense(DType::BF16) => Ok(Self::BF16),
            WeightFormat::Block(BlockFormat::Q4_0) => Ok(Self::Q4_0),
            WeightFormat::Block(BlockFormat::Q4_1) => Ok(Self::Q4_1),
            WeightFormat::Block(BlockFormat::Q8_0) => Ok(Self::Q8_0),
            WeightFormat::Block(BlockFormat::Q4_K) => Ok(Self::Q4K),
            WeightFormat::Block(BlockFormat::Q6_K) => Ok(Self::Q6K),
            WeightFormat::Block(_) => Ok(Self::Bytes),
            WeightFormat::Group(format) if format.is_channelwise_int8() => Ok(Self::Int8),
            WeightFormat::Group(format) if format.bits == GroupBits::Four && whole(Nibbles::LENGTH) => {
                Ok(Self::Nibbles)
            }
            WeightFormat::Group(_) if whole(Bytes::LENGTH) => Ok(Self::Bytes),
            WeightFormat::Group(_) => Ok(Self::F32),
            other => {
                let message = format!("weights stored as {other} cannot be packed");
                Err(Error::unsupported(message).at("weight").field("format"))
            }
        }
    }
}

/// The integer that stands for 0 in all blocks of a format, if it is the same and the format has no minimum; else 0.
pub(super) fn common_zero(format: WeightFormat) -> i32 {
    match format {
        WeightFormat::Block(BlockFormat::Q5_0) => 16,
        WeightFormat::Block(BlockFormat::Q3_K) => 4,
        WeightFormat::Block(BlockFormat::Mxfp4) => 12,
        WeightFormat::Group(format) if format.offset == GroupOffset::Symmetric => match format.bits {
            GroupBits::Four => 8,
            GroupBits::Eight => 128,
        },
        _ => 0,
    }
}

pub(super) use {with_block, with_integers};
