//! Collectives, through the host transport of core.
//!
//! The data sent is dense: rows below the extent only, without gaps.

use crate::view::{Bytes, Frame, Tensor};
use dsrun_core::{
    Code, DType, Error, Result,
    collective::{Comm, host::HostComm},
    kernels::CallDesc,
    op::{AllGather, AllReduce, AllToAll, Barrier, Broadcast, Op, Receive, ReduceScatter, Send as SendOp},
};
use std::{fmt::Debug, sync::Arc};

/// How ranks exchange the data of a collective, in three steps: the device is locked in the first and the last only.
pub(crate) trait Exchange: Debug + Send + Sync {
    /// Copies out the data that other ranks need.
    fn collect(&self, frame: &Frame<'_>, comm: &HostComm, staging: &mut Staging) -> Result<()>;

    /// Exchanges the data.
    fn exchange(&self, comm: &HostComm, staging: &mut Staging) -> Result<()>;

    /// Copies in the data of other ranks.
    fn deliver(&self, frame: &Frame<'_>, comm: &HostComm, staging: &Staging) -> Result<()>;
}

/// The exchange of an op, if the op is a collective.
pub(crate) fn exchange(op: &Op) -> Option<Box<dyn Exchange>> {
    Some(match op {
        Op::AllReduce(op) => Box::new(*op),
        Op::AllGather(op) => Box::new(*op),
        Op::ReduceScatter(op) => Box::new(*op),
        Op::AllToAll(op) => Box::new(*op),
        Op::Broadcast(op) => Box::new(*op),
        Op::Send(op) => Box::new(*op),
        Op::Receive(op) => Box::new(*op),
        Op::Barrier(op) => Box::new(*op),
        _ => return None,
    })
}

/// The data a call holds while its ranks exchange it.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
    parts: Vec<Arc<[u8]>>,
    dtype: Option<DType>,
}

impl Staging {
    fn dtype(&self) -> Result<DType> {
        self.dtype.ok_or_else(|| Error::internal("no element type was noted"))
    }
}

/// Rejects bounded rows, whose number only the device knows, where a collective splits them into equal shares.
pub(crate) fn check(call: &CallDesc) -> Result<()> {
    let shares_rows = match &call.op {
        Op::AllGather(op) => op.rows,
        Op::ReduceScatter(op) => op.rows,
        Op::AllToAll(_) => true,
        _ => false,
    };
    let bounded =
        call.tensor(0).is_some_and(|x| x.bounded) || call.results.iter().any(|result| result.bounded);
    if shares_rows && bounded {
        return Err(Error::unsupported("is bounded, but its rows are shared out").at("x").field("extent"));
    }
    Ok(())
}

/// Appends `rows` rows, `count` elements from element `first` of each.
fn pack<D: AsRef<[u8]>>(
    x: &Tensor<'_, Bytes<D>>,
    rows: usize,
    first: usize,
    count: usize,
    out: &mut Vec<u8>,
) {
    for row in 0..rows {
        out.extend_from_slice(x.data.range(x.row_start(row) + first, count));
    }
}

/// Puts `bytes` into `rows` rows from `first_row` on, into `count` elements from `first` on of each.
fn unpack(
    y: &mut Tensor<'_, Bytes<&mut [u8]>>,
    [first_row, rows]: [usize; 2],
    [first, count]: [usize; 2],
    bytes: &[u8],
) -> Result<()> {
    let row_bytes = count * y.data.element();
    // The extents may have been changed while the ranks exchanged data.
    if bytes.len() != rows * row_bytes {
        let message = format!("{} bytes came for {rows} rows of {row_bytes}", bytes.len());
        return Err(Error::new(Code::Communication, message));
    }
    if row_bytes > 0 {
        for (row, bytes) in bytes.chunks_exact(row_bytes).enumerate() {
            let start = y.row_start(first_row + row) + first;
            y.data.range_mut(start, count).copy_from_slice(bytes);
        }
    }
    Ok(())
}

/// Makes `bytes` hold the first `rows` rows of `x`.
fn stage<D: AsRef<[u8]>>(x: &Tensor<'_, Bytes<D>>, bytes: &mut Vec<u8>) {
    bytes.clear();
    pack(x, x.rows, 0, x.width(), bytes);
}

/// Makes `bytes` zeros, as many as the bytes of `rows` rows of `y`.
fn make_room(y: &Tensor<'_, Bytes<&mut [u8]>>, rows: usize, bytes: &mut Vec<u8>) {
    bytes.clear();
    bytes.resize(rows * y.width() * y.data.element(), 0);
}

impl Exchange for AllReduce {
    fn collect(&self, frame: &Frame<'_>, _: &HostComm, staging: &mut Staging) -> Result<()> {
        staging.dtype = Some(frame.result_dtype(0)?);
        stage(&frame.bytes_mut(0)?, &mut staging.incoming);
        Ok(())
    }

    fn exchange(&self, comm: &HostComm, staging: &mut Staging) -> Result<()> {
        let dtype = staging.dtype()?;
        comm.all_reduce(&mut staging.incoming, dtype, self.reduction)
    }

    fn deliver(&self, frame: &Frame<'_>, _: &HostComm, staging: &Staging) -> Result<()> {
        deliver_rows(frame, staging)
    }
}

/// The incoming bytes are the real rows of result 0.
fn deliver_rows(frame: &Frame<'_>, staging: &Staging) -> Result<()> {
    let mut y = frame.bytes_mut(0)?;
    let (rows, width) = (y.rows, y.width());
    unpack(&mut y, [0, rows], [0, width], &staging.incoming)
}

impl Exchange for AllGather {
    fn collect(&self, frame: &Frame<'_>, _: &HostComm, staging: &mut Staging) -> Result<()> {
        let x = frame.bytes(0)?;
        let rows = if self.rows { x.rows } else { x.rows.min(frame.result_rows(0)) };
        staging.outgoing.clear();
        pack(&x, rows, 0, x.width(), &mut staging.outgoing);
        Ok(())
    }

