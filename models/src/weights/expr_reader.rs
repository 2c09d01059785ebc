//! Evaluates weight expressions row by row.
//!
//! An expression is compiled once into a tree of [`Node`]s with known types, which is then asked for rows. Nodes that
//! only choose rows say which rows of which part they need ([`Segment`]); where that is one run of rows, the bytes of
//! the part are passed on, and so a weight that lies in one piece in a mapped file is never copied.

mod transpose;

use super::TensorSource;
use super::convert::Converter;
use dsrun_core::{DType, Error, Result, WeightExpr, WeightFormat, WeightReader, WeightType};
use rayon::prelude::*;
use std::borrow::Cow;
use std::ops::Range;

/// Bytes of rows that a thread reads at a time: enough to be worth handing over, few enough to stay in its cache.
const TASK_BYTES: usize = 1 << 18;

/// Reads the value of a [`WeightExpr`] over the tensors of a source, a few rows at a time.
///
/// It holds no more than the rows asked for, besides a few rows of buffers.
pub struct ExprReader<'a> {
    source: &'a dyn TensorSource,
    tensors: Vec<String>,
    root: Part,
}

impl<'a> ExprReader<'a> {
    /// Reads `expr` over `source`.
    ///
    /// # Errors
    /// If the source lacks a tensor, or shapes do not fit; the message names the source.
    pub fn new(source: &'a dyn TensorSource, expr: &WeightExpr) -> Result<Self> {
        let compiled = Part::compile(expr, &|name| source.tensor_type(name));
        let root = compiled.map_err(|error| error.field(source.describe()))?;
        let tensors = expr.tensors().into_iter().map(str::to_owned).collect();
        Ok(Self { source, tensors, root })
    }

    /// The same weight in another storage format.
    ///
    /// Every format can become dense f32, f16 or bf16, rounded to nearest. Quantised formats are those of the expression.
    ///
    /// # Errors
    /// If the weight cannot be stored so.
    pub fn stored_as(mut self, format: WeightFormat) -> Result<Self> {
        let current = self.root.weight_type.format;
        match format {
            _ if format == current => {}
            WeightFormat::Dense(dtype) if dtype.is_float() => self.root = self.root.converted(None, dtype)?,
            other => {
                let message =
                    format!("a weight stored as {current} cannot be stored as {other} without quantising it");
                return Err(Error::unsupported(message));
            }
        }
        Ok(self)
    }

    /// Rows `first .. first + count`, decoded.
    ///
    /// # Errors
    /// As [`WeightReader::rows`].
    pub fn decoded_rows(&self, first: usize, count: usize) -> Result<Vec<f32>> {
        let Part { weight_type, row_bytes, .. } = &self.root;
        let (bytes, columns) = (self.root.read(self.source, first, count)?, weight_type.columns());
        let mut converter = Converter::default();
        let mut out = Vec::with_capacity(count.saturating_mul(columns));
        for row in rows_of(&bytes, *row_bytes) {
            out.extend_from_slice(converter.decode(weight_type.format, row, columns)?);
        }
        Ok(out)
    }

    /// Says that the tensors of this expression will not be read again soon: see [`TensorSource::release`]. It may be
    /// called between rows too, to keep a very large tensor from staying in memory.
    pub fn release(&self) {
        for tensor in &self.tensors {
            self.source.release(tensor);
        }
    }
}

impl WeightReader for ExprReader<'_> {
    fn weight_type(&self) -> &WeightType {
        &self.root.weight_type
    }

    fn rows(&mut self, first: usize, count: usize) -> Result<Cow<'_, [u8]>> {
        self.root.read(self.source, first, count)
    }
}

impl std::fmt::Debug for ExprReader<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let source = self.source.describe();
        f.debug_struct("ExprReader").field("source", &source).field("root", &self.root).finish()
    }
}

/// A node and the type of its value.
#[derive(Debug)]
struct Part {
    weight_type: WeightType,
    row_bytes: usize,
    node: Node,
}

