//! Tensors made up from a seed: for benchmarks and tests of models whose files are not at hand.
//!
//! Every element is a function of the seed, the tensor's name and the element's index alone, so rows can be made in
//! any order, by any number of threads, and every rank makes the same model.
//!
//! # Distribution
//!
//! Word `i` of a tensor is output `i` of the generator SplitMix64 (Steele, Lea and Flood, 2014) started at a hash of
//! seed and name. Dense and `q8_0` elements take half a word each: the sum of its four bytes, which is bell-shaped
//! (Irwin-Hall with n = 4), is centred and scaled to the wanted mean and standard deviation. Nothing lies further than
//! 3.45 standard deviations from the mean. Four-bit elements take a nibble each, uniform over 1..=15 except that 8, the
//! middle, comes twice as often; all blocks of a tensor have the same scale.

use super::{TensorSource, row_range};
use dsrun_core::{BlockFormat, DType, Error, Result, WeightFormat, WeightType};
use half::{bf16, f16};
use rayon::{iter::IndexedParallelIterator, iter::ParallelIterator, slice::ParallelSliceMut};
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use std::collections::HashMap;

/// Mean of the sum of four bytes.
const SUM_MEAN: i32 = 510;
/// Standard deviation of the sum of four bytes: `sqrt(4 * (256^2 - 1) / 12)`.
const SUM_DEVIATION: f32 = 147.799_86;
/// Standard deviation of a random nibble: `sqrt(2 * (1^2 + .. + 7^2) / 16)`.
const NIBBLE_DEVIATION: f32 = 4.183_3;
/// One more than the largest sum, rounded up to a power of two so that lookups need no bounds check.
const SUMS: usize = 1024;

/// Bytes a thread makes at a time: enough to be worth handing over, few enough to stay in its cache.
const TASK_BYTES: usize = 1 << 18;

/// How the elements of a random tensor are distributed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Distribution {
    /// The mean.
    pub mean: f32,
    /// The standard deviation; 0 makes every element the mean.
    pub deviation: f32,
}

impl Distribution {
    /// Centred on 0, as matrices and embeddings are.
    pub const fn centred(deviation: f32) -> Self {
        Self { mean: 0.0, deviation }
    }

    /// For a matrix of `inputs` columns: standard deviation `1 / sqrt(inputs)`, which keeps the size of activations.
    pub fn matrix(inputs: usize) -> Self {
        Self::centred(1.0 / (inputs.max(1) as f32).sqrt())
    }

    /// For the factors of a norm: near 1.
    pub const fn norm() -> Self {
        Self { mean: 1.0, deviation: 0.05 }
    }

    /// Every element the same.
    pub const fn constant(value: f32) -> Self {
        Self { mean: value, deviation: 0.0 }
    }
}

/// One tensor of a [`RandomSource`].
#[derive(Clone, Debug, PartialEq)]
pub struct RandomTensor {
    /// Its name.
    pub name: String,
    /// Its shape, and the format its elements are made in.
    pub weight_type: WeightType,
    /// The values.
    pub distribution: Distribution,
}

/// A [`TensorSource`] that makes its tensors up; see the module for the distribution.
#[derive(Debug)]
pub struct RandomSource {
    seed: u64,
    names: Vec<String>,
    tensors: HashMap<String, Recipe>,
}

#[derive(Debug)]
struct Recipe {
    weight_type: WeightType,
    /// Where the tensor's SplitMix64 starts.
    start: u64,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// f16 and bf16: the element for each sum of four bytes.
    Two(Box<[u16; SUMS]>),
    /// f32: the element for each sum of four bytes.
    Four(Box<[u32; SUMS]>),
    /// `q8_0`: the scale.
    Eight { head: [u8; 2] },
    /// `q4_0` (two bytes) and `q4_1` (four): what every block starts with.
    Nibbles { head: Vec<u8> },
}

impl RandomSource {
    /// A source with these tensors. Nothing is made before it is asked for.
    ///
    /// # Errors
    /// If a name comes twice, or a tensor cannot have the format, shape or distribution it is given.
    pub fn new(seed: u64, tensors: impl IntoIterator<Item = RandomTensor>) -> Result<Self> {
        let mut source = Self { seed, names: Vec::new(), tensors: HashMap::new() };
        for RandomTensor { name, weight_type, distribution } in tensors {
            let size = weight_type.elements().and_then(|_| weight_type.bytes());
            size.map_err(|error| error.at(&name))?;
            let kind = Kind::new(weight_type.format, distribution).map_err(|error| error.at(&name))?;
            let start = name.bytes().fold(scramble(seed), |key, byte| scramble(key ^ u64::from(byte)));
            if source.tensors.insert(name.clone(), Recipe { weight_type, start, kind }).is_some() {
                return Err(Error::invalid("a random tensor of this name comes twice").at(&name));
            }
            source.names.push(name);
        }
        Ok(source)
    }

