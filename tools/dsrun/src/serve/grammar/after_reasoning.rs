//! A constraint on an answer of a model that reasons before it answers: reasoning is free, and the grammar begins after it.

use crate::serve::reasoning::Marks;
use dsrun_engine::{Constraint, ConstraintError};
use dsrun_models::tokenizer::Tokenizer;
use std::sync::Arc;

/// The tokens that may be part of reasoning.
#[derive(Debug)]
pub(super) struct ReasoningTokens {
    /// A bit for each of them, as in [`Constraint::allow`].
    allowed: Vec<u32>,
    /// Those that go on after the last byte of the closing mark, with their bytes. Where one of them would end the reasoning, the
    /// rest of it would escape the grammar.
    crossing: Vec<(u32, Vec<u8>)>,
}

impl ReasoningTokens {
    /// The tokens of a vocabulary, without control tokens other than the closing mark, and without end tokens: reasoning that
    /// ended the answer would leave it without what its grammar promises.
    pub(super) fn new(tokenizer: &Tokenizer, ends: &[u32], marks: Marks) -> Self {
        let size = tokenizer.vocabulary_size();
        let mut allowed = vec![0; size.div_ceil(32)];
        let mut crossing = Vec::new();
        let last = marks.close.as_bytes().last().copied();
        for id in 0..size as u32 {
            let is_close = tokenizer.id_to_token(id) == Some(marks.close);
            if ends.contains(&id) || (tokenizer.is_special(id) && !is_close) {
                continue;
            }
            let bytes = token_bytes(tokenizer, id);
            if bytes.is_empty() {
                continue;
            }
            allowed[id as usize / 32] |= 1 << (id % 32);
            let mut after = bytes.iter().enumerate().filter(|(_, byte)| Some(**byte) == last);
            if after.any(|(index, _)| !are_line_breaks(&bytes[index + 1..])) {
                crossing.push((id, bytes));
            }
        }
        Self { allowed, crossing }
    }
}

/// The bytes of a token in an answer that is read with the marks of reasoning: control tokens are there with their names.
fn token_bytes(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    match tokenizer.id_to_token(id).filter(|_| tokenizer.is_special(id)) {
        Some(name) => name.as_bytes().to_vec(),
        None => tokenizer.token_bytes(id),
    }
}

fn are_line_breaks(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| b"\r\n".contains(byte))
}

/// Enforces the constraint `C` on what follows the reasoning of an answer.
#[derive(Clone, Debug)]
pub(super) struct AfterReasoning<C> {
    marks: Marks,
    tokenizer: Tokenizer,
    tokens: Arc<ReasoningTokens>,
    /// The constraint on the answer, which has not begun before the last phase.
    answer: C,
    phase: Phase<C>,
}

#[derive(Clone, Debug)]
enum Phase<C> {
    /// Only blanks, and what may be a part of the opening mark. The answer begins here unless the mark follows.
    Start {
        text: Vec<u8>,
        begun: C,
    },
    /// In reasoning, whose last bytes may be a part of the closing mark.
    Reasoning {
        last: Vec<u8>,
    },
    Answer,
}

impl<C: Constraint + Clone> AfterReasoning<C> {
    /// `open` says that the prompt ends with the mark that opens reasoning. Otherwise a model may write that mark where its
    /// answer has room for it.
    pub(super) fn new(
        marks: Marks,
        open: bool,
        tokenizer: Tokenizer,
        tokens: Arc<ReasoningTokens>,
        answer: C,
    ) -> Self {
        let phase = match open {
            true => Phase::Reasoning { last: Vec::new() },
            false => Phase::Start { text: Vec::new(), begun: answer.clone() },
        };
        Self { marks, tokenizer, tokens, answer, phase }
    }
}

/// The phase after reasoning that ends with these bytes.
fn after<C>(mut last: Vec<u8>, close: &[u8]) -> Phase<C> {
    if find(&last, close).is_some() {
        return Phase::Answer;
    }
    last.drain(..last.len().saturating_sub(close.len() - 1));
    Phase::Reasoning { last }
}

impl<C: Constraint + Clone + 'static> Constraint for AfterReasoning<C> {
    fn allow(&mut self, tokens: &mut [u32]) -> Result<(), ConstraintError> {
        let last = match &mut self.phase {
            Phase::Start { begun, .. } => return begun.allow(tokens),
            Phase::Answer => return self.answer.allow(tokens),
            Phase::Reasoning { last } => last,
        };
        for (word, allowed) in tokens.iter_mut().zip(&self.tokens.allowed) {
            *word = *allowed;
        }
        for (id, bytes) in &self.tokens.crossing {
            let crosses = crosses(last, bytes, self.marks.close.as_bytes());
            if let Some(word) = tokens.get_mut(*id as usize / 32).filter(|_| crosses) {
                *word &= !(1 << (id % 32));
            }
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        let (open, close) = (self.marks.open.as_bytes(), self.marks.close.as_bytes());
        match &mut self.phase {
            Phase::Answer => return self.answer.accept(token),
            Phase::Reasoning { last } => {
                last.extend(token_bytes(&self.tokenizer, token));
                self.phase = after(std::mem::take(last), close);
            }
            Phase::Start { text, begun } => {
                begun.accept(token)?;
                text.extend(token_bytes(&self.tokenizer, token));
                let said = text.trim_ascii_start();
                if let Some(reasoned) = said.strip_prefix(open) {
                    self.phase = after(reasoned.to_vec(), close);
                } else if !open.starts_with(said) {
                    self.answer = begun.clone();
                    self.phase = Phase::Answer;
                }
            }
        }
        Ok(())
    }

    fn clone_box(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

/// Whether a token after these last bytes has the closing mark, and something for the reader after it.
fn crosses(last: &[u8], token: &[u8], close: &[u8]) -> bool {
    let text = [last, token].concat();
    find(&text, close).is_some_and(|end| !are_line_breaks(&text[end..]))
}

/// The end of the first place where `text` has `mark`.
fn find(text: &[u8], mark: &[u8]) -> Option<usize> {
    text.windows(mark.len()).position(|window| window == mark).map(|start| start + mark.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("hm </think", ">{", true)]
    #[case("</th", "ink> a", true)]
    #[case("hm </think", ">", false)]
    #[case("hm </think", ">\n\n", false)]
    #[case("hm ", "->x", false)]
    #[case("", "</think>x", true)]
    fn no_token_goes_on_after_the_reasoning(#[case] last: &str, #[case] token: &str, #[case] expected: bool) {
        assert_eq!(crosses(last.as_bytes(), token.as_bytes(), b"</think>"), expected);
    }
}
