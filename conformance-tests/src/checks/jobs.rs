//! Calls of the kinds that serving is made of, to be run in ways that must not change what they give.

use super::{
    bench::{Bench, Given, Outcome, Stop, same_bits},
    paged::{Sequence, Turn},
};
use crate::{
    cases::drawn_weight,
    random::{Random, Values},
    tensor::Tensor,
};
use dsrun_core::{
    BlockFormat, DType, WeightFormat,
    op::{Add, Linear, Op, RmsNorm, SAMPLING_COLUMNS, Sample},
};

/// A call that can be made on several sets of operands of the same types.
pub(crate) struct Job {
    pub(crate) name: &'static str,
    pub(crate) op: Op,
    pub(crate) operands: Vec<Vec<Given>>,
    /// What each set gives, alone on a quiet device.
    pub(crate) expected: Vec<Vec<Tensor>>,
}

/// The jobs that the device runs for activations of this type, each with so many sets of operands.
pub(crate) fn jobs(bench: &mut Bench, dtype: DType, sets: usize) -> Result<Vec<Job>, Stop> {
    make(bench, dtype, sets, &MAKERS)
}

/// Products whose inputs are so many that devices share them out among blocks, which must add up what each of them has.
pub(crate) fn wide_jobs(bench: &mut Bench, dtype: DType, sets: usize) -> Result<Vec<Job>, Stop> {
    make(bench, dtype, sets, &WIDE_MAKERS)
}