    fn exchange(&self, comm: &HostComm, staging: &mut Staging) -> Result<()> {
        staging.parts = comm.all_gather(&staging.outgoing)?;
        Ok(())
    }

    fn deliver(&self, frame: &Frame<'_>, _: &HostComm, staging: &Staging) -> Result<()> {
        let (x, mut y) = (frame.bytes(0)?, frame.bytes_mut(0)?);
        for (rank, part) in staging.parts.iter().enumerate() {
            if self.rows {
                unpack(&mut y, [rank * x.rows, x.rows], [0, x.width()], part)?;
            } else {
                let rows = x.rows.min(y.rows);
                unpack(&mut y, [0, rows], [rank * x.width(), x.width()], part)?;
            }
        }
        Ok(())
    }
}

impl Exchange for ReduceScatter {
    fn collect(&self, frame: &Frame<'_>, comm: &HostComm, staging: &mut Staging) -> Result<()> {
        let (x, y) = (frame.bytes(0)?, frame.bytes_mut(0)?);
        staging.dtype = Some(frame.result_dtype(0)?);
        staging.outgoing.clear();
        if self.rows {
            pack(&x, x.rows, 0, x.width(), &mut staging.outgoing);
            make_room(&y, y.rows, &mut staging.incoming);
        } else {
            // Ranks' shares one after the other.
            let rows = x.rows.min(y.rows);
            for rank in 0..comm.ranks() {
                pack(&x, rows, rank * y.width(), y.width(), &mut staging.outgoing);
            }
            make_room(&y, rows, &mut staging.incoming);
        }
        Ok(())
    }

    fn exchange(&self, comm: &HostComm, staging: &mut Staging) -> Result<()> {
        let dtype = staging.dtype()?;
        comm.reduce_scatter(&staging.outgoing, &mut staging.incoming, dtype, self.reduction)
    }

    fn deliver(&self, frame: &Frame<'_>, _: &HostComm, staging: &Staging) -> Result<()> {
        let rows = if self.rows { usize::MAX } else { frame.bytes(0)?.rows };
        let mut y = frame.bytes_mut(0)?;
        let (rows, width) = (rows.min(y.rows), y.width());
        unpack(&mut y, [0, rows], [0, width], &staging.incoming)
    }
}

impl Exchange for AllToAll {
    fn collect(&self, frame: &Frame<'_>, _: &HostComm, staging: &mut Staging) -> Result<()> {
        stage(&frame.bytes(0)?, &mut staging.outgoing);
        staging.incoming.clear();
        staging.incoming.resize(staging.outgoing.len(), 0);
        Ok(())
    }

    fn exchange(&self, comm: &HostComm, staging: &mut Staging) -> Result<()> {
        comm.all_to_all(&staging.outgoing, &mut staging.incoming)
    }

    fn deliver(&self, frame: &Frame<'_>, _: &HostComm, staging: &Staging) -> Result<()> {
        deliver_rows(frame, staging)
    }
}

impl Exchange for Broadcast {
    fn collect(&self, frame: &Frame<'_>, _: &HostComm, staging: &mut Staging) -> Result<()> {
        stage(&frame.bytes_mut(0)?, &mut staging.incoming);
        Ok(())
    }

    fn exchange(&self, comm: &HostComm, staging: &mut Staging) -> Result<()> {
        comm.broadcast(&mut staging.incoming, self.root as usize)
    }

    fn deliver(&self, frame: &Frame<'_>, _: &HostComm, staging: &Staging) -> Result<()> {
        deliver_rows(frame, staging)
    }
}

impl Exchange for SendOp {
    fn collect(&self, frame: &Frame<'_>, _: &HostComm, staging: &mut Staging) -> Result<()> {
        stage(&frame.bytes(0)?, &mut staging.outgoing);
        Ok(())
    }

    fn exchange(&self, comm: &HostComm, staging: &mut Staging) -> Result<()> {
        comm.send(&staging.outgoing, self.peer as usize)
    }

    fn deliver(&self, _: &Frame<'_>, _: &HostComm, _: &Staging) -> Result<()> {
        Ok(())
    }
}

impl Exchange for Receive {
    fn collect(&self, frame: &Frame<'_>, _: &HostComm, staging: &mut Staging) -> Result<()> {
        let x = frame.bytes_mut(0)?;
        make_room(&x, x.rows, &mut staging.incoming);
        Ok(())
    }

    fn exchange(&self, comm: &HostComm, staging: &mut Staging) -> Result<()> {
        comm.receive(&mut staging.incoming, self.peer as usize)
    }

    fn deliver(&self, frame: &Frame<'_>, _: &HostComm, staging: &Staging) -> Result<()> {
        deliver_rows(frame, staging)
    }
}

impl Exchange for Barrier {
    fn collect(&self, _: &Frame<'_>, _: &HostComm, _: &mut Staging) -> Result<()> {
        Ok(())
    }

    fn exchange(&self, comm: &HostComm, _: &mut Staging) -> Result<()> {
        comm.barrier()
    }

    fn deliver(&self, _: &Frame<'_>, _: &HostComm, _: &Staging) -> Result<()> {
        Ok(())
    }
}
