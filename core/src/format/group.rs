//! Group formats: integers with a scale for each group of columns.

use super::Affine;
use super::rounding::{round_to_bf16, round_to_f16};
use crate::DType;
use std::{fmt, ops::Range};

/// The number of bits of an integer. The numbers are fixed because they cross the C ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum GroupBits {
    /// Two integers per byte.
    Four = 0,
    /// One integer per byte.
    Eight = 1,
}

/// The number of columns that share a scale. The numbers are fixed because they cross the C ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum GroupSize {
    /// The whole row: one scale per output channel.
    Row = 0,
    /// 32 columns.
    Of32 = 1,
    /// 64 columns.
    Of64 = 2,
    /// 128 columns.
    Of128 = 3,
}

/// The offset of the integers. The numbers are fixed because they cross the C ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum GroupOffset {
    /// None: integers are signed.
    Symmetric = 0,
    /// An integer zero point for each group; integers are unsigned.
    ZeroPoint = 1,
    /// A floating-point minimum for each group; integers are unsigned.
    Minimum = 2,
}

/// The type of scales and minima. The numbers are fixed because they cross the C ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ScaleType {
    /// f32.
    F32 = 1,
    /// f16.
    F16 = 2,
    /// bf16.
    BF16 = 3,
}

impl GroupBits {
    /// Every choice.
    pub const ALL: [Self; 2] = [Self::Four, Self::Eight];

    /// The number of bits as an integer.
    pub const fn bits(self) -> usize {
        match self {
            Self::Four => 4,
            Self::Eight => 8,
        }
    }
}

impl GroupSize {
    /// Every choice.
    pub const ALL: [Self; 4] = [Self::Row, Self::Of32, Self::Of64, Self::Of128];

    /// The number of columns of a group; `None` for the whole row.
    pub const fn columns(self) -> Option<usize> {
        match self {
            Self::Row => None,
            Self::Of32 => Some(32),
            Self::Of64 => Some(64),
            Self::Of128 => Some(128),
        }
    }

    /// The size with this number of columns; `None` for the whole row.
    pub fn from_columns(columns: Option<usize>) -> Option<Self> {
        Self::ALL.into_iter().find(|size| size.columns() == columns)
    }
}

impl GroupOffset {
    /// Every choice.
    pub const ALL: [Self; 3] = [Self::Symmetric, Self::ZeroPoint, Self::Minimum];
}

impl ScaleType {
    /// Every choice.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::BF16];

    /// The element type of the scales.
    pub const fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::BF16 => DType::BF16,
        }
    }

    /// The scale type with this element type.
    pub fn from_dtype(dtype: DType) -> Option<Self> {
        Self::ALL.into_iter().find(|scale| scale.dtype() == dtype)
    }

    /// Decodes a number.
    pub(super) fn read(self, bytes: &[u8]) -> f32 {
        match (self, bytes) {
            (Self::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (Self::F16, &[a, b]) => half::f16::from_le_bytes([a, b]).to_f32(),
            (Self::BF16, &[a, b]) => half::bf16::from_le_bytes([a, b]).to_f32(),
            _ => 0.0,
        }
    }

    /// Encodes a number, rounded to nearest.
    pub(super) fn write(self, value: f32, bytes: &mut [u8]) {
        match self {
            Self::F32 => bytes.copy_from_slice(&value.to_le_bytes()),
            Self::F16 => bytes.copy_from_slice(&half::f16::from_f32(value).to_le_bytes()),
            Self::BF16 => bytes.copy_from_slice(&half::bf16::from_f32(value).to_le_bytes()),
        }
    }

    /// The number that [`Self::read`] decodes of a written one, computed without branches and calls, so that loops vectorise.
    #[inline(always)]
    pub(super) fn round(self, value: f32) -> f32 {
        match self {
            Self::F32 => value,
            Self::F16 => round_to_f16(value),
            Self::BF16 => round_to_bf16(value),
        }
    }
}

