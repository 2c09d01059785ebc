//! Bounds on the memory that rendering a template takes.
//!
//! The template engine bounds the number of instructions, but one instruction can double a text. So after every instruction whose
//! result can be larger than its operands, a call is inserted that counts the size of the result; everything that a template
//! writes is counted too. Operations whose result could be far larger are estimated before they run.

use minijinja::machinery::{CompiledTemplate, Instruction, Instructions};
use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};
use std::cell::Cell;
use std::collections::BTreeMap;

/// The maximum number of bytes of a value.
const MAX_VALUE: u64 = 32 << 20;
/// The maximum number of bytes of all values and texts of a rendering, including temporary ones.
const MAX_TOTAL: u64 = 1 << 30;
/// The maximum number of bytes that a rendering writes, to its result and to captured texts.
const MAX_WRITTEN: u64 = 128 << 20;
/// The number of bytes counted for an item of a container.
const ITEM: u64 = 8;
/// The maximum nesting depth of containers.
const MAX_DEPTH: usize = 100;
/// The name of the inserted function that counts a value, which no template can write.
const SIZED: &str = "$sized";
/// The name of the inserted function that counts a product before it is made.
const PRODUCT: &str = "$product";

thread_local! {
    /// Bytes that the rendering on this thread may still take.
    static LEFT: Cell<u64> = const { Cell::new(0) };
    /// Bytes that the rendering on this thread may still write.
    static WRITABLE: Cell<u64> = const { Cell::new(0) };
}

/// Starts the count of a rendering on this thread.
pub(super) fn start() {
    LEFT.set(MAX_TOTAL);
    WRITABLE.set(MAX_WRITTEN);
}

/// Counts bytes of a value.
///
/// # Errors
/// If the value is too large, or there are too many in all.
pub(super) fn spend(bytes: u64) -> Result<(), Error> {
    let left = LEFT.get().checked_sub(bytes).filter(|_| bytes <= MAX_VALUE);
    LEFT.set(left.unwrap_or(0));
    left.map(drop).ok_or_else(too_much)
}

fn too_much() -> Error {
    let message = format!(
        "it makes a value of more than {} MiB, or values of more than {} MiB in all",
        MAX_VALUE >> 20,
        MAX_TOTAL >> 20
    );
    Error::new(ErrorKind::InvalidOperation, message)
}

/// The size of a value with everything in it.
#[derive(Default)]
struct Size {
    /// Bytes of all texts, each as often as it occurs.
    text: u64,
    /// Values, each as often as it occurs.
    values: u64,
}

impl Size {
    fn bytes(&self) -> u64 {
        self.text + self.values * ITEM
    }
}

/// Counts a value that was made: a text with its bytes, a container without the texts in it, which were counted when they were made.
///
/// # Errors
/// As [`spend`], and if containers are nested too deeply.
fn spend_made(value: Value) -> Result<Value, Error> {
    let mut size = Size::default();
    measure(&value, 0, &mut size)?;
    let made = if value.as_str().is_some() { size.bytes() } else { size.values * ITEM };
    if size.bytes() > MAX_VALUE {
        spend(size.bytes())?
    } else {
        spend(made)?
    }
    Ok(value)
}

/// Counts the product of a text or a list with a number, which may be far larger than both, and returns its factors.
///
/// # Errors
/// As [`spend`].
fn spend_product(left: Value, right: Value) -> Result<Value, Error> {
    for (repeated, count) in [(&left, &right), (&right, &left)] {
        let item = if repeated.as_str().is_some() { 1 } else { ITEM };
        let length = repeated.as_str().map(str::len).or_else(|| repeated.len());
        if let (Some(length), Some(count)) = (length, count.as_usize()) {
            spend((length as u64).saturating_mul(count as u64).saturating_mul(item))?;
        }
    }
    Ok(Value::from(vec![left, right]))
}

/// Counts a value that is written.
///
/// # Errors
/// As [`spend`], and if containers are nested too deeply.
pub(super) fn spend_written(value: &Value) -> Result<(), Error> {
    let mut size = Size::default();
    measure(value, 0, &mut size)?;
    let left = WRITABLE.get().checked_sub(size.bytes());
    WRITABLE.set(left.unwrap_or(0));
    left.ok_or_else(too_much)?;
    spend(size.bytes())
}

/// Adds the size of a value, up to what a value may have.
fn measure(value: &Value, depth: usize, size: &mut Size) -> Result<(), Error> {
    size.values += 1;
    if let Some(text) = value.as_str() {
        size.text += text.len() as u64;
        return Ok(());
    }
    let kind = value.kind();
    // Sums and products of lists are iterables, which are written out by what reads them.
    if !matches!(kind, ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) {
        return Ok(());
    }
    if depth == MAX_DEPTH {
        return Err(Error::new(ErrorKind::InvalidOperation, "values are nested too deeply"));
    }
    for item in value.try_iter()? {
        // The value is rejected in any case, so its exact size is not needed.
        if size.bytes() > MAX_VALUE {
            return Ok(());
        }
        if kind == ValueKind::Map {
            measure(&value.get_item(&item)?, depth + 1, size)?;
        }
        measure(&item, depth + 1, size)?;
    }
    Ok(())
}

