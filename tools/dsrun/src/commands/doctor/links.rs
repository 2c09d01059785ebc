//! Measures and checks data exchange between the devices of a backend: `dsrun doctor --devices`.
//!
//! Every pair of devices exchanges messages in both directions, which are compared, and all of them together run an all-reduce whose
//! result must have the same bits on each. Data comes from the host, so that a link that loses or changes bytes is found.

use crate::group::{LIMIT, Rank, on_ranks};
use anyhow::{Context, Result, bail, ensure};
use dsrun_core::{
    DType, TensorDesc,
    device::{Backend, Device, DeviceOptions},
    op::{AllReduce, MeshAxis, Receive, Reduction, Send},
};
use serde::{Deserialize, Serialize};
use std::{sync::Arc, time::Instant};

/// Messages back and forth of which the mean latency is taken.
const TURNS: usize = 50;
/// Elements of the messages that bandwidth is measured with: 32 MiB.
const LARGE: usize = 8 << 20;
/// Large messages in a row.
const REPEATS: usize = 4;
/// Elements of the tensors that are reduced: of one token, of many, and of so many that they pass in several pieces.
const REDUCED: [usize; 3] = [4 << 10, 1 << 20, 8 << 20];

/// The report on the exchange between devices.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Links {
    backend: String,
    devices: Vec<usize>,
    /// From each device to each other one.
    links: Vec<Link>,
    all_reduces: Vec<Reduced>,
    /// The reason why the devices cannot exchange data at all.
    error: Option<String>,
}

/// What passes from one device to another.
#[derive(Debug, Serialize, Deserialize)]
struct Link {
    from: usize,
    to: usize,
    latency_us: f64,
    gigabytes_per_second: f64,
}

/// An all-reduce of all devices.
#[derive(Debug, Serialize, Deserialize)]
struct Reduced {
    bytes: usize,
    microseconds: f64,
}

impl Links {
    /// Whether all that was tried works.
    pub(super) fn work(&self) -> bool {
        self.error.is_none()
    }

    /// The report as lines.
    pub(super) fn lines(&self) -> Vec<String> {
        let Self { backend, devices, links, all_reduces, error } = self;
        let named: Vec<String> = devices.iter().map(usize::to_string).collect();
        let named = named.join(", ");
        if let Some(error) = error {
            return vec![format!("\n{backend}, devices {named}: {error}")];
        }
        if let [only] = devices[..] {
            return vec![format!(
                "\n{backend}: device {only} is the only one, so there is nothing to exchange"
            )];
        }
        let mut lines = vec![format!("\n{backend}, devices {named}: messages arrive as they were sent")];
        for (title, value) in [
            ("one way, us", (|link| format!("{:.1}", link.latency_us)) as fn(&Link) -> String),
            ("GB/s", |link| format!("{:.1}", link.gigabytes_per_second)),
        ] {
            let header: String = devices.iter().map(|to| format!("{:>9}", format!("to {to}"))).collect();
            lines.push(format!("  {title:<12}{header}"));
            for from in devices {
                let cell = |to: &usize| {
                    let link = links.iter().find(|link| (link.from, link.to) == (*from, *to));
                    format!("{:>9}", link.map_or_else(|| "-".to_owned(), value))
                };
                let cells: String = devices.iter().map(cell).collect();
                lines.push(format!("  {:<12}{cells}", format!("from {from}")));
            }
        }
        for Reduced { bytes, microseconds } in all_reduces {
            lines.push(format!(
                "  all-reduce of {bytes} bytes: the same, right bits on every device, {microseconds:.1} us"
            ));
        }
        lines
    }
}

/// The devices that `--devices` names.
///
/// # Errors
/// If one is absent or named twice.
fn chosen(backend: &dyn Backend, text: &str) -> Result<Vec<usize>> {
    let present: Vec<usize> = backend.devices()?.iter().map(|device| device.index).collect();
    if text == "all" {
        return Ok(present);
    }
    let mut devices: Vec<usize> = Vec::new();
    for part in text.split(',') {
        let Ok(index) = part.trim().parse() else {
            bail!("--devices {text}: `{part}` is no index\nhint: name indices such as 0,1, or all");
        };
        ensure!(present.contains(&index), "--devices names device {index}, which the backend does not have");
        ensure!(!devices.contains(&index), "--devices names device {index} twice");
        devices.push(index);
    }
    Ok(devices)
}