#[doc = include_str!("group.md")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupFormat {
    /// The number of bits of an integer.
    pub bits: GroupBits,
    /// The number of columns that share a scale.
    pub group: GroupSize,
    /// The offset of the integers.
    pub offset: GroupOffset,
    /// The type of scales and minima.
    pub scale: ScaleType,
}

/// The byte ranges of the parts of a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupRow {
    /// The number of groups of the row.
    pub groups: usize,
    /// The number of columns of a group.
    pub columns: usize,
    /// The scales.
    pub scales: Range<usize>,
    /// The zero points or minima; empty if there are none.
    pub offsets: Range<usize>,
    /// The integers.
    pub integers: Range<usize>,
    /// The number of bytes of the row, including padding.
    pub bytes: usize,
}

impl GroupFormat {
    /// The definition, in Markdown.
    pub const DOCUMENTATION: &'static str = include_str!("group.md");

    /// The fields of [`Self::number`]: the name, number and meaning of each choice.
    pub const FIELDS: &'static [(&'static str, u32, &'static str)] = &[
        ("bits_4", 0, "integers of 4 bits"),
        ("bits_8", 0x40, "integers of 8 bits"),
        ("row", 0, "a scale for each row"),
        ("of_32", 0x10, "a scale for 32 columns"),
        ("of_64", 0x20, "a scale for 64 columns"),
        ("of_128", 0x30, "a scale for 128 columns"),
        ("symmetric", 0, "signed integers"),
        ("zero_point", 0x4, "an integer zero point for each group"),
        ("minimum", 0x8, "a minimum for each group"),
        ("scale_f32", 1, "scales and minima are f32"),
        ("scale_f16", 2, "scales and minima are f16"),
        ("scale_bf16", 3, "scales and minima are bf16"),
    ];

    /// Signed bytes with one f32 scale for each row: the format that `linear_w8a8` takes.
    pub const INT8: Self = Self {
        bits: GroupBits::Eight,
        group: GroupSize::Row,
        offset: GroupOffset::Symmetric,
        scale: ScaleType::F32,
    };

    /// The alignment in bytes of the integers and the end of a row.
    const ALIGNMENT: usize = 16;

    /// Every format, in the order of its number.
    pub fn all() -> impl Iterator<Item = Self> {
        let scales = |bits, group, offset| {
            ScaleType::ALL.into_iter().map(move |scale| Self { bits, group, offset, scale })
        };
        let offsets = move |bits, group| {
            GroupOffset::ALL.into_iter().flat_map(move |offset| scales(bits, group, offset))
        };
        let groups = move |bits| GroupSize::ALL.into_iter().flat_map(move |group| offsets(bits, group));
        GroupBits::ALL.into_iter().flat_map(groups)
    }

    /// The number of the format: the sum of one choice of each field of [`Self::FIELDS`].
    pub const fn number(self) -> u32 {
        (self.bits as u32) << 6 | (self.group as u32) << 4 | (self.offset as u32) << 2 | self.scale as u32
    }

    /// The format of this number.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::all().find(|format| format.number() == number)
    }

    /// The format of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::all().find(|format| format.to_string() == name)
    }

    /// Whether the format is signed bytes with one scale of any type for each row, as `linear_w8a8` requires.
    pub const fn is_channelwise_int8(self) -> bool {
        matches!(
            self,
            Self { bits: GroupBits::Eight, group: GroupSize::Row, offset: GroupOffset::Symmetric, scale: _ }
        )
    }

    /// The parts of a row of `columns` elements; `None` if `columns` is not a whole number of groups, is odd with integers of 4
    /// bits, or the size overflows.
    pub fn row(self, columns: usize) -> Option<GroupRow> {
        let (groups, group) = match self.group.columns() {
            None => (1, columns),
            Some(group) if columns.is_multiple_of(group) => (columns / group, group),
            Some(_) => return None,
        };
        let integers = match self.bits {
            GroupBits::Eight => columns,
            GroupBits::Four if columns.is_multiple_of(2) => columns / 2,
            GroupBits::Four => return None,
        };
        let scales = groups.checked_mul(self.scale.dtype().bytes())?;
        let offsets = match self.offset {
            GroupOffset::Symmetric => 0,
            GroupOffset::ZeroPoint => groups,
            GroupOffset::Minimum => scales,
        };
        let head = scales.checked_add(offsets)?;
        let first = head.checked_next_multiple_of(Self::ALIGNMENT)?;
        let end = first.checked_add(integers)?;
        let bytes = end.checked_next_multiple_of(Self::ALIGNMENT)?;
        Some(GroupRow {
            groups,
            columns: group,
            scales: 0..scales,
            offsets: scales..head,
            integers: first..end,
            bytes,
        })
    }

    /// Appends the columns `part` of a row as a row of their own; `None` if they are not whole groups or bytes of the row.
    pub(super) fn copy_columns(
        self,
        row: &[u8],
        columns: usize,
        part: Range<usize>,
        out: &mut Vec<u8>,
    ) -> Option<()> {
        let (from, to) = (self.row(columns)?, self.row(part.len())?);
        let group = self.group.columns();
        let groups = group.map_or(0..1, |group| part.start / group..part.end / group);
        let first = out.len();
        out.resize(first + to.bytes, 0);
        let copied = out.get_mut(first..)?;
        let width = self.scale.dtype().bytes();
        let offset = if self.offset == GroupOffset::ZeroPoint { 1 } else { width };
        let mut copy = |target: &Range<usize>, source: &Range<usize>, skipped: usize| -> Option<()> {
            let source = row.get(source.clone())?.get(skipped..skipped.checked_add(target.len())?)?;
            copied.get_mut(target.clone())?.copy_from_slice(source);
            Some(())
        };
        copy(&to.scales, &from.scales, groups.start * width)?;
        if self.offset != GroupOffset::Symmetric {
            copy(&to.offsets, &from.offsets, groups.start * offset)?;
        }
        copy(&to.integers, &from.integers, part.start * self.bits.bits() / 8)
    }

    /// Unpacks a row whose length fits `integers`; `scales` has an item for each group. The integers are unsigned: those of
    /// symmetric formats are larger by 8 or 128, which is their zero point.
    pub(super) fn unpack(self, row: &[u8], integers: &mut [u8], scales: &mut [Affine]) {
        let Some(parts) = self.row(integers.len()).filter(|parts| parts.bytes == row.len()) else { return };
        let width = self.scale.dtype().bytes();
        let stored = &row[parts.integers];
        match (self.bits, self.offset) {
            // Flipping the sign bit of a signed byte adds 128.
            (GroupBits::Eight, GroupOffset::Symmetric) => {
                integers.iter_mut().zip(stored).for_each(|(q, byte)| *q = byte ^ 0x80);
            }
            (GroupBits::Eight, _) => integers.copy_from_slice(stored),
            (GroupBits::Four, _) => {
                for (pair, byte) in integers.chunks_exact_mut(2).zip(stored) {
                    (pair[0], pair[1]) = (byte & 15, byte >> 4);
                }
            }
        }
        let offsets = &row[parts.offsets];
        for (group, (affine, scale)) in
            scales.iter_mut().zip(row[parts.scales].chunks_exact(width)).enumerate()
        {
            let scale = self.scale.read(scale);
            let (zero, minimum) = match (self.offset, self.bits) {
                (GroupOffset::Symmetric, GroupBits::Four) => (8.0, 0.0),
                (GroupOffset::Symmetric, GroupBits::Eight) => (128.0, 0.0),
                (GroupOffset::ZeroPoint, _) => (f32::from(offsets[group]), 0.0),
                (GroupOffset::Minimum, _) => (0.0, self.scale.read(&offsets[group * width..][..width])),
            };
            *affine = Affine { scale, zero, minimum };
        }
    }
}

