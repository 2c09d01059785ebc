//! Weights as expressions over the tensors of a model file.
//!
//! A model says what a weight *is* ([`WeightExpr`]: "rows 0..512 of this tensor", "these three on top of each other"),
//! never how it is stored. Expressions are evaluated lazily, a few rows at a time, and streamed into the backend's
//! `prepack`, so that no rank ever reads or holds more of the file than its own part.

use crate::{DType, Error, GroupFormat, Result, WeightFormat};
use std::borrow::Cow;

/// Shape and storage format of a weight.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WeightType {
    /// How elements are stored.
    pub format: WeightFormat,
    /// Sizes, outermost first. One or two dimensions; a matrix is `[outputs, inputs]`.
    pub shape: Vec<usize>,
}

impl WeightType {
    /// Rows of the matrix; a vector is one row. Saturates: a shape that overflows has no [`Self::bytes`].
    pub fn rows(&self) -> usize {
        self.checked_rows().unwrap_or(usize::MAX)
    }

    fn checked_rows(&self) -> Option<usize> {
        let outer = self.shape.split_last().map_or(&[][..], |(_, outer)| outer);
        outer.iter().try_fold(1usize, |product, size| product.checked_mul(*size))
    }

    /// Elements of a row.
    pub fn columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Elements in all.
    ///
    /// # Errors
    /// If the product overflows.
    pub fn elements(&self) -> Result<usize> {
        let product = self.shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
        product.ok_or_else(|| Error::invalid(format!("{:?} elements overflow", self.shape)).field("shape"))
    }

    /// Bytes of one row.
    ///
    /// # Errors
    /// If a row is no whole number of blocks or groups of the format, or overflows.
    pub fn row_bytes(&self) -> Result<usize> {
        self.format.row_bytes(self.columns()).ok_or_else(|| {
            let message = format!("{} columns cannot be stored as {}", self.columns(), self.format);
            Error::invalid(message).field("shape")
        })
    }

    /// Bytes of the whole weight.
    ///
    /// # Errors
    /// As [`Self::row_bytes`], or if the product overflows.
    pub fn bytes(&self) -> Result<usize> {
        let row_bytes = self.row_bytes()?;
        let bytes = self.checked_rows().and_then(|rows| rows.checked_mul(row_bytes));
        bytes.ok_or_else(|| Error::invalid(format!("{:?} bytes overflow", self.shape)).field("shape"))
    }
}

/// What a weight is, in terms of the tensors of the model file.
#[derive(Clone, Debug, PartialEq)]
pub enum WeightExpr {
    /// The tensor of this name.
    Tensor(String),
    /// A constant the model computed from its configuration (for example rotary frequencies): a vector.
    Constant(Vec<f32>),
    /// Elements `start..end` along `dimension`.
    Slice {
        /// What is sliced.
        of: Box<Self>,
        /// The dimension, 0 is the outermost.
        dimension: usize,
        /// First element taken.
        start: usize,
        /// First element not taken any more.
        end: usize,
    },
    /// The parts one after the other along `dimension`.
    Concat {
        /// The parts; all other dimensions are equal.
        parts: Vec<Self>,
        /// The dimension, 0 is the outermost.
        dimension: usize,
    },
    /// Blocks of `block` rows taken from each part in turn: block 0 of every part, block 1 of every part, ..
    Interleave {
        /// The parts; all of the same shape.
        parts: Vec<Self>,
        /// Rows taken at a time; divides the number of rows.
        block: usize,
    },
    /// Row `i` of the result is row `rows[i]` of the operand.
    Permute {
        /// What is permuted.
        of: Box<Self>,
        /// For each row of the result, the row it is taken from.
        rows: Vec<usize>,
    },
    /// Rows and columns of a matrix exchanged (some files store a matrix as `[inputs, outputs]`).
    Transpose {
        /// The matrix.
        of: Box<Self>,
    },
    /// Every element times `factor`; the result is dense f32.
    Scale {
        /// What is scaled.
        of: Box<Self>,
        /// The factor.
        factor: f32,
    },
    /// Every element rounded to `dtype`.
    Cast {
        /// What is cast.
        of: Box<Self>,
        /// The element type of the result.
        dtype: DType,
    },
    /// Every column, or every row, times a factor of its own; the result is dense f32.
    Factors {
        /// What is scaled; a vector is one row.
        of: Box<Self>,
        /// As many as there are columns, or rows.
        factors: Vec<f32>,
        /// Whether they are the rows'.
        rows: bool,
    },
    /// Every row rounded to a group format, as [`GroupFormat::quantise_row`] does it.
    Quantise {
        /// What is rounded.
        of: Box<Self>,
        /// The format of the result.
        format: GroupFormat,
        /// Whether scales with less error than those that span a group are searched for.
        search: bool,
    },
    /// `before` and `after` zero rows around the operand.
    Pad {
        /// What is padded.
        of: Box<Self>,
        /// Zero rows in front.
        before: usize,
        /// Zero rows behind.
        after: usize,
    },
}

