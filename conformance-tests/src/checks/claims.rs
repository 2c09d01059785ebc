//! What a device says of itself is true.

use super::{
    bench::{Bench, During, Given, Outcome, Stop, describe, ensure, fail, floats, work_words},
    faults::refused,
    memory::sum_is_right,
};
use crate::{runner::TIMEOUT, subject::Subject, tensor::Tensor};
use dsrun_core::{
    BlockFormat, Code, DType, GroupFormat, TensorDesc, WeightFormat, WeightType,
    collective::Comm,
    device::{BufferSlice, Device, MemoryKind},
    kernels::{Arguments, Binding, OperandDesc, WeightDesc},
    op::{
        Activation, Add, AllGather, AllReduce, AllToAll, Argmax, Attention, AttentionMask, AttentionPrepare,
        Barrier, Broadcast, Cast, Columns, CommitTokens, Embed, GateLayout, GatedActivation, GatherRows,
        GroupScore, GroupedLinear, HeadLinear, KvWrite, LatentWrite, LayerNorm, Linear, LinearA8, LinearW8A8,
        LogitProcess, MeshAxis, MoeCombine, MoeGroup, MoeRoute, Nonlinearity, Op, PageGather, PageScatter,
        PagedAttention, PrepareStep, Profile, QuantPerGroup, QuantPerToken, Receive, ReduceScatter,
        Reduction, RmsNorm, Rope, RopePairing, RouterNorm, RouterScore, Sample, Send,
    },
};
use std::sync::Arc;

/// An operand of a plain call.
type Slot = Option<OperandDesc>;

fn tensor(dtype: DType, shape: &[usize]) -> Slot {
    Some(OperandDesc::Tensor(TensorDesc::dense(dtype, shape)))
}

fn weight(dtype: DType, shape: [usize; 2]) -> Slot {
    Some(OperandDesc::Weight(WeightType { format: WeightFormat::Dense(dtype), shape: shape.to_vec() }))
}

fn integers(shape: &[usize]) -> Slot {
    tensor(DType::I32, shape)
}

fn singles(shape: &[usize]) -> Slot {
    tensor(DType::F32, shape)
}

