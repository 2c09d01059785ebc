//! Reads calls that begin with a mark and the name of the function, and go on with the arguments as JSON.
//!
//! - Mistral: `[TOOL_CALLS]name[ARGS]{..}`, also `[TOOL_CALLS]name[CALL_ID]id[ARGS]{..}`, several one after the other;
//! - DeepSeek-V3.1: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{..}<｜tool▁call▁end｜>`;
//! - DeepSeek-V3 and R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, then `{..}` in a fenced block, `<｜tool▁call▁end｜>`.
//!
//! Calls of DeepSeek stand between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`.

use super::{Part, json_call::ObjectEnd, overlap};

/// The marks of a format.
#[derive(Debug)]
pub(super) struct CallMarks {
    /// Begins a call.
    pub(super) open: &'static str,
    /// Stands between the name and the arguments.
    pub(super) separator: &'static str,
    /// Ends a call; absent if the end of the arguments does.
    pub(super) close: Option<&'static str>,
    /// Stand around all calls.
    pub(super) around: Option<[&'static str; 2]>,
}

/// The marks of Mistral.
pub(super) const MISTRAL: CallMarks =
    CallMarks { open: "[TOOL_CALLS]", separator: "[ARGS]", close: None, around: None };

/// The marks of DeepSeek.
pub(super) const DEEPSEEK: CallMarks = CallMarks {
    open: "<｜tool▁call▁begin｜>",
    separator: "<｜tool▁sep｜>",
    close: Some("<｜tool▁call▁end｜>"),
    around: Some(["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"]),
};

/// Stands before the id of a call that newer models of Mistral write.
const CALL_ID: &str = "[CALL_ID]";

impl CallMarks {
    /// All marks.
    pub(super) fn all(&self) -> impl Iterator<Item = &'static str> {
        let around = self.around.into_iter().flatten();
        [self.open, self.separator, CALL_ID].into_iter().chain(self.close).chain(around)
    }

    /// The mark that no text for the reader has.
    pub(super) fn first(&self) -> &'static str {
        self.around.map_or(self.open, |[begin, _]| begin)
    }
}

/// Reads an answer that comes in pieces.
#[derive(Debug)]
pub(super) struct NamedCallParser {
    marks: &'static CallMarks,
    held: String,
    state: State,
    /// Whether there was a call, behind which blanks are dropped.
    called: bool,
}

#[derive(Debug)]
enum State {
    /// Text for the reader.
    Outside,
    /// Between the mark that begins a call and its arguments.
    Head,
    Arguments(ObjectEnd),
    /// Behind the arguments, before the mark that ends the call.
    Tail,
}

impl NamedCallParser {
    pub(super) fn new(marks: &'static CallMarks) -> Self {
        Self { marks, held: String::new(), state: State::Outside, called: false }
    }

    /// Adds the next piece of text.
    pub(super) fn push(&mut self, text: &str) -> Vec<Part> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        while self.step(&mut parts) {}
        parts
    }

    /// Returns the rest at the end of the text.
    pub(super) fn finish(&mut self) -> Vec<Part> {
        let held = std::mem::take(&mut self.held);
        let text = match self.state {
            State::Outside if self.called && held.trim().is_empty() => String::new(),
            State::Outside => held,
            State::Head => format!("{}{held}", self.marks.open),
            State::Arguments(_) | State::Tail => String::new(),
        };
        Some(text).filter(|text| !text.is_empty()).map(Part::Text).into_iter().collect()
    }

    fn step(&mut self, parts: &mut Vec<Part>) -> bool {
        match &mut self.state {
            State::Outside => self.outside(parts),
            State::Head => {
                // The arguments are an object, and no name has a brace.
                let marks = [self.marks.open].into_iter().chain(self.marks.close);
                let mark = marks.filter_map(|mark| self.held.find(mark)).min();
                let brace = self.held.find('{').filter(|brace| mark.is_none_or(|mark| *brace < mark));
                let Some(brace) = brace else { return self.not_a_call(mark, parts) };
                let head: String = self.held.drain(..brace).collect();
                match name(&head, self.marks.separator) {
                    Some(name) => {
                        parts.push(Part::Begins { name: name.to_owned() });
                        self.called = true;
                        self.state = State::Arguments(ObjectEnd::default());
                    }
                    None => {
                        parts.push(Part::Text(format!("{}{head}", self.marks.open)));
                        self.state = State::Outside;
                    }
                }
                true
            }
            State::Arguments(end) => {
                let found = end.find(&self.held);
                let arguments: String = self.held.drain(..found.unwrap_or(self.held.len())).collect();
                if !arguments.is_empty() {
                    parts.push(Part::Arguments(arguments));
                }
                if found.is_some() {
                    self.state = if self.marks.close.is_some() { State::Tail } else { State::Outside };
                }
                found.is_some()
            }
            State::Tail => {
                let close = self.marks.close.unwrap_or_default();
                let rest = self.held.trim_start_matches([' ', '\n', '\r', '\t', '`']);
                if close.starts_with(rest) && rest != close {
                    return false;
                }
                // Models forget the mark.
                let after = rest.strip_prefix(close).unwrap_or(rest).len();
                self.held.drain(..self.held.len() - after);
                self.state = State::Outside;
                true
            }
        }
    }

    /// Takes text for the reader, up to the next mark.
    fn outside(&mut self, parts: &mut Vec<Part>) -> bool {
        let marks = || [self.marks.open].into_iter().chain(self.marks.around.into_iter().flatten());
        let next = marks().filter_map(|mark| Some((self.held.find(mark)?, mark))).min();
        let kept = || marks().map(|mark| overlap(&self.held, mark)).max().unwrap_or(0);
        let end = next.map_or_else(|| self.held.len() - kept(), |(place, _)| place);
        let text = &self.held[..end];
        if self.called && text.trim().is_empty() {
            // Blanks behind calls are dropped, unless text follows.
            if next.is_none() {
                return false;
            }
        } else if !text.is_empty() {
            parts.push(Part::Text(text.to_owned()));
            self.called = false;
        }
        let Some((_, mark)) = next else {
            self.held.drain(..end);
            return false;
        };
        if mark == self.marks.open {
            self.state = State::Head;
        }
        self.held.drain(..end + mark.len());
        true
    }

    /// Gives the head of a call up that the mark at this place interrupts, if there is one.
    fn not_a_call(&mut self, mark: Option<usize>, parts: &mut Vec<Part>) -> bool {
        let Some(end) = mark else { return false };
        let head: String = self.held.drain(..end).collect();
        parts.push(Part::Text(format!("{}{head}", self.marks.open)));
        if let Some(close) = self.marks.close.filter(|close| self.held.starts_with(close)) {
            self.held.drain(..close.len());
            parts.push(Part::Text(close.to_owned()));
        }
        self.state = State::Outside;
        true
    }
}

