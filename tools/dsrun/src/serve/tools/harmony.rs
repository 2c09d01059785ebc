//! Reads answers in the Harmony format of gpt-oss, which consist of messages on channels.
//!
//! The prompt ends with `<|start|>assistant`. An answer goes on with the header of a message, such as `<|channel|>analysis`, then
//! `<|message|>`, its content, and `<|end|>` where another message follows. Reasoning is on the channel `analysis`, the answer on
//! `final`. A call is on `commentary` or `analysis` and names its function in the header: `to=functions.NAME`.

use super::{Part, overlap};

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const END: &str = "<|end|>";
const CALL: &str = "<|call|>";
const RETURN: &str = "<|return|>";

/// The marks of the format. They are control tokens, which are part of the text for this reader.
pub(super) const MARKS: [&str; 7] = [START, CHANNEL, MESSAGE, END, CALL, RETURN, "<|constrain|>"];

/// The marks that end the content of a message.
const ENDS: [&str; 5] = [END, CALL, RETURN, START, CHANNEL];

/// The prefix of the functions of a request in a header.
const FUNCTIONS: &str = "functions.";

/// Reads an answer that comes in pieces.
#[derive(Debug, Default)]
pub(super) struct HarmonyParser {
    held: String,
    state: State,
    /// Whether there was reasoning, or text for the reader.
    reasoned: bool,
    said: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// Before the header of the first message, which lacks its start.
    #[default]
    First,
    /// In a header.
    Header,
    /// In the content of a message.
    Content(Kind),
    /// Behind a message, before the start of the next.
    Between,
}

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Text,
    Call,
}

impl HarmonyParser {
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
        match self.state {
            State::Content(kind) if !held.is_empty() => vec![part(kind, held)],
            State::First if !held.trim().is_empty() => vec![Part::Text(held)],
            _ => Vec::new(),
        }
    }

    fn step(&mut self, parts: &mut Vec<Part>) -> bool {
        match self.state {
            State::First => {
                let rest = self.held.trim_start();
                let begins = |mark: &str| rest.starts_with(mark);
                let may_begin = |mark: &str| mark.starts_with(rest);
                let marks = [CHANNEL, MESSAGE, "to="];
                if marks.into_iter().any(begins) {
                    self.state = State::Header;
                } else if marks.into_iter().any(may_begin) {
                    return false;
                } else {
                    // No message at all: an answer of a model that does not keep to the format.
                    self.begin(Kind::Text, parts);
                }
                true
            }
            State::Header => {
                let Some(end) = self.held.find(MESSAGE) else { return false };
                let header: String = self.held.drain(..end + MESSAGE.len()).collect();
                let kind = match function(&header[..end]) {
                    Some(name) => {
                        parts.push(Part::Begins { name: name.to_owned() });
                        Kind::Call
                    }
                    // The model talks to a tool of its training that is not here, or to itself.
                    None if header.contains("to=") || channel(&header) == "analysis" => Kind::Reasoning,
                    None => Kind::Text,
                };
                self.begin(kind, parts);
                true
            }
            State::Content(kind) => {
                let end = ENDS.into_iter().filter_map(|mark| Some((self.held.find(mark)?, mark))).min();
                let kept = || ENDS.into_iter().map(|mark| overlap(&self.held, mark)).max().unwrap_or(0);
                let length = end.map_or_else(|| self.held.len() - kept(), |(place, _)| place);
                let content: String = self.held.drain(..length).collect();
                if !content.is_empty() {
                    parts.push(part(kind, content));
                }
                if end.is_some() {
                    self.state = State::Between;
                }
                end.is_some()
            }
            State::Between => {
                // A message may lack its start.
                let start = [START, CHANNEL].into_iter().filter_map(|mark| self.held.find(mark)).min();
                let Some(start) = start else {
                    let kept = overlap(&self.held, START).max(overlap(&self.held, CHANNEL));
                    self.held.drain(..self.held.len() - kept);
                    return false;
                };
                self.held.drain(..start);
                self.state = State::Header;
                true
            }
        }
    }

    /// Begins the content of a message. Messages of a kind are paragraphs of one text.
    fn begin(&mut self, kind: Kind, parts: &mut Vec<Part>) {
        let before = match kind {
            Kind::Reasoning => std::mem::replace(&mut self.reasoned, true),
            Kind::Text => std::mem::replace(&mut self.said, true),
            Kind::Call => false,
        };
        if before {
            parts.push(part(kind, "\n\n".to_owned()));
        }
        self.state = State::Content(kind);
    }
}

fn part(kind: Kind, text: String) -> Part {
    match kind {
        Kind::Reasoning => Part::Reasoning(text),
        Kind::Text => Part::Text(text),
        Kind::Call => Part::Arguments(text),
    }
}

