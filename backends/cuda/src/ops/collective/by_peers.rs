//! Collectives by peer exchange: `kernels/collective/exchange.cuh` has the protocol.

use super::Planes;
use crate::{
    arch::crossover::{Algorithm, algorithm},
    collective::{
        BLOCKS, CREDITS, CudaComm, DEPTH, DIRECT_BLOCKS, DIRECT_BLOCKS_AT_ONCE, Exchange, MAX_RANKS,
        PATIENCE, THREADS, nanoseconds,
    },
    driver::{
        kernel_spec::KernelSpec,
        kernel_struct::{Pointer, declaration, kernel_struct, params_header},
        launch::{LaunchOp, Parameters},
    },
    ops::{
        KernelPlan,
        bound::Bound,
        frame::Frame,
        operands::bits_of,
        params::{ExtentParams, MatrixParams},
    },
};
use dsrun_core::{
    DType, Error, Result,
    collective::Comm,
    kernels::CallDesc,
    op::{Op, Reduction},
};
use std::{sync::Arc, time::Duration};

/// Bytes of data in a packet.
pub(super) const UNIT_BYTES: usize = 8;
/// How long it waits for a message, or for a free buffer to send one: the other rank may have to compute first.
const MESSAGE_PATIENCE: Duration = Duration::from_secs(200);

kernel_struct! {
    /// Parameters of the reducing collectives.
    struct ReduceParams {
        extent: ExtentParams = "Extent",
        x: MatrixParams = "Matrix<const X>",
        y: MatrixParams = "Matrix<X>",
        /// To which the sums are added, if `ADDED`.
        added: MatrixParams = "Matrix<const X>",
        /// Elements of `x` from one rank's part to the next.
        x_part: i64 = "i64",
        columns: i64 = "i64",
        /// The address of this rank's packets in each rank's mailbox.
        to: [Pointer; MAX_RANKS] = "void*",
        /// The address of the packets of all ranks in this rank's mailbox.
        from: Pointer = "const void*",
        /// The counter of rounds of each block.
        rounds: Pointer = "u32*",
        state: Pointer = "void*",
        /// Whether a wait of the rank has failed.
        failed: Pointer = "u32*",
        /// The timeout of waits in nanoseconds.
        patience: u64 = "u64",
        rank: i32 = "int",
        ranks: i32 = "int",
        /// Packets per thread, round and rank, at most `DEPTH`.
        depths: i32 = "int",
        reduction: i32 = "int",
        /// The factor of the sums that are added.
        alpha: f32 = "float",
        unused: i32 = "int",
    }
}

kernel_struct! {
    /// Parameters of `spread`.
    struct SpreadParams {
        extent: ExtentParams = "Extent",
        x: MatrixParams = "Matrix<const X>",
        y: MatrixParams = "Matrix<X>",
        /// Elements of `x` from one rank's part to the next.
        x_part: i64 = "i64",
        /// Elements of `y` from one rank's part to the next.
        y_part: i64 = "i64",
        columns: i64 = "i64",
        /// The address of this rank's packets in each rank's mailbox.
        to: [Pointer; MAX_RANKS] = "void*",
        /// The address of the packets of all ranks in this rank's mailbox.
        from: Pointer = "const void*",
        /// The round counter of each block.
        rounds: Pointer = "u32*",
        state: Pointer = "void*",
        /// Whether a wait of the rank has failed.
        failed: Pointer = "u32*",
        /// The timeout of waits in nanoseconds.
        patience: u64 = "u64",
        rank: i32 = "int",
        ranks: i32 = "int",
        /// Packets per thread, round and rank, at most `DEPTH`.
        depths: i32 = "int",
        /// The only rank whose data is used, or -1.
        root: i32 = "int",
        /// Whether to run one round without data.
        barrier: i32 = "int",
        unused: i32 = "int",
    }
}

kernel_struct! {
    /// Parameters of `send` and `receive`.
    struct MessageParams {
        extent: ExtentParams = "Extent",
        x: MatrixParams = "Matrix<X>",
        columns: i64 = "i64",
        /// The address of the packets in the receiver's mailbox.
        packets: Pointer = "void*",
        /// The acknowledged rounds by thread, in the sender's mailbox.
        taken: Pointer = "u32*",
        /// The round counter of each block.
        rounds: Pointer = "u32*",
        state: Pointer = "void*",
        /// Whether a wait of the rank has failed.
        failed: Pointer = "u32*",
        /// The timeout of waits in nanoseconds.
        patience: u64 = "u64",
        peer: i32 = "int",
        /// Packets per thread and round, at most `DEPTH`.
        depths: i32 = "int",
    }
}

/// The generated headers of these kernels' parameters.
pub(crate) fn params_headers() -> Vec<(String, String)> {
    vec![
        params_header("collective/reduce", &[declaration::<ReduceParams>()]),
        params_header("collective/copy", &[declaration::<SpreadParams>(), declaration::<MessageParams>()]),
    ]
}