#[derive(Debug)]
enum Node {
    /// A tensor of the source.
    Tensor(String),
    /// One row.
    Constant(Vec<u8>),
    /// Groups of rows that repeat: slices, concatenations, interleaving and padding.
    Groups { parts: Vec<Part>, stretches: Vec<Stretch> },
    /// Rows in a given order.
    Permute { of: Box<Part>, rows: Vec<usize> },
    /// Rows are the columns of the part.
    Transpose(Box<Part>),
    /// Each row is made of these columns of the same row of each part. Parts of the format of the result are copied, which keeps
    /// blocks and groups; others are decoded.
    Columns(Vec<(Part, Range<usize>)>),
    /// Each row is so many rows of the part.
    Reshape { of: Box<Part>, joined: usize },
    /// Every element times the factor, rounded.
    Convert { of: Box<Part>, factor: Option<f32>, dtype: DType },
    /// Every column or every row times a factor of its own.
    Factors { of: Box<Part>, factors: Vec<f32>, rows: bool },
    /// Every row rounded to a quantised format.
    Quantise { of: Box<Part>, format: WeightFormat, search: bool },
}

/// Part of a group of rows. In group `g` it is rows `g * size + start .. g * size + start + take` of a part.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    /// The part; without one the rows are zero.
    part: Option<usize>,
    start: usize,
    take: usize,
    size: usize,
}

/// A run of rows of one part, or of zero rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    part: Option<usize>,
    first: usize,
    count: usize,
}

impl Part {
    fn compile(expr: &WeightExpr, tensor: &dyn Fn(&str) -> Result<WeightType>) -> Result<Self> {
        let weight_type = expr.infer(tensor)?;
        // Also proves that no later product of rows, columns and bytes overflows.
        weight_type.elements()?;
        weight_type.bytes()?;
        let row_bytes = weight_type.row_bytes()?;
        let part = |expr: &WeightExpr| Self::compile(expr, tensor);
        let node = match expr {
            WeightExpr::Tensor(name) => Node::Tensor(name.clone()),
            WeightExpr::Constant(values) => {
                Node::Constant(values.iter().flat_map(|value| value.to_le_bytes()).collect())
            }
            WeightExpr::Slice { of, dimension, start, end } => {
                let of = part(of)?;
                match rows_per_index(&of.weight_type, *dimension) {
                    None => Node::Columns(vec![(of, *start..*end)]),
                    Some(rows) => {
                        let size = of.weight_type.shape.get(*dimension).map_or(0, |size| size * rows);
                        let stretch =
                            Stretch { part: Some(0), start: start * rows, take: (end - start) * rows, size };
                        Node::Groups { parts: vec![of], stretches: vec![stretch] }
                    }
                }
            }
            WeightExpr::Concat { parts, dimension } => {
                let parts = parts.iter().map(part).collect::<Result<Vec<_>>>()?;
                match rows_per_index(&weight_type, *dimension) {
                    None => Node::Columns(parts.into_iter().map(whole_rows).collect()),
                    Some(rows) => {
                        let sizes = parts.iter().map(|part| part.weight_type.shape.get(*dimension));
                        let stretches = sizes.enumerate().map(|(index, size)| {
                            let size = size.map_or(0, |size| size * rows);
                            Stretch { part: Some(index), start: 0, take: size, size }
                        });
                        Node::Groups { stretches: stretches.collect(), parts }
                    }
                }
            }
            WeightExpr::Interleave { parts, block } => {
                let parts = parts.iter().map(part).collect::<Result<Vec<_>>>()?;
                let stretch = |index| Stretch { part: Some(index), start: 0, take: *block, size: *block };
                Node::Groups { stretches: (0..parts.len()).map(stretch).collect(), parts }
            }
            WeightExpr::Permute { of, rows } => Node::Permute { of: Box::new(part(of)?), rows: rows.clone() },
            WeightExpr::Transpose { of } => Node::Transpose(Box::new(part(of)?)),
            WeightExpr::Reshape { of, .. } => {
                let of = part(of)?;
                let joined = weight_type.columns() / of.weight_type.columns().max(1);
                Node::Reshape { of: Box::new(of), joined }
            }
            WeightExpr::Pad { of, before, after } => {
                let of = part(of)?;
                let rows = of.weight_type.rows();
                let zeros = |take: usize| Stretch { part: None, start: 0, take, size: take };
                let middle = Stretch { part: Some(0), start: 0, take: rows, size: rows };
                Node::Groups { parts: vec![of], stretches: vec![zeros(*before), middle, zeros(*after)] }
            }
            WeightExpr::Scale { of, factor } => {
                Node::Convert { of: Box::new(part(of)?), factor: Some(*factor), dtype: DType::F32 }
            }
            WeightExpr::Factors { of, factors, rows } => {
                Node::Factors { of: Box::new(part(of)?), factors: factors.clone(), rows: *rows }
            }
            WeightExpr::Quantise { of, format, search } => {
                Node::Quantise { of: Box::new(part(of)?), format: *format, search: *search }
            }
            WeightExpr::Cast { of, dtype } => {
                Node::Convert { of: Box::new(part(of)?), factor: None, dtype: *dtype }
            }
        };
        Ok(Self { weight_type, row_bytes, node })
    }

