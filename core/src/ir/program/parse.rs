//! The parser of the program texts that `text.rs` writes.

use super::{Call, Lane, Node, Origin, Program, Segment, SegmentKind, Value, ValueId};
use crate::{
    DType, Error, Result, WeightExpr, WeightFormat, WeightType,
    op::{MeshAxis, Op, OperandType},
    placement::{Placement, Placements},
    region::Region,
    tensor::{Size, TensorType},
};
use std::{collections::HashMap, str::FromStr, sync::Arc};

/// The maximum nesting depth of weight expressions.
const MAX_DEPTH: usize = 64;

impl FromStr for Program {
    type Err = Error;

    /// Parses and validates a program.
    fn from_str(text: &str) -> Result<Self> {
        let mut parser = Parser { text, at: 0 };
        let program = parser.program().map_err(|error| {
            let line = format!("line {}", text[..parser.at].matches('\n').count() + 1);
            // Errors of attributes already name the attribute as their argument.
            if error.argument().is_some() { error.note(&line) } else { error.at(&line) }
        })?;
        program.validate()?;
        Ok(program)
    }
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Parser<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn skip_space(&mut self) {
        self.at += self.rest().len() - self.rest().trim_start().len();
    }

    fn eat(&mut self, token: &str) -> bool {
        self.skip_space();
        let found = self.rest().starts_with(token);
        self.at += if found { token.len() } else { 0 };
        found
    }

    fn expected<T>(&self, what: &str) -> Result<T> {
        let found: String = self.rest().chars().take(24).take_while(|c| *c != '\n').collect();
        Err(Error::invalid(format!("expected {what}, found `{found}`")))
    }

    fn expect(&mut self, token: &str) -> Result<()> {
        if self.eat(token) { Ok(()) } else { self.expected(&format!("`{token}`")) }
    }

