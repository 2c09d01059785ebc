//! Weights as expressions over the tensors of a model file.
//!
//! A model defines a weight by a [`WeightExpr`] ("rows 0..512 of this tensor", "these three concatenated"), independently of
//! its storage. Expressions are evaluated lazily, a few rows at a time, and streamed into the backend's `prepack`, so that no
//! rank reads or holds more of the file than its own part.

use crate::{DType, Error, Result, WeightFormat};
use std::borrow::Cow;

/// The shape and storage format of a weight.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WeightType {
    /// The storage format.
    pub format: WeightFormat,
    /// The sizes, outermost first. A weight has one or two dimensions; a matrix is `[outputs, inputs]`.
    pub shape: Vec<usize>,
}

impl WeightType {
    /// The number of rows; a vector is one row. An overflow saturates, and is then an error of [`Self::bytes`].
    pub fn rows(&self) -> usize {
        self.checked_rows().unwrap_or(usize::MAX)
    }

    fn checked_rows(&self) -> Option<usize> {
        let outer = self.shape.split_last().map_or(&[][..], |(_, outer)| outer);
        outer.iter().try_fold(1usize, |product, size| product.checked_mul(*size))
    }

    /// The number of elements of a row.
    pub fn columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// The number of elements.
    ///
    /// # Errors
    /// If the product overflows.
    pub fn elements(&self) -> Result<usize> {
        let product = self.shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
        product.ok_or_else(|| Error::invalid(format!("{:?} elements overflow", self.shape)).field("shape"))
    }

    /// The number of bytes of a row.
    ///
    /// # Errors
    /// If a row is not a whole number of blocks or groups of the format, or overflows.
    pub fn row_bytes(&self) -> Result<usize> {
        self.format.row_bytes(self.columns()).ok_or_else(|| {
            let message = format!("{} columns cannot be stored as {}", self.columns(), self.format);
            Error::invalid(message).field("shape")
        })
    }

    /// The number of bytes of the weight.
    ///
    /// # Errors
    /// As [`Self::row_bytes`], or if the product overflows.
    pub fn bytes(&self) -> Result<usize> {
        let row_bytes = self.row_bytes()?;
        let bytes = self.checked_rows().and_then(|rows| rows.checked_mul(row_bytes));
        bytes.ok_or_else(|| Error::invalid(format!("{:?} bytes overflow", self.shape)).field("shape"))
    }
}

/// The definition of a weight in terms of the tensors of the model file.
#[derive(Clone, Debug, PartialEq)]
pub enum WeightExpr {
    /// The tensor of this name.
    Tensor(String),
    /// A constant vector that the model computes from its configuration, for example rotary frequencies.
    Constant(Vec<f32>),
    /// Elements `start..end` along `dimension`.
    Slice {
        /// The operand.
        of: Box<Self>,
        /// The dimension; 0 is the outermost.
        dimension: usize,
        /// The first element of the slice.
        start: usize,
        /// The end of the slice, exclusive.
        end: usize,
    },
    /// The parts concatenated along `dimension`.
    Concat {
        /// The parts, which have equal sizes in the other dimensions.
        parts: Vec<Self>,
        /// The dimension; 0 is the outermost.
        dimension: usize,
    },
    /// Blocks of `block` rows of all parts in turn: block 0 of every part, block 1 of every part, ..
    Interleave {
        /// The parts, which have the same shape.
        parts: Vec<Self>,
        /// The number of rows of a block; it divides the number of rows of a part.
        block: usize,
    },
    /// Row `i` of the result is row `rows[i]` of the operand.
    Permute {
        /// The operand.
        of: Box<Self>,
        /// The row of the operand for each row of the result.
        rows: Vec<usize>,
    },
    /// The transpose of a matrix (some files store a matrix as `[inputs, outputs]`).
    Transpose {
        /// The operand.
        of: Box<Self>,
    },
    /// The same elements in the same order in another shape, whose rows are whole numbers of rows of the operand.
    ///
    /// It makes a matrix of a tensor with more dimensions, and rows of several rows.
    Reshape {
        /// The operand.
        of: Box<Self>,
        /// The shape of the result, of one or two dimensions.
        shape: Vec<usize>,
    },
    /// Every element times `factor`; the result is dense f32.
    Scale {
        /// The operand.
        of: Box<Self>,
        /// The factor.
        factor: f32,
    },
    /// Every element rounded to `dtype`.
    Cast {
        /// The operand.
        of: Box<Self>,
        /// The element type of the result.
        dtype: DType,
    },
    /// Every column, or every row, times its own factor; the result is dense f32.
    Factors {
        /// The operand; a vector is one row.
        of: Box<Self>,
        /// One factor for each column, or for each row.
        factors: Vec<f32>,
        /// Whether the factors are those of rows.
        rows: bool,
    },
    /// Every row rounded with [`WeightFormat::quantise_row`].
    Quantise {
        /// The operand.
        of: Box<Self>,
        /// The format of the result: a group format, or MXFP4.
        format: WeightFormat,
        /// Whether to search for the scales of least squared error.
        search: bool,
    },
    /// The operand with `before` zero rows before and `after` zero rows after it.
    Pad {
        /// The operand.
        of: Box<Self>,
        /// The number of zero rows before the operand.
        before: usize,
        /// The number of zero rows after the operand.
        after: usize,
    },
}