impl WeightExpr {
    /// The tensor of this name.
    pub fn tensor(name: impl Into<String>) -> Self {
        Self::Tensor(name.into())
    }

    /// The names of all tensors the expression reads, in order, with repeats.
    pub fn tensors(&self) -> Vec<&str> {
        match self {
            Self::Tensor(name) => vec![name],
            Self::Constant(_) => vec![],
            Self::Concat { parts, .. } | Self::Interleave { parts, .. } => {
                parts.iter().flat_map(Self::tensors).collect()
            }
            Self::Slice { of, .. }
            | Self::Permute { of, .. }
            | Self::Transpose { of }
            | Self::Scale { of, .. }
            | Self::Cast { of, .. }
            | Self::Factors { of, .. }
            | Self::Quantise { of, .. }
            | Self::Pad { of, .. } => of.tensors(),
        }
    }

    /// The type of the expression's value, given the types of the file's tensors.
    ///
    /// Row-wise expressions (slices, concatenations, permutations of rows) keep the storage format; those that cut
    /// through rows or change values yield dense f32, except that a cut of a dense weight keeps its element type.
    ///
    /// # Errors
    /// If a tensor is unknown, shapes do not fit, or an index is outside.
    pub fn infer(&self, tensor: &dyn Fn(&str) -> Result<WeightType>) -> Result<WeightType> {
        match self {
            Self::Tensor(name) => tensor(name),
            Self::Constant(values) => {
                Ok(WeightType { format: WeightFormat::Dense(DType::F32), shape: vec![values.len()] })
            }
            Self::Slice { of, dimension, start, end } => {
                let mut inner = of.infer(tensor)?;
                let size = dimension_of(&inner, *dimension, "slice")?;
                if start > end || *end > size {
                    return Err(Error::invalid(format!("slice {start}..{end} of a dimension of {size}")));
                }
                if *dimension + 1 == inner.shape.len() {
                    inner.format = cut_format(inner.format);
                }
                inner.shape[*dimension] = end - start;
                Ok(inner)
            }
            Self::Concat { parts, dimension } => {
                let mut types = parts.iter().map(|part| part.infer(tensor)).collect::<Result<Vec<_>>>()?;
                let mut first = types.pop().ok_or_else(|| Error::invalid("concat of nothing"))?;
                dimension_of(&first, *dimension, "concat")?;
                if *dimension + 1 == first.shape.len() {
                    first.format = cut_format(first.format);
                }
                for mut other in types {
                    let size = dimension_of(&other, *dimension, "concat")?;
                    if *dimension + 1 == other.shape.len() {
                        other.format = cut_format(other.format);
                    }
                    other.shape[*dimension] = first.shape[*dimension];
                    if other != first {
                        let message = format!("concat of unlike parts: {other:?} and {first:?}");
                        return Err(Error::invalid(message));
                    }
                    first.shape[*dimension] = add(first.shape[*dimension], size)?;
                }
                Ok(first)
            }
            Self::Interleave { parts, block } => {
                let types = parts.iter().map(|part| part.infer(tensor)).collect::<Result<Vec<_>>>()?;
                let mut first =
                    types.first().cloned().ok_or_else(|| Error::invalid("interleave of nothing"))?;
                if types.iter().any(|other| *other != first) {
                    return Err(Error::invalid(format!("interleave of unlike parts: {types:?}")));
                }
                let rows = matrix_rows(&first, "interleave")?;
                if *block == 0 || !rows.is_multiple_of(*block) {
                    return Err(Error::invalid(format!("interleave of {rows} rows in blocks of {block}")));
                }
                let all = rows.checked_mul(parts.len());
                first.shape[0] = all.ok_or_else(|| Error::invalid("interleave overflows"))?;
                Ok(first)
            }
            Self::Permute { of, rows } => {
                let mut inner = of.infer(tensor)?;
                let size = matrix_rows(&inner, "permute")?;
                if let Some(outside) = rows.iter().find(|row| **row >= size) {
                    return Err(Error::invalid(format!("permute takes row {outside} of {size}")));
                }
                inner.shape[0] = rows.len();
                Ok(inner)
            }
            Self::Transpose { of } => {
                let mut inner = of.infer(tensor)?;
                matrix_rows(&inner, "transpose")?;
                inner.format = cut_format(inner.format);
                inner.shape.reverse();
                Ok(inner)
            }
            Self::Scale { of, .. } => {
                Ok(WeightType { format: WeightFormat::Dense(DType::F32), ..of.infer(tensor)? })
            }
            Self::Cast { of, dtype } => {
                if !dtype.is_float() {
                    return Err(Error::unsupported(format!("weights cannot be cast to {dtype}")));
                }
                Ok(WeightType { format: WeightFormat::Dense(*dtype), ..of.infer(tensor)? })
            }
            Self::Factors { of, factors, rows } => {
                let inner = of.infer(tensor)?;
                let (what, count) = if *rows { ("rows", inner.rows()) } else { ("columns", inner.columns()) };
                if factors.len() != count {
                    return Err(Error::invalid(format!("{} factors for {count} {what}", factors.len())));
                }
                Ok(WeightType { format: WeightFormat::Dense(DType::F32), ..inner })
            }
            Self::Quantise { of, format, .. } => {
                let inner = of.infer(tensor)?;
                matrix_rows(&inner, "quantise")?;
                if format.row(inner.columns()).is_none() {
                    let message = format!("{} columns cannot be quantised to {format}", inner.columns());
                    return Err(Error::invalid(message));
                }
                Ok(WeightType { format: WeightFormat::Group(*format), ..inner })
            }
            Self::Pad { of, before, after } => {
                let mut inner = of.infer(tensor)?;
                let rows = matrix_rows(&inner, "pad")?;
                inner.shape[0] = add(add(rows, *before)?, *after)?;
                Ok(inner)
            }
        }
    }
}

