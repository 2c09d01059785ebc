//! Reads calls in the syntax of Python, as Llama 4, Llama 3.2 and Gemma 3 write them: `[f(x=1, y="a"), g()]`.
//!
//! The whole answer is a list of calls. Arguments are returned as JSON, one after the other as they are complete.

use super::Part;
use serde_json::{Map, Number, Value};

/// The deepest nesting of lists and dictionaries in an argument.
const MAX_DEPTH: usize = 64;

/// Reads an answer that comes in pieces.
#[derive(Debug)]
pub(super) struct PythonicParser {
    /// The names of the functions.
    functions: Vec<String>,
    held: String,
    state: State,
    calls: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Before the list.
    Start,
    /// Before the name of a function.
    Name,
    /// Before an argument, or the end of the arguments.
    Argument { first: bool },
    /// Behind a call.
    After,
    /// Text for the reader.
    Text,
    /// Behind the list, where blanks are dropped.
    End,
}

/// The result of reading a part of a text that may go on.
enum Read<T> {
    /// More text is needed.
    Partial,
    /// The part, and the bytes that it takes.
    Whole(T, usize),
    /// The text is something else.
    Other,
}

impl PythonicParser {
    pub(super) fn new(functions: Vec<String>) -> Self {
        Self { functions, held: String::new(), state: State::Start, calls: 0 }
    }

    /// Adds the next piece of text.
    pub(super) fn push(&mut self, text: &str) -> Vec<Part> {
        self.held.push_str(text);
        // An argument ends with one of these, so that a long one is not read again for every piece.
        if matches!(self.state, State::Argument { .. }) && !text.contains([',', ')']) {
            return Vec::new();
        }
        let mut parts = Vec::new();
        while self.step(&mut parts) {}
        parts
    }

    /// Returns the rest at the end of the text.
    pub(super) fn finish(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        while self.step(&mut parts) {}
        let held = std::mem::take(&mut self.held);
        match self.state {
            // A limit cuts the arguments off.
            State::Argument { .. } => {}
            State::Name | State::After | State::End if self.calls > 0 => {}
            _ => parts.extend(Some(held).filter(|text| !text.is_empty()).map(Part::Text)),
        }
        parts
    }

    fn step(&mut self, parts: &mut Vec<Part>) -> bool {
        let blanks = self.held.len() - self.held.trim_start().len();
        let rest = &self.held[blanks..];
        let (state, taken) = match self.state {
            State::Text => {
                if !self.held.is_empty() {
                    parts.push(Part::Text(std::mem::take(&mut self.held)));
                }
                return false;
            }
            _ if rest.is_empty() => return false,
            // The bracket is kept until a call is certain, because it may belong to a text.
            State::Start => (if rest.starts_with('[') { State::Name } else { State::Text }, 0),
            State::Name => {
                let opened = usize::from(self.calls == 0);
                match name(&rest[opened..]) {
                    Read::Partial => return false,
                    Read::Whole(name, length) if self.functions.contains(&name) => {
                        parts.extend([Part::Begins { name }, Part::Arguments("{".to_owned())]);
                        self.calls += 1;
                        (State::Argument { first: true }, blanks + opened + length)
                    }
                    _ => (State::Text, 0),
                }
            }
            State::Argument { first } => match argument(rest) {
                Read::Partial => return false,
                Read::Whole(None, length) => {
                    parts.push(Part::Arguments("}".to_owned()));
                    (State::After, blanks + length)
                }
                Read::Whole(Some((key, value)), length) => {
                    let comma = if first { "" } else { ", " };
                    parts.push(Part::Arguments(format!("{comma}{}: {value}", Value::from(key))));
                    (State::Argument { first: false }, blanks + length)
                }
                Read::Other => {
                    parts.push(Part::Arguments("}".to_owned()));
                    (State::Text, 0)
                }
            },
            State::After => match rest.chars().next() {
                Some(',') => (State::Name, blanks + 1),
                Some(']') => (State::End, blanks + 1),
                _ => (State::Text, 0),
            },
            State::End => (State::Text, 0),
        };
        self.held.drain(..taken);
        self.state = state;
        true
    }
}

/// Reads a name and the parenthesis behind it.
fn name(text: &str) -> Read<String> {
    let rest = text.trim_start();
    let end = rest.find(|character: char| !(character.is_ascii_alphanumeric() || "_-.".contains(character)));
    match end {
        None => Read::Partial,
        Some(end) if end > 0 && rest[end..].starts_with('(') => {
            Read::Whole(rest[..end].to_owned(), text.len() - rest.len() + end + 1)
        }
        Some(_) => Read::Other,
    }
}