impl WeightExpr {
    /// The tensor of this name.
    pub fn tensor(name: impl Into<String>) -> Self {
        Self::Tensor(name.into())
    }

    /// The names of the tensors that the expression reads, in order, with duplicates.
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
            | Self::Reshape { of, .. }
            | Self::Scale { of, .. }
            | Self::Cast { of, .. }
            | Self::Factors { of, .. }
            | Self::Quantise { of, .. }
            | Self::Pad { of, .. } => of.tensors(),
        }
    }

    /// The type of the expression's value, given the types of the file's tensors.
    ///
    /// Row-wise expressions (slices, concatenations, permutations of rows) keep the storage format, and so do slices of columns
    /// that are whole blocks or groups. Those that split a block or group or change values yield dense f32, except that part of a
    /// row of a dense weight keeps its element type.
    ///
    /// # Errors
    /// If a tensor is unknown, shapes do not fit, or an index is out of range.
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
                    return Err(Error::invalid(format!(
                        "slice {start}..{end} exceeds a dimension of {size}"
                    )));
                }
                if *dimension + 1 == inner.shape.len() && !inner.format.holds_columns(size, *start..*end) {
                    inner.format = cut_format(inner.format);
                }
                inner.shape[*dimension] = end - start;
                Ok(inner)
            }
            Self::Concat { parts, dimension } => {
                let mut types = parts.iter().map(|part| part.infer(tensor)).collect::<Result<Vec<_>>>()?;
                let mut first = types.pop().ok_or_else(|| Error::invalid("concat has no parts"))?;
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
                        let message = format!("concat of different types: {other:?} and {first:?}");
                        return Err(Error::invalid(message));
                    }
                    first.shape[*dimension] = add(first.shape[*dimension], size)?;
                }
                Ok(first)
            }
            Self::Interleave { parts, block } => {
                let types = parts.iter().map(|part| part.infer(tensor)).collect::<Result<Vec<_>>>()?;
                let mut first =
                    types.first().cloned().ok_or_else(|| Error::invalid("interleave has no parts"))?;
                if types.iter().any(|other| *other != first) {
                    return Err(Error::invalid(format!("interleave of different types: {types:?}")));
                }
                let rows = matrix_rows(&first, "interleave")?;
                if *block == 0 || !rows.is_multiple_of(*block) {
                    return Err(Error::invalid(format!(
                        "interleave of {rows} rows, which are not a multiple of the block of {block}"
                    )));
                }
                let all = rows.checked_mul(parts.len());
                first.shape[0] = all.ok_or_else(|| Error::invalid("the rows of interleave overflow"))?;
                Ok(first)
            }
            Self::Permute { of, rows } => {
                let mut inner = of.infer(tensor)?;
                let size = matrix_rows(&inner, "permute")?;
                if let Some(outside) = rows.iter().find(|row| **row >= size) {
                    return Err(Error::invalid(format!("permute reads row {outside} of {size} rows")));
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
            Self::Reshape { of, shape } => {
                let inner = of.infer(tensor)?;
                let reshaped = WeightType { format: inner.format, shape: shape.clone() };
                let (columns, inner_columns) = (reshaped.columns(), inner.columns());
                let joined = inner_columns > 0 && columns.is_multiple_of(inner_columns);
                // A row of a group format has its scales in one place, so two rows are not one.
                let joins_groups = columns != inner_columns && matches!(inner.format, WeightFormat::Group(_));
                if !(1..=2).contains(&shape.len())
                    || !joined
                    || joins_groups
                    || reshaped.elements()? != inner.elements()?
                {
                    let message = format!(
                        "reshape of {:?} {} elements to {shape:?}: rows must be whole rows",
                        inner.shape, inner.format
                    );
                    return Err(Error::invalid(message));
                }
                Ok(reshaped)
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
                if !format.can_quantise() {
                    return Err(Error::unsupported(format!("weights cannot be rounded to {format}")));
                }
                if format.row_bytes(inner.columns()).is_none() {
                    let message = format!("{} columns cannot be quantised to {format}", inner.columns());
                    return Err(Error::invalid(message));
                }
                Ok(WeightType { format: *format, ..inner })
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
    a.checked_add(b).ok_or_else(|| Error::invalid("the size of a weight overflows"))
}

fn dimension_of(weight: &WeightType, dimension: usize, what: &str) -> Result<usize> {
    weight.shape.get(dimension).copied().ok_or_else(|| {
        Error::invalid(format!(
            "{what} along dimension {dimension}, which a weight of shape {:?} does not have",
            weight.shape
        ))
    })
}

fn matrix_rows(weight: &WeightType, what: &str) -> Result<usize> {
    match weight.shape.as_slice() {
        [rows, _] => Ok(*rows),
        shape => Err(Error::invalid(format!("{what} needs a matrix, not shape {shape:?}"))),
    }
}

/// The format of a part of a row that splits blocks or groups: these are decoded.
fn cut_format(format: WeightFormat) -> WeightFormat {
    match format {
        WeightFormat::Dense(dtype) => WeightFormat::Dense(dtype),
        WeightFormat::Block(_) | WeightFormat::Group(_) => WeightFormat::Dense(DType::F32),
    }
}

/// The source of a weight's rows for a backend's `prepack`, which need not hold them all at once.
///
/// Rows are in the canonical layout of the [`WeightFormat`]: consecutive, without padding, little-endian.
pub trait WeightReader {
    /// The shape and format of the rows.
    fn weight_type(&self) -> &WeightType;

    /// The bytes of rows `first .. first + count`.
    ///
    /// # Errors
    /// If the rows are out of range, or the file cannot be read.
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
    /// A reader of the rows of a weight of this type in `bytes`.
    ///
    /// # Errors
    /// If the length of `bytes` is not that of the type.
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
            Error::invalid(format!(
                "rows {first}..+{count} exceed a weight of {} rows",
                self.weight_type.rows()
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlockFormat, GroupFormat};

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
    fn parts_of_rows_decode_blocks_and_keep_dense_types() {
        for (name, format) in [("blocks", DType::F32), ("dense", DType::BF16)] {
            let expr = WeightExpr::Slice { of: boxed(name), dimension: 1, start: 5, end: 7 };
            let expected = WeightType { format: WeightFormat::Dense(format), shape: vec![8, 2] };
            assert_eq!(expr.infer(&file).unwrap(), expected);
        }
    }

    #[test]
    fn slices_of_whole_blocks_keep_the_format() {
        let format = |start, end| {
            let expr = WeightExpr::Slice { of: boxed("blocks"), dimension: 1, start, end };
            expr.infer(&file).unwrap().format
        };
        let (blocks, decoded) = (WeightFormat::Block(BlockFormat::Q4_1), WeightFormat::Dense(DType::F32));
        assert_eq!([format(0, 32), format(32, 64), format(0, 64)], [blocks; 3]);
        assert_eq!([format(0, 31), format(16, 64), format(1, 33)], [decoded; 3]);
    }

    #[test]
    fn transposing_swaps_sizes_and_decodes_blocks() {
        for (name, format) in [("blocks", DType::F32), ("dense", DType::BF16)] {
            let expected = WeightType { format: WeightFormat::Dense(format), shape: vec![64, 8] };
            assert_eq!(WeightExpr::Transpose { of: boxed(name) }.infer(&file).unwrap(), expected);
        }
    }

    #[test]
    fn factors_and_quantisation_check_their_sizes() {
        let of_columns = WeightExpr::Factors { of: boxed("blocks"), factors: vec![2.0; 64], rows: false };
        let of_rows = WeightExpr::Factors { of: Box::new(of_columns), factors: vec![2.0; 8], rows: true };
        let format = WeightFormat::from_name("int4g32_f16").unwrap();
        let quantised = WeightExpr::Quantise { of: Box::new(of_rows.clone()), format, search: true };
        assert_eq!(of_rows.infer(&file).unwrap().format, WeightFormat::Dense(DType::F32));
        let inferred = quantised.infer(&file).unwrap();
        assert_eq!(inferred, WeightType { format, shape: vec![8, 64] });

        let few = WeightExpr::Factors { of: boxed("dense"), factors: vec![1.0; 8], rows: false };
        assert!(few.infer(&file).unwrap_err().to_string().contains("8 factors for 64 columns"));
        let format = WeightFormat::from_name("int4g128").unwrap();
        let wide = WeightExpr::Quantise { of: boxed("dense"), format, search: false };
        assert!(
            wide.infer(&file).unwrap_err().to_string().contains("64 columns cannot be quantised to int4g128")
        );
        let int8 = WeightFormat::Group(GroupFormat::INT8);
        let vector = WeightExpr::Quantise { of: boxed("vector"), format: int8, search: false };
        assert!(vector.infer(&file).is_err());
        let of_dense = |format: BlockFormat| {
            let format = WeightFormat::Block(format);
            WeightExpr::Quantise { of: boxed("dense"), format, search: true }.infer(&file)
        };
        assert_eq!(of_dense(BlockFormat::Mxfp4).unwrap().format.to_string(), "mxfp4");
        let error = of_dense(BlockFormat::Q4_0).unwrap_err().to_string();
        assert!(error.contains("weights cannot be rounded to q4_0"), "{error}");
    }

    #[test]
    fn invalid_expressions_are_refused() {
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
    fn bytes_reader_refuses_rows_out_of_range() {
        let weight_type = WeightType { format: WeightFormat::Dense(DType::F16), shape: vec![3, 2] };
        let bytes: Vec<u8> = (0..12).collect();
        let mut reader = BytesReader::new(weight_type.clone(), bytes.as_slice()).unwrap();
        assert_eq!(&*reader.rows(1, 2).unwrap(), &bytes[4..]);
        assert!(reader.rows(2, 2).is_err());
        assert!(reader.rows(usize::MAX, 2).is_err());
        assert!(BytesReader::new(weight_type, &bytes[1..]).is_err());
    }
}
