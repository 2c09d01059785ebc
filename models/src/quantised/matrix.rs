//! A quantised matrix, put together row by row.

use super::{
    awq,
    parts::{Result, group_size},
};
use crate::weights::TensorSource;
use dsrun_core::{
    DType, Error, GroupBits, GroupFormat, GroupOffset, GroupRow, ScaleType, WeightFormat, WeightType,
};
use half::{bf16, f16};

/// Lines of packed integers that are taken apart at a time where they run across rows: what they fill of a row is a cache
/// line or less.
const LINES: usize = 16;

/// A quantised matrix `[outputs, inputs]`: where its parts are.
#[derive(Debug)]
pub(super) struct Matrix {
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    pub(super) bits: GroupBits,
    pub(super) integers: Integers,
    /// Whether integers are signed bytes; else they are counted from the least.
    pub(super) signed: bool,
    pub(super) scales: Scales,
    pub(super) scale: ScaleType,
    /// Inputs that share a scale.
    pub(super) group: usize,
    /// Absent where they are in the middle of the range by definition.
    pub(super) zeros: Option<Zeros>,
    /// Whether zero points are in the middle of the range. They are held to it as they are read.
    pub(super) symmetric: bool,
    /// The group of each input, where inputs are not in the order of their groups.
    pub(super) order: Option<Vec<u32>>,
    /// Tensors that belong to the matrix and are not read for its rows.
    pub(super) other_parts: Vec<String>,
    /// Whether its inputs are quantised too.
    pub(super) quantises_inputs: bool,
    pub(super) weight_type: WeightType,
}

/// Where the integers are.
#[derive(Debug)]
pub(super) enum Integers {
    /// A row of the tensor is a row of the matrix: bytes, or words with the lowest bits first.
    Rows(String),
    /// Words of consecutive inputs of one output: `[words, outputs]`.
    InputWords(String),
    /// Nibbles of eight outputs of one input, in AWQ's order: `[inputs, words]`.
    OutputWords(String),
}

/// Where the scales are.
#[derive(Debug)]
pub(super) enum Scales {
    /// `[outputs, groups]`.
    Rows(String),
    /// `[groups, outputs]`.
    Columns(String),
    /// One for the matrix.
    One(String),
}

/// Where the zero points are.
#[derive(Debug)]
pub(super) enum Zeros {
    /// Packed as the integers are.
    Words {
        tensor: String,
        words: ZeroWords,
        /// The field of a word that an output is in, by its remainder; only as many as a word has.
        order: [u8; 8],
        /// What the file has left off.
        add: u16,
    },
    /// A signed byte each, `[outputs, groups]`.
    Bytes { tensor: String, bits: GroupBits },
}

/// Which way words of zero points run.
#[derive(Clone, Copy, Debug)]
pub(super) enum ZeroWords {
    /// `[groups, words]`.
    OutputsInRow,
    /// `[words, groups]`.
    OutputsInColumn,
}

/// Fields from the lowest bits up.
pub(super) const fn field_order(bits: GroupBits) -> [u8; 8] {
    match bits {
        GroupBits::Four => [0, 1, 2, 3, 4, 5, 6, 7],
        GroupBits::Eight => [0, 1, 2, 3, 0, 0, 0, 0],
    }
}

impl Matrix {
    /// Stands in until [`Self::typed`] has seen all fields.
    pub(super) const UNTYPED: WeightType =
        WeightType { format: WeightFormat::Dense(DType::F32), shape: Vec::new() };

    /// The matrix with the type that its rows have.
    pub(super) fn typed(mut self) -> Result<Self> {
        let format = match self.order {
            Some(_) => WeightFormat::Dense(self.dense_type()),
            None => WeightFormat::Group(self.format()?),
        };
        let weight_type = WeightType { format, shape: vec![self.outputs, self.inputs] };
        weight_type.elements().and(weight_type.bytes()).map_err(|error| error.to_string())?;
        self.weight_type = weight_type;
        Ok(self)
    }

