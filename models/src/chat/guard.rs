//! Keeps what is written in a conversation apart from what its template writes around it.
//!
//! Templates mark turns with control tokens such as `<|im_end|>`, which are read as tokens when the text is encoded. Those
//! written in a message must not be, or whoever writes a message could end its turn and speak in the name of another. So in
//! every text that comes from outside, the first character of a control token gets a stand-in before the template sees it, and
//! is put back when the control tokens of the whole have been found. Texts without control tokens, which are nearly all, are left
//! as they are, so templates that look into messages see no difference.

use super::{Message, RenderOptions};
use crate::tokenizer::ControlTokens;
use serde_json::{Map, Value};
use std::collections::{BTreeSet, HashSet};
use std::ops::RangeInclusive;

/// Characters that stand in for others: letters to every template and tokenizer, and in nobody's way. Hieroglyphs.
const STAND_INS: RangeInclusive<char> = '\u{13000}'..='\u{1342E}';

/// Puts stand-ins where control tokens start. Returns what each stands for; nothing if there is none.
///
/// `taken` says whether the template itself uses a character.
pub(super) fn protect(
    messages: &mut [Message],
    options: &mut RenderOptions,
    control: &ControlTokens,
    taken: impl Fn(char) -> bool,
) -> Vec<(char, char)> {
    let mut firsts = BTreeSet::new();
    let mut written = HashSet::new();
    each_text(messages, options, &mut |text| {
        let starts = control.starts(text);
        firsts.extend(starts.iter().filter_map(|start| text[*start..].chars().next()));
        written.extend(text.chars().filter(|character| STAND_INS.contains(character)));
    });
    if firsts.is_empty() {
        return Vec::new();
    }
    // Where all are taken, what was written with them is spoilt; a control token it is not, either way.
    let free = STAND_INS.filter(|character| !written.contains(character) && !taken(*character));
    let stand_ins: Vec<(char, char)> = free.chain(STAND_INS.cycle()).zip(firsts).collect();
    each_text(messages, options, &mut |text| {
        let starts = control.starts(text);
        if starts.is_empty() {
            return;
        }
        let stand_in = |(index, character): (usize, char)| match starts.binary_search(&index) {
            Ok(_) => stand_ins.iter().find(|pair| pair.1 == character).map_or(character, |pair| pair.0),
            Err(_) => character,
        };
        *text = text.char_indices().map(stand_in).collect();
    });
    stand_ins
}

/// Every text that comes from outside.
fn each_text(messages: &mut [Message], options: &mut RenderOptions, each: &mut dyn FnMut(&mut String)) {
    for Message { role, content, other } in messages {
        each(role);
        content.iter_mut().for_each(|content| in_value(content, each));
        in_map(other, each);
    }
    let lists = [&mut options.tools, &mut options.documents];
    lists.into_iter().flatten().flatten().for_each(|value| in_value(value, each));
    in_map(&mut options.variables, each);
}

fn in_value(value: &mut Value, each: &mut dyn FnMut(&mut String)) {
    match value {
        Value::String(text) => each(text),
        Value::Array(values) => values.iter_mut().for_each(|value| in_value(value, each)),
        Value::Object(map) => in_map(map, each),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn in_map(map: &mut Map<String, Value>, each: &mut dyn FnMut(&mut String)) {
    for (mut key, mut value) in std::mem::take(map) {
        each(&mut key);
        in_value(&mut value, each);
        map.insert(key, value);
    }
}
