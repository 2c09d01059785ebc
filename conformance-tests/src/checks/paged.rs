//! Sequences over a paged cache, run in whatever steps a check wants.

use super::bench::{Bench, Given, Held, Stop, rows, stack};
use crate::{
    gate::Gate,
    oracle::{
        Real,
        attention::{Scoring, Seen, attend},
    },
    random::{Random, Values},
    tensor::Tensor,
};
use dsrun_core::{
    DType,
    op::{AttentionMask, KvWrite, Op, PagedAttention},
};

/// The attention gate: its weights may be rounded to the cache's type, and are exponentials.
pub(crate) fn gate(dtype: DType) -> Gate {
    Gate { inner: Some(dtype), exponential: true }
}

/// A sequence with its queries, keys and values.
pub(crate) struct Sequence {
    heads: usize,
    kv_heads: usize,
    size: usize,
    pub(crate) length: usize,
    dtype: DType,
    query: Tensor,
    key: Tensor,
    value: Tensor,
}

/// The pages of a layer.
pub(crate) struct Cache {
    key: Held,
    value: Held,
    block: usize,
}

/// What a sequence does in a step: its new tokens, where they start, and its pages.
pub(crate) struct Turn<'a> {
    pub(crate) sequence: &'a Sequence,
    pub(crate) first: usize,
    pub(crate) count: usize,
    pub(crate) pages: &'a [i32],
}

impl Sequence {
    pub(crate) fn new(name: &str, dtype: DType, [heads, kv_heads, size]: [usize; 3], length: usize) -> Self {
        let mut random = Random::named(name);
        let query = random.tensor(dtype, &[length, heads * size], Values::Uniform);
        let key = random.tensor(dtype, &[length, kv_heads * size], Values::HeavyTailed);
        let value = random.tensor(dtype, &[length, kv_heads * size], Values::Uniform);
        Self { heads, kv_heads, size, length, dtype, query, key, value }
    }

    pub(crate) fn op(&self) -> Op {
        PagedAttention {
            query_heads: self.heads as u32,
            kv_heads: self.kv_heads as u32,
            scale: (self.size as f32).sqrt().recip(),
            softcap: 0.0,
            window: 0,
            mask: AttentionMask::Causal,
            value_size: 0,
        }
        .into()
    }

    pub(crate) fn cache(&self, bench: &mut Bench, pages: usize, block: usize) -> Result<Cache, Stop> {
        let shape = [pages, self.kv_heads, block, self.size];
        let (key, value) = (bench.empty(self.dtype, &shape)?, bench.empty(self.dtype, &shape)?);
        Ok(Cache { key, value, block })
    }

    /// What attention gives for each token.
    pub(crate) fn expected(&self) -> Vec<Real> {
        let (query, key, value) = (self.query.values(), self.key.values(), self.value.values());
        let scoring = Scoring { scale: f64::from((self.size as f32).sqrt().recip()), ..Scoring::default() };
        let width = self.kv_heads * self.size;
        let mut all = Vec::new();
        for (token, head) in (0..self.length).flat_map(|token| (0..self.heads).map(move |head| (token, head)))
        {
            let start = head / (self.heads / self.kv_heads) * self.size;
            let one = |index: usize| Seen {
                distance: (token - index) as f64,
                key: &key[index * width + start..][..self.size],
                value: &value[index * width + start..][..self.size],
            };
            let seen: Vec<Seen<'_>> = (0..=token).map(one).collect();
            let query = &query[(token * self.heads + head) * self.size..][..self.size];
            all.extend(attend(scoring, query, &seen, self.size).0);
        }
        all
    }

    /// Runs the whole sequence in chunks of these lengths, on these pages.
    pub(crate) fn in_chunks(
        &self,
        bench: &mut Bench,
        chunks: &[usize],
        pages: &[i32],
        block: usize,
    ) -> Result<Tensor, Stop> {
        let most = pages.iter().map(|page| *page as usize + 1).max().unwrap_or(0);
        let cache = self.cache(bench, most, block)?;
        let (mut first, mut answers) = (0, Vec::new());
        for count in chunks.iter().copied() {
            answers.push(cache.step(bench, &[Turn { sequence: self, first, count, pages }])?);
            first += count;
        }
        Ok(stack(&answers))
    }
}

impl Cache {
    /// The same pages in other memory.
    pub(crate) fn map(self, mut change: impl FnMut(&Held) -> Result<Held, Stop>) -> Result<Self, Stop> {
        Ok(Self { key: change(&self.key)?, value: change(&self.value)?, block: self.block })
    }

    /// The keys and the values.
    pub(crate) fn tensors(&self) -> [&Held; 2] {
        [&self.key, &self.value]
    }

    /// Writes the keys and values of a step.
    pub(crate) fn write(&self, bench: &mut Bench, turns: &[Turn<'_>]) -> Result<(), Stop> {
        let gather = |of: fn(&Sequence) -> &Tensor| {
            let one = |turn: &Turn<'_>| rows(of(turn.sequence), turn.first, turn.count);
            stack(&turns.iter().map(one).collect::<Vec<_>>())
        };
        let slot = |turn: &Turn<'_>, token: usize| {
            turn.pages[token / self.block] * self.block as i32 + (token % self.block) as i32
        };
        let slots: Vec<i32> = turns
            .iter()
            .flat_map(|turn| (turn.first..turn.first + turn.count).map(move |token| slot(turn, token)))
            .collect();
        let operands = [
            Given::from(&self.key),
            Given::from(&self.value),
            bench.give(&gather(|sequence| &sequence.key))?,
            bench.give(&gather(|sequence| &sequence.value))?,
            bench.give(&Tensor::vector(&slots))?,
        ];
        bench.run(KvWrite {}, &operands).map(drop)
    }

    /// The operands of a step's attention.
    pub(crate) fn operands(&self, bench: &mut Bench, turns: &[Turn<'_>]) -> Result<Vec<Given>, Stop> {
        let queries: Vec<Tensor> =
            turns.iter().map(|turn| rows(&turn.sequence.query, turn.first, turn.count)).collect();
        let columns = turns.iter().map(|turn| turn.pages.len()).max().unwrap_or(0);
        let (mut start, mut starts, mut table) = (0, Vec::new(), Vec::new());
        for turn in turns {
            starts.push(start as i32);
            start += turn.count;
            table.extend((0..columns).map(|column| turn.pages.get(column).copied().unwrap_or(-1)));
        }
        let counts: Vec<i32> = turns.iter().map(|turn| turn.count as i32).collect();
        let lengths: Vec<i32> = turns.iter().map(|turn| (turn.first + turn.count) as i32).collect();
        let vectors = [starts, counts, lengths].map(|vector| bench.give(&Tensor::vector(&vector)));
        let vectors = vectors.into_iter().collect::<Result<Vec<_>, _>>()?;
        let mut operands = vec![bench.give(&stack(&queries))?, (&self.key).into(), (&self.value).into()];
        operands.extend(vectors.iter().cloned());
        operands.push(bench.give(&Tensor::integers(&[turns.len(), columns], &table))?);
        operands.push(bench.work_list(&vectors)?);
        operands.extend([Given::Absent, Given::Absent, Given::Absent]);
        Ok(operands)
    }

    /// Writes the keys and values of a step and attends to them.
    pub(crate) fn step(&self, bench: &mut Bench, turns: &[Turn<'_>]) -> Result<Tensor, Stop> {
        self.write(bench, turns)?;
        let operands = self.operands(bench, turns)?;
        let results = bench.run(turns[0].sequence.op(), &operands)?;
        bench.get(&results[0])
    }
}
