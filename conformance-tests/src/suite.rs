//! All cases and checks: the cases of the tables and random ones, in groups that are made at once, each found by its id.

use crate::{
    case::{CallCase, Case, Operand},
    cases::{TABLES, Table, ids, only, uneven},
    checks::{CHECKS, Check, LARGE},
    draw::DrawnId,
    runner::{self, Report, Status, lowering},
    subject::Subject,
    tensor::with_flushed_operands,
};
use dsrun_core::{
    DType, TensorType, WeightFormat,
    device::Device,
    op::{Op, OperandKind, OperandType, Profile},
};
use std::{
    any::Any,
    borrow::Cow,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

/// Stands for the op in the ids of checks.
pub const CHECK: &str = "check";

/// The default seed of the random cases.
pub const SEED: u64 = 1;

/// The number of random cases for an op and element type.
pub const DRAWN: usize = 20;

/// The suffix in the id of a region's case when its body runs op by op.
const LOWERED: &str = "/lowered";

/// Cases that are made at once.
#[derive(Clone, Copy, Debug)]
pub enum Group {
    /// The cases of an op and element type.
    Table(&'static Table, DType),
    /// A single check.
    Check(&'static Check),
}

/// A case or a check.
#[derive(Clone, Debug)]
pub struct Item {
    /// The id, which never changes.
    pub id: String,
    /// The choices that made a random case; `None` for others.
    pub choices: Option<Vec<usize>>,
    work: Work,
}

#[derive(Clone, Debug)]
enum Work {
    Case(Box<Case>),
    /// The body of a region's case.
    Lowered(Box<Case>),
    Check(&'static Check),
}

/// The checks that take gigabytes, which are not among [`groups`].
pub fn large_groups() -> impl Iterator<Item = Group> {
    LARGE.iter().map(Group::Check)
}

/// All groups but the large ones, in the order of the op table, with the checks at the end.
pub fn groups() -> impl Iterator<Item = Group> {
    let of = |table: &'static Table| table.dtypes.iter().map(move |dtype| Group::Table(table, *dtype));
    TABLES.iter().flat_map(of).chain(CHECKS.iter().map(Group::Check))
}

impl Group {
    /// The group that a case with this id belongs to, whether or not the case exists.
    pub fn of(id: &str) -> Option<Self> {
        let mut parts = id.split('/');
        let (first, second) = (parts.next()?, parts.next()?);
        if first == CHECK {
            return CHECKS.iter().chain(LARGE).find(|check| check.id == second).map(Group::Check);
        }
        // An id begins with the op, which a variant may follow: the op is the longest name that matches.
        let names = |table: &&Table| {
            first.strip_prefix(table.op).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
        };
        let table = TABLES.iter().filter(names).max_by_key(|table| table.op.len())?;
        let dtype = DType::from_name(second).filter(|dtype| table.dtypes.contains(dtype))?;
        Some(Self::Table(table, dtype))
    }

    /// The op of the cases; [`CHECK`] for a check.
    pub fn op(&self) -> &'static str {
        match self {
            Self::Table(table, _) => table.op,
            Self::Check(_) => CHECK,
        }
    }

    /// The element type of the cases; `None` for a check.
    pub fn dtype(&self) -> Option<DType> {
        match self {
            Self::Table(_, dtype) => Some(*dtype),
            Self::Check(_) => None,
        }
    }

    /// The name: op and element type, or the id of the check.
    pub fn name(&self) -> String {
        match self {
            Self::Table(table, dtype) => format!("{}/{dtype}", table.op),
            Self::Check(check) => check.full_id(),
        }
    }

    /// Whether the group belongs to one of these profiles. Regions belong to the profile of their bodies.
    pub fn belongs_to(&self, profiles: &[Profile]) -> bool {
        match self {
            Self::Table(table, _) => {
                let signature = Op::PRIMITIVES.iter().find(|signature| signature.name == table.op);
                let quantised = ["quant", "w8a8"].iter().any(|part| table.op.contains(part));
                let of_region = if quantised { Profile::LlmQuant1 } else { Profile::LlmCore1 };
                profiles.contains(&signature.map_or(of_region, |signature| signature.profile))
            }
            Self::Check(check) => check.profile.is_none_or(|profile| profiles.contains(&profile)),
        }
    }

    /// Makes the items of the group: those of the table, then `drawn` random cases.
    pub fn items(&self, seed: u64, drawn: usize) -> Vec<Item> {
        let (table, dtype) = match self {
            Self::Table(table, dtype) => (*table, *dtype),
            Self::Check(check) => {
                return vec![Item { id: check.full_id(), choices: None, work: Work::Check(check) }];
            }
        };
        let with_variants = |case: Case| {
            let variants = uneven(&case);
            [case].into_iter().chain(variants)
        };
        let cases = (table.cases)(dtype).into_iter().flat_map(with_variants);
        let mut items: Vec<Item> = cases.flat_map(|case| Item::of(case, None)).collect();
        for index in 0..drawn {
            let id = DrawnId::numbered(table.op, dtype, seed, index);
            let case = table.draw(id).map(|(case, choices)| Item::of(case, Some(choices)));
            items.extend(case.into_iter().flatten());
        }
        items
    }

    /// The ids of the group's items: those that [`Self::items`] makes, in an order of their own. This is much faster than making them.
    pub fn ids(&self, seed: u64, drawn: usize) -> Vec<String> {
        let Self::Table(table, dtype) = self else {
            return self.items(seed, drawn).into_iter().map(|item| item.id).collect();
        };
        let is_region = Op::PRIMITIVES.iter().all(|signature| signature.name != table.op);
        let (made, left_out) = ids(|| (table.cases)(*dtype));
        let made = made.into_iter().flat_map(|case| {
            let variants = uneven(&case);
            [case].into_iter().chain(variants).map(|case| case.id)
        });
        let drawn = if table.drawn.is_some() { drawn } else { 0 };
        let drawn = (0..drawn).map(|index| DrawnId::numbered(table.op, *dtype, seed, index).to_string());
        let with_body = |id: String| {
            let body = is_region.then(|| format!("{id}{LOWERED}"));
            [id].into_iter().chain(body)
        };
        made.chain(left_out).chain(drawn).flat_map(with_body).collect()
    }
}

impl Item {
    /// The item of a case, and for a region also the item that runs its body.
    fn of(case: Case, choices: Option<Vec<usize>>) -> Vec<Self> {
        let is_region = case.calls.iter().any(|call| matches!(call.op, Op::Region(_)));
        let case = Box::new(case);
        let lowered = is_region.then(|| Self {
            id: format!("{}{LOWERED}", case.id),
            choices: choices.clone(),
            work: Work::Lowered(case.clone()),
        });
        let whole = Self { id: case.id.clone(), choices, work: Work::Case(case) };
        [whole].into_iter().chain(lowered).collect()
    }

    /// The item with this id: a case of a table, a random case of any seed, or a check.
    pub fn find(id: &str) -> Option<Self> {
        let group = Group::of(id)?;
        let whole = id.strip_suffix(LOWERED).unwrap_or(id);
        let items = match (group, DrawnId::parse(whole)) {
            (Group::Table(table, _), Some(drawn)) => {
                let (case, choices) = table.draw(drawn)?;
                Self::of(case, Some(choices))
            }
            _ => only(whole, || group.items(SEED, 0)),
        };
        items.into_iter().find(|item| item.id == id)
    }

    /// Whether these profiles require the item of a backend: whether its op belongs to one of them, and the device lists its
    /// element types. Regions are optional, their bodies are not. Quantised weights are required by `llm-quant-1` and `llm-quant-2`, and
    /// i8 caches of a device that says it runs `kv_write` with one.
    pub fn is_required(&self, subject: &Subject, profiles: &[Profile]) -> bool {
        let (case, op_profile): (&Case, fn(&Op) -> Option<Profile>) = match &self.work {
            Work::Check(check) => return check.profile.is_some_and(|profile| profiles.contains(&profile)),
            Work::Case(case) => (case, Op::profile),
            Work::Lowered(case) => (case, |op| Some(profile_of_body(op))),
        };
        let required =
            |call: &CallCase| op_profile(&call.op).is_some_and(|profile| profiles.contains(&profile));
        case.calls.iter().all(|call| required(call) && takes(subject, profiles, call))
    }

    /// The number of elements of all operands and results; 0 for a check. It measures how simple a case is.
    pub fn elements(&self) -> usize {
        match &self.work {
            Work::Case(case) | Work::Lowered(case) => case.calls.iter().map(CallCase::elements).sum(),
            Work::Check(_) => 0,
        }
    }

    /// The case, with the expectations of a device that flushes subnormal operands if this one says that it may.
    fn for_device<'a>(&self, case: &'a Case, subject: &Subject) -> Cow<'a, Case> {
        let flushed = &subject.device().properties().flushed.operands;
        if flushed.is_empty() || !case.has_subnormals(flushed) {
            return Cow::Borrowed(case);
        }
        let again = with_flushed_operands(flushed, || Self::find(&self.id));
        match again.map(|item| item.work) {
            Some(Work::Case(other) | Work::Lowered(other)) => Cow::Owned(case.clone().or_flushed(*other)),
            _ => Cow::Borrowed(case),
        }
    }

    /// Runs a case on as many devices as it has ranks.
    fn run_case(
        &self,
        case: &Case,
        subject: &Subject,
        run: fn(&Case, &[Arc<dyn Device>]) -> Report,
    ) -> Report {
        match subject.ranks(case.calls.len()) {
            Ok(devices) => run(&self.for_device(case, subject), &devices),
            Err(error) => {
                let status = Status::Failed(vec![format!("a device cannot be opened: {error}")]);
                Report { id: self.id.clone(), status, verdicts: Vec::new() }
            }
        }
    }

    /// Runs the item. A panic is a failure.
    pub fn run(&self, subject: &Subject) -> Report {
        let run = || match &self.work {
            Work::Check(check) => check.report(subject),
            Work::Case(case) => self.run_case(case, subject, runner::run),
            Work::Lowered(case) => self.run_case(case, subject, lowering::run),
        };
        catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| Report {
            id: self.id.clone(),
            status: Status::Failed(vec![format!("panicked: {}", message_of(&*panic))]),
            verdicts: Vec::new(),
        })
    }
}

