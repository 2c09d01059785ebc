//! The layout of integers of quantised weights on the device, which all kernels share.
//!
//! 8 rows form a unit. A unit stores 16 bytes of row 0, then the same columns of rows 1 to 7, then the next 16 bytes of each row,
//! and so on. So a line of 128 bytes is 8 rows by 16 bytes: wgmma reads it from shared memory without rearrangement, and a warp
//! copies it contiguously. Four lines are a step of the kernels for few rows: 64 integers of 8 bits, or 128 of 4 bits, of each
//! row. Rows are padded to whole units, columns to whole steps.
//!
//! The columns in the four 16-byte pieces of a step depend on what a lane of `mma.m16n8k16` needs:
//!
//! - one scale per row, 8 bits: in order, 16 each;
//! - groups, 8 bits: word `j` of piece `p` holds columns `16 j + 4 p` to `+ 3`, so that four lanes share a group of 16;
//! - 4 bits: word `w` of piece `p` holds columns `32 w + 8 p` to `+ 7`, the even ones in its low half, the odd ones in the high:
//!   column `2 i` is nibble `i`, column `2 i + 1` nibble `i + 4`. A shift and a mask then extract two neighbours;
//! - 4 bits that are a float: the same columns, whose bits lie as [`FLOAT_BITS`] says.
//!
//! 8-bit integers are signed. The scales and offsets of groups follow in the same units: for each group, for each of the 8
//! rows, the scale and, if there is one, the zero point or the minimum. Groups are padded to whole k tiles of two steps.

use dsrun_core::{
    Affine, BlockFormat, DType, Error, GroupBits, GroupOffset, Result, WeightFormat, WeightType,
};
use rayon::prelude::*;

/// Where in a word the bits of the floats of even columns are, from the sign to the mantissa. Those of the following column are in
/// the other half of the word. A rotation and a mask, or two, move a pair to its place in two bf16 (`linear/floats.cuh`).
const FLOAT_BITS: [[u32; 4]; 4] = [[15, 8, 7, 6], [9, 2, 1, 0], [19, 12, 11, 10], [5, 30, 29, 4]];

/// The bits of a float of 4 bits by the integer that it is unpacked to, the inverse of [`BlockFormat::E2M1`].
const FLOATS: [u8; 25] = {
    let mut floats = [0; 25];
    // From the last, so that zero is the positive one.
    let mut bits = BlockFormat::E2M1.len();
    while bits > 0 {
        bits -= 1;
        floats[BlockFormat::E2M1[bits] as usize] = bits as u8;
    }
    floats
};

/// The bits that a float of each of the eight columns sets in a word, by the integer that it is unpacked to.
const FLOAT_WORDS: [[u32; FLOATS.len()]; 8] = {
    let mut words = [[0; FLOATS.len()]; 8];
    let mut index = 0;
    while index < 8 * 4 * FLOATS.len() {
        let (column, bit, stored) = (index % 8, index / 8 % 4, index / 32);
        let place = (FLOAT_BITS[column / 2][bit] + 16 * (column as u32 % 2)) % 32;
        words[column][stored] |= (FLOATS[stored] as u32 >> (3 - bit) & 1) << place;
        index += 1;
    }
    words
};

/// The largest scale of a group of floats: kernels multiply it by 2^94 in bf16 (`linear/floats.cuh`).
const MAX_FLOAT_SCALE: f32 = (1u64 << 33) as f32;

/// Rows of a unit.
pub(crate) const UNIT: usize = 8;

/// The zero point of integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Offset {
    /// The same integer everywhere.
    Fixed(u8),
    /// An integer zero point per group.
    ZeroPoint,
    /// A minimum per group, as a real number.
    Minimum,
    /// None: the four bits are not an integer but a float (E2M1).
    Floats,
}

/// How the integers of a weight format are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packing {
    /// Bits of an integer, 4 or 8.
    pub(crate) bits: usize,
    /// Columns that share a scale; 0 for a whole row.
    pub(crate) group: usize,
    pub(crate) offset: Offset,
    /// Element type of scales and minima.
    pub(crate) scale: DType,
}