fn add(a: usize, b: usize) -> Result<usize> {
    a.checked_add(b).ok_or_else(|| Error::invalid("size overflows"))
}

fn dimension_of(weight: &WeightType, dimension: usize, what: &str) -> Result<usize> {
    weight.shape.get(dimension).copied().ok_or_else(|| {
        Error::invalid(format!("{what} along dimension {dimension} of a weight of shape {:?}", weight.shape))
    })
}

fn matrix_rows(weight: &WeightType, what: &str) -> Result<usize> {
    match weight.shape.as_slice() {
        [rows, _] => Ok(*rows),
        shape => Err(Error::invalid(format!("{what} needs a matrix, not shape {shape:?}"))),
    }
}

/// The format of part of a row: blocks and groups cannot be cut, so they are decoded.
fn cut_format(format: WeightFormat) -> WeightFormat {
    match format {
        WeightFormat::Dense(dtype) => WeightFormat::Dense(dtype),
        WeightFormat::Block(_) | WeightFormat::Group(_) => WeightFormat::Dense(DType::F32),
    }
}

/// A weight's rows, read from front to back or in any order, without ever holding them all.
///
/// This is what a backend's `prepack` is given. Rows are in the canonical layout of the [`WeightFormat`]: one after the
/// other, nothing between them, little-endian.
pub trait WeightReader {
    /// Shape and format of the rows that come.
    fn weight_type(&self) -> &WeightType;