/// The name of the function in the head of a call.
fn name<'a>(head: &'a str, separator: &str) -> Option<&'a str> {
    let (before, after) = head.split_once(separator)?;
    let name = match before.trim() {
        "function" => after.lines().next().unwrap_or_default(),
        before => before.split(CALL_ID).next().unwrap_or_default(),
    };
    let is_name =
        |name: &str| !name.is_empty() && !name.contains(|character: char| character.is_whitespace());
    Some(name.trim()).filter(|name| is_name(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    /// The parts of an answer in pieces of this many characters, as one text.
    fn read(marks: &'static CallMarks, answer: &str, size: usize) -> String {
        let mut parser = NamedCallParser::new(marks);
        let characters: Vec<char> = answer.chars().collect();
        let mut parts: Vec<Part> = characters
            .chunks(size)
            .flat_map(|piece| parser.push(&piece.iter().collect::<String>()))
            .collect();
        parts.extend(parser.finish());
        let written = |part: Part| match part {
            Part::Text(text) | Part::Reasoning(text) | Part::Arguments(text) => text,
            Part::Begins { name } => format!("CALL {name} "),
        };
        parts.into_iter().map(written).collect()
    }

    #[rstest]
    #[case("Hello.", "Hello.")]
    #[case("[TOOL_CALLS]f[ARGS]{\"x\": {\"y\": 1}}", "CALL f {\"x\": {\"y\": 1}}")]
    #[case(
        "Let me see.[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[CALL_ID]a1b2[ARGS]{\"z\": \"}\"}",
        "Let me see.CALL f {}CALL g {\"z\": \"}\"}"
    )]
    #[case("[TOOL_CALLS]f[ARGS]{}\n\n", "CALL f {}")]
    #[case("[TOOL_CALLS]f[ARGS]{\"x\": 1", "CALL f {\"x\": 1")]
    #[case("[TOOL_CALLS]f", "[TOOL_CALLS]f")]
    #[case("[TOOL_CALLS]no separator {}", "[TOOL_CALLS]no separator {}")]
    #[case("a [TOOL", "a [TOOL")]
    fn mistral(#[case] answer: &str, #[case] expected: &str, #[values(1, 3, 1000)] size: usize) {
        assert_eq!(read(&MISTRAL, answer, size), expected);
    }

    #[rstest]
    #[case(
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"x\": 1}\n```<｜tool▁call▁end｜>\n\
         <｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I look.CALL f {\"x\": 1}CALL g {}"
    )]
    #[case(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"x\": \"<｜tool▁call▁end｜>\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "CALL f {\"x\": \"<｜tool▁call▁end｜>\"}"
    )]
    #[case(
        "<｜tool▁call▁begin｜>nonsense<｜tool▁call▁end｜> and on",
        "<｜tool▁call▁begin｜>nonsense<｜tool▁call▁end｜> and on"
    )]
    #[case("a <｜tool", "a <｜tool")]
    // The closing mark is forgotten.
    #[case(
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}\n<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "CALL f {}CALL g {}"
    )]
    #[case("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{} Done.", "CALL f {}Done.")]
    #[case(
        "<｜tool▁call▁begin｜>no<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}",
        "<｜tool▁call▁begin｜>noCALL f {}"
    )]
    fn deepseek(#[case] answer: &str, #[case] expected: &str, #[values(1, 3, 1000)] size: usize) {
        assert_eq!(read(&DEEPSEEK, answer, size), expected);
    }

    #[test]
    fn arguments_come_piece_by_piece() {
        let mut parser = NamedCallParser::new(&MISTRAL);
        assert_eq!(parser.push("[TOOL_CALLS]f[ARGS]"), []);
        let begins = [Part::Begins { name: "f".into() }, Part::Arguments("{\"x\"".into())];
        assert_eq!(parser.push("{\"x\""), begins);
        assert_eq!(parser.push(": 1}"), [Part::Arguments(": 1}".into())]);
        assert_eq!(parser.finish(), []);
    }
}
