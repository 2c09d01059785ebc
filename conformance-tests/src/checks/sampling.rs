//! Sampling as it is served: masks in front of it, and batches in any order.

use super::bench::{Bench, Given, Outcome, ensure, fail, rows};
use crate::{
    random::{Random, Values},
    subject::Subject,
    tensor::Tensor,
};
use dsrun_core::{
    DType,
    op::{LogitProcess, SAMPLING_COLUMNS, Sample, SamplingColumn},
};

const VOCABULARY: usize = 97;
const REQUESTS: usize = 4;

/// A row of parameters for each request: all kinds of filters.
fn parameters() -> Tensor {
    let kinds: [&[(SamplingColumn, f64)]; REQUESTS] = [
        &[(SamplingColumn::Temperature, 1.0)],
        &[(SamplingColumn::Temperature, 2.0), (SamplingColumn::TopK, 20.0)],
        &[(SamplingColumn::Temperature, 0.75), (SamplingColumn::TopP, 0.875)],
        &[(SamplingColumn::Temperature, 1.0), (SamplingColumn::MinP, 0.03125)],
    ];
    table(&kinds)
}

/// A row of parameters for each request: greedy without penalties but for what is given.
pub(super) fn table(requests: &[&[(SamplingColumn, f64)]]) -> Tensor {
    let mut all = Vec::new();
    for request in requests {
        let mut row = [0.0; SAMPLING_COLUMNS];
        row[SamplingColumn::TopP as usize] = 1.0;
        row[SamplingColumn::RepetitionPenalty as usize] = 1.0;
        request.iter().for_each(|(column, value)| row[*column as usize] = *value);
        all.extend(row);
    }
    Tensor::floats(DType::F32, &[requests.len(), SAMPLING_COLUMNS], &all)
}

/// A token whose mask bit is 0 is never drawn, however likely it would be, under any filter.
pub(super) fn masked(subject: &Subject) -> Outcome {
    const ROWS: usize = 4096;
    let mut bench = Bench::new(subject.device())?;
    let mut random = Random::named("sampling/masked");
    let words = VOCABULARY.div_ceil(32);
    // Few tokens are allowed, and those that are not are the likeliest.
    let mask: Vec<u32> = (0..ROWS * words).map(|_| random.bits() as u32 & random.bits() as u32).collect();
    let allowed = |row: usize, token: usize| mask[row * words + token / 32] >> (token % 32) & 1 == 1;
    let mut logits = Vec::new();
    for row in 0..ROWS {
        logits.extend(
            (0..VOCABULARY)
                .map(|token| random.between(-2.0, 2.0) + if allowed(row, token) { 0.0 } else { 20.0 }),
        );
    }
    let requests: Vec<i32> = (0..ROWS).map(|row| (row % REQUESTS) as i32).collect();
    let (requests, table) = (bench.give(&Tensor::vector(&requests))?, bench.give(&parameters())?);
    let operands = [
        bench.give(&Tensor::floats(DType::F32, &[ROWS, VOCABULARY], &logits))?,
        requests.clone(),
        table.clone(),
        bench.give(&Tensor::integers(&[REQUESTS, VOCABULARY], &[0; REQUESTS * VOCABULARY]))?,
        Given::Absent,
        bench.give(&Tensor::words(&[ROWS, words], &mask))?,
    ];
    let processed = bench.one(LogitProcess {}, &operands)?;
    let positions: Vec<i32> = (0..ROWS as i32).collect();
    let operands = [
        processed.into(),
        requests,
        bench.give(&Tensor::vector(&positions))?,
        table,
        bench.give(&Tensor::words(&[REQUESTS, 2], &[1, 2, 3, 4, 5, 6, 7, 8]))?,
    ];
    let drawn = bench.run(Sample {}, &operands)?;
    let drawn = bench.get(&drawn[0])?.signed();
    for (row, id) in drawn.into_iter().enumerate() {
        let any = (0..VOCABULARY).any(|token| allowed(row, token));
        match usize::try_from(id) {
            Ok(token) if token < VOCABULARY => {
                ensure(allowed(row, token), || format!("row {row} draws token {token}, which is masked"))?;
            }
            _ => ensure(id == -1 && !any, || format!("row {row} draws {id}, though there are tokens"))?,
        }
    }
    Ok(())
}

/// A draw depends on seed, position and token alone: rows in another order, in smaller batches and next to other requests
/// draw the same.
pub(super) fn order(subject: &Subject) -> Outcome {
    const ROWS: usize = 64;
    let mut bench = Bench::new(subject.device())?;
    let mut random = Random::named("sampling/order");
    let logits = random.scaled(DType::F32, &[ROWS, VOCABULARY], Values::Uniform, 3.0);
    let requests: Vec<i32> = (0..ROWS).map(|_| random.below(REQUESTS) as i32).collect();
    let positions: Vec<i32> = (0..ROWS).map(|_| random.below(10_000) as i32).collect();
    let table = bench.give(&parameters())?;
    let mut draw = |seeds: &[u32], order: &[usize]| {
        let pick = |of: &[i32]| Tensor::vector(&order.iter().map(|row| of[*row]).collect::<Vec<_>>());
        let picked: Vec<Tensor> = order.iter().map(|row| rows(&logits, *row, 1)).collect();
        let operands = [
            bench.give(&super::bench::stack(&picked))?,
            bench.give(&pick(&requests))?,
            bench.give(&pick(&positions))?,
            table.clone(),
            bench.give(&Tensor::words(&[REQUESTS, 2], seeds))?,
        ];
        let drawn = bench.run(Sample {}, &operands)?;
        bench.get(&drawn[0]).map(|ids| ids.signed())
    };
    let seeds = [11, 22, 33, 44, 55, 66, 77, 88];
    let all: Vec<usize> = (0..ROWS).collect();
    let whole = draw(&seeds, &all)?;
    let shuffled = Random::named("sampling/shuffled").shuffled(ROWS);
    for (how, order) in [("in another order", &shuffled[..]), ("in a smaller batch", &shuffled[..5])] {
        let part = draw(&seeds, order)?;
        if let Some((row, id)) = order.iter().zip(&part).find(|(row, id)| whole[**row] != **id) {
            return fail(format!("row {row} draws {id} {how}, and {} otherwise", whole[*row]));
        }
    }
    // With other seeds about as many draws agree as would by chance: far from all.
    let other = draw(&seeds.map(|word| word ^ 0x5555), &all)?;
    let alike = whole.iter().zip(&other).filter(|(a, b)| a == b).count();
    ensure(alike < ROWS / 2, || format!("{alike} of {ROWS} draws are the same with other seeds"))
}