    /// Eats a word: letters, digits and the punctuation of numbers and names.
    fn word(&mut self) -> Result<&'a str> {
        self.skip_space();
        let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-' | '+');
        let length = self.rest().find(|c| !is_part(c)).unwrap_or(self.rest().len());
        if length == 0 {
            return self.expected("a word");
        }
        let word = &self.rest()[..length];
        self.at += length;
        Ok(word)
    }

    /// Eats the next word if it is `word`.
    fn eat_word(&mut self, expected: &str) -> bool {
        let start = self.at;
        if self.word().is_ok_and(|word| word == expected) {
            return true;
        }
        self.at = start;
        false
    }

    fn parsed<T: FromStr>(&mut self, what: &str) -> Result<T> {
        self.skip_space();
        let start = self.at;
        self.word()?.parse().or_else(|_| {
            self.at = start;
            self.expected(what)
        })
    }

    fn named<T>(&mut self, what: &str, from_name: impl Fn(&str) -> Option<T>) -> Result<T> {
        self.skip_space();
        let start = self.at;
        let word = self.word()?;
        from_name(word).map_or_else(
            || {
                self.at = start;
                self.expected(what)
            },
            Ok,
        )
    }

    /// Eats a quoted string with the escapes of Rust's `{:?}`.
    fn string(&mut self) -> Result<String> {
        self.expect("\"")?;
        let mut text = String::new();
        let mut chars = self.rest().char_indices();
        while let Some((index, c)) = chars.next() {
            match c {
                '"' => {
                    self.at += index + 1;
                    return Ok(text);
                }
                '\\' => match chars.next().map(|(_, c)| c) {
                    Some('n') => text.push('\n'),
                    Some('t') => text.push('\t'),
                    Some('r') => text.push('\r'),
                    Some('0') => text.push('\0'),
                    Some('u') => {
                        let hex: String =
                            chars.by_ref().map(|(_, c)| c).skip(1).take_while(|c| *c != '}').collect();
                        let code = u32::from_str_radix(&hex, 16).ok().and_then(char::from_u32);
                        text.push(code.map_or_else(|| self.expected("a character code"), Ok)?);
                    }
                    Some(c) => text.push(c),
                    None => break,
                },
                c => text.push(c),
            }
        }
        self.expected("a closing quote")
    }

    /// Parses items separated by commas up to `end`, and eats `end`.
    fn list<T>(&mut self, end: &str, mut item: impl FnMut(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        let mut items = Vec::new();
        if self.eat(end) {
            return Ok(items);
        }
        loop {
            items.push(item(self)?);
            if self.eat(end) {
                return Ok(items);
            }
            self.expect(",")?;
        }
    }

    fn value_id(&mut self) -> Result<ValueId> {
        self.expect("%")?;
        self.parsed::<u32>("the number of a value").map(ValueId)
    }

    fn program(&mut self) -> Result<Program> {
        self.expect("program")?;
        let mut program = Program { name: self.string()?, ..Program::default() };
        let mut values: HashMap<usize, Value> = HashMap::new();
        self.expect("{")?;
        if self.eat_word("extents") {
            loop {
                program.extents.push(Arc::from(self.word()?));
                if !self.eat(",") {
                    break;
                }
            }
        }
        loop {
            if self.eat_word("output") {
                program.outputs = self.list("}", Self::value_id)?;
                break;
            }
            if self.eat_word("segment") {
                let name = self.string()?;
                self.expect(":")?;
                let kind = |name: &str| SegmentKind::ALL.into_iter().find(|kind| kind.name() == name);
                let kind = self.named("a segment kind", kind)?;
                program.segments.push(Segment { name, kind });
                continue;
            }
            self.statement(&mut program, &mut values)?;
        }
        self.skip_space();
        if !self.rest().is_empty() {
            return self.expected("the end of the text");
        }
        for index in 0..values.len() {
            let value = values.remove(&index);
            program.values.push(value.ok_or_else(|| Error::invalid(format!("%{index} is never declared")))?);
        }
        Ok(program)
    }

    /// Parses a declaration or a node.
    fn statement(&mut self, program: &mut Program, values: &mut HashMap<usize, Value>) -> Result<()> {
        let mut results = Vec::new();
        if self.eat("%") {
            self.at -= 1;
            let id = self.value_id()?;
            if self.eat("=") {
                let value = self.declaration()?;
                return self.define(values, id, value);
            }
            let origin = || Origin::Node(program.nodes.len());
            self.result(values, id, origin())?;
            results.push(id);
            while self.eat(",") {
                let id = self.value_id()?;
                self.result(values, id, origin())?;
                results.push(id);
            }
            self.expect("=")?;
        }
        let op = self.op()?;
        let operands = self.operands()?;
        let lane = if self.eat_word("on") {
            self.named("a lane", |name| Lane::ALL.into_iter().find(|lane| lane.name() == name))?
        } else {
            Lane::usual(&op)
        };
        let segment = program
            .segments
            .len()
            .checked_sub(1)
            .ok_or_else(|| Error::invalid("a call precedes the first segment"))?;
        program.nodes.push(Node { call: Call { op, operands, results }, lane, segment });
        Ok(())
    }

    fn define(&self, values: &mut HashMap<usize, Value>, id: ValueId, value: Value) -> Result<()> {
        match values.insert(id.index(), value) {
            None => Ok(()),
            Some(_) => Err(Error::invalid(format!("{id} is declared twice"))),
        }
    }

    fn result(&mut self, values: &mut HashMap<usize, Value>, id: ValueId, origin: Origin) -> Result<()> {
        self.expect(":")?;
        let value_type = OperandType::Tensor(self.tensor_type()?);
        let placements = self.placements()?;
        self.define(values, id, Value { name: String::new(), value_type, origin, placements })
    }

    fn declaration(&mut self) -> Result<Value> {
        let keyword = self.word()?;
        let name = self.string()?;
        self.expect(":")?;
        let value_type = match keyword {
            "weight" => OperandType::Weight(self.weight_type()?),
            "input" | "state" | "vector" => OperandType::Tensor(self.tensor_type()?),
            _ => return Err(Error::invalid(format!("unknown declaration `{keyword}`"))),
        };
        let placements = self.placements()?;
        let origin = match keyword {
            "input" => Origin::Input,
            "state" => Origin::State,
            _ => {
                self.expect("=")?;
                Origin::Weight(self.weight_expr(0)?)
            }
        };
        Ok(Value { name, value_type, origin, placements })
    }

    fn size(&mut self) -> Result<Size> {
        if self.eat("$") {
            return Ok(Size::bucket(self.word()?));
        }
        if self.eat("?") {
            return Ok(Size::bounded(self.word()?));
        }
        self.parsed("a size").map(Size::Static)
    }

    fn tensor_type(&mut self) -> Result<TensorType> {
        let dtype = self.named("an element type", DType::from_name)?;
        self.expect("[")?;
        Ok(TensorType { dtype, shape: self.list("]", Self::size)? })
    }

    fn weight_type(&mut self) -> Result<WeightType> {
        let format = self.named("a weight format", WeightFormat::from_name)?;
        self.expect("[")?;
        Ok(WeightType { format, shape: self.list("]", |parser| parser.parsed("a size"))? })
    }

    fn placements(&mut self) -> Result<Placements> {
        let mut placements = Placements::default();
        if !self.eat("@") {
            return Ok(placements);
        }
        loop {
            let axis = self.named("a mesh axis", MeshAxis::from_name)?;
            self.expect("=")?;
            let placement = match self.word()? {
                "partial" => Placement::Partial,
                "sharded" => {
                    self.expect("(")?;
                    let dimension = self.parsed("a dimension")?;
                    self.expect(")")?;
                    Placement::Sharded(dimension)
                }
                other => return Err(Error::invalid(format!("unknown placement `{other}`"))),
            };
            placements.set(axis, placement);
            // A comma may also separate results, which start with `%`.
            let comma = self.at;
            if !self.eat(",") || self.eat("%") {
                self.at = comma;
                return Ok(placements);
            }
        }
    }

    fn weight_expr(&mut self, depth: usize) -> Result<WeightExpr> {
        if depth > MAX_DEPTH {
            return Err(Error::invalid("weight expressions are nested too deeply"));
        }
        let keyword = self.word()?;
        self.expect("(")?;
        let expr = match keyword {
            "tensor" => WeightExpr::Tensor(self.string()?),
            "constant" => {
                return Ok(WeightExpr::Constant(self.list(")", |parser| parser.parsed("a number"))?));
            }
            "slice" => {
                let (dimension, start, end) = (self.comma()?, self.comma()?, self.comma()?);
                WeightExpr::Slice { of: Box::new(self.weight_expr(depth + 1)?), dimension, start, end }
            }
            "concat" => {
                let dimension = self.comma()?;
                let parts = self.list(")", |parser| parser.weight_expr(depth + 1))?;
                return Ok(WeightExpr::Concat { parts, dimension });
            }
            "interleave" => {
                let block = self.comma()?;
                let parts = self.list(")", |parser| parser.weight_expr(depth + 1))?;
                return Ok(WeightExpr::Interleave { parts, block });
            }
            "permute" => {
                let of = Box::new(self.weight_expr(depth + 1)?);
                WeightExpr::Permute { of, rows: self.trailing("a row")? }
            }
            "reshape" => {
                let of = Box::new(self.weight_expr(depth + 1)?);
                WeightExpr::Reshape { of, shape: self.trailing("a size")? }
            }
            "transpose" => WeightExpr::Transpose { of: Box::new(self.weight_expr(depth + 1)?) },
            "scale" => {
                let factor = self.comma()?;
                WeightExpr::Scale { of: Box::new(self.weight_expr(depth + 1)?), factor }
            }
            "cast" => {
                let dtype = self.named("an element type", DType::from_name)?;
                self.expect(",")?;
                WeightExpr::Cast { of: Box::new(self.weight_expr(depth + 1)?), dtype }
            }
            "factors" => {
                let rows = self.either("columns", "rows")?;
                let of = Box::new(self.weight_expr(depth + 1)?);
                WeightExpr::Factors { of, factors: self.trailing("a factor")?, rows }
            }
            "quantise" => {
                let format = self.named("a format of quantised weights", |name| {
                    WeightFormat::from_name(name).filter(|format| format.can_quantise())
                })?;
                self.expect(",")?;
                let search = self.either("span", "search")?;
                WeightExpr::Quantise { of: Box::new(self.weight_expr(depth + 1)?), format, search }
            }
            "pad" => {
                let (before, after) = (self.comma()?, self.comma()?);
                WeightExpr::Pad { of: Box::new(self.weight_expr(depth + 1)?), before, after }
            }
            other => return Err(Error::invalid(format!("unknown weight expression `{other}`"))),
        };
        self.expect(")")?;
        Ok(expr)
    }

    /// Eats one of two words and a comma, and returns whether it was the second.
    fn either(&mut self, first: &'static str, second: &'static str) -> Result<bool> {
        let choice = |word: &str| [first, second].iter().position(|known| *known == word);
        let index = self.named(&format!("`{first}` or `{second}`"), choice)?;
        self.expect(",")?;
        Ok(index == 1)
    }

    /// Eats a comma and a number as often as there are some.
    fn trailing<T: FromStr>(&mut self, what: &str) -> Result<Vec<T>> {
        let mut numbers = Vec::new();
        while self.eat(",") {
            numbers.push(self.parsed(what)?);
        }
        Ok(numbers)
    }

    /// Eats a number and a comma.
    fn comma<T: FromStr>(&mut self) -> Result<T> {
        let value = self.parsed("a number")?;
        self.expect(",")?;
        Ok(value)
    }

    fn operands(&mut self) -> Result<Vec<Option<ValueId>>> {
        self.expect("(")?;
        self.list(")", |parser| if parser.eat_word("_") { Ok(None) } else { parser.value_id().map(Some) })
    }

    fn op(&mut self) -> Result<Op> {
        if self.eat_word("region") {
            return Ok(Op::Region(Arc::new(self.region()?)));
        }
        let name = self.word()?;
        if !Op::PRIMITIVES.iter().any(|signature| signature.name == name) {
            return Err(Error::unsupported(format!("there is no op `{name}`")));
        }
        let mut texts: Vec<(&str, &str)> = Vec::new();
        if self.eat("{") {
            texts = self.list("}", |parser| {
                let attribute = parser.word()?;
                parser.expect("=")?;
                Ok((attribute, parser.word()?))
            })?;
        }
        for (index, (attribute, _)) in texts.iter().enumerate() {
            let known = Op::attribute_names(name).contains(attribute);
            if !known || texts[..index].iter().any(|(other, _)| other == attribute) {
                let message = if known { "is given twice" } else { "is not an attribute of the op" };
                return Err(Error::invalid(message).at(attribute).in_op(name));
            }
        }
        let take = |wanted: &str| Some(texts.iter().find(|(name, _)| *name == wanted)?.1.to_owned());
        Op::from_texts(name, &take)
    }

    fn region(&mut self) -> Result<Region> {
        let name = self.string()?;
        self.expect("(")?;
        let operands = self.parsed("the number of operands of the region")?;
        self.expect(")")?;
        self.expect("{")?;
        let mut calls = Vec::new();
        while !self.eat_word("return") {
            let mut results = Vec::new();
            if self.eat("%") {
                self.at -= 1;
                results.push(self.value_id()?);
                while self.eat(",") {
                    results.push(self.value_id()?);
                }
                self.expect("=")?;
            }
            let op = self.op()?;
            calls.push(Call { op, operands: self.operands()?, results });
            self.expect(";")?;
        }
        let results = self.list("}", Self::value_id)?;
        Region::new(name, operands, calls, results)
    }
}
