//! A table of devices for forecasts.

use crate::passes::shard::MeshCosts;
use dsrun_core::DType;

/// The network between hosts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// Devices of a host. The ranks of a mesh fill one host after the other.
    pub per_host: usize,
    /// Bytes per second that a device exchanges with those of other hosts.
    pub bandwidth: f64,
    /// Microseconds of an exchange, besides its bytes.
    pub latency_us: f64,
}

impl Network {
    /// A network adapter of 400 Gbit/s for each device.
    pub const FAST: Self = Self { per_host: 8, bandwidth: 5e10, latency_us: 20.0 };

    /// Whether ranks are on different hosts.
    pub(super) fn separates(&self, ranks: impl Iterator<Item = usize>) -> bool {
        let mut hosts = ranks.map(|rank| rank / self.per_host.max(1));
        let first = hosts.next();
        hosts.any(|host| Some(host) != first)
    }
}

/// A device, and its links to others of its kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Hardware {
    /// The name.
    pub name: String,
    /// Bytes of memory, if they are known.
    pub memory: Option<u64>,
    /// Its preferred element type; bf16 if not given.
    pub dtype: Option<DType>,
    /// Its speeds.
    pub costs: MeshCosts,
    /// Microseconds until the experts of a layer are chosen, in which none of their weights can be read.
    pub choice_us: f64,
    /// The network, if the devices are those of several hosts.
    pub network: Option<Network>,
    /// Bytes per second that the device copies from pinned host memory.
    pub host_bandwidth: f64,
}

/// A row of the table of devices: name, bytes of memory, bytes per second of it, dense bf16 operations per second, bytes per second
/// and direction of the links to others, bytes per second of copies from host memory, and microseconds of an all-reduce.
type Row = (&'static str, f64, f64, f64, f64, f64, f64);

/// Bytes per second of copies from host memory over PCIe 5.0 with 16 lanes, as measured on an H200, and over PCIe 4.0, which has half
/// the rate.
const PCIE_5: f64 = 5.4e10;
const PCIE_4: f64 = PCIE_5 / 2.0;

/// The shares of the figures of data sheets that real steps reach, as measured with H100 and H200: reads of weights (2.99 of 3.35 and
/// 4.28 of 4.8 TB/s), products of prompts of an 8B model (670 of 989 TFLOP/s), and all-reduces of 16 MiB and more (270 to 300 of 450
/// GB/s).
const READ_SHARE: f64 = 0.89;
const OPERATIONS_SHARE: f64 = 0.68;
const LINK_SHARE: f64 = 0.66;

/// Microseconds that an all-reduce adds to a step with one request, besides its bytes: within the one launch of all layers, which CUDA has
/// on GPUs of data centres from compute capability 9.0 on, and between launches. Steps of four models on two H200 give 3 to 5, and those
/// of six on two and four H100 and H200, by builds without that launch, 8 to 14. Ranks in several processes, and those of uneven
/// parts, have all-reduces between launches too.
const ALL_REDUCE_US: f64 = 5.0;
const ALL_REDUCE_BETWEEN_LAUNCHES_US: f64 = 12.0;

/// Microseconds of a choice of experts. Steps of two models on one, two and four H200 give 11 to 19; other devices were not measured.
const CHOICE_US: f64 = 15.0;

/// Devices with the figures of their data sheets. Links are NVLink where the device has it, else PCIe 4.0 or 5.0 with 16 lanes.
const DEVICES: [Row; 7] = [
    ("a100", 80e9, 2.04e12, 3.12e14, 3.0e11, PCIE_4, ALL_REDUCE_BETWEEN_LAUNCHES_US),
    ("h100", 80e9, 3.35e12, 9.89e14, 4.5e11, PCIE_5, ALL_REDUCE_US),
    ("h200", 141e9, 4.8e12, 9.89e14, 4.5e11, PCIE_5, ALL_REDUCE_US),
    ("b200", 180e9, 8.0e12, 2.25e15, 9.0e11, PCIE_5, ALL_REDUCE_US),
    ("l40s", 48e9, 8.64e11, 3.62e14, 3.2e10, PCIE_4, ALL_REDUCE_BETWEEN_LAUNCHES_US),
    ("rtx-4090", 24e9, 1.008e12, 1.65e14, 3.2e10, PCIE_4, ALL_REDUCE_BETWEEN_LAUNCHES_US),
    ("rtx-5090", 32e9, 1.79e12, 2.1e14, 6.4e10, PCIE_5, ALL_REDUCE_BETWEEN_LAUNCHES_US),
];

impl Hardware {
    /// The names that [`Self::named`] knows.
    pub fn names() -> Vec<&'static str> {
        DEVICES.iter().map(|(name, ..)| *name).chain(["host"]).collect()
    }

    /// A device of the table, or `host`: ranks that share the processors and the memory of a host.
    pub fn named(name: &str) -> Option<Self> {
        if name == "host" {
            let costs = MeshCosts::HOST;
            return Some(Self {
                name: name.into(),
                memory: None,
                dtype: Some(DType::F32),
                costs,
                choice_us: 0.0,
                network: None,
                host_bandwidth: MeshCosts::HOST.memory_bandwidth,
            });
        }
        let (name, memory, memory_bandwidth, operations, link_bandwidth, host_bandwidth, latency_us) =
            DEVICES.into_iter().find(|(known, ..)| *known == name)?;
        let costs = MeshCosts {
            memory_bandwidth: memory_bandwidth * READ_SHARE,
            operations: operations * OPERATIONS_SHARE,
            link_bandwidth: link_bandwidth * LINK_SHARE,
            latency_us,
            ..MeshCosts::ACCELERATORS
        };
        let memory = Some(memory as u64);
        Some(Self {
            name: name.into(),
            memory,
            dtype: None,
            costs,
            choice_us: CHOICE_US,
            network: None,
            host_bandwidth,
        })
    }

    /// The costs of exchanges between these ranks: those of the network if they are on different hosts.
    pub(super) fn link(&self, costs: &MeshCosts, ranks: impl Iterator<Item = usize>) -> MeshCosts {
        match &self.network {
            Some(network) if network.separates(ranks) => MeshCosts {
                link_bandwidth: network.bandwidth,
                latency_us: network.latency_us,
                gather_latency_us: network.latency_us,
                ..costs.clone()
            },
            _ => costs.clone(),
        }
    }
}