/// A call of every op that no device which claims the op's profile can call special: small, dense, of activations of this
/// type, with nothing that may be left out.
fn plain(dtype: DType, words: u32, ranks: u32) -> Vec<(Op, Vec<Slot>)> {
    let axis = MeshAxis::Tensor;
    let float = |shape: &[usize]| tensor(dtype, shape);
    let (plane, cache) = ([6, 64], [8, 2, 16, 32]);
    let per_sequence = || integers(&[3]);
    let paged = PagedAttention {
        query_heads: 4,
        kv_heads: 2,
        scale: 0.2,
        softcap: 0.0,
        window: 0,
        mask: AttentionMask::Causal,
        value_size: 0,
    };
    let unpaged = Attention {
        query_heads: 4,
        kv_heads: 2,
        scale: 0.2,
        softcap: 0.0,
        window: 0,
        mask: AttentionMask::Bidirectional,
    };
    let gated = GatedActivation {
        function: Nonlinearity::Silu,
        layout: GateLayout::Separate,
        limit: 0.0,
        up_offset: 0.0,
    };
    let route = MoeRoute {
        top_k: 2,
        score: RouterScore::Softmax,
        groups: 1,
        top_groups: 1,
        group_score: GroupScore::Max,
        norm: RouterNorm::Sum,
        eps: 0.0,
        scale: 1.0,
        threshold: 0.0,
    };
    let (count, first_expert) = (8, 0);
    let embed = Embed { dtype, first_row: 0, position_offset: 0 };
    let sum = Reduction::Sum;
    let wide = plane[1] * ranks as usize;
    let blocks = WeightType { format: WeightFormat::Block(BlockFormat::Q4_0), shape: vec![48, 64] };
    let signed_bytes = WeightType { format: WeightFormat::Group(GroupFormat::INT8), shape: vec![48, 64] };
    vec![
        (embed.into(), vec![integers(&[6]), weight(dtype, [50, 64]), None, None]),
        (RmsNorm { eps: 1e-5, weight_offset: 0.0 }.into(), vec![float(&plane), float(&[64])]),
        (LayerNorm { eps: 1e-5 }.into(), vec![float(&plane), float(&[64]), float(&[64])]),
        (Linear { dtype }.into(), vec![float(&plane), weight(dtype, [48, 64]), None]),
        (Activation { function: Nonlinearity::GeluTanh, limit: 0.0 }.into(), vec![float(&plane), None]),
        (gated.into(), vec![float(&plane), float(&plane), None]),
        (
            Rope { heads: 2, pairing: RopePairing::Halves, scale: 1.0 }.into(),
            vec![float(&plane), integers(&[6]), singles(&[16])],
        ),
        (KvWrite {}.into(), vec![float(&cache), float(&cache), float(&plane), float(&plane), integers(&[6])]),
        (PageGather {}.into(), vec![float(&cache), integers(&[3])]),
        (PageScatter {}.into(), vec![float(&cache), float(&[3, 1024]), integers(&[3])]),
        (AttentionPrepare { words }.into(), vec![per_sequence(), per_sequence(), per_sequence()]),
        (
            paged.into(),
            vec![
                float(&[6, 128]),
                float(&cache),
                float(&cache),
                per_sequence(),
                per_sequence(),
                per_sequence(),
                integers(&[3, 4]),
                integers(&[words as usize]),
                None,
                None,
                None,
            ],
        ),
        (
            PagedAttention { kv_heads: 1, value_size: 48, ..paged }.into(),
            vec![
                float(&[6, 256]),
                float(&[8, 1, 16, 64]),
                None,
                per_sequence(),
                per_sequence(),
                per_sequence(),
                integers(&[3, 4]),
                integers(&[words as usize]),
                None,
                None,
                None,
            ],
        ),
        (
            unpaged.into(),
            vec![float(&[6, 128]), float(&[6, 64]), float(&[6, 64]), per_sequence(), per_sequence(), None],
        ),
        (Add { alpha: 1.0 }.into(), vec![float(&plane), float(&plane), None, None]),
        (Cast { dtype: DType::F32 }.into(), vec![float(&plane)]),
        (Columns { start: 8, count: 16 }.into(), vec![float(&plane)]),
        (QuantPerToken {}.into(), vec![float(&plane)]),
        (
            LinearW8A8 { dtype }.into(),
            vec![tensor(DType::I8, &plane), singles(&[6]), Some(OperandDesc::Weight(signed_bytes)), None],
        ),
        (QuantPerGroup { group: 32 }.into(), vec![float(&plane)]),
        (
            LinearA8 { dtype, group: 32 }.into(),
            vec![tensor(DType::I8, &plane), singles(&[6, 2]), Some(OperandDesc::Weight(blocks)), None],
        ),
        (GatherRows {}.into(), vec![float(&plane), integers(&[3])]),
        (
            PrepareStep { block_size: 16 }.into(),
            vec![
                per_sequence(),
                per_sequence(),
                per_sequence(),
                integers(&[6]),
                integers(&[3]),
                integers(&[5, 4]),
                integers(&[5]),
                integers(&[5]),
                integers(&[5]),
                integers(&[5, 100]),
            ],
        ),
        (
            LogitProcess {}.into(),
            vec![float(&[3, 100]), integers(&[3]), singles(&[5, 8]), integers(&[5, 100]), None, None],
        ),
        (Argmax {}.into(), vec![float(&[3, 100])]),
        (
            Sample {}.into(),
            vec![
                singles(&[3, 100]),
                integers(&[3]),
                integers(&[3]),
                singles(&[5, 8]),
                tensor(DType::U32, &[5, 2]),
            ],
        ),
        (
            CommitTokens {}.into(),
            vec![
                integers(&[3]),
                integers(&[3]),
                integers(&[2]),
                integers(&[5]),
                integers(&[5]),
                integers(&[5, 100]),
            ],
        ),
        (route.into(), vec![float(&[6, 8]), None, None, None, None]),
        (MoeGroup { count, first_expert }.into(), vec![integers(&[6, 2])]),
        (
            GroupedLinear { dtype, count, first_expert }.into(),
            vec![float(&plane), weight(dtype, [8 * 48, 64]), integers(&[6, 2]), None, None, None],
        ),
        (
            MoeCombine { count, first_expert }.into(),
            vec![float(&[6, 128]), singles(&[6, 2]), integers(&[6, 2])],
        ),
        (HeadLinear { dtype, heads: 2 }.into(), vec![float(&[6, 80]), weight(dtype, [48, 32])]),
        (LatentWrite {}.into(), vec![float(&cache), float(&[6, 48]), float(&[6, 16]), integers(&[6])]),
        (AllReduce { axis, reduction: sum }.into(), vec![float(&plane)]),
        (AllGather { axis, ranks, rows: false }.into(), vec![float(&plane)]),
        (ReduceScatter { axis, ranks, rows: false, reduction: sum }.into(), vec![float(&[6, wide])]),
        (AllToAll { axis, ranks }.into(), vec![float(&[4 * ranks as usize, 8])]),
        (Broadcast { axis, root: 0 }.into(), vec![float(&plane)]),
        (Send { axis, peer: 1 }.into(), vec![float(&plane)]),
        (Receive { axis, peer: 1 }.into(), vec![float(&plane)]),
        (Barrier { axis }.into(), vec![]),
    ]
}

