//! Reads calls that are JSON as a whole, in the forms of Hermes, Llama 3 and Mistral.

use super::{
    Part, as_call,
    json_call::{Head, ObjectEnd, head},
    marked_call, overlap,
};
use crate::serve::api::chat::Function;
use serde_json::Value;

/// The beginning of a call in the form of Hermes.
pub(super) const OPEN: &str = "<tool_call>";
/// The end of a call in the form of Hermes.
pub(super) const CLOSE: &str = "</tool_call>";
/// What stands between calls in the other forms, and around them.
const SEPARATORS: [char; 8] = [' ', '\n', '\r', '\t', ';', ',', '[', ']'];

/// The forms of calls that are JSON as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JsonCalls {
    /// Between marks.
    Hermes,
    /// One after the other.
    Json,
    /// In a list.
    List,
}

/// Reads an answer that comes in pieces.
#[derive(Debug)]
pub(super) struct JsonCallParser {
    form: JsonCalls,
    functions: Vec<Function>,
    /// Text that may be a call, or the beginning of one.
    held: String,
    state: State,
    /// Calls so far.
    calls: usize,
}

#[derive(Debug)]
enum State {
    /// Only blanks so far.
    Start,
    /// Text for the reader.
    Outside,
    /// Where a call begins.
    Head,
    /// In the arguments of a call.
    Arguments(ObjectEnd),
    /// After the arguments of a call, before what closes it.
    Tail,
    /// In what may be a call with its fields in another order, which is read as a whole.
    Whole,
    /// After a call, where blanks are dropped.
    AfterCall,
}

impl JsonCallParser {
    pub(super) fn new(form: JsonCalls, functions: Vec<Function>) -> Self {
        Self { form, functions, held: String::new(), state: State::Start, calls: 0 }
    }

