//! Runs one call on one device.

use super::image::{Content, Image, Role, Scratch, describe, poison};
use crate::{
    case::{CallCase, Element, Expected, Operand, Weight},
    float,
    tensor::Tensor,
    verdict::{self, Numbers, Verdict},
};
use dsrun_core::{
    BytesReader, Code, DType, Error, TensorDesc,
    checked::CheckedPlan,
    collective::Comm,
    device::{Device, Stream},
    kernels::{Argument, Arguments, Binding, CallDesc, OperandDesc, PackedWeight, WeightDesc},
    op::{AttentionPrepare, Op},
};
use std::sync::Arc;

/// The results of a call.
#[derive(Debug, Default)]
pub(crate) struct CallRun {
    /// The bits of each result.
    pub(crate) results: Vec<Vec<u32>>,
    /// The element type of each result.
    pub(crate) dtypes: Vec<DType>,
    /// The comparison of each result, with its name.
    pub(crate) verdicts: Vec<(String, Verdict)>,
    /// Descriptions of what is wrong.
    pub(crate) failures: Vec<String>,
}

/// The reason why a call did not run.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The device does not support the call.
    Unsupported(String),
    /// A step failed that must not fail.
    Failed(String),
}

/// The reason a rank gives when it aborts its group because a call of its own failed.
pub(crate) const ABORT_REASON: &str = "this rank cannot go on";

impl Stop {
    /// Whether the cause is that another rank aborted the group.
    pub(crate) fn is_abort(&self) -> bool {
        matches!(self, Self::Failed(message) if message.contains(ABORT_REASON))
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        match error.code() {
            Code::Unsupported => Self::Unsupported(error.to_string()),
            _ => Self::Failed(error.to_string()),
        }
    }
}

/// An operand on the device.
pub(crate) enum Placed {
    Absent,
    Tensor(Image),
    Weight(Arc<dyn PackedWeight>),
}

