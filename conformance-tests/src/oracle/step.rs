//! Oracle of `prepare_step` and `commit_tokens`, which work on the request table.

use dsrun_core::op::IN_PROMPT;

/// The request table, with an entry or a row for each request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requests {
    /// The block table, `[C][N]`.
    pub block_table: Vec<Vec<i32>>,
    /// The last generated token.
    pub last_token: Vec<i32>,
    /// Whether the request is finished: not 0 if so.
    pub finished: Vec<i32>,
    /// The number of tokens in the cache.
    pub length: Vec<i32>,
    /// The number of occurrences of each token, `[C][V]`.
    pub counts: Vec<Vec<i32>>,
}

/// A sequence of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planned {
    /// The index of the request; -1 for a padded sequence.
    pub request: i32,
    /// The number of new tokens.
    pub length: i32,
    /// The index of the first of its prompt tokens, or -1.
    pub source: i32,
}

/// The derived inputs of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Token ids, one per row.
    pub ids: Vec<i32>,
    /// Positions, one per row.
    pub positions: Vec<i32>,
    /// Slots, one per row.
    pub slots: Vec<i32>,
    /// The first row of each sequence; not defined for sequences without rows.
    pub query_start: Vec<i32>,
    /// The number of rows of each sequence.
    pub query_length: Vec<i32>,
    /// The number of tokens of each sequence, including new ones.
    pub kv_length: Vec<i32>,
    /// The pages of each sequence; -1 for a padded one, and not defined for a finished one.
    pub tables: Vec<Vec<i32>>,
    /// The positions of the tokens that follow the rows whose logits are computed.
    pub row_positions: Vec<i32>,
}

/// Derives the inputs of a step of `tokens` rows, and advances the table.
pub fn prepare(
    requests: &mut Requests,
    plan: &[Planned],
    prompt_ids: &[i32],
    rows: &[i32],
    tokens: usize,
    block: usize,
) -> Step {
    let mut step = Step { ids: vec![-1; tokens], positions: vec![-1; tokens], ..Step::default() };
    step.slots = vec![-1; tokens];
    let blocks = requests.block_table.first().map_or(0, Vec::len);
    let mut start = 0usize;
    for planned in plan {
        let request = usize::try_from(planned.request).ok();
        let running = request.filter(|request| requests.finished[*request] == 0);
        let brings = running.map_or(0, |_| planned.length as usize);
        let before = running.map_or(0, |request| requests.length[request]);
        step.query_start.push(start as i32);
        step.query_length.push(brings as i32);
        step.kv_length.push(if running.is_some() { before + brings as i32 } else { 0 });
        step.tables
            .push(request.map_or_else(|| vec![-1; blocks], |request| requests.block_table[request].clone()));
        if let Some(request) = running {
            for offset in 0..brings {
                let id = if planned.source >= 0 {
                    let id = prompt_ids.get(planned.source as usize + offset).copied().unwrap_or(-1);
                    let count = usize::try_from(id).ok().and_then(|id| requests.counts[request].get_mut(id));
                    if let Some(count) = count {
                        *count |= IN_PROMPT;
                    }
                    id
                } else {
                    requests.last_token[request]
                };
                let position = before + offset as i32;
                let page =
                    requests.block_table[request].get(position as usize / block).copied().unwrap_or(-1);
                let row = start + offset;
                step.ids[row] = id;
                step.positions[row] = position;
                step.slots[row] = if page < 0 { -1 } else { page * block as i32 + position % block as i32 };
            }
            requests.length[request] += brings as i32;
        }
        start += planned.length as usize;
    }
    let follows = |row: &i32| {
        let position = usize::try_from(*row).ok().and_then(|row| step.positions.get(row));
        position.filter(|position| **position >= 0).map_or(-1, |position| position + 1)
    };
    step.row_positions = rows.iter().map(follows).collect();
    step
}

/// Records sampled tokens in the table.
pub fn commit(requests: &mut Requests, rows: &[(i32, i32)], stop_ids: &[i32]) {
    for (request, id) in rows {
        let (Ok(request), Ok(token)) = (usize::try_from(*request), usize::try_from(*id)) else { continue };
        if requests.finished[request] != 0 {
            continue;
        }
        requests.last_token[request] = *id;
        let count = &mut requests.counts[request][token];
        // The count saturates below the bit of the prompt.
        *count += i32::from(*count & (IN_PROMPT - 1) != IN_PROMPT - 1);
        if stop_ids.contains(id) {
            requests.finished[request] = 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests() -> Requests {
        Requests {
            block_table: vec![vec![5, 2], vec![7, -1], vec![1, 3]],
            last_token: vec![9, 8, 7],
            finished: vec![0, 0, 1],
            length: vec![3, 0, 6],
            counts: vec![vec![0; 10]; 3],
        }
    }

    #[test]
    fn a_mixed_step_by_hand() {
        let mut table = requests();
        let plan = [
            Planned { request: 1, length: 2, source: 1 },  // two prompt tokens
            Planned { request: 2, length: 1, source: -1 }, // finished
            Planned { request: 0, length: 1, source: -1 }, // one generated token
            Planned { request: -1, length: 0, source: -1 },
        ];
        let step = prepare(&mut table, &plan, &[0, 4, 6, 0, 0, 0], &[1, 3, -1, 2], 6, 4);
        assert_eq!(step.ids, [4, 6, -1, 9, -1, -1]);
        assert_eq!(step.positions, [0, 1, -1, 3, -1, -1]);
        assert_eq!(step.slots, [28, 29, -1, 23, -1, -1]);
        assert_eq!(step.query_start[..3], [0, 2, 3]);
        assert_eq!(step.query_length, [2, 0, 1, 0]);
        assert_eq!(step.kv_length, [2, 0, 4, 0]);
        assert_eq!(step.tables, [vec![7, -1], vec![1, 3], vec![5, 2], vec![-1, -1]]);
        assert_eq!(step.row_positions, [2, 4, -1, -1]);
        assert_eq!(table.length, [4, 2, 6]);
        assert_eq!((table.counts[1][4], table.counts[1][6], table.counts[0][9]), (IN_PROMPT, IN_PROMPT, 0));
    }

    #[test]
    fn tokens_without_a_page_have_no_slot() {
        let mut table = requests();
        table.length[1] = 3;
        let step = prepare(&mut table, &[Planned { request: 1, length: 2, source: 0 }], &[1, 1], &[], 2, 4);
        assert_eq!(step.slots, [31, -1]);
        table.length[0] = 8;
        let step = prepare(&mut table, &[Planned { request: 0, length: 1, source: -1 }], &[], &[], 1, 4);
        assert_eq!(step.slots, [-1]);
    }

    #[test]
    fn commits_by_hand() {
        let mut table = requests();
        commit(&mut table, &[(0, 4), (-1, 5), (2, 6), (1, -1)], &[4, -1]);
        assert_eq!(table.last_token, [4, 8, 7]);
        assert_eq!(table.finished, [1, 0, 1]);
        assert_eq!(table.counts[0][4], 1);
        assert_eq!(table.counts.iter().flatten().sum::<i32>(), 1);
    }
}