    /// Adds the next piece of text.
    pub(super) fn push(&mut self, text: &str) -> Vec<Part> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        // Each step takes text from what is held, or changes the state; the last one waits for more.
        while self.step(&mut parts) {}
        parts
    }

    /// Returns the rest at the end of the text.
    pub(super) fn finish(&mut self) -> Vec<Part> {
        let held = std::mem::take(&mut self.held);
        let hermes = self.form == JsonCalls::Hermes;
        let calls = match self.state {
            State::Arguments(_) | State::Tail => Some(Vec::new()),
            State::Head | State::Whole if hermes => self.parse(&held),
            // What closes the list.
            State::Head if self.calls > 0 && held.trim_matches(SEPARATORS).is_empty() => Some(Vec::new()),
            State::Head | State::Whole => self.all_calls(&held),
            State::AfterCall if held.trim().is_empty() => Some(Vec::new()),
            _ => None,
        };
        let text = || match self.state {
            State::Head | State::Whole if hermes => format!("{OPEN}{held}"),
            _ => held.clone(),
        };
        calls.unwrap_or_else(|| {
            Some(text()).filter(|text| !text.is_empty()).map(Part::Text).into_iter().collect()
        })
    }

    /// Reads on, and returns whether there is more to read.
    fn step(&mut self, parts: &mut Vec<Part>) -> bool {
        match &mut self.state {
            State::Start | State::AfterCall => self.start(),
            State::Outside => self.outside(parts),
            State::Head => self.head(parts),
            State::Arguments(end) => {
                let found = end.find(&self.held);
                let arguments: String = self.held.drain(..found.unwrap_or(self.held.len())).collect();
                if !arguments.is_empty() {
                    parts.push(Part::Arguments(arguments));
                }
                if found.is_some() {
                    self.state = State::Tail;
                }
                found.is_some()
            }
            State::Tail => self.tail(),
            State::Whole => self.whole(parts),
        }
    }

    /// Finds out whether a call begins after blanks.
    fn start(&mut self) -> bool {
        let blanks = self.held.len() - self.held.trim_start().len();
        let rest = &self.held[blanks..];
        let first = match self.form {
            JsonCalls::Hermes => OPEN,
            JsonCalls::Json => "{",
            JsonCalls::List => "[",
        };
        if rest.len() < first.len() && first.starts_with(rest) {
            return false;
        }
        let begins = rest.starts_with(first);
        // Blanks before a call are dropped; before text they are part of it.
        if begins && self.form == JsonCalls::Hermes {
            self.held.drain(..blanks);
        }
        self.state = if begins && self.form != JsonCalls::Hermes { State::Head } else { State::Outside };
        true
    }

    /// Takes text for the reader, up to what may begin a call.
    fn outside(&mut self, parts: &mut Vec<Part>) -> bool {
        let (end, open) = match (self.form, self.held.find(OPEN)) {
            (JsonCalls::Hermes, Some(end)) => (end, true),
            (JsonCalls::Hermes, None) => (self.held.len() - overlap(&self.held, OPEN), false),
            // Calls are the whole answer.
            _ => (self.held.len(), false),
        };
        let text: String = self.held.drain(..end).collect();
        if !text.is_empty() {
            parts.push(Part::Text(text));
        }
        if open {
            self.held.drain(..OPEN.len());
            self.state = State::Head;
        }
        open
    }

    /// Reads the beginning of a call.
    fn head(&mut self, parts: &mut Vec<Part>) -> bool {
        let separators = match self.form {
            JsonCalls::Hermes => 0,
            _ => self.held.len() - self.held.trim_start_matches(SEPARATORS).len(),
        };
        match head(&self.held[separators..]) {
            Head::Partial => false,
            Head::Call { name, arguments } if self.is_known(&name) => {
                self.held.drain(..separators + arguments);
                parts.push(Part::Begins { name });
                self.calls += 1;
                self.state = State::Arguments(ObjectEnd::default());
                true
            }
            // After calls, other text is for the reader.
            _ if self.calls > 0 && self.form != JsonCalls::Hermes => {
                self.held.drain(..separators);
                self.state = State::Outside;
                true
            }
            _ => {
                self.state = State::Whole;
                true
            }
        }
    }

    /// Whether a call of this function is one. In the format with marks any is, and the client says that there is no such tool.
    fn is_known(&self, name: &str) -> bool {
        self.form == JsonCalls::Hermes || self.functions.iter().any(|known| known.name == name)
    }

    /// Skips what closes a call.
    fn tail(&mut self) -> bool {
        if self.form == JsonCalls::Hermes {
            let rest = self.held.trim_start_matches([' ', '\n', '\r', '\t', '}']);
            let end = if self.held.trim_start().starts_with(',') {
                // Further fields of the call.
                let marks = [OPEN, CLOSE].map(|mark| self.held.find(mark));
                let Some(end) = marks.into_iter().flatten().min() else { return false };
                end
            } else if CLOSE.starts_with(rest) && rest != CLOSE {
                return false;
            } else {
                self.held.len() - rest.len()
            };
            self.held.drain(..end);
            // Models forget the mark.
            if self.held.starts_with(CLOSE) {
                self.held.drain(..CLOSE.len());
            }
            self.state = State::AfterCall;
            return true;
        }
        let blanks = self.held.len() - self.held.trim_start().len();
        let closes = self.held[blanks..].starts_with('}');
        if self.held.len() > blanks {
            self.held.drain(..blanks + usize::from(closes));
            self.state = State::Head;
        }
        self.held.len() > blanks
    }

    /// Reads a call as a whole, once it is there.
    fn whole(&mut self, parts: &mut Vec<Part>) -> bool {
        // In the other formats the whole answer is calls, or none of it.
        let Some(end) = self.held.find(CLOSE).filter(|_| self.form == JsonCalls::Hermes) else {
            return false;
        };
        let text = &self.held[..end];
        // Anything else between the tags is text.
        parts.extend(self.parse(text).unwrap_or_else(|| vec![Part::Text(format!("{OPEN}{text}{CLOSE}"))]));
        self.held.drain(..end + CLOSE.len());
        self.state = State::AfterCall;
        true
    }

    /// A call that is there as a whole: as JSON, or with its arguments between marks.
    fn parse(&self, text: &str) -> Option<Vec<Part>> {
        let json = || as_call(serde_json::from_str(text.trim()).ok()?);
        let (name, arguments) = json().or_else(|| marked_call::parse(text, &self.functions))?;
        Some(vec![Part::Begins { name }, Part::Arguments(arguments)])
    }

    /// The calls of a text, if it consists of calls of known functions only.
    fn all_calls(&self, text: &str) -> Option<Vec<Part>> {
        let mut calls = Vec::new();
        let mut rest = text.trim();
        while !rest.is_empty() {
            let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
            let values_here = match values.next()?.ok()? {
                Value::Array(list) => list,
                value => vec![value],
            };
            for value in values_here {
                let (name, arguments) = as_call(value)?;
                if !self.is_known(&name) {
                    return None;
                }
                calls.extend([Part::Begins { name }, Part::Arguments(arguments)]);
            }
            rest = rest[values.byte_offset()..].trim_start_matches(SEPARATORS);
        }
        Some(calls)
    }
}
