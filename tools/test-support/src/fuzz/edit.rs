//! Edits of inputs.

use super::Random;
use serde_json::{Map, Value, json};

/// Numbers around which lengths and products overflow.
const NUMBERS: [u64; 14] = [
    0,
    1,
    2,
    0x7F,
    0xFF,
    0xFFFF,
    0x7FFF_FFFF,
    0x8000_0000,
    0xFFFF_FFFF,
    1 << 32,
    1 << 40,
    1 << 61,
    1 << 63,
    u64::MAX,
];

/// The most elements that a list gets at once.
const MANY: usize = 300;

/// Edits an input as bytes: overwrites, inserts, removes, repeats and copies, also parts of another input.
pub fn edit_bytes(random: &mut Random, input: &mut Vec<u8>, other: &[u8], words: &[Vec<u8>]) {
    let at = random.below(input.len() + 1);
    let end = (at + 1 + random.below(32)).min(input.len());
    match random.below(9) {
        0 => {
            if let Some(byte) = input.get_mut(at) {
                *byte = random.bits() as u8;
            }
        }
        1 => {
            if let Some(byte) = input.get_mut(at) {
                *byte ^= 1 << random.below(8);
            }
        }
        2 => {
            let number = NUMBERS[random.below(NUMBERS.len())].to_le_bytes();
            let width = [1, 2, 4, 8][random.below(4)].min(input.len().saturating_sub(at));
            input[at..at + width].copy_from_slice(&number[..width]);
        }
        3 => drop(input.drain(at.min(end)..end)),
        4 => {
            let repeated = input[at.min(end)..end].repeat(1 + random.below(MANY));
            input.splice(at..at, repeated);
        }
        5 => {
            let from = random.below(other.len());
            let part = &other[from..(from + 1 + random.below(64)).min(other.len())];
            input.splice(at..at, part.iter().copied());
        }
        6 => {
            let from = random.below(other.len());
            let part = &other[from..(from + 1 + random.below(64)).min(other.len())];
            let place = at..(at + part.len()).min(input.len());
            input.splice(place, part.iter().copied());
        }
        7 => replace_number(random, input),
        _ => {
            if let Some(word) = random.of(words).cloned() {
                input.splice(at..at, word);
            }
        }
    }
}

/// Replaces one of the decimal numbers of a text.
fn replace_number(random: &mut Random, input: &mut Vec<u8>) {
    let starts: Vec<usize> = (0..input.len())
        .filter(|at| input[*at].is_ascii_digit() && (*at == 0 || !input[*at - 1].is_ascii_digit()))
        .collect();
    let Some(start) = random.of(&starts).copied() else { return };
    let length = input[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let number = NUMBERS[random.below(NUMBERS.len())].to_string();
    input.splice(start..start + length, number.into_bytes());
}

/// Edits an input as JSON: replaces, removes, repeats, wraps and moves values, also those of another input. Texts and names are often
/// one of `words`. Input that is no JSON is left as it is.
pub fn edit_json(random: &mut Random, input: &mut Vec<u8>, other: &[u8], words: &[String]) {
    let Ok(mut root) = serde_json::from_slice::<Value>(input) else { return };
    let donor = serde_json::from_slice::<Value>(other).unwrap_or(Value::Null);
    let count = count(&root);
    if let Some(value) = nth(&mut root, &mut random.below(count)) {
        change(random, value, &donor, words);
    }
    // A value that was read can be written.
    *input = serde_json::to_vec(&root).unwrap_or_default();
}

fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(count).sum(),
        Value::Object(fields) => fields.values().map(count).sum(),
        _ => 0,
    }
}

/// The value with an index, in order.
fn nth<'a>(value: &'a mut Value, index: &mut usize) -> Option<&'a mut Value> {
    if *index == 0 {
        return Some(value);
    }
    *index -= 1;
    match value {
        Value::Array(items) => items.iter_mut().find_map(|item| nth(item, index)),
        Value::Object(fields) => fields.values_mut().find_map(|field| nth(field, index)),
        _ => None,
    }
}

fn change(random: &mut Random, value: &mut Value, donor: &Value, words: &[String]) {
    match random.below(8) {
        0 => *value = scalar(random, words),
        1 => {
            let mut donor = donor.clone();
            let count = count(&donor);
            if let Some(part) = nth(&mut donor, &mut random.below(count)) {
                *value = part.take();
            }
        }
        2 => {
            for _ in 0..=random.below(200) * random.below(2) {
                let inner = value.take();
                *value = match random.of(words) {
                    Some(word) if random.below(2) == 0 => {
                        Value::Object(Map::from_iter([(word.clone(), inner)]))
                    }
                    _ => Value::Array(vec![inner]),
                };
            }
        }
        _ => match value {
            Value::Array(items) => {
                let at = random.below(items.len() + 1);
                match (random.below(3), items.get(at).cloned()) {
                    (0, Some(_)) => drop(items.remove(at)),
                    (1, Some(item)) => {
                        items.splice(at..at, vec![item; 1 + random.below(MANY)]);
                    }
                    _ => items.insert(at, scalar(random, words)),
                }
            }
            Value::Object(fields) => {
                let names: Vec<String> = fields.keys().cloned().collect();
                match (random.below(3), random.of(&names)) {
                    (0, Some(name)) => drop(fields.remove(name)),
                    (1, Some(name)) => {
                        if let (Some(field), Some(word)) = (fields.get(name).cloned(), random.of(words)) {
                            fields.insert(word.clone(), field);
                        }
                    }
                    _ => {
                        if let Some(word) = random.of(words) {
                            fields.insert(word.clone(), scalar(random, words));
                        }
                    }
                }
            }
            Value::String(text) => {
                let mut bytes = std::mem::take(text).into_bytes();
                let words: Vec<Vec<u8>> = words.iter().map(|word| word.clone().into_bytes()).collect();
                edit_bytes(random, &mut bytes, &[], &words);
                *text = String::from_utf8_lossy(&bytes).into_owned();
            }
            _ => *value = scalar(random, words),
        },
    }
}

fn scalar(random: &mut Random, words: &[String]) -> Value {
    let number = NUMBERS[random.below(NUMBERS.len())];
    match random.below(12) {
        0 => Value::Null,
        1 => json!(random.below(2) == 0),
        2 => json!(number),
        3 => json!((number as i64).wrapping_neg()),
        4 => json!(random.below(100)),
        5 => json!([1e-300, 1e300, 0.5, -0.0, 1e-6][random.below(5)]),
        6 => json!([]),
        7 => json!({}),
        8 => json!(["", "\0", "\u{202e}", "\u{10ffff}", "e\u{301}", " "][random.below(6)]),
        9 => json!("x".repeat(random.below(5000))),
        _ => random.of(words).map_or(Value::Null, |word| json!(word)),
    }
}