    fn recipe(&self, name: &str) -> Result<&Recipe> {
        self.tensors
            .get(name)
            .ok_or_else(|| Error::invalid("the random weights have no such tensor").at(name))
    }
}

impl TensorSource for RandomSource {
    fn describe(&self) -> String {
        format!("random weights of seed {}", self.seed)
    }

    fn names(&self) -> Vec<&str> {
        self.names.iter().map(String::as_str).collect()
    }

    fn tensor_type(&self, name: &str) -> Result<WeightType> {
        Ok(self.recipe(name)?.weight_type.clone())
    }

    fn rows(&self, name: &str, first: usize, count: usize) -> Result<Cow<'_, [u8]>> {
        let recipe = self.recipe(name)?;
        let bytes = row_range(&recipe.weight_type, first, count).map_err(|error| error.at(name))?.len();
        let columns = recipe.weight_type.columns();
        // Cannot overflow: the number of bytes of the whole tensor does not.
        Ok(Cow::Owned(recipe.make((first * columns) as u64, bytes)))
    }

    /// That of the seed, and of the first row of each tensor, in which its distribution shows.
    fn fingerprint(&self) -> Option<String> {
        let mut hash = Sha256::new();
        for name in &self.names {
            hash.update(self.rows(name, 0, 1).ok()?);
        }
        Some(format!("seed {} {:x?}", self.seed, hash.finalize().as_slice()))
    }
}

impl Recipe {
    /// The elements from element `first` on that take `bytes` bytes.
    fn make(&self, first: u64, bytes: usize) -> Vec<u8> {
        let (unit_bytes, unit_elements) = match &self.kind {
            Kind::Two(_) => (2, 1),
            Kind::Four(_) => (4, 1),
            Kind::Eight { .. } => (BlockFormat::Q8_0.bytes(), BlockFormat::Q8_0.elements()),
            Kind::Nibbles { head } => (head.len() + 16, 32),
        };
        let units = TASK_BYTES / unit_bytes;
        let mut out = vec![0; bytes];
        let tasks = out.par_chunks_mut(units * unit_bytes).enumerate();
        tasks.for_each(|(task, out)| self.fill(first + (task * units * unit_elements) as u64, out));
        out
    }

    /// Fills `out` with the elements from element `first` on.
    fn fill(&self, first: u64, out: &mut [u8]) {
        let start = self.start;
        match &self.kind {
            Kind::Two(table) => fill(out, start, first, |sum| table[sum].to_le_bytes()),
            Kind::Four(table) => fill(out, start, first, |sum| table[sum].to_le_bytes()),
            Kind::Eight { head } => {
                let (bytes, elements) = (BlockFormat::Q8_0.bytes(), BlockFormat::Q8_0.elements());
                for (block, first) in out.chunks_exact_mut(bytes).zip((first..).step_by(elements)) {
                    let (scale, quants) = block.split_at_mut(head.len());
                    scale.copy_from_slice(head);
                    fill(quants, start, first, |sum| [quantised_sum(sum)]);
                }
            }
            Kind::Nibbles { head } => {
                // A block of 32 nibbles is two words, whatever the format.
                for (block, first) in out.chunks_exact_mut(head.len() + 16).zip((first / 16..).step_by(2)) {
                    let (scale, quants) = block.split_at_mut(head.len());
                    scale.copy_from_slice(head);
                    for (quants, index) in quants.as_chunks_mut().0.iter_mut().zip(first..) {
                        *quants = nibbles(word(start, index)).to_le_bytes();
                    }
                }
            }
        }
    }
}

