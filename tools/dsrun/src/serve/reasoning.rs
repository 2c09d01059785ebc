//! Tells the reasoning of an answer from the answer itself, by the marks that models put around it.

use dsrun_models::chat::ChatTemplate;

/// The marks before and after reasoning, by family.
const MARKS: [Marks; 3] = [
    // Qwen, DeepSeek, SmolLM, OLMo, GLM and most others.
    Marks { open: "<think>", close: "</think>" },
    // Mistral.
    Marks { open: "[THINK]", close: "[/THINK]" },
    // Seed.
    Marks { open: "<seed:think>", close: "</seed:think>" },
];

/// The marks before and after reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Marks {
    pub(crate) open: &'static str,
    pub(crate) close: &'static str,
}

impl Marks {
    /// The marks of a model, by its chat template; `None` if the template has none.
    pub(crate) fn of(template: &ChatTemplate) -> Option<Self> {
        MARKS.into_iter().find(|marks| template.mentions(marks.close))
    }
}

/// A piece of an answer, split.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Split {
    pub(crate) reasoning: String,
    pub(crate) text: String,
}

/// Splits an answer that comes in pieces.
#[derive(Debug)]
pub(crate) struct ReasoningSplitter {
    marks: Marks,
    state: State,
    /// Text that may be a mark, or the beginning of one, or blanks before one.
    held: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Only blanks so far.
    Start,
    /// Within reasoning, of which nothing was returned yet.
    Opened,
    Reasoning,
    /// After reasoning, where line breaks are dropped.
    Closed,
    Answer,
}

impl ReasoningSplitter {
    /// A splitter of an answer; `open` says that its prompt ends with the mark that opens reasoning.
    pub(crate) fn new(marks: Marks, open: bool) -> Self {
        Self { marks, state: if open { State::Opened } else { State::Start }, held: String::new() }
    }

    /// Adds the next piece of text.
    pub(crate) fn push(&mut self, text: &str) -> Split {
        self.held.push_str(text);
        let mut split = Split::default();
        loop {
            match self.state {
                State::Start => {
                    let rest = self.held.trim_start();
                    if rest.is_empty()
                        || (rest.len() < self.marks.open.len() && self.marks.open.starts_with(rest))
                    {
                        return split;
                    }
                    self.state = match rest.strip_prefix(self.marks.open).map(str::to_owned) {
                        Some(rest) => {
                            self.held = rest;
                            State::Opened
                        }
                        None => State::Answer,
                    };
                }
                State::Opened | State::Closed => {
                    let rest = self.held.trim_start_matches(['\n', '\r']).len();
                    self.held.drain(..self.held.len() - rest);
                    if self.held.is_empty() {
                        return split;
                    }
                    self.state = if self.state == State::Opened { State::Reasoning } else { State::Answer };
                }
                State::Reasoning => {
                    let Some(end) = self.held.find(self.marks.close) else {
                        let kept = self.held.len() - overlap(&self.held, self.marks.close);
                        // Line breaks before the mark are no part of the reasoning.
                        let end = self.held[..kept].trim_end_matches(['\n', '\r']).len();
                        split.reasoning.extend(self.held.drain(..end));
                        return split;
                    };
                    split.reasoning.push_str(self.held[..end].trim_end_matches(['\n', '\r']));
                    self.held.drain(..end + self.marks.close.len());
                    self.state = State::Closed;
                }
                State::Answer => {
                    split.text.push_str(&std::mem::take(&mut self.held));
                    return split;
                }
            }
        }
    }

    /// Returns the rest at the end of the answer.
    pub(crate) fn finish(&mut self) -> Split {
        let held = std::mem::take(&mut self.held);
        match self.state {
            State::Opened | State::Reasoning => Split { reasoning: held, text: String::new() },
            State::Start | State::Closed | State::Answer => Split { reasoning: String::new(), text: held },
        }
    }
}

/// The number of bytes at the end of a text that may be the beginning of a mark.
fn overlap(text: &str, mark: &str) -> usize {
    (1..mark.len()).rev().find(|length| text.ends_with(&mark[..*length])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("Hello.", false, "", "Hello.")]
    #[case("<think>\nhm, so\n</think>\n\nHello.", false, "hm, so", "Hello.")]
    #[case("\n<think>a</think>b", false, "a", "b")]
    #[case("a <b <think> c", false, "", "a <b <think> c")]
    #[case("hm </thin is no mark</think>yes", true, "hm </thin is no mark", "yes")]
    #[case("\nhm\n\nmore\n", true, "hm\n\nmore\n", "")]
    #[case("<think>\n\n</think>\n\nHello", false, "", "Hello")]
    #[case("<thi", false, "", "<thi")]
    #[case("<think>never ends </thi", false, "never ends </thi", "")]
    #[case("</think>x", true, "", "x")]
    fn reasoning_is_split_wherever_the_answer_is_cut(
        #[case] answer: &str,
        #[case] open: bool,
        #[case] reasoning: &str,
        #[case] text: &str,
        #[values(1, 2, 5, 1000)] size: usize,
    ) {
        let mut splitter = ReasoningSplitter::new(MARKS[0], open);
        let characters: Vec<char> = answer.chars().collect();
        let mut whole = Split::default();
        let mut pieces: Vec<Split> =
            characters.chunks(size).map(|piece| splitter.push(&piece.iter().collect::<String>())).collect();
        pieces.push(splitter.finish());
        for piece in pieces {
            whole.reasoning.push_str(&piece.reasoning);
            whole.text.push_str(&piece.text);
        }
        assert_eq!((whole.reasoning.as_str(), whole.text.as_str()), (reasoning, text));
    }
}