/// The kernels' name of a type that can be reduced.
fn reduced_type(dtype: DType) -> Result<&'static str> {
    Ok(match dtype {
        DType::F32 => "f32",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::I32 => "i32",
        DType::U32 => "u32",
        DType::I8 => "i8",
        DType::U8 => "u8",
        other => return Err(Error::unsupported(format!("CUDA cannot reduce elements of {other}"))),
    })
}

/// The kernel of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernel {
    OneShot(Reduction),
    TwoShots(Reduction),
    Direct(Reduction),
    Scatter(Reduction),
    /// Copies the data of all ranks, or only of the given one.
    Spread(Option<u32>),
    Barrier,
    Send(usize),
    Receive(usize),
}

impl Kernel {
    fn of(op: &Op, planes: &Planes, comm: &CudaComm) -> Result<Self> {
        let exchange = exchange(comm)?;
        let algorithm = || match comm.only.unwrap_or_else(|| algorithm(planes.bytes(), planes.ranks)) {
            Algorithm::Direct if !exchange.direct_fits() => Algorithm::TwoShots,
            algorithm => algorithm,
        };
        Ok(match op {
            Op::AllReduce(op) => match algorithm() {
                Algorithm::OneShot => Self::OneShot(op.reduction),
                Algorithm::TwoShots => Self::TwoShots(op.reduction),
                Algorithm::Direct => Self::Direct(op.reduction),
            },
            Op::ReduceScatter(op) => Self::Scatter(op.reduction),
            Op::AllGather(_) | Op::AllToAll(_) => Self::Spread(None),
            Op::Broadcast(op) => Self::Spread(Some(op.root)),
            Op::Barrier(_) => Self::Barrier,
            Op::Send(op) => Self::Send(op.peer as usize),
            Op::Receive(op) => Self::Receive(op.peer as usize),
            other => return Err(Error::internal(format!("{} is no collective", other.name()))),
        })
    }

    /// The maximum number of blocks of a launch, and of packets per thread and round.
    fn most(self) -> [usize; 2] {
        if matches!(self, Self::Direct(_)) { [DIRECT_BLOCKS, 1] } else { [BLOCKS, DEPTH] }
    }

    /// The kernel for elements of a type; if `added`, of one that adds the sums to a residual.
    fn spec(self, dtype: DType, wide: bool, added: bool) -> Result<KernelSpec> {
        let (unit, entry, name) = match self {
            Self::OneShot(_) => ("collective/reduce.cu", "one_shot", reduced_type(dtype)?),
            Self::TwoShots(_) => ("collective/reduce.cu", "two_shots", reduced_type(dtype)?),
            Self::Direct(_) => ("collective/direct.cu", "direct", reduced_type(dtype)?),
            Self::Scatter(_) => ("collective/reduce.cu", "scatter", reduced_type(dtype)?),
            Self::Spread(_) | Self::Barrier => ("collective/copy.cu", "spread", bits_of(dtype.bytes())?),
            Self::Send(_) => ("collective/copy.cu", "send", bits_of(dtype.bytes())?),
            Self::Receive(_) => ("collective/copy.cu", "receive", bits_of(dtype.bytes())?),
        };
        // This kernel finds out how all ranks have their planes.
        let wide = u8::from(wide && !matches!(self, Self::Direct(_)));
        let [blocks, depth] = self.most();
        let defines: [(_, &dyn std::fmt::Display); 9] = [
            ("X", &name),
            ("ADDED", &u8::from(added)),
            ("WIDE", &wide),
            ("BLOCKS", &blocks),
            ("THREADS", &THREADS),
            ("DEPTH", &depth),
            ("CREDITS", &CREDITS),
            ("RESIDENT", &DIRECT_BLOCKS_AT_ONCE),
            ("MOST_RANKS", &MAX_RANKS),
        ];
        Ok(KernelSpec::new(unit, entry, defines))
    }
}

fn exchange(comm: &CudaComm) -> Result<&Exchange> {
    comm.exchange.as_ref().ok_or_else(|| Error::internal("the group has no peer exchange"))
}

/// Blocks, and packets per thread and round, for this many packets, in rounds of about equal sizes. All ranks must compute the
/// same numbers.
fn geometry(packets: usize, [most_blocks, most_depth]: [usize; 2]) -> (usize, usize) {
    let blocks = packets.div_ceil(THREADS).clamp(1, most_blocks);
    let depths = packets.div_ceil(most_blocks * THREADS).max(1);
    (blocks, depths.div_ceil(depths.div_ceil(most_depth)))
}

/// The plan of a collective. With `alpha`, its sums times that are added to operand 1, a residual.
pub(super) fn plan(
    call: &CallDesc,
    alpha: Option<f32>,
    planes: Planes,
    comm: &Arc<CudaComm>,
) -> Result<KernelPlan> {
    let kernel = Kernel::of(&call.op, &planes, comm)?;
    let dtype = call.tensor(0).map_or(DType::U32, |x| x.dtype);
    let spec = kernel.spec(dtype, planes.wide, alpha.is_some())?;
    let comm = comm.clone();
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let exchange = exchange(&comm)?;
        let units = planes.bytes().div_ceil(UNIT_BYTES);
        let packets = match kernel {
            Kernel::TwoShots(_) => units.div_ceil(planes.ranks),
            // A thread reads two units at once.
            Kernel::Direct(_) => units.div_ceil(2 * planes.ranks),
            _ => units,
        };
        let (blocks, depths) = geometry(packets, kernel.most());
        let parameters = parameters(kernel, alpha, &planes, frame, exchange, comm.rank(), depths)?;
        Ok(LaunchOp::kernel(function, [blocks, 1, 1], THREADS, parameters))
    }))
}