/// The function that a header calls.
fn function(header: &str) -> Option<&str> {
    let (_, recipient) = header.split_once("to=")?;
    let end = recipient.find(|character: char| character.is_whitespace() || character == '<');
    let name = recipient[..end.unwrap_or(recipient.len())].strip_prefix(FUNCTIONS)?;
    Some(name).filter(|name| !name.is_empty())
}

/// The channel of a header.
fn channel(header: &str) -> &str {
    let channel = header.split_once(CHANNEL).map_or("", |(_, channel)| channel);
    let end = channel.find(|character: char| character.is_whitespace() || character == '<');
    &channel[..end.unwrap_or(channel.len())]
}

/// The rules of messages before a call or the answer, and of a call of one of `functions`; `mark` writes a mark.
pub(super) fn rules(mark: &dyn Fn(&str) -> String) -> String {
    let [start, channel, message, end] = [START, CHANNEL, MESSAGE, END].map(mark);
    format!(
        "before: {channel} (\"analysis\" | \"commentary\") {message} BODY {end} {start} \"assistant\"\n\
         final: {channel} \"final\" {message} answer\nBODY: /(?s:.*)/\n"
    )
}

/// What stands before the arguments of a call of a function in Lark.
pub(super) fn call_head(name: &str, mark: &dyn Fn(&str) -> String) -> String {
    let recipient = serde_json::Value::from(format!("commentary to={FUNCTIONS}{name} "));
    let [channel, message, constrain] = [CHANNEL, MESSAGE, "<|constrain|>"].map(mark);
    format!("{channel} {recipient} {constrain} \"json\" {message}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    /// The reasoning, the text and the calls of an answer in pieces of this many characters.
    fn read(answer: &str, size: usize) -> (String, String, Vec<String>) {
        let (mut reasoning, mut text, mut calls) = (String::new(), String::new(), Vec::<String>::new());
        let mut parser = HarmonyParser::default();
        let characters: Vec<char> = answer.chars().collect();
        let mut parts: Vec<Part> = characters
            .chunks(size)
            .flat_map(|piece| parser.push(&piece.iter().collect::<String>()))
            .collect();
        parts.extend(parser.finish());
        for part in parts {
            match part {
                Part::Reasoning(more) => reasoning.push_str(&more),
                Part::Text(more) => text.push_str(&more),
                Part::Begins { name } => calls.push(format!("{name} ")),
                Part::Arguments(more) => calls.last_mut().expect("a call").push_str(&more),
            }
        }
        (reasoning, text, calls)
    }

    #[rstest]
    #[case("<|channel|>final<|message|>Hello.", "", "Hello.", &[])]
    #[case(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>2 < 3",
        "Hm.", "2 < 3", &[]
    )]
    #[case(
        "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather \
         <|constrain|>json<|message|>{\"city\":\"Rome\"}",
        "Need it.", "", &["get_weather {\"city\":\"Rome\"}"]
    )]
    // The recipient before the channel, a preamble, and two calls.
    #[case(
        "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant to=functions.f<|channel|>commentary json\
         <|message|>{}<|call|><|start|>assistant<|channel|>commentary to=functions.g<|message|>{\"x\":1}<|call|>",
        "", "Let me look.", &["f {}", "g {\"x\":1}"]
    )]
    #[case(" to=functions.f<|channel|>commentary<|message|>{}", "", "", &["f {}"])]
    #[case("<|channel|>analysis to=python code<|message|>print(1)<|call|>", "print(1)", "", &[])]
    #[case(
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>",
        "a\n\nb", "", &[]
    )]
    #[case("Hello.", "", "Hello.", &[])]
    #[case("<|channel|>final<|message|>cut off <|en", "", "cut off <|en", &[])]
    #[case("<|channel|>analysis", "", "", &[])]
    fn messages_are_told_apart_wherever_the_answer_is_cut(
        #[case] answer: &str,
        #[case] reasoning: &str,
        #[case] text: &str,
        #[case] calls: &[&str],
        #[values(1, 3, 7, 1000)] size: usize,
    ) {
        let calls: Vec<String> = calls.iter().map(|call| (*call).to_owned()).collect();
        assert_eq!(read(answer, size), (reasoning.to_owned(), text.to_owned(), calls));
    }

    #[test]
    fn arguments_and_text_are_not_held_back() {
        let mut parser = HarmonyParser::default();
        let header = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>";
        assert_eq!(parser.push(header), [Part::Begins { name: "f".into() }]);
        assert_eq!(parser.push("{\"x\""), [Part::Arguments("{\"x\"".into())]);
        assert_eq!(parser.push(": 1}"), [Part::Arguments(": 1}".into())]);
    }
}