/// Examines the exchange between devices of a backend.
///
/// # Errors
/// If `devices` does not name devices of the backend.
pub(super) fn examine(backend: &dyn Backend, devices: &str) -> Result<Links> {
    let indices = chosen(backend, devices)?;
    let name = backend.info().name.clone();
    let report =
        Links { backend: name, devices: indices.clone(), links: vec![], all_reduces: vec![], error: None };
    let measured = || -> Result<(Vec<Link>, Vec<Reduced>)> {
        let open = |index: &usize| Ok(backend.open(*index, &DeviceOptions::default())?);
        let opened = indices.iter().map(open).collect::<Result<Vec<_>>>()?;
        let mut links = Vec::new();
        for (first, from) in opened.iter().enumerate() {
            for (second, to) in opened.iter().enumerate().skip(first + 1) {
                let pair = [from.clone(), to.clone()];
                let [there, back] = link(&pair).with_context(|| {
                    format!("devices {} and {} do not exchange data", indices[first], indices[second])
                })?;
                for ((from, to), (latency_us, gigabytes_per_second)) in
                    [((first, second), there), ((second, first), back)]
                {
                    let (from, to) = (indices[from], indices[to]);
                    links.push(Link { from, to, latency_us, gigabytes_per_second });
                }
            }
        }
        if opened.len() < 2 {
            return Ok((links, Vec::new()));
        }
        let reduced = |count: usize| {
            let microseconds = reduce(&opened, count).context("an all-reduce of all devices")?;
            Ok(Reduced { bytes: count * size_of::<f32>(), microseconds })
        };
        Ok((links, REDUCED.into_iter().map(reduced).collect::<Result<_>>()?))
    };
    Ok(match measured() {
        Ok((links, all_reduces)) => Links { links, all_reduces, ..report },
        Err(error) => Links { error: Some(format!("{error:#}")), ..report },
    })
}

impl Rank {
    fn set(&mut self, numbers: impl Iterator<Item = f32>) -> Result<()> {
        let bytes: Vec<u8> = numbers.flat_map(f32::to_le_bytes).collect();
        Ok(self.stream.upload(&bytes, &self.memory)?)
    }

    fn has(&mut self, numbers: impl Iterator<Item = f32>, what: &str) -> Result<()> {
        let mut bytes = vec![0; self.memory.bytes];
        self.stream.download(&self.memory, &mut bytes, what, LIMIT)?;
        self.comm.status()?;
        let found = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        // Compared as bits: all numbers are whole and small.
        let wrong = found.zip(numbers).position(|(found, number)| found.to_bits() != number.to_bits());
        match wrong {
            Some(place) => bail!("element {place} of {what} is wrong on rank {}", self.rank),
            None => Ok(()),
        }
    }
}

/// One row of this many numbers.
fn row(count: usize) -> TensorDesc {
    TensorDesc::dense(DType::F32, &[1, count])
}

/// A number that is exact in every sum here.
fn number(rank: usize, round: usize, place: usize) -> f32 {
    ((place * 7 + rank * 31 + round * 13) % 1021) as f32
}

/// Latency in microseconds and bandwidth in gigabytes per second, there and back.
fn link(pair: &[Arc<dyn Device>; 2]) -> Result<[(f64, f64); 2]> {
    let latency = on_ranks(pair, &row(1), |rank| {
        let peer = 1 - rank.rank as u32;
        let (sends, receives) = (rank.bind(Send { axis: MeshAxis::Tensor, peer }, false)?, {
            rank.bind(Receive { axis: MeshAxis::Tensor, peer }, true)?
        });
        rank.set([number(rank.rank, 0, 0)].into_iter())?;
        let mut start = Instant::now();
        // The first turns load what they need.
        for turn in 0..TURNS + 5 {
            if turn == 5 {
                rank.wait("first messages")?;
                start = Instant::now();
            }
            let (first, second) = if rank.rank == 0 { (&sends, &receives) } else { (&receives, &sends) };
            first.enqueue(&mut *rank.stream)?;
            second.enqueue(&mut *rank.stream)?;
        }
        rank.wait("messages")?;
        let micros = start.elapsed().as_secs_f64() * 1e6 / (2 * TURNS) as f64;
        // What rank 0 sent first has gone back and forth.
        rank.has([number(0, 0, 0)].into_iter(), "a message")?;
        Ok(micros)
    })?;
    let mut directions = [(latency[0], 0.0), (latency[1], 0.0)];
    for (sender, direction) in directions.iter_mut().enumerate() {
        let times = on_ranks(pair, &row(LARGE), |rank| {
            let peer = 1 - rank.rank as u32;
            let call = match rank.rank == sender {
                true => rank.bind(Send { axis: MeshAxis::Tensor, peer }, false)?,
                false => rank.bind(Receive { axis: MeshAxis::Tensor, peer }, true)?,
            };
            let own = rank.rank;
            rank.set((0..LARGE).map(|place| number(own, 1, place)))?;
            call.enqueue(&mut *rank.stream)?;
            rank.wait("a first large message")?;
            rank.has((0..LARGE).map(|place| number(sender, 1, place)), "a large message")?;
            let start = Instant::now();
            for _ in 0..REPEATS {
                call.enqueue(&mut *rank.stream)?;
            }
            rank.wait("large messages")?;
            Ok(start.elapsed().as_secs_f64())
        })?;
        let slowest = times.into_iter().fold(0.0, f64::max);
        direction.1 = (REPEATS * LARGE * size_of::<f32>()) as f64 / slowest / 1e9;
    }
    Ok(directions)
}

