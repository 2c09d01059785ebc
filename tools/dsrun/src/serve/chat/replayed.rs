//! Conversations in the form of every family, cut at random places: what a client gets is what the model meant.

use super::{CallPiece, Content, Piece, Reader};
use crate::serve::{
    api::{Finish, chat::Function},
    reasoning::{Marks, ReasoningSplitter},
    tools::{ToolFormat, ToolParser},
};
use proptest::{collection::vec, prelude::*, sample::select, test_runner::Config};
use rstest::rstest;
use serde_json::{Map, Value, json};

const THINK: Marks = Marks { open: "<think>", close: "</think>" };

/// How a family of models writes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    Hermes,
    Glm,
    QwenCoder,
    Llama,
    Phi,
    Mistral,
    DeepSeek,
    FencedDeepSeek,
    Pythonic,
    GptOss,
}

impl Family {
    fn format(self) -> ToolFormat {
        match self {
            Self::Hermes | Self::Glm | Self::QwenCoder => ToolFormat::Hermes,
            Self::Llama => ToolFormat::Json,
            Self::Phi => ToolFormat::List,
            Self::Mistral => ToolFormat::Mistral,
            Self::DeepSeek => ToolFormat::DeepSeek { fenced: false },
            Self::FencedDeepSeek => ToolFormat::DeepSeek { fenced: true },
            Self::Pythonic => ToolFormat::Pythonic,
            Self::GptOss => ToolFormat::Harmony,
        }
    }

    /// Whether calls are the whole answer.
    fn has_no_text(self) -> bool {
        matches!(self, Self::Llama | Self::Phi | Self::Pythonic)
    }

    /// Whether values stand between marks, which no text among them may have then.
    fn has_marked_values(self) -> bool {
        matches!(self, Self::Glm | Self::QwenCoder)
    }
}

/// What a model means.
#[derive(Clone, Debug, Default, PartialEq)]
struct Turn {
    reasoning: String,
    text: String,
    calls: Vec<(String, Map<String, Value>)>,
}

/// A text that could be mistaken for marks, and begins and ends with a letter.
fn prose() -> impl Strategy<Value = String> {
    let pieces = select(vec![
        "a", " ", "\n", "é", "🦀", "世界", "{", "}", "[", "]", "\"", "<", "<tool", "</tool_", "</thin",
        "[TOOL", "<｜tool", "<|chan", "f(", ", ", ";", "```", "name", ":",
    ]);
    vec(pieces, 0..12).prop_map(|pieces| format!("a{}z", pieces.concat()))
}

/// Any JSON. `marked` leaves out what may be a mark.
fn value(marked: bool) -> impl Strategy<Value = Value> {
    let text = prop_oneof![prose(), "[a-z\\\\\"'\t,)(]{0,8}"];
    let text = text.prop_map(move |text| if marked { text.replace('<', "(") } else { text });
    let leaf = prop_oneof![
        text.prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<bool>().prop_map(Value::from),
        Just(Value::Null),
        (-1000..1000_i32).prop_map(|number| json!(f64::from(number) / 8.0)),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..4).prop_map(Value::from),
            vec(("[a-z ]{1,6}", inner), 0..4)
                .prop_map(|entries| Value::Object(entries.into_iter().collect())),
        ]
    })
}

fn turn(family: Family) -> impl Strategy<Value = Turn> {
    let arguments = vec(("[a-z_]{1,6}", value(family.has_marked_values())), 0..4);
    let arguments = arguments.prop_map(|entries| entries.into_iter().collect::<Map<String, Value>>());
    let calls = vec(("[a-z_]{1,6}", arguments), 0..4);
    // Talk about calls is no call as long as it is reasoning.
    let reasoning = (prose(), select(vec!["", " [f(x=1)] <tool_call> {\"name\"} z"]));
    let reasoning = reasoning.prop_map(move |(prose, talk)| match family {
        Family::GptOss => prose,
        _ => prose + talk,
    });
    let perhaps = |text: BoxedStrategy<String>| prop_oneof![Just(String::new()), text];
    (perhaps(reasoning.boxed()), perhaps(prose().boxed()), calls).prop_map(
        move |(reasoning, mut text, calls)| {
            // Names are unique, because each function has its own schema.
            let numbered =
                |(index, (name, arguments)): (usize, (String, _))| (format!("{name}{index}"), arguments);
            let calls: Vec<_> = calls.into_iter().enumerate().map(numbered).collect();
            if family.has_no_text() && !calls.is_empty() {
                text.clear();
            }
            Turn { reasoning, text, calls }
        },
    )
}