    /// This value in a dense format.
    fn converted(self, factor: Option<f32>, dtype: DType) -> Result<Self> {
        let weight_type =
            WeightType { format: WeightFormat::Dense(dtype), shape: self.weight_type.shape.clone() };
        weight_type.bytes()?;
        let row_bytes = weight_type.row_bytes()?;
        Ok(Self { weight_type, row_bytes, node: Node::Convert { of: Box::new(self), factor, dtype } })
    }

    fn read<'s>(&'s self, source: &'s dyn TensorSource, first: usize, count: usize) -> Result<Cow<'s, [u8]>> {
        let rows = self.weight_type.rows();
        if first.checked_add(count).is_none_or(|end| end > rows) {
            return Err(Error::invalid(format!(
                "rows {first}..{first}+{count} of a weight of {rows} rows asked for"
            )));
        }
        if self.row_bytes == 0 {
            // There may be any number of rows without columns; nothing below should count them.
            return Ok(Cow::Borrowed(&[]));
        }
        match &self.node {
            Node::Tensor(name) => source.rows(name, first, count),
            Node::Constant(bytes) => Ok(Cow::Borrowed(if count == 0 { &[] } else { bytes })),
            Node::Groups { parts, stretches } => {
                self.gather(source, parts, &group_segments(stretches, first, count))
            }
            Node::Permute { of, rows } => {
                let chosen = rows.get(first..first + count).unwrap_or_default();
                self.gather(source, std::slice::from_ref(&**of), &runs(chosen))
            }
            Node::Transpose(of) => self.transpose(source, of, first, count),
            Node::Columns(parts) => self.join_columns(source, parts, first, count),
            Node::Reshape { of, joined } => of.read(source, first * joined, count * joined),
            Node::Convert { of, factor, dtype } => {
                let (format, columns) = (of.weight_type.format, self.weight_type.columns());
                if factor.is_none() && format == self.weight_type.format {
                    return of.read(source, first, count);
                }
                self.each_row(source, of, first..first + count, |converter, _, row, out| {
                    converter.convert((format, row), columns, *factor, *dtype, out)
                })
            }
            Node::Factors { of, factors, rows } => {
                let columns = self.weight_type.columns();
                self.each_row(source, of, first..first + count, |converter, index, row, out| {
                    let values = converter.decode(of.weight_type.format, row, columns)?;
                    for (column, (value, out)) in values.iter().zip(out.as_chunks_mut().0).enumerate() {
                        // There are as many as rows or columns, or the type would not have been inferred.
                        let factor = factors.get(if *rows { index } else { column }).copied();
                        *out = (value * factor.unwrap_or(1.0)).to_le_bytes();
                    }
                    Ok(())
                })
            }
            Node::Quantise { of, format, search } => {
                let columns = self.weight_type.columns();
                self.each_row(source, of, first..first + count, |converter, _, row, out| {
                    let values = converter.decode(of.weight_type.format, row, columns)?;
                    format.quantise_row(values, *search, out)
                })
            }
        }
    }