impl Kind {
    fn new(format: WeightFormat, Distribution { mean, deviation }: Distribution) -> Result<Self> {
        if !mean.is_finite() || !deviation.is_finite() || deviation < 0.0 {
            return Err(Error::invalid(format!(
                "a mean of {mean} and deviation of {deviation} make no weights"
            )));
        }
        let value = |sum: usize| (sum as i32 - SUM_MEAN) as f32 / SUM_DEVIATION * deviation + mean;
        let f16 = |value: f32| f16::from_f32(value).to_le_bytes();
        let nibble = deviation / NIBBLE_DEVIATION;
        match format {
            WeightFormat::Dense(DType::F32) => {
                Ok(Self::Four(Box::new(std::array::from_fn(|sum| value(sum).to_bits()))))
            }
            WeightFormat::Dense(DType::F16) => {
                Ok(Self::Two(Box::new(std::array::from_fn(|sum| f16::from_f32(value(sum)).to_bits()))))
            }
            WeightFormat::Dense(DType::BF16) => {
                Ok(Self::Two(Box::new(std::array::from_fn(|sum| bf16::from_f32(value(sum)).to_bits()))))
            }
            WeightFormat::Block(BlockFormat::Q4_1) => {
                let head = [f16(nibble), f16(mean - 8.0 * nibble)].concat();
                Ok(Self::Nibbles { head })
            }
            WeightFormat::Block(format) if mean != 0.0 => Err(Error::unsupported(format!(
                "random {} weights are centred on 0, not {mean}",
                format.name()
            ))),
            WeightFormat::Block(BlockFormat::Q4_0) => Ok(Self::Nibbles { head: f16(nibble).to_vec() }),
            WeightFormat::Block(BlockFormat::Q8_0) => {
                Ok(Self::Eight { head: f16(deviation / (SUM_DEVIATION / 4.0)) })
            }
            other => Err(Error::unsupported(format!("random weights cannot be {other}"))),
        }
    }
}

/// Fills `out` with the elements from `first` on, each made of its sum of four bytes.
fn fill<const BYTES: usize>(out: &mut [u8], start: u64, first: u64, encode: impl Fn(usize) -> [u8; BYTES]) {
    let elements = out.as_chunks_mut().0;
    // The second half of a word, when the first belongs to the element before.
    let (head, rest) = elements.split_at_mut(elements.len().min((first % 2) as usize));
    for element in head {
        *element = encode(sums(word(start, first / 2)).1);
    }
    let (pairs, tail) = rest.as_chunks_mut();
    let mut index = first.div_ceil(2);
    for [low, high] in pairs {
        let sums = sums(word(start, index));
        (*low, *high) = (encode(sums.0), encode(sums.1));
        index += 1;
    }
    for element in tail {
        *element = encode(sums(word(start, index)).0);
    }
}

/// The sums of the four low and the four high bytes.
fn sums(word: u64) -> (usize, usize) {
    const EVEN_BYTES: u64 = 0x00FF_00FF_00FF_00FF;
    let pairs = (word & EVEN_BYTES) + ((word >> 8) & EVEN_BYTES);
    let fours = pairs + (pairs >> 16);
    // At most 1020 each; the mask only tells the compiler so.
    ((fours & 0x3FF) as usize, (fours >> 32 & 0x3FF) as usize)
}

/// A sum of four bytes as a signed byte, symmetric around 0.
fn quantised_sum(sum: usize) -> u8 {
    ((sum as i32 - SUM_MEAN) / 4) as i8 as u8
}

/// Sixteen nibbles with 0 replaced by 8, which makes them symmetric around 8.
fn nibbles(word: u64) -> u64 {
    let zeros = !(word | word >> 1 | word >> 2 | word >> 3) & 0x1111_1111_1111_1111;
    word | zeros << 3
}

/// Output `index` of SplitMix64 started at `start`.
fn word(start: u64, index: u64) -> u64 {
    scramble(start.wrapping_add(index.wrapping_mul(0x9E37_79B9_7F4A_7C15)))
}