/// Runs a call twice and compares its results with the expected ones.
pub(crate) fn run(
    case: &CallCase,
    device: &Arc<dyn Device>,
    comm: Option<Arc<dyn Comm>>,
) -> Result<CallRun, Stop> {
    let device = &**device;
    let mut stream = device.stream()?;
    let stream = &mut *stream;
    let operands = place_operands(case, device, stream)?;
    let operand_descs: Vec<Option<OperandDesc>> = operands.iter().map(Placed::desc).collect();
    let op = sized(device, &case.op, &operand_descs)?;
    let mut call = CallDesc { op, operands: operand_descs, results: Vec::new(), comm };
    let mut results: Vec<Option<Image>> = Vec::new();
    for (index, inferred) in call.op.infer(&call.operand_types())?.iter().enumerate() {
        let shape = inferred.resolve(&|_| None)?;
        if let Some(updated) = call.op.updates(index) {
            let desc = operands.get(updated).and_then(Placed::image).map(|image| image.desc.clone());
            call.results.push(desc.ok_or_else(|| {
                Stop::Failed(format!("the operand that result {index} updates is not a tensor"))
            })?);
            results.push(None);
            continue;
        }
        let layout = case.results.get(index).map(|expected| expected.layout).unwrap_or_default();
        let image = Image::of_result(device, inferred.dtype, &shape, layout)?;
        call.results.push(image.desc.clone());
        results.push(Some(image));
    }
    let plan = CheckedPlan::new(device, call.validate()?)?;
    let call = plan.call().clone();
    // Memory is planned by what the query says.
    let (said, needed) = (device.kernels().query(&call)?, plan.workspace_bytes());
    if said.native && said.workspace_bytes < needed {
        let said = said.workspace_bytes;
        return Err(Stop::Failed(format!(
            "the plan needs {needed} bytes of workspace, but the query said {said}"
        )));
    }
    let scratch = Scratch::new(device, needed)?;
    let image_of = |index: usize| match (&results[index], call.op.updates(index)) {
        (Some(image), _) => Some(image),
        (None, updated) => updated.and_then(|operand| operands[operand].image()),
    };
    let bindings = (0..results.len()).filter_map(image_of).map(Image::binding);
    let arguments = Arguments {
        operands: operands.iter().map(Placed::argument).collect::<Result<_, _>>()?,
        results: bindings.collect::<Result<_, _>>()?,
        workspace: Some(scratch.slice()?),
    };
    let images: Vec<(String, &Image, Option<usize>)> = named_images(&call, &operands, &results);
    // What is in memory when a call is bound is not what it will run on.
    images.iter().try_for_each(|(_, image, _)| image.upload(stream, Content::Decoy).map(drop))?;
    let bound = plan.bind(&arguments)?;
    let mut run = CallRun::default();
    let held = device.memory().used;
    let keeps_integers = case.operands.iter().any(|operand| matches!(operand, Some(Operand::WorkList)));
    let mut first: Vec<Vec<u8>> = Vec::new();
    for (content, byte) in ROUNDS {
        if content == Content::Decoy && call.op.mesh_axis().is_none() && images_bytes(&images)? > LARGE {
            continue;
        }
        let upload = |(_, image, _): &(String, &Image, Option<usize>)| {
            // A work list belongs to the lengths that it was made from.
            let kept = content == Content::Decoy && keeps_integers && !image.desc.dtype.is_float();
            image.upload(stream, if kept { Content::Poisoned } else { content })
        };
        let before: Vec<Vec<u8>> = images.iter().map(upload).collect::<Result<_, _>>()?;
        scratch.fill(stream, byte)?;
        bound.enqueue(stream)?;
        stream.synchronize("a case of the conformance suite", super::TIMEOUT)?;
        let after: Vec<Vec<u8>> =
            images.iter().map(|(_, image, _)| image.download(stream)).collect::<Result<_, _>>()?;
        if !scratch.intact(stream)? {
            run.failures.push("memory around the workspace was overwritten".into());
        }
        for (index, (name, image, result)) in images.iter().enumerate() {
            let (before, after) = (&before[index], &after[index]);
            run.failures.extend(image.outside(after, before).map(|change| format!("{name}: {change}")));
            let expected = result.and_then(|result| case.results.get(result));
            match (result, content) {
                (None, _) if before != after => {
                    run.failures.push(format!("{name} is an operand that is not updated, and was changed"));
                }
                (None, _) | (Some(_), Content::Decoy) => {}
                (Some(_), Content::Poisoned) => {
                    let Some(expected) = expected.filter(|expected| !expected.elements.is_empty()) else {
                        continue;
                    };
                    let (found, before) = (image.elements(after), image.elements(before));
                    let verdict = judge(&image.desc, expected, &found, &before, device)?;
                    run.failures.extend(verdict.failures.iter().map(|failure| format!("{name}: {failure}")));
                    run.verdicts.push((name.clone(), verdict));
                }
                (Some(_), Content::Plausible) => {
                    let found = [&first[index], after, before].map(|bytes| image.elements(bytes));
                    let elements = expected.map_or(&[][..], |expected| &expected.elements);
                    let change = compare_rounds(&image.desc, elements, &found);
                    run.failures.extend(change.map(|change| format!("{name} {change}")));
                }
            }
        }
        if content == Content::Poisoned {
            first = after;
        }
        // The other ranks of a collective go on.
        if !run.failures.is_empty() && call.op.mesh_axis().is_none() {
            break;
        }
    }
    let holds = device.memory().used;
    if holds > held {
        run.failures
            .push(format!("the device holds {} bytes more after the call than before it", holds - held));
    }
    run.dtypes = call.results.iter().map(|desc| desc.dtype).collect();
    run.results = (0..results.len())
        .filter_map(image_of)
        .filter_map(|image| {
            let at = images.iter().position(|(_, other, _)| std::ptr::eq(*other, image))?;
            Some(image.elements(first.get(at)?))
        })
        .collect();
    Ok(run)
}