/// Reads `key=value` and the comma behind it, or the parenthesis that ends the arguments: `None`.
fn argument(text: &str) -> Read<Option<(String, Value)>> {
    let mut cursor = Cursor { text, at: 0 };
    let read = (|| {
        if cursor.peek()? == ')' {
            cursor.at += 1;
            return Ok(None);
        }
        let start = cursor.at;
        while cursor.next_is(|character| character.is_alphanumeric() || character == '_')? {
            cursor.skip();
        }
        let key = text[start..cursor.at].to_owned();
        if key.is_empty() {
            return Err(Stop::Other);
        }
        cursor.take('=')?;
        let value = cursor.value(0)?;
        // The parenthesis is left for the next time.
        match cursor.peek()? {
            ',' => cursor.at += 1,
            ')' => {}
            _ => return Err(Stop::Other),
        }
        Ok(Some((key, value)))
    })();
    match read {
        Ok(argument) => Read::Whole(argument, cursor.at),
        Err(Stop::Partial) => Read::Partial,
        Err(Stop::Other) => Read::Other,
    }
}

/// Why reading stops.
enum Stop {
    /// At the end of the text.
    Partial,
    /// At something that is no value.
    Other,
}

/// A place in a text.
struct Cursor<'a> {
    text: &'a str,
    at: usize,
}