    /// Makes rows of those of a part, on all cores: `row` is told the index of each.
    ///
    /// Each task reads its own rows of the part, which then stay in the cache of its core and in buffers that are used again.
    fn each_row<'s>(
        &self,
        source: &dyn TensorSource,
        of: &Self,
        rows: Range<usize>,
        row: impl Fn(&mut Converter, usize, &[u8], &mut [u8]) -> Result<()> + Sync,
    ) -> Result<Cow<'s, [u8]>> {
        if of.row_bytes == 0 {
            return Ok(Cow::Borrowed(&[]));
        }
        let task_rows = TASK_BYTES.div_ceil(of.row_bytes.max(self.row_bytes));
        // A transposed part reads all rows of its operand for every run of rows: one run, divided only afterwards.
        let run_rows = if of.transposes() { rows.len().max(1) } else { task_rows };
        let mut out = vec![0; rows.len() * self.row_bytes];
        let runs = out.par_chunks_mut(run_rows * self.row_bytes).enumerate();
        runs.try_for_each(|(run, out)| {
            let first = rows.start + run * run_rows;
            let bytes = of.read(source, first, run_rows.min(rows.end - first))?;
            let each = out.par_chunks_mut(self.row_bytes).zip(bytes.par_chunks(of.row_bytes)).enumerate();
            each.with_min_len(task_rows)
                .try_for_each_init(Converter::default, |converter, (index, (out, bytes))| {
                    row(converter, first + index, bytes, out)
                })
        })?;
        Ok(Cow::Owned(out))
    }

    /// Whether reading some rows of this part reads all rows of a matrix.
    fn transposes(&self) -> bool {
        match &self.node {
            Node::Tensor(_) | Node::Constant(_) => false,
            Node::Transpose(_) => true,
            Node::Groups { parts, .. } => parts.iter().any(Self::transposes),
            Node::Columns(parts) => parts.iter().any(|(part, _)| part.transposes()),
            Node::Permute { of, .. }
            | Node::Reshape { of, .. }
            | Node::Convert { of, .. }
            | Node::Factors { of, .. }
            | Node::Quantise { of, .. } => of.transposes(),
        }
    }

    /// Puts runs of rows of parts one behind the other, on all cores.
    fn gather<'s>(
        &self,
        source: &'s dyn TensorSource,
        parts: &'s [Self],
        segments: &[Segment],
    ) -> Result<Cow<'s, [u8]>> {
        let part =
            |index: usize| parts.get(index).ok_or_else(|| Error::internal("a weight lost one of its parts"));
        if let [Segment { part: Some(index), first, count }] = segments {
            return part(*index)?.read(source, *first, *count);
        }
        let rows: usize = segments.iter().map(|segment| segment.count).sum();
        // All zero bytes are zeros in every format: scales and minima are zero too.
        let mut out = vec![0; rows * self.row_bytes];
        let mut rest = out.as_mut_slice();
        let places = segments.iter().map(|segment| {
            let place = rest.split_off_mut(..segment.count * self.row_bytes).unwrap_or_default();
            (segment, place)
        });
        let places: Vec<_> = places.collect();
        let lost = || Error::internal("rows of a part are of another length");
        places.into_par_iter().try_for_each(|(segment, place)| {
            let Some(index) = segment.part else { return Ok(()) };
            let bytes = part(index)?.read(source, segment.first, segment.count)?;
            if bytes.len() != place.len() {
                return Err(lost());
            }
            place.copy_from_slice(&bytes);
            Ok(())
        })?;
        Ok(Cow::Owned(out))
    }

    fn join_columns<'s>(
        &self,
        source: &'s dyn TensorSource,
        parts: &'s [(Self, Range<usize>)],
        first: usize,
        count: usize,
    ) -> Result<Cow<'s, [u8]>> {
        let format = self.weight_type.format;
        let lost = || Error::internal("a cut through rows is outside its part");
        let of_part =
            parts.iter().map(|(part, columns)| Ok((part, columns, part.read(source, first, count)?)));
        let of_part = of_part.collect::<Result<Vec<_>>>()?;
        // One row of one part is one piece of the file.
        if let ([(part, columns, Cow::Borrowed(bytes))], 1, WeightFormat::Dense(dtype)) =
            (of_part.as_slice(), count, format)
            && part.weight_type.format == format
        {
            let piece = bytes.get(columns.start * dtype.bytes()..columns.end * dtype.bytes());
            return piece.map(Cow::Borrowed).ok_or_else(lost);
        }
        let mut out = Vec::with_capacity(count * self.row_bytes);
        let mut converter = Converter::default();
        for row in 0..count {
            for (part, columns, bytes) in &of_part {
                let row = bytes.get(row * part.row_bytes..(row + 1) * part.row_bytes).ok_or_else(lost)?;
                if part.weight_type.format == format {
                    format.copy_columns(row, part.weight_type.columns(), Range::clone(columns), &mut out)?;
                } else {
                    let (start, end, row) = covering(&part.weight_type, columns, row).ok_or_else(lost)?;
                    let values = converter.decode(part.weight_type.format, row, end - start)?;
                    let piece = values.get(columns.start - start..columns.end - start);
                    out.extend(piece.ok_or_else(lost)?.iter().flat_map(|value| value.to_le_bytes()));
                }
            }
        }
        Ok(Cow::Owned(out))
    }
}