/// The runs of a call: what its tensors hold, and what its workspace is filled with. The first gives a device the opportunity to
/// keep something that it must read again.
const ROUNDS: [(Content, u8); 3] =
    [(Content::Decoy, 0xE1), (Content::Poisoned, 0x7F), (Content::Plausible, 0x33)];

/// Calls on more bytes than this run without the first round, to save time.
const LARGE: usize = 1 << 20;

fn images_bytes(images: &[(String, &Image, Option<usize>)]) -> Result<usize, Error> {
    images.iter().map(|(_, image, _)| image.desc.bytes()).sum()
}

/// Describes how a result differs between two runs, given its elements after the first and the second, and before the second.
fn compare_rounds(desc: &TensorDesc, expected: &[Element], found: &[Vec<u32>; 3]) -> Option<String> {
    let [first, second, before] = found;
    let poison = poison(desc.dtype, Role::Result);
    for at in 0..first.len() {
        match expected.get(at) {
            Some(Element::Anything) => {}
            Some(Element::Untouched) if second[at] != before[at] => {
                let value = float::value(desc.dtype, second[at]);
                return Some(format!(
                    "element {at} was set to {value:e}, must be left alone: what is past an extent or skipped held plausible values"
                ));
            }
            Some(Element::Untouched) => {}
            // A list in the device's own format need not be full.
            None if first[at] == poison && second[at] == before[at] => {}
            _ if first[at] == second[at] => {}
            _ => {
                let [first, second] = [first, second].map(|found| float::value(desc.dtype, found[at]));
                return Some(format!(
                    "differs when the same call runs again with other values in the memory that it must not read: element {at} is first {first:e}, then {second:e}"
                ));
            }
        }
    }
    None
}

/// Compares a result with what the case expects.
pub(crate) fn judge(
    desc: &TensorDesc,
    expected: &Expected,
    found: &[u32],
    before: &[u32],
    device: &dyn Device,
) -> Result<Verdict, Stop> {
    if expected.elements.len() != found.len() {
        let message =
            format!("the case expects {} elements, the result has {}", expected.elements.len(), found.len());
        return Err(Stop::Failed(message));
    }
    let properties = device.properties();
    let numbers = Numbers { strict_nan: properties.strict_nan, flushed: properties.flushed.clone() };
    Ok(verdict::judge(desc.dtype, &desc.shape, expected, found, before, &numbers))
}

/// All tensors of a call, each once, with the name and, for results, the index.
fn named_images<'a>(
    call: &CallDesc,
    operands: &'a [Placed],
    results: &'a [Option<Image>],
) -> Vec<(String, &'a Image, Option<usize>)> {
    let mut images = Vec::new();
    for (index, operand) in operands.iter().enumerate() {
        if let Some(image) = operand.image() {
            let result = (0..results.len()).find(|result| call.op.updates(*result) == Some(index));
            images.push((call.operand_name(index), image, result));
        }
    }
    for (index, image) in results.iter().enumerate() {
        images.extend(image.as_ref().map(|image| (call.result_name(index), image, Some(index))));
    }
    images
}

impl Placed {
    pub(crate) fn image(&self) -> Option<&Image> {
        match self {
            Self::Tensor(image) => Some(image),
            Self::Absent | Self::Weight(_) => None,
        }
    }

    pub(crate) fn desc(&self) -> Option<OperandDesc> {
        match self {
            Self::Absent => None,
            Self::Tensor(image) => Some(OperandDesc::Tensor(image.desc.clone())),
            Self::Weight(weight) => Some(OperandDesc::Weight(weight.weight_type().clone())),
        }
    }

    pub(crate) fn argument(&self) -> Result<Option<Argument>, Error> {
        Ok(match self {
            Self::Absent => None,
            Self::Tensor(image) => Some(Argument::Tensor(image.binding()?)),
            Self::Weight(weight) => Some(Argument::Weight(weight.clone())),
        })
    }
}