impl fmt::Display for GroupFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "int{}", self.bits.bits())?;
        if let Some(columns) = self.group.columns() {
            write!(f, "g{columns}")?;
        }
        f.write_str(match self.offset {
            GroupOffset::Symmetric => "",
            GroupOffset::ZeroPoint => "z",
            GroupOffset::Minimum => "m",
        })?;
        match self.scale {
            ScaleType::F32 => Ok(()),
            scale => write!(f, "_{}", scale.dtype()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WeightFormat;

    fn format(name: &str) -> GroupFormat {
        GroupFormat::from_name(name).unwrap()
    }

    fn decoded(name: &str, row: &[u8], columns: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; columns];
        WeightFormat::Group(format(name)).decode_row(row, &mut out).unwrap();
        out
    }

    #[test]
    fn numbers_are_sums_of_the_fields_in_the_header() {
        let numbers = ["int8", "int4g128_f16", "int4g32z_bf16", "int8g64m"].map(|name| format(name).number());
        assert_eq!(numbers, [0x41, 0x32, 0x17, 0x69]);
        assert_eq!(GroupFormat::from_number(0x40), None);
        let field = |name: &str| GroupFormat::FIELDS.iter().find(|field| field.0 == name).unwrap().1;
        let sum = |names: [&str; 4]| names.map(field).iter().sum::<u32>();
        assert_eq!(sum(["bits_4", "of_128", "symmetric", "scale_f16"]), 0x32);
        assert_eq!(sum(["bits_8", "of_64", "minimum", "scale_f32"]), 0x69);
        assert_eq!(sum(["bits_4", "of_32", "zero_point", "scale_bf16"]), 0x17);
        assert_eq!(sum(["bits_8", "row", "symmetric", "scale_f32"]), 0x41);
    }

    #[test]
    fn parts_of_a_row_are_aligned() {
        let row = format("int4g32z_f16").row(160).unwrap();
        assert_eq!((row.groups, row.columns), (5, 32));
        assert_eq!((row.scales, row.offsets, row.integers, row.bytes), (0..10, 10..15, 16..96, 96));
        let row = format("int8").row(5).unwrap();
        assert_eq!((row.scales, row.offsets, row.integers, row.bytes), (0..4, 4..4, 16..21, 32));
        let row = format("int8g64m").row(256).unwrap();
        assert_eq!((row.scales, row.offsets, row.integers, row.bytes), (0..16, 16..32, 32..288, 288));
        assert_eq!(format("int4").row(5), None);
        assert_eq!(format("int4g64").row(96), None);
        assert_eq!(format("int8").row(usize::MAX), None);
    }

    #[test]
    fn rows_decode_by_their_formula() {
        let mut row = vec![0u8; 32];
        row[..4].copy_from_slice(&0.5f32.to_le_bytes());
        row[16..19].copy_from_slice(&[1, 0x80, 0xFF]);
        assert_eq!(decoded("int8", &row, 3), [0.5, -64.0, -0.5]);

        // Two groups of 32: scales 1 and 2, zero points 3 and 15; the first bytes of each are 0x52 and 0x0F.
        let mut row = vec![0u8; 48];
        row[..8].copy_from_slice(&[1.0f32, 2.0].map(f32::to_le_bytes).concat());
        (row[8], row[9], row[16], row[32]) = (3, 15, 0x52, 0x0F);
        let out = decoded("int4g32z", &row, 64);
        assert_eq!((out[0], out[1], out[2], out[32], out[33]), (-1.0, 2.0, -3.0, 0.0, -30.0));

        let mut row = vec![0u8; 32];
        row[..2].copy_from_slice(&half::f16::from_f32(0.5).to_le_bytes());
        row[2..4].copy_from_slice(&half::f16::from_f32(-1.0).to_le_bytes());
        row[16] = 0xF3;
        let out = decoded("int4g32m_f16", &row, 32);
        assert_eq!((out[0], out[1], out[2]), (0.5, 6.5, -1.0));
        let out = decoded("int4g32_f16", &row, 32);
        assert_eq!((out[0], out[1], out[2]), (-2.5, 3.5, -4.0));

        let mut row = vec![0u8; 32];
        row[..2].copy_from_slice(&half::bf16::from_f32(0.25).to_le_bytes());
        (row[2], row[16], row[17]) = (255, 0, 254);
        assert_eq!(decoded("int8z_bf16", &row, 2), [-63.75, -0.25]);
    }
}