/// One step of SplitMix64.
fn scramble(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn source(format: &str, shape: &[usize], distribution: Distribution) -> Result<RandomSource> {
        let weight_type =
            WeightType { format: WeightFormat::from_name(format).unwrap(), shape: shape.to_vec() };
        RandomSource::new(7, [RandomTensor { name: "w".into(), weight_type, distribution }])
    }

    fn decoded(source: &RandomSource, name: &str) -> Vec<f32> {
        let weight_type = source.tensor_type(name).unwrap();
        let bytes = source.rows(name, 0, weight_type.rows()).unwrap();
        let mut out = vec![0.0; weight_type.elements().unwrap()];
        let row_bytes = weight_type.row_bytes().unwrap();
        for (row, out) in bytes.chunks(row_bytes).zip(out.chunks_mut(weight_type.columns())) {
            weight_type.format.decode_row(row, out).unwrap();
        }
        out
    }

    #[test]
    fn generator_is_splitmix64() {
        // The first outputs of the published generator for state 1234567.
        let expected = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!([0, 1, 2].map(|index| word(1_234_567, index)), expected);
    }

    #[rstest]
    #[case("f32", Distribution::centred(0.02))]
    #[case("bf16", Distribution::matrix(2048))]
    #[case("f16", Distribution::norm())]
    #[case("q8_0", Distribution::centred(0.02))]
    #[case("q4_0", Distribution::centred(0.02))]
    #[case("q4_1", Distribution { mean: 0.5, deviation: 0.02 })]
    #[case("f32", Distribution::constant(0.25))]
    fn mean_and_deviation_are_as_asked(#[case] format: &str, #[case] distribution: Distribution) {
        let values = decoded(&source(format, &[512, 256], distribution).unwrap(), "w");
        let count = values.len() as f32;
        let mean = values.iter().sum::<f32>() / count;
        let deviation = (values.iter().map(|value| (value - mean).powi(2)).sum::<f32>() / count).sqrt();
        let near = distribution.deviation * 0.015 + distribution.mean.abs() * 1e-3;
        assert!((mean - distribution.mean).abs() <= near, "{mean}");
        assert!((deviation - distribution.deviation).abs() <= near, "{deviation}");
    }

    #[rstest]
    fn rows_do_not_depend_on_how_they_are_asked_for(
        #[values("f32", "bf16", "q8_0", "q4_0", "q4_1")] format: &str,
        #[values(32, 96)] columns: usize,
    ) {
        let source = source(format, &[9, columns], Distribution::centred(1.0)).unwrap();
        let all = source.rows("w", 0, 9).unwrap().into_owned();
        let single: Vec<u8> = (0..9).flat_map(|row| source.rows("w", row, 1).unwrap().into_owned()).collect();
        assert_eq!(all, single);
    }

    #[rstest]
    fn tasks_join_without_a_seam(#[values("bf16", "f32", "q8_0", "q4_1")] format: &str) {
        // Three tasks and a bit, and a row that begins in the middle of one.
        let source = source(format, &[1000, 800], Distribution::centred(1.0)).unwrap();
        let all = source.rows("w", 0, 1000).unwrap().into_owned();
        let row_bytes = source.tensor_type("w").unwrap().row_bytes().unwrap();
        for row in [0, 163, 164, 500, 999] {
            assert_eq!(
                &*source.rows("w", row, 1).unwrap(),
                &all[row * row_bytes..][..row_bytes],
                "row {row}"
            );
        }
        assert_eq!(&*source.rows("w", 100, 700).unwrap(), &all[100 * row_bytes..800 * row_bytes]);
    }

    #[test]
    fn odd_columns_start_in_the_middle_of_a_word() {
        let source = source("f32", &[5, 7], Distribution::centred(1.0)).unwrap();
        let all = source.rows("w", 0, 5).unwrap().into_owned();
        assert_eq!(&*source.rows("w", 3, 2).unwrap(), &all[3 * 28..]);
    }

    #[test]
    fn seed_and_name_both_matter() {
        let weight_type = WeightType { format: WeightFormat::Dense(DType::F32), shape: vec![64] };
        let tensor = |name: &str| RandomTensor {
            name: name.into(),
            weight_type: weight_type.clone(),
            distribution: Distribution::centred(1.0),
        };
        let first = RandomSource::new(1, [tensor("a"), tensor("b")]).unwrap();
        let second = RandomSource::new(2, [tensor("a")]).unwrap();
        assert_ne!(decoded(&first, "a"), decoded(&first, "b"));
        assert_ne!(decoded(&first, "a"), decoded(&second, "a"));
        assert!(RandomSource::new(1, [tensor("a"), tensor("a")]).unwrap_err().to_string().contains("twice"));
    }

    #[rstest]
    #[case("i8", &[4, 4], Distribution::centred(1.0), "cannot be i8")]
    #[case("q4_0", &[4, 32], Distribution::norm(), "centred")]
    #[case("q4_0", &[4, 33], Distribution::centred(1.0), "33 columns")]
    #[case("f32", &[usize::MAX, 4], Distribution::centred(1.0), "overflow")]
    #[case("f32", &[4], Distribution::centred(f32::NAN), "NaN")]
    fn impossible_tensors_are_refused(
        #[case] format: &str,
        #[case] shape: &[usize],
        #[case] distribution: Distribution,
        #[case] message: &str,
    ) {
        let error = source(format, shape, distribution).unwrap_err().to_string();
        assert!(error.contains(message) && error.starts_with('w'), "{error}");
    }
}