/// The profile of a region's body: ops beyond `llm-core-1` all belong to one further profile.
fn profile_of_body(op: &Op) -> Profile {
    let Op::Region(region) = op else { return Profile::LlmCore1 };
    let profiles =
        region.calls().iter().filter_map(|call| call.op.signature()).map(|signature| signature.profile);
    profiles.max().unwrap_or(Profile::LlmCore1)
}

/// Whether a device lists all element types of a call, and the profiles require the formats of its weights.
fn takes(subject: &Subject, profiles: &[Profile], call: &CallCase) -> bool {
    let mut types = Vec::new();
    for operand in &call.operands {
        types.push(match operand {
            None => None,
            Some(Operand::Tensor(input)) => {
                let shape = input.tensor.shape.iter().copied();
                Some(OperandType::Tensor(TensorType::new(input.tensor.dtype, shape)))
            }
            Some(Operand::Weight(weight)) => Some(OperandType::Weight(weight.weight_type.clone())),
            Some(Operand::WorkList) => Some(OperandType::Tensor(TensorType::new(DType::I32, [0usize]))),
        });
    }
    let taken = |operand: &OperandType| match operand {
        OperandType::Tensor(tensor) => subject.takes(tensor.dtype),
        OperandType::Weight(weight) => match weight.format {
            WeightFormat::Dense(dtype) => subject.takes(dtype),
            _ => [Profile::LlmQuant1, Profile::LlmQuant2].iter().any(|profile| profiles.contains(profile)),
        },
    };
    let caches = call.op.signature().map_or(&[][..], |signature| signature.operands);
    let has_i8_cache = caches.iter().zip(&types).any(|(spec, operand)| {
        let is_i8 = matches!(operand, Some(OperandType::Tensor(tensor)) if tensor.dtype == DType::I8);
        spec.kind == OperandKind::Cache && is_i8
    });
    if has_i8_cache && !subject.takes_i8_caches() {
        return false;
    }
    // If results cannot be inferred the case is wrong, which running it reports.
    let results = call.op.infer(&types).unwrap_or_default();
    types.iter().flatten().all(taken) && results.iter().all(|result| subject.takes(result.dtype))
}