/// Uploads the operands of a call.
pub(crate) fn place_operands(
    case: &CallCase,
    device: &dyn Device,
    stream: &mut dyn Stream,
) -> Result<Vec<Placed>, Stop> {
    let mut placed = Vec::new();
    for (index, operand) in case.operands.iter().enumerate() {
        placed.push(match operand {
            None => Placed::Absent,
            Some(Operand::Tensor(input)) => {
                Placed::Tensor(Image::new(device, &input.tensor, input.layout, Role::Operand)?)
            }
            Some(Operand::Weight(weight)) => Placed::Weight(pack(device, stream, weight)?),
            Some(Operand::WorkList) => Placed::Tensor(work_list(case, index, device, stream, &placed)?),
        });
        if let Some(Placed::Tensor(image)) = placed.last() {
            image.upload(stream, Content::Poisoned)?;
        }
    }
    Ok(placed)
}

fn pack(
    device: &dyn Device,
    stream: &mut dyn Stream,
    weight: &Weight,
) -> Result<Arc<dyn PackedWeight>, Stop> {
    let desc = WeightDesc { weight_type: weight.weight_type.clone(), immutable: true };
    device.kernels().prepack_query(&desc)?;
    let mut reader = BytesReader::new(weight.weight_type.clone(), weight.bytes.as_slice())?;
    Ok(device.kernels().prepack(stream, &desc, &mut reader)?)
}

/// The op, and for `attention_prepare`, whose result the device sizes, the op with that size.
fn sized(device: &dyn Device, op: &Op, operands: &[Option<OperandDesc>]) -> Result<Op, Stop> {
    let Op::AttentionPrepare(_) = op else { return Ok(op.clone()) };
    let results = vec![TensorDesc::dense(DType::I32, &[0])];
    let op = Op::from(AttentionPrepare { words: 0 });
    let call = CallDesc { op, operands: operands.to_vec(), results, comm: None }.validate()?;
    let words = device.kernels().query(&call)?.work_words;
    let words = u32::try_from(words).map_err(|_| {
        Stop::Failed(format!("the device asks for a work list of {words} words, more than fit in 32 bits"))
    })?;
    Ok(AttentionPrepare { words }.into())
}

/// Has the device make the work list of paged attention from the operands before it.
fn work_list(
    case: &CallCase,
    index: usize,
    device: &dyn Device,
    stream: &mut dyn Stream,
    placed: &[Placed],
) -> Result<Image, Stop> {
    let lengths = placed.get(3..6).filter(|_| index == 7);
    let lengths = lengths
        .ok_or_else(|| Stop::Failed(format!("operand {index} of {} is not a work list", case.op.name())))?;
    let operands: Vec<_> = lengths.iter().map(Placed::desc).collect();
    let op = sized(device, &AttentionPrepare { words: 0 }.into(), &operands)?;
    let Op::AttentionPrepare(AttentionPrepare { words }) = op else {
        return Err(Stop::Failed("attention_prepare has become another op".into()));
    };
    let desc = describe(DType::I32, &[words as usize], Default::default());
    let call = CallDesc { op, operands, results: vec![desc], comm: None };
    let plan = CheckedPlan::new(device, call.validate()?)?;
    let image = Image::of_result(device, DType::I32, &[words as usize], Default::default())?;
    image.upload(stream, Content::Poisoned)?;
    let scratch = Scratch::new(device, plan.workspace_bytes())?;
    let binding: Binding = image.binding()?;
    let bound = plan.bind(&Arguments {
        operands: lengths.iter().map(Placed::argument).collect::<Result<_, _>>()?,
        results: vec![binding],
        workspace: Some(scratch.slice()?),
    })?;
    bound.enqueue(stream)?;
    // The list becomes the initial content of the image, which every run of the attention uploads.
    let bytes = image.download(stream)?;
    let list = Tensor { dtype: DType::I32, shape: vec![words as usize], bits: image.elements(&bytes) };
    Ok(Image::new(device, &list, Default::default(), Role::Operand)?)
}