/// Adds the function that counts, and filters that count before they run.
pub(super) fn prepare(environment: &mut Environment<'static>) {
    environment.add_function(SIZED, spend_made);
    environment.add_function(PRODUCT, spend_product);
    let estimated: [(&'static str, Value); 6] = [
        ("replace", Value::from_function(filters::replace)),
        ("join", Value::from_function(filters::join)),
        ("indent", Value::from_function(filters::indent)),
        ("format", Value::from_function(filters::format)),
        ("batch", Value::from_function(filters::batch)),
        ("slice", Value::from_function(filters::slice)),
    ];
    for (name, original) in estimated {
        environment.add_filter(name, move |state: &mut State, arguments: Rest<Value>, named: Kwargs| {
            let mut arguments: Vec<Value> = arguments.to_vec();
            if named.args().next().is_some() {
                arguments.push(named.into());
            }
            estimate(name, &arguments)?;
            original.call(state, &arguments)
        });
    }
}

/// Counts what a filter or a method with these arguments will make, its value first.
///
/// # Errors
/// As [`spend`].
pub(super) fn estimate(name: &str, arguments: &[Value]) -> Result<(), Error> {
    let text = |index: usize| arguments.get(index).and_then(Value::as_str).unwrap_or_default();
    let length = |index: usize| arguments.get(index).and_then(Value::len).unwrap_or(0) as u64;
    // A number may be given by name.
    let number = || {
        let numbers = arguments.iter().skip(1).map(|argument| match argument.kind() {
            ValueKind::Map => argument.get_attr("width").ok().and_then(|width| width.as_i64()),
            _ => argument.as_i64(),
        });
        numbers.flatten().max().unwrap_or(4).unsigned_abs()
    };
    let bytes = match name {
        "replace" => {
            let (whole, from) = (text(0), text(1));
            let found = if from.is_empty() { whole.len() + 1 } else { whole.matches(from).count() };
            (found as u64).saturating_mul(text(2).len() as u64)
        }
        // As a filter the list comes first, as a method the separator.
        "join" => {
            let separator = text(0).len().max(text(1).len()) as u64;
            length(0).max(length(1)).saturating_mul(separator)
        }
        "indent" => (text(0).lines().count() as u64 + 1).saturating_mul(number()),
        "format" => longest_number(text(0)),
        "batch" | "slice" => number().saturating_mul(ITEM * 4),
        _ => 0,
    };
    spend(bytes)
}

/// The largest number in a text, which may be a width.
fn longest_number(text: &str) -> u64 {
    let numbers =
        text.split(|character: char| !character.is_ascii_digit()).filter(|number| !number.is_empty());
    numbers.map(|number| number.parse().unwrap_or(u64::MAX)).fold(0, u64::saturating_add)
}

/// The instructions of a template with the counting calls inserted.
pub(super) type Counted<'source> = (Instructions<'source>, BTreeMap<&'source str, Instructions<'source>>);

/// Inserts the counting into a template.
pub(super) fn counted<'source>(template: &CompiledTemplate<'source>) -> Counted<'source> {
    let blocks = template.blocks.iter().map(|(name, block)| (*name, insert(block))).collect();
    (insert(&template.instructions), blocks)
}

fn insert<'source>(plain: &Instructions<'source>) -> Instructions<'source> {
    let instructions: Vec<&Instruction<'source>> = (0..).map_while(|index| plain.get(index)).collect();
    // The place of each instruction, and of the end.
    let mut places = Vec::with_capacity(instructions.len() + 1);
    let mut place = 0;
    for instruction in &instructions {
        places.push(place);
        let before = if matches!(instruction, Instruction::Mul) { 3 } else { 0 };
        let after = is_larger(instruction) || matches!(instruction, Instruction::EmitRaw(_));
        place += before + 1 + u32::from(after);
    }
    places.push(place);
    let moved = |target: u32| places.get(target as usize).copied().unwrap_or(place);
    let mut counting = Instructions::new(plain.name(), plain.source());
    for (index, instruction) in instructions.into_iter().enumerate() {
        let index = index as u32;
        let mut add = |instruction: Instruction<'source>| match (plain.get_span(index), plain.get_line(index))
        {
            (Some(span), _) => counting.add_with_span(instruction, span),
            (None, Some(line)) => {
                counting.add_with_line(instruction, u16::try_from(line).unwrap_or(u16::MAX))
            }
            (None, None) => counting.add(instruction),
        };
        if matches!(instruction, Instruction::Mul) {
            // Unpacking leaves the first factor on top.
            add(Instruction::CallFunction(PRODUCT, Some(2)));
            add(Instruction::UnpackList(2));
            add(Instruction::Swap);
        }
        let adapted = match instruction {
            // Text of the template is written as a value, which is counted as such.
            Instruction::EmitRaw(text) => {
                add(Instruction::LoadConst(Value::from(*text)));
                Instruction::Emit
            }
            Instruction::Iterate(target) => Instruction::Iterate(moved(*target)),
            Instruction::Jump(target) => Instruction::Jump(moved(*target)),
            Instruction::JumpIfFalse(target) => Instruction::JumpIfFalse(moved(*target)),
            Instruction::JumpIfFalseOrPop(target) => Instruction::JumpIfFalseOrPop(moved(*target)),
            Instruction::JumpIfTrueOrPop(target) => Instruction::JumpIfTrueOrPop(moved(*target)),
            Instruction::BuildMacro(name, target, flags) => {
                Instruction::BuildMacro(name, moved(*target), *flags)
            }
            other => other.clone(),
        };
        add(adapted);
        if is_larger(instruction) {
            add(Instruction::CallFunction(SIZED, Some(1)));
        }
    }
    counting
}

/// Whether the result of an instruction can be larger than its operands.
fn is_larger(instruction: &Instruction<'_>) -> bool {
    matches!(
        instruction,
        Instruction::Add
            | Instruction::Mul
            | Instruction::StringConcat
            | Instruction::BuildList(_)
            | Instruction::BuildTuple(_)
            | Instruction::BuildMap(_)
            | Instruction::Slice
            | Instruction::ApplyFilter(..)
            | Instruction::CallFunction(..)
            | Instruction::CallMethod(..)
            | Instruction::CallObject(_)
    )
}