fn make(
    bench: &mut Bench,
    dtype: DType,
    sets: usize,
    makers: &[(&'static str, Maker)],
) -> Result<Vec<Job>, Stop> {
    let mut jobs = Vec::new();
    for (name, make) in makers {
        match make(bench, dtype, sets) {
            Ok((op, operands)) => jobs.push(Job::new(bench, name, op, operands)?),
            // Whether it must be there is for the profiles to say, not here.
            Err(Stop::Unsupported(_)) => {}
            Err(stop) => return Err(stop),
        }
    }
    if jobs.is_empty() {
        return Err(Stop::Unsupported(format!(
            "the device runs none of the calls of this check for {dtype}"
        )));
    }
    Ok(jobs)
}

type Made = Result<(Op, Vec<Vec<Given>>), Stop>;

type Maker = fn(&mut Bench, DType, usize) -> Made;

const MAKERS: [(&str, Maker); 6] = [
    ("add", add),
    ("rms_norm", rms_norm),
    ("linear", dense),
    ("linear_q4_1", quantised),
    ("paged_attention", attention),
    ("sample", sample),
];

const WIDE_MAKERS: [(&str, Maker); 4] = [
    ("linear of one long row", |bench, dtype, count| {
        long_rows(bench, dtype, WeightFormat::Dense(dtype), 1, count)
    }),
    ("linear of long rows", |bench, dtype, count| {
        long_rows(bench, dtype, WeightFormat::Dense(dtype), 8, count)
    }),
    ("linear of long rows by int8", |bench, dtype, count| {
        let format = WeightFormat::from_name("int8").unwrap_or(WeightFormat::Dense(dtype));
        long_rows(bench, dtype, format, 8, count)
    }),
    ("linear of many long rows", |bench, dtype, count| {
        long_rows(bench, dtype, WeightFormat::Dense(dtype), 40, count)
    }),
];

impl Job {
    fn new(bench: &mut Bench, name: &'static str, op: Op, operands: Vec<Vec<Given>>) -> Result<Self, Stop> {
        let mut expected = Vec::new();
        for set in &operands {
            let results = bench.run(op.clone(), set)?;
            expected.push(results.iter().map(|held| bench.get(held)).collect::<Result<_, _>>()?);
        }
        Ok(Self { name, op, operands, expected })
    }

    /// Fails unless these are the results of set `set`, to the bit.
    pub(crate) fn check(&self, how: &str, set: usize, found: &[Tensor]) -> Outcome {
        for (found, expected) in found.iter().zip(&self.expected[set]) {
            same_bits(&format!("{} {how}", self.name), found, expected)?;
        }
        Ok(())
    }
}

fn sets(
    bench: &mut Bench,
    name: &str,
    dtype: DType,
    shapes: &[&[usize]],
    sets: usize,
) -> Result<Vec<Vec<Given>>, Stop> {
    let mut random = Random::named(&format!("{name}/{dtype}"));
    let mut set = || -> Result<Vec<Given>, Stop> {
        shapes.iter().map(|shape| bench.give(&random.tensor(dtype, shape, Values::HeavyTailed))).collect()
    };
    (0..sets).map(|_| set()).collect()
}

fn add(bench: &mut Bench, dtype: DType, count: usize) -> Made {
    let mut operands = sets(bench, "add", dtype, &[&[13, 257], &[13, 257]], count)?;
    operands.iter_mut().for_each(|set| set.extend([Given::Absent, Given::Absent]));
    Ok((Add { alpha: 0.5 }.into(), operands))
}

fn rms_norm(bench: &mut Bench, dtype: DType, count: usize) -> Made {
    let operands = sets(bench, "rms_norm", dtype, &[&[13, 320], &[320]], count)?;
    Ok((RmsNorm { eps: 1e-5, weight_offset: 0.0 }.into(), operands))
}

fn dense(bench: &mut Bench, dtype: DType, count: usize) -> Made {
    linear(bench, dtype, WeightFormat::Dense(dtype), count)
}

fn quantised(bench: &mut Bench, dtype: DType, count: usize) -> Made {
    linear(bench, dtype, WeightFormat::Block(BlockFormat::Q4_1), count)
}

fn linear(bench: &mut Bench, dtype: DType, format: WeightFormat, count: usize) -> Made {
    let mut random = Random::named(&format!("linear/{format}/{dtype}"));
    let weight = drawn_weight(&mut random, format, [193, 256], 0.06);
    let weight = bench.pack(&weight)?;
    let mut operands = sets(bench, "linear", dtype, &[&[5, 256], &[193]], count)?;
    operands.iter_mut().for_each(|set| set.insert(1, weight.clone()));
    Ok((Linear { dtype }.into(), operands))
}

fn long_rows(bench: &mut Bench, dtype: DType, format: WeightFormat, rows: usize, count: usize) -> Made {
    const INPUTS: usize = 8192;
    const OUTPUTS: usize = 512;
    let mut random = Random::named(&format!("linear/long rows/{format}/{dtype}"));
    let weight = drawn_weight(&mut random, format, [OUTPUTS, INPUTS], 0.01);
    let weight = bench.pack(&weight)?;
    let name = format!("linear/long rows/{rows}");
    let mut operands = sets(bench, &name, dtype, &[&[rows, INPUTS]], count)?;
    operands.iter_mut().for_each(|set| set.extend([weight.clone(), Given::Absent]));
    Ok((Linear { dtype }.into(), operands))
}

fn attention(bench: &mut Bench, dtype: DType, count: usize) -> Made {
    const BLOCK: usize = 16;
    let mut operands = Vec::new();
    for set in 0..count {
        let name = |index: usize| format!("jobs/attention/{dtype}/{set}/{index}");
        let sequences = [(300, 1), (40, 3), (17, 17)];
        let all: Vec<(Sequence, usize)> = sequences
            .iter()
            .enumerate()
            .map(|(index, (length, new))| (Sequence::new(&name(index), dtype, [4, 2, 32], *length), *new))
            .collect();
        let cache = all[0].0.cache(bench, 24, BLOCK)?;
        let pages: Vec<Vec<i32>> = vec![(0..19).rev().collect(), vec![21, 19, 23], vec![20, 22]];
        let turns = |whole: bool| -> Vec<Turn<'_>> {
            let mut turns = Vec::new();
            for ((sequence, new), pages) in all.iter().zip(&pages) {
                let first = if whole { 0 } else { sequence.length - new };
                turns.push(Turn { sequence, first, count: sequence.length - first, pages });
            }
            turns
        };
        cache.write(bench, &turns(true))?;
        operands.push(cache.operands(bench, &turns(false))?);
    }
    let op = Sequence::new("jobs/attention", dtype, [4, 2, 32], 0).op();
    Ok((op, operands))
}

fn sample(bench: &mut Bench, _: DType, count: usize) -> Made {
    const ROWS: usize = 7;
    let mut operands = sets(bench, "sample", DType::F32, &[&[ROWS, 1009]], count)?;
    for (set, operands) in operands.iter_mut().enumerate() {
        let mut parameters = vec![0.0; SAMPLING_COLUMNS];
        parameters[..5].copy_from_slice(&[0.75, 50.0, 0.875, 0.0, 1.0]);
        let positions: Vec<i32> = (0..ROWS as i32).map(|row| 100 * set as i32 + row).collect();
        operands.push(bench.give(&Tensor::vector(&[0; ROWS]))?);
        operands.push(bench.give(&Tensor::vector(&positions))?);
        operands.push(bench.give(&Tensor::floats(DType::F32, &[1, SAMPLING_COLUMNS], &parameters))?);
        operands.push(bench.give(&Tensor::words(&[1, 2], &[7, 11]))?);
    }
    Ok((Sample {}.into(), operands))
}