/// The microseconds of an all-reduce of so many elements, whose result is compared on every device.
fn reduce(devices: &[Arc<dyn Device>], count: usize) -> Result<f64> {
    let times = on_ranks(devices, &row(count), |rank| {
        let op = AllReduce { axis: MeshAxis::Tensor, reduction: Reduction::Sum };
        let (call, own) = (rank.bind(op, true)?, rank.rank);
        for round in 0..3 {
            rank.set((0..count).map(|place| number(own, round, place)))?;
            call.enqueue(&mut *rank.stream)?;
            let sum = |place| (0..devices.len()).map(|rank| number(rank, round, place)).sum();
            rank.has((0..count).map(sum), "a sum")?;
        }
        // Zeros stay zeros however often they are summed.
        rank.set(std::iter::repeat_n(0.0, count))?;
        rank.wait("zeros")?;
        let start = Instant::now();
        for _ in 0..TURNS {
            call.enqueue(&mut *rank.stream)?;
        }
        rank.wait("sums")?;
        Ok(start.elapsed().as_secs_f64() * 1e6 / TURNS as f64)
    })?;
    Ok(times.into_iter().fold(0.0, f64::max))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn several() -> Vec<Arc<dyn Device>> {
        let open = |_| dsrun_cpu::CpuBackend::new().open(0, &DeviceOptions::default()).unwrap();
        (0..3).map(open).collect()
    }

    #[test]
    fn devices_that_work_are_measured() {
        let devices = several();
        let [there, back] = link(&[devices[0].clone(), devices[1].clone()]).unwrap();
        for (latency, bandwidth) in [there, back] {
            assert!(latency > 0.0 && bandwidth > 0.0, "{latency} us, {bandwidth} GB/s");
        }
        assert!(reduce(&devices, 1000).unwrap() > 0.0);
    }

    #[test]
    fn names_of_devices_are_checked() {
        let backend = dsrun_cpu::CpuBackend::new();
        assert_eq!(chosen(&backend, "all").unwrap(), [0]);
        for (text, part) in [("0,0", "device 0 twice"), ("7", "device 7"), ("x", "`x` is no index")] {
            let error = chosen(&backend, text).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn the_report_says_what_there_is() {
        let backend = dsrun_cpu::CpuBackend::new();
        let report = examine(&backend, "all").unwrap();
        assert!(report.work());
        assert_eq!(report.lines(), ["\ncpu: device 0 is the only one, so there is nothing to exchange"]);
        let link = |from, to, latency_us| Link { from, to, latency_us, gigabytes_per_second: 250.0 };
        let report = Links {
            backend: "cuda".into(),
            devices: vec![0, 2],
            links: vec![link(0, 2, 4.25), link(2, 0, 5.0)],
            all_reduces: vec![Reduced { bytes: 16384, microseconds: 7.0 }],
            error: None,
        };
        let expected = [
            "\ncuda, devices 0, 2: messages arrive as they were sent",
            "  one way, us      to 0     to 2",
            "  from 0              -      4.2",
            "  from 2            5.0        -",
            "  GB/s             to 0     to 2",
            "  from 0              -    250.0",
            "  from 2          250.0        -",
            "  all-reduce of 16384 bytes: the same, right bits on every device, 7.0 us",
        ];
        assert_eq!(report.lines(), expected);
    }
}
