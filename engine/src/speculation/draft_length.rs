//! Adapts the length of a draft model's drafts: each token costs a step of that model, and pays off only if it is accepted.

/// The number of steps without drafts after a one-token draft was rejected. The pause doubles with each further rejection.
const FIRST_PAUSE: usize = 4;

/// The longest pause.
const LONGEST_PAUSE: usize = 64;

/// The length of drafts for one request.
#[derive(Debug)]
pub(crate) struct DraftLength {
    /// Tokens to request next; at least one.
    length: usize,
    most: usize,
    /// Remaining steps of the current pause.
    paused: usize,
    /// Length of the next pause, in steps.
    pause: usize,
}

impl DraftLength {
    /// Starts at the maximum, `most` tokens: drafts are expected to be accepted.
    pub(crate) fn new(most: usize) -> Self {
        Self { length: most, most, paused: 0, pause: FIRST_PAUSE }
    }

    /// The number of tokens to request after a completed step; 0 while drafts pause.
    pub(crate) fn next(&mut self) -> usize {
        if self.paused > 0 {
            self.paused -= 1;
            return 0;
        }
        self.length
    }

    /// Adapts to the number of accepted tokens: the next draft is one token longer if all were accepted, half as long if fewer than
    /// half were.
    pub(crate) fn learn(&mut self, proposed: usize, accepted: usize) {
        if accepted > 0 {
            self.pause = FIRST_PAUSE;
        }
        if accepted == proposed && proposed >= self.length {
            self.length = (self.length + 1).min(self.most);
        } else if 2 * accepted < proposed {
            if proposed == 1 {
                self.paused = self.pause;
                self.pause = (2 * self.pause).min(LONGEST_PAUSE);
            }
            self.length = (proposed.min(self.length) / 2).max(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_follows_acceptance() {
        let mut length = DraftLength::new(6);
        // Tokens requested, tokens accepted.
        for (requested, accepted) in
            [(6, 6), (6, 3), (6, 2), (3, 1), (1, 1), (2, 2), (3, 2), (3, 3), (4, 4), (5, 5), (6, 0)]
        {
            assert_eq!(length.next(), requested);
            length.learn(requested, accepted);
        }
        assert_eq!(length.next(), 3);
        // Fewer tokens than requested, for lack of room: their acceptance says nothing about longer drafts.
        length.learn(2, 2);
        assert_eq!(length.next(), 3);
    }

    #[test]
    fn pauses_grow_while_every_token_is_rejected() {
        let mut length = DraftLength::new(4);
        let requested: Vec<usize> = (0..1000)
            .filter(|_| {
                let tokens = length.next();
                if tokens > 0 {
                    length.learn(tokens, 0);
                }
                tokens > 0
            })
            .collect();
        // 4, 2 and 1 token, then after 4 steps, 8, 16, 32, and every 64 from there on.
        let pauses: Vec<usize> = requested.windows(2).map(|pair| pair[1] - pair[0] - 1).collect();
        assert_eq!(pauses[..8], [0, 0, 4, 8, 16, 32, 64, 64]);
        // One accepted token ends the long pauses.
        while length.next() == 0 {}
        length.learn(1, 1);
        assert_eq!(length.next(), 2);
        length.learn(2, 0);
        assert_eq!(length.next(), 1);
        length.learn(1, 0);
        assert_eq!((0..9).position(|_| length.next() > 0), Some(FIRST_PAUSE));
    }
}