/// How long the device wants the work list of the plain call, if it has attention at all.
fn work(device: &dyn Device) -> u32 {
    let lengths = vec![integers(&[3]); 3];
    work_words(device, lengths).unwrap_or(0)
}

/// A device runs a plain call of every op of the profiles it claims, for every float type it takes.
pub(super) fn profiles(subject: &Subject) -> Outcome {
    let device = &**subject.device();
    let claimed: Vec<Profile> = Profile::ALL.into_iter().filter(|profile| subject.claims(*profile)).collect();
    if claimed.is_empty() {
        return Err(Stop::Unsupported("the device claims no profile".into()));
    }
    let mut missing = Vec::new();
    for dtype in floats(device) {
        for (op, operands) in plain(dtype, work(device), 2) {
            let Some(signature) = op.signature() else { continue };
            // Calls over ranks are asked for with the ranks that are there.
            if op.mesh_axis().is_some() || !op.profile().is_some_and(|profile| claimed.contains(&profile)) {
                continue;
            }
            let name = format!("{}/{dtype}", signature.name);
            for operand in operands.iter().flatten() {
                let OperandDesc::Weight(weight_type) = operand else { continue };
                let weight = WeightDesc { weight_type: weight_type.clone(), immutable: true };
                if let Err(error) = device.kernels().prepack_query(&weight) {
                    missing.push(format!("{name}: {error}"));
                }
            }
            let support = device.kernels().query(&describe(op, operands, None)?).during(&name)?;
            if !support.native {
                missing.push(format!("{name}: {}", support.reason));
            }
        }
    }
    if subject.claims(Profile::LlmDist1) {
        missing.extend(collectives(subject)?);
    }
    ensure(missing.is_empty(), || {
        format!("the profile is claimed, but not all of it is there:\n{}", missing.join("\n"))
    })
}

/// The collectives of the profile that are not there.
fn collectives(subject: &Subject) -> Result<Vec<String>, Stop> {
    let devices = subject.ranks(2)?;
    let Some(collective) = devices[0].collective() else {
        return Ok(vec!["the device has no collectives".into()]);
    };
    let id = collective.group_id(None)?;
    let second = devices[1].clone();
    let other = std::thread::spawn(move || -> Result<Option<Arc<dyn Comm>>, Stop> {
        let Some(collective) = second.collective() else { return Ok(None) };
        Ok(Some(collective.join(&id, 1, 2, TIMEOUT)?))
    });
    let comm = collective.join(&id, 0, 2, TIMEOUT)?;
    // The other rank is kept, so that there are two for as long as questions are asked.
    let _other = other.join().unwrap_or_else(|_| fail("a thread panicked"))?;
    let mut missing = Vec::new();
    for dtype in floats(&*devices[0]) {
        for (op, operands) in plain(dtype, 0, 2).into_iter().filter(|(op, _)| op.mesh_axis().is_some()) {
            let name = op.name().to_owned();
            let call = describe(op, operands, Some(comm.clone()))?;
            let support = devices[0].kernels().query(&call).during(&name)?;
            if !support.native {
                missing.push(format!("{name}/{dtype}: {}", support.reason));
            }
        }
    }
    Ok(missing)
}