    /// The bytes of rows `first .. first + count`.
    ///
    /// # Errors
    /// If the rows are outside, or the file cannot be read.
    fn rows(&mut self, first: usize, count: usize) -> Result<Cow<'_, [u8]>>;
}

/// A [`WeightReader`] over bytes in memory.
#[derive(Debug)]
pub struct BytesReader<'a> {
    weight_type: WeightType,
    row_bytes: usize,
    bytes: Cow<'a, [u8]>,
}

impl<'a> BytesReader<'a> {
    /// Reads the rows of a weight of this type from `bytes`.
    ///
    /// # Errors
    /// If `bytes` is not as long as the type says.
    pub fn new(weight_type: WeightType, bytes: impl Into<Cow<'a, [u8]>>) -> Result<Self> {
        let (bytes, row_bytes) = (bytes.into(), weight_type.row_bytes()?);
        if weight_type.bytes()? != bytes.len() {
            let message = format!("{weight_type:?} is {} bytes, not {}", weight_type.bytes()?, bytes.len());
            return Err(Error::invalid(message));
        }
        Ok(Self { weight_type, row_bytes, bytes })
    }
}

impl WeightReader for BytesReader<'_> {
    fn weight_type(&self) -> &WeightType {
        &self.weight_type
    }

    fn rows(&mut self, first: usize, count: usize) -> Result<Cow<'_, [u8]>> {
        let range = first.checked_mul(self.row_bytes).zip(count.checked_mul(self.row_bytes));
        let bytes = range.and_then(|(start, length)| self.bytes.get(start..start.checked_add(length)?));
        bytes.map(Cow::Borrowed).ok_or_else(|| {
            Error::invalid(format!("rows {first}..+{count} of {} asked for", self.weight_type.rows()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BlockFormat;

    fn file(name: &str) -> Result<WeightType> {
        let (format, shape) = match name {
            "dense" => (WeightFormat::Dense(DType::BF16), vec![8, 64]),
            "blocks" => (WeightFormat::Block(BlockFormat::Q4_1), vec![8, 64]),
            "vector" => (WeightFormat::Dense(DType::F32), vec![8]),
            _ => return Err(Error::invalid(format!("no tensor {name}"))),
        };
        Ok(WeightType { format, shape })
    }

    fn boxed(name: &str) -> Box<WeightExpr> {
        Box::new(WeightExpr::tensor(name))
    }

    #[test]
    fn row_wise_expressions_keep_the_format() {
        let slice = WeightExpr::Slice { of: boxed("blocks"), dimension: 0, start: 2, end: 6 };
        let expr = WeightExpr::Concat { parts: vec![slice, WeightExpr::tensor("blocks")], dimension: 0 };
        let inferred = expr.infer(&file).unwrap();
        assert_eq!(
            inferred,
            WeightType { format: WeightFormat::Block(BlockFormat::Q4_1), shape: vec![12, 64] }
        );
        assert_eq!(expr.tensors(), ["blocks", "blocks"]);
    }

    #[test]
    fn cuts_through_rows_decode_blocks_only() {
        for (name, format) in [("blocks", DType::F32), ("dense", DType::BF16)] {
            let expr = WeightExpr::Slice { of: boxed(name), dimension: 1, start: 5, end: 7 };
            let expected = WeightType { format: WeightFormat::Dense(format), shape: vec![8, 2] };
            assert_eq!(expr.infer(&file).unwrap(), expected);
        }
    }

    #[test]
    fn transposing_exchanges_sizes_and_decodes_blocks() {
        for (name, format) in [("blocks", DType::F32), ("dense", DType::BF16)] {
            let expected = WeightType { format: WeightFormat::Dense(format), shape: vec![64, 8] };
            assert_eq!(WeightExpr::Transpose { of: boxed(name) }.infer(&file).unwrap(), expected);
        }
    }

    #[test]
    fn factors_and_rounding_say_what_comes_of_them() {
        let of_columns = WeightExpr::Factors { of: boxed("blocks"), factors: vec![2.0; 64], rows: false };
        let of_rows = WeightExpr::Factors { of: Box::new(of_columns), factors: vec![2.0; 8], rows: true };
        let format = GroupFormat::from_name("int4g32_f16").unwrap();
        let quantised = WeightExpr::Quantise { of: Box::new(of_rows.clone()), format, search: true };
        assert_eq!(of_rows.infer(&file).unwrap().format, WeightFormat::Dense(DType::F32));
        let inferred = quantised.infer(&file).unwrap();
        assert_eq!(inferred, WeightType { format: WeightFormat::Group(format), shape: vec![8, 64] });

        let few = WeightExpr::Factors { of: boxed("dense"), factors: vec![1.0; 8], rows: false };
        assert!(few.infer(&file).unwrap_err().to_string().contains("8 factors for 64 columns"));
        let format = GroupFormat::from_name("int4g128").unwrap();
        let wide = WeightExpr::Quantise { of: boxed("dense"), format, search: false };
        assert!(
            wide.infer(&file).unwrap_err().to_string().contains("64 columns cannot be quantised to int4g128")
        );
        let vector = WeightExpr::Quantise { of: boxed("vector"), format: GroupFormat::INT8, search: false };
        assert!(vector.infer(&file).is_err());
    }

    #[test]
    fn bad_expressions_are_refused() {
        let bad = [
            WeightExpr::tensor("missing"),
            WeightExpr::Slice { of: boxed("dense"), dimension: 0, start: 3, end: 9 },
            WeightExpr::Slice { of: boxed("dense"), dimension: 2, start: 0, end: 1 },
            WeightExpr::Concat { parts: vec![], dimension: 0 },
            WeightExpr::Concat { parts: vec![*boxed("dense"), *boxed("blocks")], dimension: 0 },
            WeightExpr::Interleave { parts: vec![*boxed("dense")], block: 3 },
            WeightExpr::Permute { of: boxed("dense"), rows: vec![8] },
            WeightExpr::Permute { of: boxed("vector"), rows: vec![0] },
            WeightExpr::Transpose { of: boxed("vector") },
            WeightExpr::Cast { of: boxed("dense"), dtype: DType::I32 },
            WeightExpr::Pad { of: boxed("dense"), before: usize::MAX, after: 0 },
        ];
        for expr in bad {
            assert!(expr.infer(&file).is_err(), "{expr:?}");
        }
    }

    #[test]
    fn bytes_reader_stays_inside() {
        let weight_type = WeightType { format: WeightFormat::Dense(DType::F16), shape: vec![3, 2] };
        let bytes: Vec<u8> = (0..12).collect();
        let mut reader = BytesReader::new(weight_type.clone(), bytes.as_slice()).unwrap();
        assert_eq!(&*reader.rows(1, 2).unwrap(), &bytes[4..]);
        assert!(reader.rows(2, 2).is_err());
        assert!(reader.rows(usize::MAX, 2).is_err());
        assert!(BytesReader::new(weight_type, &bytes[1..]).is_err());
    }
}