impl Packing {
    /// The packing of a format; `None` for dense weights.
    pub(crate) fn of(format: WeightFormat) -> Option<Self> {
        let blocks = |bits, offset| Self { bits, group: 32, offset, scale: DType::F16 };
        // Scales of blocks of 256 are products of two scales, which f32 represents exactly.
        let large = |bits, group, offset| Self { bits, group, offset, scale: DType::F32 };
        Some(match format {
            WeightFormat::Group(format) => {
                let bits = format.bits.bits();
                let offset = match (format.offset, format.bits) {
                    (GroupOffset::Symmetric, GroupBits::Four) => Offset::Fixed(8),
                    (GroupOffset::Symmetric, GroupBits::Eight) => Offset::Fixed(128),
                    (GroupOffset::ZeroPoint, _) => Offset::ZeroPoint,
                    (GroupOffset::Minimum, _) => Offset::Minimum,
                };
                Self { bits, group: format.group.columns().unwrap_or(0), offset, scale: format.scale.dtype() }
            }
            WeightFormat::Block(BlockFormat::Q4_0) => blocks(4, Offset::Fixed(8)),
            WeightFormat::Block(BlockFormat::Q4_1) => blocks(4, Offset::Minimum),
            WeightFormat::Block(BlockFormat::Q5_0) => blocks(8, Offset::Fixed(16)),
            WeightFormat::Block(BlockFormat::Q5_1) => blocks(8, Offset::Minimum),
            WeightFormat::Block(BlockFormat::Q8_0) => blocks(8, Offset::Fixed(128)),
            WeightFormat::Block(BlockFormat::Q2_K) => large(8, 16, Offset::Minimum),
            WeightFormat::Block(BlockFormat::Q3_K) => large(8, 16, Offset::Fixed(4)),
            WeightFormat::Block(BlockFormat::Q4_K) => large(4, 32, Offset::Minimum),
            WeightFormat::Block(BlockFormat::Q5_K) => large(8, 32, Offset::Minimum),
            WeightFormat::Block(BlockFormat::Q6_K) => large(8, 16, Offset::Fixed(32)),
            // Powers of two are exact in bf16.
            WeightFormat::Block(BlockFormat::Mxfp4) => {
                Self { bits: 4, group: 32, offset: Offset::Floats, scale: DType::BF16 }
            }
            _ => return None,
        })
    }

    /// Columns of a step: 64 bytes of a row.
    pub(crate) const fn span(self) -> usize {
        512 / self.bits
    }

    /// Values stored per group of a row: the scale, and the offset if there is one.
    const fn numbers(self) -> usize {
        match self.offset {
            Offset::Fixed(_) | Offset::Floats => 1,
            Offset::ZeroPoint | Offset::Minimum => 2,
        }
    }

    /// Bytes of the scales and offsets of a group of 8 rows.
    pub(crate) const fn line(self) -> usize {
        UNIT * self.numbers() * self.scale.bytes()
    }

    /// Bytes of the integers of a unit; `None` on overflow.
    pub(super) fn unit_bytes(self, columns: usize) -> Option<usize> {
        (columns.checked_next_multiple_of(self.span())? / 8).checked_mul(self.bits * UNIT)
    }

    /// Bytes of the scales and offsets of a unit; `None` on overflow.
    pub(super) fn number_bytes(self, columns: usize) -> Option<usize> {
        let groups = match self.group {
            0 => 1,
            group => columns.checked_next_multiple_of(2 * self.span())? / group,
        };
        groups.checked_mul(self.line())
    }

    /// Whether `linear_w8a8` supports it.
    pub(crate) fn is_channelwise_int8(self) -> bool {
        self.bits == 8 && self.group == 0 && self.offset == Offset::Fixed(128)
    }

    /// 0 for a fixed offset, 1 for zero points, 2 for minima, 3 for floats.
    const fn offset_number(self) -> u32 {
        match self.offset {
            Offset::Fixed(_) => 0,
            Offset::ZeroPoint => 1,
            Offset::Minimum => 2,
            Offset::Floats => 3,
        }
    }

    /// The number of the packing in `linear/weight.cuh`.
    pub(crate) fn number(self) -> u32 {
        let group = if self.group == 0 { 0 } else { self.group.ilog2() - 3 };
        let scale = match self.scale {
            DType::F32 => 0,
            DType::F16 => 1,
            _ => 2,
        };
        0x100 | u32::from(self.bits == 8) | group << 1 | self.offset_number() << 4 | scale << 6
    }