/// Sizes and addresses are what the properties say.
pub(super) fn properties(subject: &Subject) -> Outcome {
    let device = subject.device();
    let properties = device.properties();
    let listed = subject.backend().devices()?;
    let Some(listed) = listed.iter().find(|listed| listed.index == subject.index()) else {
        return fail("the device is open, but not listed");
    };
    let (open, listed) = (properties.memory_bytes, listed.memory_bytes.unwrap_or(0));
    ensure(open == 0 || listed == 0 || open == listed, || {
        format!("the device has {open} bytes of memory, and {listed} where it is listed")
    })?;
    let memory = device.memory();
    ensure(open == 0 || memory.used <= open, || format!("{} bytes are held of {open}", memory.used))?;
    for (kind, reachable) in [(MemoryKind::Pinned, true), (MemoryKind::Device, properties.unified_memory)] {
        let buffer = device.allocate(1000, kind)?;
        ensure(buffer.bytes() == 1000 && buffer.kind() == kind, || {
            format!("1000 bytes of {kind:?} memory are {} of {:?}", buffer.bytes(), buffer.kind())
        })?;
        match buffer.host_pointer() {
            Some(pointer) => ensure(pointer.addr().get().is_multiple_of(properties.alignment), || {
                format!("{kind:?} memory is not aligned to {} bytes", properties.alignment)
            })?,
            None => ensure(!reachable, || format!("the host cannot reach {kind:?} memory"))?,
        }
    }
    Ok(())
}

/// A call runs at every offset that the alignment allows.
pub(super) fn alignment(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    let alignment = bench.device.properties().alignment;
    let dtype = floats(&*bench.device)[0];
    let (rows, columns) = (5, 37);
    let tensor = |value: f64| Tensor::floats(dtype, &[rows, columns], &vec![value; rows * columns]);
    let operands = [bench.give(&tensor(1.0))?, bench.give(&tensor(2.0))?, Given::Absent, Given::Absent];
    let plan = bench.plan(Add { alpha: 1.0 }, &operands)?;
    let bytes = tensor(0.0).bytes().len();
    for offset in [1, 2, 3, 5, 8] {
        let offset = offset * alignment;
        let place = |bench: &Bench| -> Result<BufferSlice, Stop> {
            Ok(BufferSlice::new(bench.buffer(offset + bytes)?, offset, bytes)?)
        };
        let (a, y) = (place(&bench)?, place(&bench)?);
        bench.stream.upload(&tensor(1.0).bytes(), &a)?;
        let workspace = bench.workspace(plan.workspace_bytes())?;
        let mut arguments = Arguments {
            operands: operands.iter().map(Given::argument).collect(),
            results: vec![Binding::new(y.clone())],
            workspace: Some(workspace),
        };
        arguments.operands[0] = Some(dsrun_core::kernels::Argument::Tensor(Binding::new(a)));
        let bound = plan.bind(&arguments).during("an aligned offset")?;
        bound.enqueue(&mut *bench.stream)?;
        let mut found = vec![0; bytes];
        bench.stream.download(&y, &mut found, "a sum at an offset", TIMEOUT)?;
        ensure(found == tensor(3.0).bytes(), || format!("a sum at byte {offset} is wrong"))?;
    }
    sum_is_right(&mut bench)
}

/// What a device does not run it says no to, with a reason, and does not plan.
pub(super) fn no_means_no(subject: &Subject) -> Outcome {
    let device = &**subject.device();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (op, operands) in plain(dtype, work(device), 2) {
            if op.mesh_axis().is_some() {
                continue;
            }
            let name = format!("{}/{dtype}", op.name());
            let call = describe(op, operands, None)?;
            // That a call is not run is an answer. An error, even one that says so, is none.
            let support = match device.kernels().query(&call) {
                Ok(support) => support,
                Err(error) => return fail(format!("a query for {name} is an error: {error}")),
            };
            if support.native {
                let planned = device.kernels().plan(&call).map(drop);
                ensure(planned.is_ok(), || format!("{name} is said to run, and not planned: {planned:?}"))?;
                continue;
            }
            ensure(!support.reason.is_empty(), || format!("{name} is not run, and no reason is given"))?;
            let planned = device.kernels().plan(&call);
            let what = format!("a plan for {name}, which the device says it does not run");
            refused(&what, planned, &[Code::Unsupported])?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsrun_core::collective::host::HostComm;

    #[test]
    fn every_primitive_has_a_plain_call_that_is_valid() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let calls = plain(dtype, 4, 2);
            let mut names: Vec<&str> = calls.iter().map(|(op, _)| op.name()).collect();
            let mut all: Vec<&str> = Op::PRIMITIVES.iter().map(|signature| signature.name).collect();
            names.sort_unstable();
            // Attention is there in two forms.
            names.dedup();
            all.sort_unstable();
            assert_eq!(names, all);
            for (op, operands) in calls {
                let first_of_two = || Arc::new(HostComm::group(2).unwrap().remove(0)) as Arc<dyn Comm>;
                let comm = op.mesh_axis().map(|_| first_of_two());
                describe(op, operands, comm).unwrap_or_else(|stop| panic!("{stop:?}"));
            }
        }
    }
}