fn parameters(
    kernel: Kernel,
    alpha: Option<f32>,
    planes: &Planes,
    frame: &Frame,
    exchange: &Exchange,
    rank: usize,
    depths: usize,
) -> Result<Parameters> {
    let x = frame.optional(0);
    let y = frame.results.first().or(x);
    let added = alpha.and_then(|_| frame.optional(1));
    let bounds: Vec<&Bound> = x.into_iter().chain(y).chain(added).collect();
    let extent = ExtentParams::of(planes.rows, &bounds);
    let columns = planes.columns as i64;
    let (state, failed, depths) = (exchange.state(), exchange.failed(), depths as i32);
    let (rank, ranks) = (rank as i32, planes.ranks as i32);
    let message = |[packets, taken, rounds]: [u64; 3], of: Option<&Bound>, peer: usize| {
        Parameters::from(&MessageParams {
            extent,
            x: MatrixParams::optional(of),
            columns,
            packets,
            taken,
            rounds,
            state,
            failed,
            patience: nanoseconds(MESSAGE_PATIENCE),
            peer: peer as i32,
            depths,
        })
    };
    Ok(match kernel {
        Kernel::OneShot(reduction)
        | Kernel::TwoShots(reduction)
        | Kernel::Direct(reduction)
        | Kernel::Scatter(reduction) => {
            let (to, from, rounds) = match kernel {
                Kernel::Direct(_) => exchange.direct(),
                _ => (exchange.to(), exchange.from(), exchange.rounds()),
            };
            Parameters::from(&ReduceParams {
                extent,
                x: MatrixParams::optional(x),
                y: MatrixParams::optional(y),
                added: MatrixParams::optional(added),
                x_part: planes.x_part as i64,
                columns,
                to,
                from,
                rounds,
                state,
                failed,
                patience: nanoseconds(PATIENCE),
                rank,
                ranks,
                depths,
                reduction: reduction as i32,
                alpha: alpha.unwrap_or(0.0),
                unused: 0,
            })
        }
        Kernel::Spread(_) | Kernel::Barrier => Parameters::from(&SpreadParams {
            extent,
            x: MatrixParams::optional(x),
            y: MatrixParams::optional(y),
            x_part: planes.x_part as i64,
            y_part: planes.y_part as i64,
            columns,
            to: exchange.to(),
            from: exchange.from(),
            rounds: exchange.rounds(),
            state,
            failed,
            patience: nanoseconds(PATIENCE),
            rank,
            ranks,
            depths,
            root: if let Kernel::Spread(Some(root)) = kernel { root as i32 } else { -1 },
            barrier: i32::from(kernel == Kernel::Barrier),
            unused: 0,
        }),
        Kernel::Send(peer) => message(exchange.sending(peer), x, peer),
        Kernel::Receive(peer) => message(exchange.receiving(peer), y, peer),
    })
}

/// The kernels that groups may need.
pub(crate) fn all_specs() -> Result<Vec<KernelSpec>> {
    let sum = Reduction::Sum;
    let reducing = [Kernel::OneShot(sum), Kernel::TwoShots(sum), Kernel::Direct(sum), Kernel::Scatter(sum)];
    let copying = [Kernel::Spread(None), Kernel::Send(0), Kernel::Receive(0)];
    let mut specs = Vec::new();
    for wide in [false, true] {
        for dtype in DType::ALL {
            for kernel in reducing {
                specs.push(kernel.spec(dtype, wide, false)?);
                if dtype.is_float() && !matches!(kernel, Kernel::Scatter(_)) {
                    specs.push(kernel.spec(dtype, wide, true)?);
                }
            }
        }
        for dtype in [DType::U8, DType::F16, DType::U32] {
            for kernel in copying {
                specs.push(kernel.spec(dtype, wide, false)?);
            }
        }
    }
    Ok(specs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_spread_over_blocks_before_threads_have_several_packets() {
        let most = [BLOCKS, DEPTH];
        assert_eq!(geometry(0, most), (1, 1));
        assert_eq!(geometry(1, most), (1, 1));
        assert_eq!(geometry(2 << 10, most), (8, 1));
        assert_eq!(geometry(BLOCKS * THREADS, most), (BLOCKS, 1));
        assert_eq!(geometry(BLOCKS * THREADS + 1, most), (BLOCKS, 2));
        // Two rounds of three rather than one of four and one of one.
        assert_eq!(geometry(BLOCKS * THREADS * 5, [BLOCKS, 4]), (BLOCKS, 3));
        assert_eq!(geometry(1 << 30, most), (BLOCKS, DEPTH));
    }
}