impl Cursor<'_> {
    /// The next character.
    fn next(&self) -> Result<char, Stop> {
        self.text[self.at..].chars().next().ok_or(Stop::Partial)
    }

    fn next_is(&self, test: impl Fn(char) -> bool) -> Result<bool, Stop> {
        self.next().map(test)
    }

    fn skip(&mut self) {
        self.at += self.next().map_or(0, char::len_utf8);
    }

    /// The next character that is no blank.
    fn peek(&mut self) -> Result<char, Stop> {
        while self.next_is(char::is_whitespace)? {
            self.skip();
        }
        self.next()
    }

    /// Takes a character behind blanks.
    fn take(&mut self, wanted: char) -> Result<(), Stop> {
        if self.peek()? != wanted {
            return Err(Stop::Other);
        }
        self.skip();
        Ok(())
    }

    /// Reads a literal of Python, or of JSON.
    fn value(&mut self, depth: usize) -> Result<Value, Stop> {
        if depth > MAX_DEPTH {
            return Err(Stop::Other);
        }
        match self.peek()? {
            '"' | '\'' => self.string().map(Value::from),
            '[' => self.items('[', ']', depth).map(Value::from),
            '(' => self.items('(', ')', depth).map(Value::from),
            '{' => self.dictionary(depth).map(Value::from),
            _ => self.word(),
        }
    }

    fn items(&mut self, open: char, close: char, depth: usize) -> Result<Vec<Value>, Stop> {
        self.take(open)?;
        let mut items = Vec::new();
        while self.peek()? != close {
            items.push(self.value(depth + 1)?);
            if self.peek()? != close {
                self.take(',')?;
            }
        }
        self.skip();
        Ok(items)
    }

    fn dictionary(&mut self, depth: usize) -> Result<Map<String, Value>, Stop> {
        self.take('{')?;
        let mut entries = Map::new();
        while self.peek()? != '}' {
            if !matches!(self.next()?, '"' | '\'') {
                return Err(Stop::Other);
            }
            let key = self.string()?;
            self.take(':')?;
            entries.insert(key, self.value(depth + 1)?);
            if self.peek()? != '}' {
                self.take(',')?;
            }
        }
        self.skip();
        Ok(entries)
    }

    /// Reads a number, or the name of a constant. It ends before the next character that belongs to neither.
    fn word(&mut self) -> Result<Value, Stop> {
        let start = self.at;
        while self.next_is(|character| character.is_ascii_alphanumeric() || "+-._".contains(character))? {
            self.skip();
        }
        let word = &self.text[start..self.at];
        Ok(match word {
            "True" | "true" => true.into(),
            "False" | "false" => false.into(),
            "None" | "null" => Value::Null,
            word => {
                let plain = word.replace('_', "");
                let number = serde_json::from_str::<Number>(plain.trim_start_matches('+')).ok();
                let float = || plain.parse::<f64>().ok().and_then(Number::from_f64);
                Value::Number(number.or_else(float).ok_or(Stop::Other)?)
            }
        })
    }

    fn string(&mut self) -> Result<String, Stop> {
        let quote = self.next()?;
        self.skip();
        let mut text = String::new();
        loop {
            let character = self.next()?;
            self.skip();
            if character == quote {
                return Ok(text);
            }
            if character != '\\' {
                text.push(character);
                continue;
            }
            let escape = self.next()?;
            self.skip();
            match escape {
                'n' => text.push('\n'),
                't' => text.push('\t'),
                'r' => text.push('\r'),
                'b' => text.push('\u{8}'),
                'f' => text.push('\u{c}'),
                '\n' => {}
                'x' => text.push(self.code(2)?),
                'u' => text.push(self.code_unit()?),
                'U' => text.push(self.code(8)?),
                '\\' | '\'' | '"' | '/' => text.push(escape),
                // Python keeps what it does not know.
                other => text.extend(['\\', other]),
            }
        }
    }

    /// Reads the hexadecimal digits of a character.
    fn code(&mut self, digits: usize) -> Result<char, Stop> {
        char::from_u32(self.digits(digits)?).ok_or(Stop::Other)
    }

    /// Reads a character of four digits, or of two halves of a pair as in JSON.
    fn code_unit(&mut self) -> Result<char, Stop> {
        let first = self.digits(4)?;
        if !(0xD800..0xDC00).contains(&first) {
            return char::from_u32(first).ok_or(Stop::Other);
        }
        for wanted in ['\\', 'u'] {
            if self.next()? != wanted {
                return Err(Stop::Other);
            }
            self.skip();
        }
        let second = self.digits(4)?;
        let low = second.checked_sub(0xDC00).filter(|low| *low < 0x400).ok_or(Stop::Other)?;
        char::from_u32(0x10000 + ((first - 0xD800) << 10) + low).ok_or(Stop::Other)
    }

    fn digits(&mut self, digits: usize) -> Result<u32, Stop> {
        let mut value: u32 = 0;
        for _ in 0..digits {
            let digit = self.next()?.to_digit(16).ok_or(Stop::Other)?;
            value = value.checked_mul(16).ok_or(Stop::Other)? + digit;
            self.skip();
        }
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    /// The parts of an answer in pieces of this many characters, as one text.
    fn read(answer: &str, size: usize) -> String {
        let mut parser = PythonicParser::new(vec!["f".into(), "get_g".into()]);
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
    #[case("[f()]", "CALL f {}")]
    #[case(
        " [f(x=1, y='a\"b'), get_g(list=[1, -2.5, 3e2,])]\n",
        r#"CALL f {"x": 1, "y": "a\"b"}CALL get_g {"list": [1,-2.5,300.0]}"#
    )]
    #[case(
        "[f(d={'k': True, \"n\": None, 'm': {'t': (1, 2)}}, s=\"a, b) ]\")]",
        r#"CALL f {"d": {"k":true,"n":null,"m":{"t":[1,2]}}, "s": "a, b) ]"}"#
    )]
    #[case(
        "[f(s='\\n\\u00e9\\x41\\q\\'', e=\"\\ud83d\\ude00\")]",
        "CALL f {\"s\": \"\\né\u{41}\\\\q'\", \"e\": \"😀\"}"
    )]
    #[case("[f(x=true, y=1_000)]", r#"CALL f {"x": true, "y": 1000}"#)]
    #[case("Hello.", "Hello.")]
    #[case("[1] is a list", "[1] is a list")]
    #[case("[unknown(x=1)]", "[unknown(x=1)]")]
    #[case("[f", "[f")]
    #[case("[f(this is prose", "CALL f {}this is prose")]
    #[case("[f(x=1", "CALL f {")]
    #[case("[f(x=1, ", r#"CALL f {"x": 1"#)]
    #[case("[f(x=1)", r#"CALL f {"x": 1}"#)]
    #[case("[f(), get_g(", "CALL f {}CALL get_g {")]
    #[case("", "")]
    fn calls(#[case] answer: &str, #[case] expected: &str, #[values(1, 3, 1000)] size: usize) {
        assert_eq!(read(answer, size), expected);
    }

    #[test]
    fn nesting_is_bounded() {
        let answer = format!("[f(x={})]", "[".repeat(100_000));
        assert!(read(&answer, 1000).starts_with("CALL f {}"));
    }

    #[test]
    fn arguments_come_one_by_one() {
        let mut parser = PythonicParser::new(vec!["f".into()]);
        assert_eq!(parser.push("[f("), [Part::Begins { name: "f".into() }, Part::Arguments("{".into())]);
        assert_eq!(parser.push("x=1"), []);
        assert_eq!(parser.push(", y="), [Part::Arguments("\"x\": 1".into())]);
        assert_eq!(parser.push("2)"), [Part::Arguments(", \"y\": 2".into()), Part::Arguments("}".into())]);
        assert_eq!(parser.push("]"), []);
        assert_eq!(parser.finish(), []);
    }
}
