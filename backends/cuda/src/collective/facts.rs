//! The facts that ranks exchange before they connect.

use crate::{
    arch::crossover::Algorithm,
    driver::{context::Context, fault},
};
use cudarc::driver::sys;
use dsrun_core::{Code, Error, Result, collective::host::HostComm};
use std::{
    hash::{BuildHasher, RandomState},
    sync::{Arc, LazyLock},
};

/// A transport of collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Peer,
    /// Peer exchange without synchronising ranks that share a device: tests the waits of kernels.
    PeerApart,
    /// Peer exchange, with one algorithm for all all-reduces.
    PeerBy(Algorithm),
    Nccl,
}

/// The transports and their names.
const WAYS: [(&str, Way); 6] = [
    ("peer", Way::Peer),
    ("peer-apart", Way::PeerApart),
    ("one-shot", Way::PeerBy(Algorithm::OneShot)),
    ("two-shots", Way::PeerBy(Algorithm::TwoShots)),
    ("direct", Way::PeerBy(Algorithm::Direct)),
    ("nccl", Way::Nccl),
];

impl Way {
    /// # Errors
    /// If there is none of this name.
    pub(super) fn named(name: &str) -> Result<Self> {
        WAYS.iter().find(|(known, _)| *known == name).map(|(_, way)| *way).ok_or_else(|| {
            let known = WAYS.map(|(known, _)| format!("`{known}`")).join(", ");
            Error::invalid(format!("{} is `{name}`, must be one of {known}", super::WAY))
        })
    }
}

/// A rank's process, GPU and NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Facts {
    /// A random number that identifies the process.
    process: u64,
    gpu: [u8; 16],
    /// The version of NCCL, or 0.
    nccl: i32,
}

const BYTES: usize = 8 + 16 + 4;

/// A random number drawn once per process. The process id is not enough: processes in different containers may have the same.
static PROCESS: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(std::process::id()));

impl Facts {
    pub(super) fn of(context: &Context, nccl: Option<i32>) -> Result<Self> {
        // SAFETY: plain data for which zero is a valid value.
        let mut uuid: sys::CUuuid = unsafe { std::mem::zeroed() };
        // SAFETY: the device is open; the pointer is to a place of the right type.
        let status = unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, context.device()) };
        fault::check(status, "asking for the id of a GPU")?;
        let gpu = uuid.bytes.map(|byte| byte as u8);
        Ok(Self { process: *PROCESS, gpu, nccl: nccl.unwrap_or(0) })
    }

    fn bytes(&self) -> Vec<u8> {
        [&self.process.to_le_bytes()[..], &self.gpu, &self.nccl.to_le_bytes()].concat()
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let (process, rest) = bytes.split_first_chunk()?;
        let (gpu, rest) = rest.split_first_chunk()?;
        let (nccl, rest) = rest.split_first_chunk()?;
        let facts =
            Self { process: u64::from_le_bytes(*process), gpu: *gpu, nccl: i32::from_le_bytes(*nccl) };
        rest.is_empty().then_some(facts)
    }
}

/// The facts of all ranks.
///
/// # Errors
/// If a rank does not send them.
pub(super) fn gather(host: &HostComm, own: &Facts) -> Result<Vec<Facts>> {
    let all: Vec<Arc<[u8]>> = host.all_gather(&own.bytes())?;
    let read = |(rank, bytes): (usize, &Arc<[u8]>)| {
        let strange = || {
            let message = format!("rank {rank} sent {} bytes of facts instead of {BYTES}", bytes.len());
            Error::new(Code::Communication, message)
        };
        Facts::read(bytes).ok_or_else(strange)
    };
    all.iter().enumerate().map(read).collect()
}

/// Whether all ranks are threads of one process.
pub(super) fn one_process(all: &[Facts]) -> bool {
    all.iter().all(|facts| facts.process == all[0].process)
}

/// Two ranks on the same GPU, if there are any.
pub(super) fn shared_device(all: &[Facts]) -> Option<[usize; 2]> {
    let before = |rank: usize| all[..rank].iter().position(|other| other.gpu == all[rank].gpu);
    (0..all.len()).find_map(|rank| Some([before(rank)?, rank]))
}

/// A rank without NCCL, if there is one.
pub(super) fn lacks_nccl(all: &[Facts]) -> Option<usize> {
    all.iter().position(|facts| facts.nccl == 0)
}

/// The reason why ranks cannot use peer exchange.
pub(super) fn why_not_peers(only: Option<Way>, all: &[Facts], most: usize) -> String {
    match all.len() {
        _ if only == Some(Way::Nccl) => format!("{} is `nccl`", super::WAY),
        _ if !one_process(all) => "the ranks run in several processes".to_owned(),
        many if many > most => format!("there are {many} ranks, and {most} at most exchange data directly"),
        _ => "the ranks' GPUs cannot reach each other's memory".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(process: u64, gpu: u8, nccl: i32) -> Facts {
        Facts { process, gpu: [gpu; 16], nccl }
    }

    #[test]
    fn facts_survive_their_bytes() {
        let facts = rank(0x0102_0304, 9, 22_809);
        assert_eq!(facts.bytes().len(), BYTES);
        assert_eq!(Facts::read(&facts.bytes()), Some(facts));
        assert_eq!(Facts::read(&facts.bytes()[1..]), None);
        assert_eq!(Facts::read(&[facts.bytes(), vec![0]].concat()), None);
    }

    #[test]
    fn what_ranks_have_in_common_is_found() {
        let ranks = [rank(1, 0, 22_809), rank(1, 1, 0), rank(1, 0, 22_809)];
        assert!(one_process(&ranks));
        assert_eq!(shared_device(&ranks), Some([0, 2]));
        assert_eq!(shared_device(&ranks[..2]), None);
        assert_eq!(lacks_nccl(&ranks), Some(1));
        let elsewhere = Facts { process: 2, ..ranks[1] };
        assert!(!one_process(&[ranks[0], elsewhere]));
        assert!(why_not_peers(None, &[ranks[0], elsewhere], 8).contains("several processes"));
        assert!(why_not_peers(None, &ranks, 2).contains("3 ranks, and 2 at most"));
    }

    #[test]
    fn ways_have_names() {
        assert_eq!(Way::named("peer"), Ok(Way::Peer));
        let error = Way::named("tcp").unwrap_err();
        assert!(error.message().contains("DSRUN_CUDA_COLLECTIVES is `tcp`"), "{error}");
    }
}