    fn format(&self) -> Result<GroupFormat> {
        let offset = if self.symmetric { GroupOffset::Symmetric } else { GroupOffset::ZeroPoint };
        let group = group_size(self.group, self.inputs)?;
        Ok(GroupFormat { bits: self.bits, group, offset, scale: self.scale })
    }

    /// The type that elements are decoded to where they must be.
    fn dense_type(&self) -> DType {
        self.scale.dtype()
    }

    pub(super) fn weight_type(&self) -> &WeightType {
        &self.weight_type
    }

    pub(super) fn is_decoded(&self) -> bool {
        self.order.is_some()
    }

    pub(super) fn is_channelwise_int8(&self) -> bool {
        matches!(self.weight_type.format, WeightFormat::Group(format) if format.is_channelwise_int8())
    }

    /// The tensors that belong to the matrix.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &str> {
        let (Integers::Rows(integers) | Integers::InputWords(integers) | Integers::OutputWords(integers)) =
            &self.integers;
        let (Scales::Rows(scales) | Scales::Columns(scales) | Scales::One(scales)) = &self.scales;
        let zeros = self.zeros.as_ref().map(|zeros| match zeros {
            Zeros::Words { tensor, .. } | Zeros::Bytes { tensor, .. } => tensor,
        });
        let others = self.other_parts.iter();
        [integers, scales].into_iter().chain(zeros).chain(others).map(String::as_str)
    }

    /// Rows `first .. first + count`.
    pub(super) fn rows(
        &self,
        files: &dyn TensorSource,
        first: usize,
        count: usize,
    ) -> dsrun_core::Result<Vec<u8>> {
        if first.checked_add(count).is_none_or(|end| end > self.outputs) {
            let message = format!("rows {first}..{first}+{count} of {} asked for", self.outputs);
            return Err(Error::invalid(message));
        }
        match &self.order {
            Some(order) => self.decoded_rows(files, order, first, count),
            None => self.group_rows(files, first, count),
        }
    }

    /// Rows in the group-wise format.
    fn group_rows(
        &self,
        files: &dyn TensorSource,
        first: usize,
        count: usize,
    ) -> dsrun_core::Result<Vec<u8>> {
        let lost = || Error::internal("a quantised matrix lost its format");
        let format = self.format().map_err(|_| lost())?;
        let row = format.row(self.inputs).ok_or_else(lost)?;
        let mut out = vec![0; count * row.bytes];
        // Bytes are signed in symmetric formats only; a nibble means the same either way.
        let flip = if self.bits == GroupBits::Eight && self.signed != self.symmetric { 0x80 } else { 0 };
        self.put_integers(files, first, &row, flip, &mut out)?;

        let scales = self.scale_bytes(files, first, count)?;
        let width = self.scale.dtype().bytes();
        let groups = self.inputs / self.group;
        // Which of the file's groups each group of the row is part of.
        let part_of = |index: usize| index * row.columns / self.group;
        for (out, scales) in out.chunks_exact_mut(row.bytes).zip(scales.chunks_exact(groups * width)) {
            for (index, place) in out[row.scales.clone()].chunks_exact_mut(width).enumerate() {
                place.copy_from_slice(&scales[part_of(index) * width..][..width]);
            }
        }
        let zeros = self.zero_points(files, first, count)?;
        if self.symmetric {
            let middle = 1 << (self.bits.bits() - 1);
            if let Some(at) = zeros.iter().position(|zero| *zero != middle) {
                let (output, found) = (first + at / groups, zeros[at]);
                let message = format!(
                    "the configuration says that it is symmetric, but a zero point of output {output} is {found}, not {middle}"
                );
                return Err(Error::invalid(message));
            }
        } else {
            for (out, zeros) in out.chunks_exact_mut(row.bytes).zip(zeros.chunks_exact(groups)) {
                for (index, place) in out[row.offsets.clone()].iter_mut().enumerate() {
                    *place = zeros[part_of(index)];
                }
            }
        }
        Ok(out)
    }

    /// Rows decoded, where no format can say which scale is whose.
    fn decoded_rows(
        &self,
        files: &dyn TensorSource,
        order: &[u32],
        first: usize,
        count: usize,
    ) -> dsrun_core::Result<Vec<u8>> {
        let bytes = self.inputs * self.bits.bits() / 8;
        let row = GroupRow { groups: 0, columns: 0, scales: 0..0, offsets: 0..0, integers: 0..bytes, bytes };
        let mut integers = vec![0; count * bytes];
        let flip = if self.signed { 0x80 } else { 0 };
        self.put_integers(files, first, &row, flip, &mut integers)?;
        let width = self.scale.dtype().bytes();
        let groups = self.inputs / self.group;
        let scales = self.scale_bytes(files, first, count)?;
        let mut zeros = self.zero_points(files, first, count)?;
        if zeros.is_empty() {
            zeros = vec![1 << (self.bits.bits() - 1); count * groups];
        }
        let mut out = Vec::with_capacity(count * self.inputs * width);
        let mut of_row = vec![0.0; groups];
        let rows = integers
            .chunks_exact(bytes)
            .zip(scales.chunks_exact(groups * width))
            .zip(zeros.chunks_exact(groups));
        for ((integers, scales), zeros) in rows {
            WeightFormat::Dense(self.scale.dtype()).decode_row(scales, &mut of_row)?;
            for (input, group) in order.iter().enumerate() {
                let group = *group as usize;
                let integer = match self.bits {
                    GroupBits::Eight => integers[input],
                    GroupBits::Four => integers[input / 2] >> (input % 2 * 4) & 15,
                };
                // Exact in f32: 9 bits times 11 or 8. It is rounded once, below.
                let value = of_row[group] * (f32::from(integer) - f32::from(zeros[group]));
                match self.scale {
                    ScaleType::F32 => out.extend_from_slice(&value.to_le_bytes()),
                    ScaleType::F16 => out.extend_from_slice(&f16::from_f32(value).to_le_bytes()),
                    ScaleType::BF16 => out.extend_from_slice(&bf16::from_f32(value).to_le_bytes()),
                }
            }
        }
        Ok(out)
    }

    /// Puts the integers of rows, from `first` on, into their places, every byte changed by `flip`.
    fn put_integers(
        &self,
        files: &dyn TensorSource,
        first: usize,
        row: &GroupRow,
        flip: u8,
        out: &mut [u8],
    ) -> dsrun_core::Result<()> {
        let count = out.len() / row.bytes;
        match &self.integers {
            Integers::Rows(tensor) => {
                let line_bytes = files.tensor_type(tensor)?.row_bytes()?;
                let bytes = files.rows(tensor, first, count)?;
                for (out, line) in out.chunks_exact_mut(row.bytes).zip(bytes.chunks_exact(line_bytes)) {
                    out[row.integers.clone()].iter_mut().zip(line).for_each(|(out, byte)| *out = byte ^ flip);
                }
            }
            Integers::InputWords(tensor) => {
                let weight = files.tensor_type(tensor)?;
                let line_bytes = weight.row_bytes()?;
                for start in (0..weight.rows()).step_by(LINES) {
                    let lines = files.rows(tensor, start, LINES.min(weight.rows() - start))?;
                    for (index, out) in out.chunks_exact_mut(row.bytes).enumerate() {
                        let at = (first + index) * 4;
                        let place = &mut out[row.integers.start + start * 4..];
                        for (place, line) in
                            place.as_chunks_mut::<4>().0.iter_mut().zip(lines.chunks_exact(line_bytes))
                        {
                            for (place, byte) in place.iter_mut().zip(&line[at..at + 4]) {
                                *place = byte ^ flip;
                            }
                        }
                    }
                }
            }
            Integers::OutputWords(tensor) => {
                let weight = files.tensor_type(tensor)?;
                let line_bytes = weight.row_bytes()?;
                // An even number of lines: two inputs make a byte.
                for start in (0..weight.rows()).step_by(2 * LINES) {
                    let lines = files.rows(tensor, start, (2 * LINES).min(weight.rows() - start))?;
                    for (index, out) in out.chunks_exact_mut(row.bytes).enumerate() {
                        let output = first + index;
                        let nibble = awq::NIBBLES[output % 8];
                        let at = output / 8 * 4 + usize::from(nibble / 2);
                        let shift = nibble % 2 * 4;
                        let place = &mut out[row.integers.start + start / 2..];
                        for (place, lines) in place.iter_mut().zip(lines.chunks_exact(2 * line_bytes)) {
                            let (low, high) = (lines[at] >> shift & 15, lines[line_bytes + at] >> shift & 15);
                            *place = low | high << 4;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// The scales of rows, `[count, groups]`, as they are stored.
    fn scale_bytes(
        &self,
        files: &dyn TensorSource,
        first: usize,
        count: usize,
    ) -> dsrun_core::Result<Vec<u8>> {
        let width = self.scale.dtype().bytes();
        match &self.scales {
            Scales::Rows(tensor) => Ok(files.rows(tensor, first, count)?.into_owned()),
            Scales::One(tensor) => Ok(files.rows(tensor, 0, 1)?.repeat(count)),
            Scales::Columns(tensor) => {
                let weight = files.tensor_type(tensor)?;
                let (groups, line_bytes) = (weight.rows(), weight.row_bytes()?);
                let lines = files.rows(tensor, 0, groups)?;
                let mut out = Vec::with_capacity(count * groups * width);
                for output in first..first + count {
                    for line in lines.chunks_exact(line_bytes) {
                        out.extend_from_slice(&line[output * width..][..width]);
                    }
                }
                Ok(out)
            }
        }
    }

    /// The zero points of rows, `[count, groups]`; empty if there are none.
    fn zero_points(
        &self,
        files: &dyn TensorSource,
        first: usize,
        count: usize,
    ) -> dsrun_core::Result<Vec<u8>> {
        let Some(zeros) = &self.zeros else { return Ok(Vec::new()) };
        let groups = self.inputs / self.group;
        match zeros {
            Zeros::Bytes { tensor, bits } => {
                let middle = 1i16 << (bits.bits() - 1);
                let bytes = files.rows(tensor, first, count)?;
                let zero = |byte: &u8| {
                    let zero = i16::from(*byte as i8) + middle;
                    u8::try_from(zero).map_err(|_| Error::invalid(format!("a zero point is {zero}")))
                };
                bytes.iter().map(zero).collect()
            }
            Zeros::Words { tensor, words, order, add } => {
                let weight = files.tensor_type(tensor)?;
                let bytes = files.rows(tensor, 0, weight.rows())?;
                let (all, columns) = (bytes.as_chunks::<4>().0, weight.columns());
                let (bits, per_word) = (self.bits.bits(), 32 / self.bits.bits());
                let mut out = Vec::with_capacity(count * groups);
                for output in first..first + count {
                    let (word, field) = (output / per_word, order[output % per_word]);
                    for group in 0..groups {
                        let at = match words {
                            ZeroWords::OutputsInRow => group * columns + word,
                            ZeroWords::OutputsInColumn => word * columns + group,
                        };
                        let stored =
                            u32::from_le_bytes(all[at]) >> (usize::from(field) * bits) & ((1 << bits) - 1);
                        let zero = stored + u32::from(*add);
                        let zero = u8::try_from(zero).map_err(|_| {
                            Error::invalid(format!(
                                "a zero point of output {output} is {zero}, more than 255"
                            ))
                        })?;
                        out.push(zero);
                    }
                }
                Ok(out)
            }
        }
    }
}
