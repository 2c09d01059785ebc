use dsrun_candle::CandleBackend;
use dsrun_core::{*, checked::CheckedPlan, device::*, kernels::*, op::*};
fn cpu() -> u64 { let s = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap(); s.split(' ').next().unwrap().parse().unwrap() }
fn main() {
    let threads = std::env::args().nth(1).and_then(|s| s.parse().ok());
    let dev = CandleBackend::new().open(0, &DeviceOptions { threads, ..Default::default() }).unwrap();
    let mut st = dev.stream().unwrap();
    let mut t = |op: Op, ops: Vec<Option<(TensorDesc, Vec<u8>)>>, res: Vec<TensorDesc>, name: &str, n: usize| {
        let operands: Vec<_> = ops.iter().map(|o| o.as_ref().map(|(d, _)| OperandDesc::Tensor(d.clone()))).collect();
        let call = CallDesc { op: op.clone(), operands, results: res.clone(), comm: None };
        let plan = CheckedPlan::new(dev.as_ref(), call).unwrap();
        let args: Vec<_> = ops.iter().map(|o| o.as_ref().map(|(_, b)| {
            let s = BufferSlice::whole(dev.allocate(b.len(), MemoryKind::Device).unwrap());
            st.upload(b, &s).unwrap();
            Argument::Tensor(Binding::new(s))
        })).collect();
        let results: Vec<_> = res.iter().enumerate().map(|(i, d)| match op.updates(i) {
            Some(o) => match &args[o] { Some(Argument::Tensor(b)) => b.clone(), _ => panic!() },
            None => Binding::new(BufferSlice::whole(dev.allocate(d.bytes().unwrap(), MemoryKind::Device).unwrap())),
        }).collect();
        let b = plan.bind(&Arguments { operands: args, results, workspace: None }).unwrap();
        for _ in 0..3 { b.enqueue(st.as_mut()).unwrap(); }
        let s = cpu();
        for _ in 0..n { b.enqueue(st.as_mut()).unwrap(); }
        println!("{name:40} {:10.2} us", (cpu() - s) as f64 / 1e3 / n as f64);
    };
    let f = |shape: &[usize], dt: DType| {
        let c: usize = shape.iter().product();
        let v: Vec<f32> = (0..c).map(|i| ((i * 7919) % 1009) as f32 / 300.0 - 1.5).collect();
        let b = match dt {
            DType::F32 => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            DType::F16 => v.iter().flat_map(|x| half::f16::from_f32(*x).to_le_bytes()).collect(),
            _ => v.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect::<Vec<u8>>(),
        };
        Some((TensorDesc::dense(dt, shape), b))
    };
    let i = |v: &[i32], shape: &[usize]| Some((TensorDesc::dense(DType::I32, shape), v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()));
    for dt in [DType::F32, DType::BF16, DType::F16] { for rows in [1usize, 500] {
        let d = |s: &[usize]| TensorDesc::dense(dt, s);
        let n = if rows == 1 { 2000 } else { 20 };
        let nm = |s: &str| format!("{s} {dt} rows {rows}");
        t(RmsNorm { eps: 1e-5, weight_offset: 0.0 }.into(), vec![f(&[rows, 576], dt), f(&[576], dt)], vec![d(&[rows, 576])], &nm("rms_norm"), n);
        t(Add { alpha: 1.0 }.into(), vec![f(&[rows, 576], dt), f(&[rows, 576], dt), None, None], vec![d(&[rows, 576])], &nm("add"), n);
        t(GatedActivation { function: Nonlinearity::Silu, layout: GateLayout::Separate, limit: 0.0 }.into(), vec![f(&[rows, 1536], dt), f(&[rows, 1536], dt), None], vec![d(&[rows, 1536])], &nm("gated silu"), n);
        let pos: Vec<i32> = (0..rows as i32).map(|p| p + 400).collect();
        t(Rope { heads: 9, pairing: RopePairing::Halves, scale: 1.0 }.into(), vec![f(&[rows, 576], dt), i(&pos, &[rows]), f(&[32], DType::F32)], vec![d(&[rows, 576])], &nm("rope"), n);
        for block in [16usize, 64] {
            let (pages, kv) = (2048 / block, 500);
            let c = [pages, 3, block, 64];
            let slots: Vec<i32> = (0..rows as i32).collect();
            t(KvWrite {}.into(), vec![f(&c, dt), f(&c, dt), f(&[rows, 192], dt), f(&[rows, 192], dt), i(&slots, &[rows])], vec![d(&c), d(&c)], &nm("kv_write"), n);
            let table: Vec<i32> = (0..(512 / block) as i32).rev().collect();
            t(PagedAttention { query_heads: 9, kv_heads: 3, scale: 0.125, softcap: 0.0, window: 0, mask: AttentionMask::Causal }.into(),
              vec![f(&[rows, 576], dt), f(&c, dt), f(&c, dt), i(&[0], &[1]), i(&[rows as i32], &[1]), i(&[kv], &[1]), i(&table, &[1, table.len()]), i(&[], &[0]), None, None, None],
              vec![d(&[rows, 576]), TensorDesc::dense(DType::F32, &[rows, 9])], &nm(&format!("paged_attention block {block}")), n);
        }
    }}
    let v = 49152;
    let d = |dt, s: &[usize]| TensorDesc::dense(dt, s);
    t(Argmax {}.into(), vec![f(&[1, v], DType::F32)], vec![d(DType::I32, &[1])], "argmax", 200);
    let params = |p: [f32; 8]| Some((d(DType::F32, &[1, 8]), p.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()));
    t(LogitProcess {}.into(), vec![f(&[1, v], DType::F32), i(&[0], &[1]), params([1., 0., 1., 0., 1.1, 0.1, 0.1, 0.]), i(&vec![1; v], &[1, v]), None, None], vec![d(DType::F32, &[1, v])], "logit_process", 200);
    for p in [[0.; 8], [0.8, 0., 1., 0., 1., 0., 0., 0.], [0.8, 50., 0.9, 0., 1., 0., 0., 0.], [0.8, 0., 0.9, 0.05, 1., 0., 0., 0.]] {
        let seeds = Some((d(DType::U32, &[1, 2]), vec![1u8; 8]));
        t(Sample {}.into(), vec![f(&[1, v], DType::F32), i(&[0], &[1]), i(&[7], &[1]), params(p), seeds], vec![d(DType::I32, &[1]), d(DType::F32, &[1])], &format!("sample {:?}", &p[..4]), 100);
    }
}