/// How many rows one index of `dimension` spans; `None` for the last dimension, which runs along the rows.
fn rows_per_index(weight: &WeightType, dimension: usize) -> Option<usize> {
    let inner = weight.shape.get(dimension + 1..).filter(|inner| !inner.is_empty())?;
    Some(inner[..inner.len() - 1].iter().product())
}

fn whole_rows(part: Part) -> (Part, Range<usize>) {
    let columns = part.weight_type.columns();
    (part, 0..columns)
}

/// The rows of these bytes; none if rows are empty.
fn rows_of(bytes: &[u8], row_bytes: usize) -> std::slice::ChunksExact<'_, u8> {
    bytes.chunks_exact(row_bytes.max(1))
}

/// The smallest run of columns around `columns` that can be decoded by itself: its first column, the one after its last, its
/// bytes. Blocks stand one after the other; a row with scales in front is decoded as a whole.
fn covering<'a>(
    weight: &WeightType,
    columns: &Range<usize>,
    row: &'a [u8],
) -> Option<(usize, usize, &'a [u8])> {
    let elements = match weight.format {
        WeightFormat::Block(block) => block.elements(),
        WeightFormat::Group(_) => return Some((0, weight.columns(), row)),
        _ => 1,
    };
    let start = columns.start / elements * elements;
    let end = columns.end.checked_next_multiple_of(elements)?;
    Some((start, end, row.get(weight.format.row_bytes(start)?..weight.format.row_bytes(end)?)?))
}

/// The rows that rows `first .. first + count` of repeated groups are made of.
fn group_segments(stretches: &[Stretch], first: usize, count: usize) -> Vec<Segment> {
    let group_rows: usize = stretches.iter().map(|stretch| stretch.take).sum();
    let mut segments: Vec<Segment> = Vec::new();
    let (mut row, end) = (first, first + count);
    while row < end && group_rows > 0 {
        let (group, mut within) = (row / group_rows, row % group_rows);
        for stretch in stretches {
            if within >= stretch.take {
                within -= stretch.take;
                continue;
            }
            let count = (stretch.take - within).min(end - row);
            if count == 0 {
                break;
            }
            push(
                &mut segments,
                Segment { part: stretch.part, first: group * stretch.size + stretch.start + within, count },
            );
            row += count;
            within = 0;
        }
    }
    segments
}

/// The runs of consecutive rows among these.
fn runs(rows: &[usize]) -> Vec<Segment> {
    let mut segments = Vec::new();
    for row in rows {
        push(&mut segments, Segment { part: Some(0), first: *row, count: 1 });
    }
    segments
}

/// Adds a segment, to the last one if it goes on there.
fn push(segments: &mut Vec<Segment>, next: Segment) {
    match segments.last_mut() {
        Some(last)
            if last.part == next.part && (last.part.is_none() || last.first + last.count == next.first) =>
        {
            last.count += next.count;
        }
        _ => segments.push(next),
    }
}

#[cfg(test)]
mod tests;