/// A literal of Python.
fn python(value: &Value) -> String {
    let list = |items: Vec<String>| items.join(", ");
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Number(number) => number.to_string(),
        Value::String(_) => value.to_string(),
        Value::Array(items) => format!("[{}]", list(items.iter().map(python).collect())),
        Value::Object(entries) => {
            let entry =
                |(key, value): (&String, &Value)| format!("{}: {}", Value::from(key.as_str()), python(value));
            format!("{{{}}}", list(entries.iter().map(entry).collect()))
        }
    }
}

/// A value between marks: a text as it is, anything else as JSON.
fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// The answer as the family writes it; `open` says that its prompt ended with the mark that opens reasoning.
fn written(family: Family, turn: &Turn, open: bool) -> String {
    let Turn { reasoning, text, calls } = turn;
    if family == Family::GptOss {
        return written_on_channels(turn);
    }
    let thought = match (open, reasoning.as_str()) {
        (true, reasoning) => format!("{reasoning}\n</think>\n\n"),
        (false, "") => String::new(),
        (false, reasoning) => format!("<think>\n{reasoning}\n</think>\n\n"),
    };
    let call = |(name, arguments): &(String, Map<String, Value>)| {
        let json = Value::Object(arguments.clone());
        let pairs = |write: &dyn Fn(&String, &Value) -> String| -> Vec<String> {
            arguments.iter().map(|(key, value)| write(key, value)).collect()
        };
        match family {
            Family::Hermes => {
                format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {json}}}\n</tool_call>")
            }
            Family::Glm => {
                let pair = |key: &String, value: &Value| {
                    format!("<arg_key>{key}</arg_key>\n<arg_value>{}</arg_value>\n", plain(value))
                };
                format!("<tool_call>{name}\n{}</tool_call>", pairs(&pair).concat())
            }
            Family::QwenCoder => {
                let pair = |key: &String, value: &Value| {
                    format!("<parameter={key}>\n{}\n</parameter>\n", plain(value))
                };
                format!("<tool_call>\n<function={name}>\n{}</function>\n</tool_call>", pairs(&pair).concat())
            }
            Family::Llama => format!("{{\"name\": \"{name}\", \"parameters\": {json}}}"),
            Family::Phi => format!("{{\"name\": \"{name}\", \"arguments\": {json}}}"),
            Family::Mistral if name.len() % 2 == 0 => {
                format!("[TOOL_CALLS]{name}[CALL_ID]a1b2c3[ARGS]{json}")
            }
            Family::Mistral => format!("[TOOL_CALLS]{name}[ARGS]{json}"),
            Family::DeepSeek => format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json}<｜tool▁call▁end｜>"),
            Family::FencedDeepSeek => format!(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json}\n```<｜tool▁call▁end｜>"
            ),
            Family::Pythonic => {
                let pair = |key: &String, value: &Value| format!("{key}={}", python(value));
                format!("{name}({})", pairs(&pair).join(", "))
            }
            Family::GptOss => unreachable!("it was written above"),
        }
    };
    let calls: Vec<String> = calls.iter().map(call).collect();
    let calls = match family {
        _ if calls.is_empty() => String::new(),
        Family::Hermes | Family::Glm | Family::QwenCoder => calls.join("\n"),
        Family::Llama => calls.join("; "),
        Family::Phi | Family::Pythonic => format!("[{}]", calls.join(", ")),
        Family::DeepSeek | Family::FencedDeepSeek => {
            format!("<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>", calls.join("\n"))
        }
        Family::Mistral | Family::GptOss => calls.concat(),
    };
    format!("{thought}{text}{calls}")
}

fn written_on_channels(Turn { reasoning, text, calls }: &Turn) -> String {
    let message = |channel: &str, content: &str| format!("<|channel|>{channel}<|message|>{content}");
    let mut messages = Vec::new();
    if !reasoning.is_empty() {
        messages.push(message("analysis", reasoning));
    }
    if !text.is_empty() {
        messages.push(message(if calls.is_empty() { "final" } else { "commentary" }, text));
    }
    for (name, arguments) in calls {
        let channel = format!("commentary to=functions.{name} <|constrain|>json");
        messages.push(message(&channel, &Value::Object(arguments.clone()).to_string()));
    }
    messages.join("<|end|><|start|>assistant")
}

/// The functions of a turn, with the types of their arguments.
fn functions(turn: &Turn) -> Vec<Function> {
    let function = |(name, arguments): &(String, Map<String, Value>)| {
        let kind = |value: &Value| if value.is_string() { json!({"type": "string"}) } else { json!({}) };
        let properties: Map<String, Value> =
            arguments.iter().map(|(key, value)| (key.clone(), kind(value))).collect();
        let parameters = Some(json!({"type": "object", "properties": properties}));
        Function { name: name.clone(), description: None, parameters, strict: None }
    };
    turn.calls.iter().map(function).collect()
}

/// An answer as a client puts it together.
#[derive(Debug, Default, PartialEq)]
struct Received {
    reasoning: String,
    text: String,
    calls: Vec<(String, String)>,
}

impl Received {
    fn add(&mut self, content: Content) {
        self.reasoning.push_str(&content.reasoning);
        self.text.push_str(&content.text);
        for CallPiece { index, begins, arguments } in content.calls {
            if let Some((_, name)) = begins {
                assert_eq!(index, self.calls.len(), "calls come in their order");
                self.calls.push((name, String::new()));
            }
            assert_eq!(index + 1, self.calls.len(), "arguments belong to the last call");
            self.calls[index].1.push_str(&arguments);
        }
    }

    /// What the model meant by it.
    fn meaning(self) -> Turn {
        let Self { reasoning, text, calls } = self;
        let call = |(name, arguments): (String, String)| {
            let arguments =
                serde_json::from_str(&arguments).unwrap_or_else(|error| panic!("{error}: {arguments}"));
            (name, arguments)
        };
        Turn { reasoning, text, calls: calls.into_iter().map(call).collect() }
    }
}

/// Reads an answer in pieces of these numbers of characters, again and again.
fn received(family: Family, answer: &str, functions: Vec<Function>, open: bool, cuts: &[usize]) -> Received {
    let mut reader = Reader {
        splitter: (family != Family::GptOss).then(|| ReasoningSplitter::new(THINK, open)),
        parser: Some(ToolParser::new(family.format(), functions, usize::MAX)),
        ..Reader::default()
    };
    let mut received = Received::default();
    let mut characters = answer.chars().peekable();
    let mut cuts = cuts.iter().cycle();
    loop {
        let text: String = characters.by_ref().take(*cuts.next().expect("there is a cut")).collect();
        let finish = characters.peek().is_none().then_some(Finish::Stop);
        let piece = Piece { index: 0, id: None, cached: 0, text, tokens: Vec::new(), stop: None, finish };
        received.add(reader.read(&piece));
        if finish.is_some() {
            return received;
        }
    }
}

fn cuts() -> impl Strategy<Value = Vec<usize>> {
    vec(1..=12_usize, 1..16)
}

#[rstest]
fn conversations_lose_nothing_wherever_they_are_cut(
    #[values(
        Family::Hermes,
        Family::Glm,
        Family::QwenCoder,
        Family::Llama,
        Family::Phi,
        Family::Mistral,
        Family::DeepSeek,
        Family::FencedDeepSeek,
        Family::Pythonic,
        Family::GptOss
    )]
    family: Family,
) {
    proptest!(Config::with_cases(1000), |(turn in turn(family), open in any::<bool>(), cuts in cuts())| {
        let answer = written(family, &turn, open);
        prop_assert_eq!(received(family, &answer, functions(&turn), open, &cuts).meaning(), turn, "{}", answer);
    });
}

/// What answers of models that do not keep to their form are made of.
const FRAGMENTS: [&str; 44] = [
    "w1 ",
    " w2",
    "w3",
    "\n",
    " ",
    "{}",
    "{",
    "}",
    "[",
    "]",
    ", ",
    "; ",
    "{\"x\": 1}",
    "\"x\"",
    "f",
    "g",
    "f(",
    "x=1",
    "x='a",
    ")",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "{\"name\": \"f\", \"arguments\": ",
    "{\"name\": \"f\"",
    "{\"name\": \"f\", \"parameters\": ",
    "<arg_key>",
    "<function=f>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "to=functions.f",
    "analysis",
    "final",
];

#[rstest]
fn any_answer_is_read_in_the_same_way_wherever_it_is_cut(
    #[values(
        Family::Hermes,
        Family::Llama,
        Family::Phi,
        Family::Mistral,
        Family::DeepSeek,
        Family::Pythonic,
        Family::GptOss
    )]
    family: Family,
) {
    let function =
        |name: &str| Function { name: name.into(), description: None, parameters: None, strict: None };
    let functions = || vec![function("f"), function("g")];
    let fragments = vec(select(FRAGMENTS.to_vec()), 0..16);
    proptest!(Config::with_cases(1000), |(fragments in fragments, open in any::<bool>(), cuts in cuts())| {
        let answer = fragments.concat();
        let whole = received(family, &answer, functions(), open, &[usize::MAX]);
        prop_assert_eq!(received(family, &answer, functions(), open, &cuts), whole, "{}", answer);
    });
}