fn message_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use std::collections::{BTreeSet, HashSet};

    fn calls(item: &Item) -> &[CallCase] {
        match &item.work {
            Work::Case(case) | Work::Lowered(case) => &case.calls,
            Work::Check(_) => &[],
        }
    }

    fn is_same(item: &Item, other: &Item) -> bool {
        let pairs = calls(item).iter().zip(calls(other));
        item.id == other.id
            && calls(item).len() == calls(other).len()
            && pairs.into_iter().all(|(one, other)| one.op == other.op && one.operands == other.operands)
    }

    /// One test for each element type, so that they run side by side: making all cases takes long.
    #[rstest]
    fn ids_are_unique_and_cases_repeat(
        #[values(DType::F32, DType::F16, DType::BF16, DType::I32, DType::I8, DType::U8, DType::U32)]
        dtype: DType,
    ) {
        // Two tables have the cases of `send` and `receive`.
        for group in groups().filter(|group| group.dtype() == Some(dtype) && group.op() != "receive") {
            let (name, items) = (group.name(), group.items(SEED, 1));
            let mut seen = HashSet::new();
            for item in &items {
                assert!(seen.insert(&item.id), "two cases have the id {}", item.id);
                assert_eq!(
                    Group::of(&item.id).map(|group| group.name()).as_deref(),
                    Some(&*name),
                    "{}",
                    item.id
                );
            }
            let own = items.iter().flat_map(calls).filter(|call| call.op.name() == group.op()).count();
            assert!(own >= 3, "{name} has too few cases");
            let mut ids = group.ids(SEED, 1);
            ids.sort_unstable();
            assert!(ids.iter().eq(seen.iter().copied().collect::<BTreeSet<_>>()), "{name}");
            let again = group.items(SEED, 1);
            assert_eq!(items.len(), again.len(), "{name}");
            for (item, again) in items.iter().zip(&again) {
                assert!(is_same(item, again), "{} differs from run to run", item.id);
            }
            // Some, because each is looked for among all of its group.
            for item in items.iter().step_by(23).chain(items.last()) {
                let found = Item::find(&item.id).unwrap_or_else(|| panic!("{} is not found", item.id));
                assert!(is_same(item, &found), "{} is another case when asked for", item.id);
            }
        }
    }

    #[test]
    fn checks_are_found_by_their_ids() {
        for check in CHECKS.iter().chain(LARGE) {
            assert_eq!(Item::find(&check.full_id()).map(|item| item.id), Some(check.full_id()));
        }
    }

    #[rstest]
    #[case("add/f32")]
    #[case("add/f32/no_such_case")]
    #[case("add/i32/prime")]
    #[case("added/f32/prime")]
    #[case("check/no_such_check")]
    #[case("barrier/i32/property-1")]
    #[case("add/f32/prime/lowered")]
    #[case("")]
    fn unknown_ids_are_not_found(#[case] id: &str) {
        assert!(Item::find(id).is_none());
    }
}
