//! How many tokens a second model is asked for: each costs a step of that model, and pays only if it is right.

/// After how many steps of its request a draft that paused is tried again, the first time. Twice as many each time that it is
/// wrong again.
const FIRST_PAUSE: usize = 4;

/// The longest pause.
const LONGEST_PAUSE: usize = 64;

/// How long drafts for one request are.
#[derive(Debug)]
pub(crate) struct DraftLength {
    /// Tokens to ask for next; at least one.
    length: usize,
    most: usize,
    /// Steps without a draft that are left, and how many there are the next time that one token is wrong.
    paused: usize,
    pause: usize,
}

impl DraftLength {
    /// Of `most` tokens in the beginning: one model is given with the other because it is expected to be right.
    pub(crate) fn new(most: usize) -> Self {
        Self { length: most, most, paused: 0, pause: FIRST_PAUSE }
    }

    /// How many tokens to ask for behind the step that has come; 0 while drafts pause.
    pub(crate) fn next(&mut self) -> usize {
        if self.paused > 0 {
            self.paused -= 1;
            return 0;
        }
        self.length
    }

    /// Learns how many of the tokens proposed were right: one more is asked for if all were, half as many if fewer than half.
    pub(crate) fn learn(&mut self, proposed: usize, right: usize) {
        if right > 0 {
            self.pause = FIRST_PAUSE;
        }
        if right == proposed && proposed >= self.length {
            self.length = (self.length + 1).min(self.most);
        } else if 2 * right < proposed {
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
    fn the_length_follows_what_is_right() {
        let mut length = DraftLength::new(6);
        // What is asked for, how many of it are right.
        for (asked, right) in
            [(6, 6), (6, 3), (6, 2), (3, 1), (1, 1), (2, 2), (3, 2), (3, 3), (4, 4), (5, 5), (6, 0)]
        {
            assert_eq!(length.next(), asked);
            length.learn(asked, right);
        }
        assert_eq!(length.next(), 3);
        // Fewer than asked for, as there was no room for more: nothing is learnt from their being right.
        length.learn(2, 2);
        assert_eq!(length.next(), 3);
    }

    #[test]
    fn a_model_that_is_always_wrong_is_asked_ever_more_seldom() {
        let mut length = DraftLength::new(4);
        let asked: Vec<usize> = (0..1000)
            .filter(|_| {
                let asked = length.next();
                if asked > 0 {
                    length.learn(asked, 0);
                }
                asked > 0
            })
            .collect();
        // 4, 2 and 1 token, then after 4 steps, 8, 16, 32, and every 64 from there on.
        let pauses: Vec<usize> = asked.windows(2).map(|pair| pair[1] - pair[0] - 1).collect();
        assert_eq!(pauses[..8], [0, 0, 4, 8, 16, 32, 64, 64]);
        // Right once, it is asked for more, and again soon when it is wrong.
        while length.next() == 0 {}
        length.learn(1, 1);
        assert_eq!(length.next(), 2);
        length.learn(2, 0);
        assert_eq!(length.next(), 1);
        length.learn(1, 0);
        assert_eq!((0..9).position(|_| length.next() > 0), Some(FIRST_PAUSE));
    }
}