    /// The constants of the kernels for few rows.
    pub(crate) fn defines(self) -> [(&'static str, String); 6] {
        let scale = match self.scale {
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            _ => "f32",
        };
        [
            ("BITS", self.bits.to_string()),
            ("GROUP", self.group.to_string()),
            ("OFFSET", self.offset_number().to_string()),
            ("NUMBERS", self.numbers().to_string()),
            ("SCALE", scale.to_owned()),
            ("SCALE_BYTES", self.scale.bytes().to_string()),
        ]
    }

    /// Packs rows, the first of which begins a unit, on all cores. Replaces the contents of `integers`, and of `numbers`
    /// by the scales and offsets. Buffers that are used again need not be cleared, which one core would do.
    pub(super) fn pack(
        self,
        weight: &WeightType,
        rows: &[u8],
        integers: &mut Vec<u8>,
        numbers: &mut Vec<u8>,
    ) -> Result<()> {
        let columns = weight.columns();
        let row_bytes = weight.row_bytes()?;
        let (Some(unit), Some(unit_numbers)) = (self.unit_bytes(columns), self.number_bytes(columns)) else {
            return Err(Error::invalid(format!("{columns} columns are too many")));
        };
        if columns == 0 {
            integers.clear();
            numbers.clear();
            numbers.resize((rows.len() / row_bytes.max(1)).div_ceil(UNIT) * unit_numbers, 0);
            return Ok(());
        }
        let group = if self.group == 0 { columns } else { self.group };
        let units = (rows.len() / row_bytes.max(1)).div_ceil(UNIT);
        integers.resize(units * unit, 0);
        numbers.resize(units * unit_numbers, 0);
        let buffers =
            || (vec![0u8; columns], vec![Affine::default(); columns.div_ceil(weight.format.group(columns))]);
        let units = integers.par_chunks_mut(unit).zip(numbers.par_chunks_mut(unit_numbers));
        units.zip(rows.par_chunks(row_bytes * UNIT)).try_for_each_init(
            buffers,
            |(stored, scales), ((integers, numbers), rows)| {
                // Padding is zero.
                integers.fill(0);
                numbers.fill(0);
                for (index, row) in rows.chunks_exact(row_bytes).enumerate() {
                    weight.format.unpack_row(row, stored, scales)?;
                    self.check(scales)?;
                    self.shift(stored);
                    self.place(stored, index, integers);
                    for (number, affine) in scales.iter().enumerate().take(columns.div_ceil(group)) {
                        let at = number * self.line() + index * self.numbers() * self.scale.bytes();
                        self.write(affine, &mut numbers[at..]);
                    }
                }
                Ok(())
            },
        )
    }

    /// Refuses scales of floats that kernels cannot multiply by.
    fn check(self, scales: &[Affine]) -> Result<()> {
        if self.offset != Offset::Floats {
            return Ok(());
        }
        let mut numbers = scales.iter().map(|affine| self.number_of(affine));
        match numbers.find(|number| number.is_nan() || *number > MAX_FLOAT_SCALE) {
            Some(number) => Err(Error::unsupported(format!(
                "a block of floats of 4 bits has the scale {number:e}; it may be {MAX_FLOAT_SCALE:e} at most: the file is damaged, \
                 or needs another backend"
            ))),
            None => Ok(()),
        }
    }

    /// The scale that is stored.
    fn number_of(self, affine: &Affine) -> f32 {
        // What is stored of a float is twice its value (see `word_of_floats`).
        if self.offset == Offset::Floats { 2.0 * affine.scale } else { affine.scale }
    }

    /// Makes integers of 8 bits signed.
    fn shift(self, stored: &mut [u8]) {
        match (self.bits, self.offset) {
            (4, _) => {}
            (_, Offset::Fixed(zero)) => stored.iter_mut().for_each(|q| *q = q.wrapping_sub(zero)),
            _ => stored.iter_mut().for_each(|q| *q ^= 0x80),
        }
    }

    /// Writes the integers of row `index` of a unit to their positions.
    fn place(self, stored: &[u8], index: usize, unit: &mut [u8]) {
        // The 16 bytes of the row in each line of a step.
        let lines = |step: usize, piece: usize| (step * 4 + piece) * 128 + index * 16;
        for (step, columns) in stored.chunks(self.span()).enumerate() {
            if self.bits == 4 {
                for (at, eight) in columns.chunks(8).enumerate() {
                    let word = match self.offset {
                        Offset::Floats => word_of_floats(eight),
                        _ => word_of_integers(eight),
                    };
                    let to = lines(step, at % 4) + at / 4 * 4;
                    unit[to..to + 4].copy_from_slice(&word.to_le_bytes());
                }
            } else if self.group == 0 {
                for (piece, bytes) in columns.chunks(16).enumerate() {
                    unit[lines(step, piece)..][..bytes.len()].copy_from_slice(bytes);
                }
            } else {
                for (at, four) in columns.chunks(4).enumerate() {
                    // Word 4 j + p of the step.
                    let to = lines(step, at % 4) + at / 4 * 4;
                    unit[to..][..four.len()].copy_from_slice(four);
                }
            }
        }
    }

    /// Writes the scale and offset of a group of a row.
    fn write(self, affine: &Affine, to: &mut [u8]) {
        let second = match self.offset {
            Offset::Fixed(_) | Offset::Floats => None,
            // 8-bit integers were made signed by subtracting 128.
            Offset::ZeroPoint => Some(affine.zero - if self.bits == 8 { 128.0 } else { 0.0 }),
            Offset::Minimum => Some(affine.minimum),
        };
        let bytes = self.scale.bytes();
        for (value, to) in
            [Some(self.number_of(affine)), second].into_iter().flatten().zip(to.chunks_exact_mut(bytes))
        {
            match self.scale {
                DType::F16 => to.copy_from_slice(&half::f16::from_f32(value).to_le_bytes()),
                DType::BF16 => to.copy_from_slice(&half::bf16::from_f32(value).to_le_bytes()),
                _ => to.copy_from_slice(&value.to_le_bytes()),
            }
        }
    }
}

/// A word of up to eight integers of 4 bits.
fn word_of_integers(integers: &[u8]) -> u32 {
    let mut bytes = [0; 8];
    match integers.try_into() {
        Ok(eight) => bytes = eight,
        Err(_) => bytes.iter_mut().zip(integers).for_each(|(byte, q)| *byte = *q),
    }
    // The four nibbles in every other byte become 16 bits.
    let joined = |bytes: u64| {
        let fours = bytes & 0x000F_000F_000F_000F;
        let pairs = (fours | fours >> 12) & 0x0000_00FF_0000_00FF;
        (pairs | pairs >> 24) as u32 & 0xFFFF
    };
    let all = u64::from_le_bytes(bytes);
    joined(all) | joined(all >> 8) << 16
}

/// A word of up to eight floats of 4 bits, given the integers that [`WeightFormat::unpack_row`] makes of them.
fn word_of_floats(stored: &[u8]) -> u32 {
    let bits = |(words, stored): (&[u32; FLOATS.len()], &u8)| words.get(usize::from(*stored)).copied();
    FLOAT_WORDS.iter().zip(stored).filter_map(bits).fold(0, |word, bits| word | bits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsrun_core::GroupFormat;
    use rstest::rstest;

    fn packed(name: &str, columns: usize, rows: &[u8]) -> (Vec<u8>, Vec<u8>) {
        let format = WeightFormat::Group(GroupFormat::from_name(name).unwrap());
        let weight = WeightType { format, shape: vec![2, columns] };
        let (mut integers, mut numbers) = (Vec::new(), Vec::new());
        Packing::of(format).unwrap().pack(&weight, rows, &mut integers, &mut numbers).unwrap();
        (integers, numbers)
    }

    #[rstest]
    #[case::largest(160, "")]
    #[case::too_large(161, "has the scale 1.717987e10; it may be 8.589935e9 at most: the file is")]
    #[case::not_a_number(255, "has the scale NaN")]
    fn scales_of_floats_are_bounded(#[case] exponent: u8, #[case] expected: &str) {
        let format = WeightFormat::Block(BlockFormat::Mxfp4);
        let mut row = [0x22; 17];
        row[0] = exponent;
        let weight = WeightType { format, shape: vec![1, 32] };
        let packed = Packing::of(format).unwrap().pack(&weight, &row, &mut Vec::new(), &mut Vec::new());
        let error = packed.map_or_else(|error| error.to_string(), |()| String::new());
        assert!(error.contains(expected) && error.is_empty() == expected.is_empty(), "{error}");
    }

    #[test]
    fn channelwise_bytes_keep_their_order() {
        // Two rows of a scale, 12 bytes of nothing, 32 integers.
        let row = |first: i8| {
            let mut row = 2.0f32.to_le_bytes().to_vec();
            row.resize(16, 0);
            row.extend((0..32).map(|i| (first + i) as u8));
            row
        };
        let (integers, numbers) = packed("int8", 32, &[row(-5), row(40)].concat());
        assert_eq!((integers.len(), numbers.len()), (512, 32));
        assert_eq!(integers[..3], [251, 252, 253]);
        assert_eq!(integers[16..18], [40, 41]);
        // Column 16 begins the second line.
        assert_eq!((integers[128], integers[128 + 16]), (11, 56));
        assert_eq!(numbers[4..8], 2.0f32.to_le_bytes());
    }

    #[test]
    fn nibbles_of_neighbours_are_half_a_word_apart() {
        let row: Vec<u8> = {
            let mut row = 1.0f32.to_le_bytes().to_vec();
            row.resize(16, 0);
            row.extend((0..16).map(|i| {
                if i == 0 {
                    0x21
                } else if i == 4 {
                    0x43
                } else {
                    0
                }
            }));
            row
        };
        let (integers, _) = packed("int4g32", 32, &[row.clone(), row].concat());
        // Columns 0 and 1 are in word 0 of piece 0, columns 8 and 9 in word 0 of piece 1.
        assert_eq!(integers[..4], [0x01, 0, 0x02, 0]);
        assert_eq!(integers[128..132], [0x03, 0, 0x04, 0]);
        assert_eq!(integers[16], 0x01);
    }

    #[test]
    fn bytes_of_groups_are_dealt_to_four_pieces() {
        let mut row = 1.0f32.to_le_bytes().to_vec();
        row.push(130);
        row.resize(16, 0);
        row.extend(0..32);
        let (integers, numbers) = packed("int8g32z", 32, &[row.clone(), row].concat());
        // Columns 4 to 7 are word 0 of piece 1, columns 16 to 19 word 1 of piece 0; all 128 less.
        assert_eq!(integers[128..132], [4 ^ 0x80, 5 ^ 0x80, 6 ^ 0x80, 7 ^ 0x80]);
        assert_eq!(integers[4..6], [16 ^ 0x80, 17 ^ 0x80]);
        assert_eq!(numbers[4..8], 2.0f32.to_le_bytes());
    }

    /// Same as `small_floats` of `linear/floats.cuh`.
    fn small_floats(word: u32, pair: usize) -> u32 {
        match pair {
            0 => word & 0x81c0_81c0,
            1 => word << 6 & 0x81c0_81c0,
            2 => word.rotate_left(28) & 0x81c0_81c0,
            _ => word.rotate_left(10) & 0x8180_8180 | word << 2 & 0x0040_0040,
        }
    }

    #[test]
    fn floats_are_moved_to_bf16_by_rotations() {
        const VALUES: [i16; 15] = [-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12];
        for first in 0..VALUES.len() {
            let twice: Vec<i16> = (0..8).map(|column| VALUES[(first + column * 4) % VALUES.len()]).collect();
            let stored: Vec<u8> = twice.iter().map(|twice| u8::try_from(twice + 12).unwrap()).collect();
            let word = word_of_floats(&stored);
            let float = |column: usize| {
                let bits = (small_floats(word, column / 2) >> (16 * (column % 2))) as u16;
                half::bf16::from_bits(bits).to_f32() * 2.0f32.powi(126)
            };
            for (column, twice) in twice.iter().enumerate() {
                assert_eq!(2.0 * float(column), f32::from(*twice), "column {column} of {twice:?}");
            }
        }
    }
}
