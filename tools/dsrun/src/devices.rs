//! The devices that run a model: one, or several as the ranks of a mesh, in one process or in several.

use crate::{
    arguments::{DeviceArguments, DevicesArguments},
    find_backend::{find_backend, registry},
    terminal::Terminal,
};
use anyhow::{Context, Result, bail};
use dsrun_core::device::{Backend, Device, DeviceOptions};
use dsrun_engine::{
    EnginePlan, Launch, Processes, Trace,
    passes::{partition::PipelineOptions, shard::ShardPolicy},
};
use std::{
    collections::HashSet,
    error::Error,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

/// The open devices of one engine, in the order of their ranks.
type Ranks = Vec<Arc<dyn Device>>;

/// The open devices of one engine, at least one.
#[derive(Clone, Debug)]
pub(crate) struct Devices {
    ranks: Ranks,
    /// How the user pins the split of weights.
    shard: ShardPolicy,
    /// How layers are divided into stages.
    pipeline: PipelineOptions,
    /// The processes that have devices of the model, if they are several.
    processes: Option<Arc<Processes>>,
    /// The engines of this process, this one included, that use the same devices.
    engines: usize,
    /// Whether they were opened to give bit-identical answers whatever else runs.
    batch_invariant: bool,
    /// Where the ranks record what they run.
    trace: Option<Arc<Trace>>,
}

/// This process has followed another, which has ended. No error, but there is nothing left to do.
#[derive(Debug)]
pub(crate) struct Followed;

impl fmt::Display for Followed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the leading process has ended")
    }
}

impl Error for Followed {}

impl Devices {
    /// One device, which holds the whole model.
    pub(crate) fn one(device: Arc<dyn Device>) -> Self {
        let (shard, pipeline) = (ShardPolicy::default(), PipelineOptions::default());
        Self {
            ranks: vec![device],
            shard,
            pipeline,
            processes: None,
            engines: 1,
            batch_invariant: false,
            trace: None,
        }
    }

    /// Whether they were opened to give bit-identical answers whatever else runs.
    pub(crate) fn batch_invariant(&self) -> bool {
        self.batch_invariant
    }

    /// The processes that have devices of the model, if they are several.
    pub(crate) fn processes(&self) -> Option<&Arc<Processes>> {
        self.processes.as_ref()
    }

    /// The engines of this process that use the same devices, the one that these are for included.
    pub(crate) fn engines(&self) -> usize {
        self.engines
    }

    /// Whether another process has the results.
    pub(crate) fn follow(&self) -> bool {
        self.processes.as_ref().is_some_and(|processes| !processes.leads())
    }

    /// The device of rank 0.
    pub(crate) fn first(&self) -> &Arc<dyn Device> {
        &self.ranks[0]
    }

    /// The devices of this process in the order of their ranks.
    pub(crate) fn ranks(&self) -> &[Arc<dyn Device>] {
        &self.ranks
    }

    /// How weights are split over the devices.
    pub(crate) fn shard(&self) -> &ShardPolicy {
        &self.shard
    }

    /// How layers are divided into stages.
    pub(crate) fn pipeline(&self) -> &PipelineOptions {
        &self.pipeline
    }

    /// Makes the ranks record what they run.
    pub(crate) fn record(&mut self, trace: &Arc<Trace>) {
        self.trace = Some(trace.clone());
    }

    /// Where the ranks record what they run, if the user wants to know.
    pub(crate) fn trace(&self) -> Option<&Arc<Trace>> {
        self.trace.as_ref()
    }

    /// Describes the devices of a model with this many ranks in a line of results.
    pub(crate) fn name(&self, ranks: usize) -> String {
        let name = &self.first().properties().name;
        match ranks {
            1 => name.clone(),
            ranks => format!("{ranks} ranks of {name}"),
        }
    }

    /// The memory plan of each rank of this process as text. Neighbouring ranks with equal plans are described once.
    pub(crate) fn memory(&self, plan: &EnginePlan) -> String {
        let memory: Vec<_> = plan.memory_of_ranks().zip(plan.stage_of_ranks()).collect();
        let name = |rank: usize| self.ranks.get(rank).map_or("", |device| device.properties().name.as_str());
        let mut sections = Vec::new();
        let mut start = 0;
        while start < memory.len() {
            let alike = |rank: &usize| memory[*rank] == memory[start] && name(*rank) == name(start);
            let end = start + (start..memory.len()).take_while(alike).count();
            let (first, last) = (plan.first_rank() + start, plan.first_rank() + end - 1);
            let (own, stage) = memory[start];
            let stage = match plan.stages() {
                1 => String::new(),
                stages => format!("stage {} of {stages}, ", stage + 1),
            };
            let ranks = match end - start {
                _ if plan.ranks() == 1 => String::new(),
                1 => format!("rank {first}, {stage}"),
                _ => format!("each of the ranks {first} to {last}, {stage}"),
            };
            sections.push(format!("memory on {ranks}{}:\n{own}", name(start)));
            start = end;
        }
        sections.join("\n")
    }
}

/// Opens one device.
pub(crate) fn open_device(arguments: &DeviceArguments) -> Result<Arc<dyn Device>> {
    let backend = find_backend(arguments.backend.as_deref())?;
    let options = DeviceOptions {
        threads: arguments.threads.map(usize::from),
        memory_limit: arguments.gpu_memory.map(|size| size.0),
        ..DeviceOptions::default()
    };
    open(&*backend, arguments.device, &options)
}

/// Opens the device of a command that runs on one device only.
pub(crate) fn open_only_device(
    arguments: &DevicesArguments,
    command: &str,
    terminal: &Terminal,
) -> Result<Devices> {
    if arguments.tensor_ranks().unwrap_or(1) * arguments.pipeline_stages() > 1 || arguments.devices.len() > 1
    {
        bail!(
            "{command} runs on one device\nhint: leave --tp, --pp and --mesh out, and choose the device with --device"
        );
    }
    open_devices(arguments, terminal)
}

/// Opens the devices that the arguments name.
pub(crate) fn open_devices(arguments: &DevicesArguments, terminal: &Terminal) -> Result<Devices> {
    let mut opened = open_replicas(arguments, 1, terminal)?;
    opened.pop().context("there is no device")
}

/// Which of several processes this is, if a launcher has started several.
pub(crate) fn launch(arguments: &DevicesArguments) -> Result<Option<Launch>> {
    let variable = |name: &str| std::env::var(name).ok();
    let launch = Launch::detect(arguments.launcher.into(), arguments.rendezvous.as_deref(), &variable)?;
    if let (None, Some(rendezvous)) = (&launch, &arguments.rendezvous) {
        bail!(
            "--rendezvous {rendezvous} is where several processes meet, but this is the only one\nhint: start the processes with a \
             launcher, or leave --rendezvous out"
        );
    }
    Ok(launch)
}

/// Opens the devices of several engines with the same model. Each takes the devices that follow those of the engine before it.
///
/// If a launcher has started several processes, this waits until all have come.
pub(crate) fn open_replicas(
    arguments: &DevicesArguments,
    replicas: usize,
    terminal: &Terminal,
) -> Result<Vec<Devices>> {
    open_engines(arguments, replicas, None, terminal)
}

/// Opens the devices of one of several engines anew.
pub(crate) fn open_replica(
    arguments: &DevicesArguments,
    replicas: usize,
    index: usize,
    terminal: &Terminal,
) -> Result<Devices> {
    open_engines(arguments, replicas, Some(index), terminal)?.pop().context("there is no device")
}

/// Opens the devices of several engines, or of `only` one of them.
fn open_engines(
    arguments: &DevicesArguments,
    replicas: usize,
    only: Option<usize>,
    terminal: &Terminal,
) -> Result<Vec<Devices>> {
    let launch = launch(arguments)?;
    if let (Some(launch), 2..) = (&launch, replicas) {
        bail!(
            "--replicas {replicas} runs every engine in one process, but this is {launch}\nhint: leave --replicas out, or start \
             one process with --launcher none"
        );
    }
    let asked = Asked { tensor: arguments.tensor_ranks(), stages: arguments.pipeline_stages() };
    let pipeline = arguments.pipeline();
    pipeline
        .check()
        .map_err(|error| anyhow::anyhow!("--{} {}", error.argument().unwrap_or("stages"), error.message()))?;
    let own = own_ranks(arguments, asked, launch.as_ref())?;
    // What follows depends on the machine, and may fail on one process only: the others are told why.
    let processes = launch.as_ref().map(|launch| join(launch, arguments, asked, terminal)).transpose()?;
    let (groups, engines) = open_groups(arguments, replicas, only, launch.as_ref(), own, terminal)?;
    // All engines have as many.
    let ranks = groups.first().map_or(0, Vec::len);
    if ranks * replicas == 1 && processes.is_none() && arguments.shard.is_some() {
        bail!(
            "--shard decides how weights are split, but the model runs on one device\nhint: add --tp COUNT, or leave \
             --shard out"
        );
    }
    if !ranks.is_multiple_of(pipeline.count()) && processes.is_none() {
        bail!(
            "{} cannot be divided into {} stages\nhint: name a multiple of the stages with --devices, or choose fewer stages",
            count(ranks),
            pipeline.count()
        );
    }
    let shard = arguments.shard.clone().unwrap_or_default();
    let devices = |ranks| Devices {
        ranks,
        shard: shard.clone(),
        pipeline: pipeline.clone(),
        processes: processes.clone(),
        engines,
        batch_invariant: arguments.batch_invariant,
        trace: None,
    };
    Ok(groups.into_iter().map(devices).collect())
}

/// The other processes of this command, to tell them why this one ends.
static JOINED: Mutex<Option<Arc<Processes>>> = Mutex::new(None);

/// Connects to the other processes, and checks that they run the same mesh on the same backend.
fn join(
    launch: &Launch,
    arguments: &DevicesArguments,
    asked: Asked,
    terminal: &Terminal,
) -> Result<Arc<Processes>> {
    terminal.note(&format!("waiting for the other processes: this is {launch}"));
    let processes = Processes::join(launch)?;
    *JOINED.lock().unwrap_or_else(PoisonError::into_inner) = Some(processes.clone());
    // A backend may be named by the path of its plugin.
    let backend = find_backend(arguments.device.backend.as_deref())?.info().name.clone();
    let mesh = [("the mesh", asked.to_string()), ("the backend", backend)];
    processes.agree(&mesh.map(|(name, value)| (name.to_owned(), value)).into())?;
    Ok(processes)
}

/// Tells the other processes, if there are any, that this one ends with an error. Returns whether there are.
pub(crate) fn tell_others(error: &anyhow::Error) -> bool {
    let joined = JOINED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(processes) = &*joined {
        let text = format!("{error:#}");
        processes.leave(text.split("\nhint:").next().unwrap_or_default());
    }
    joined.is_some()
}

/// The ranks of an engine in this process, if the mesh says how many.
fn own_ranks(arguments: &DevicesArguments, asked: Asked, launch: Option<&Launch>) -> Result<Option<usize>> {
    let processes = launch.map_or(1, |launch| launch.processes);
    let all = asked.ranks(!arguments.devices.is_empty() || processes > asked.stages);
    if all.is_some_and(|ranks| ranks % processes != 0) {
        bail!(
            "{asked} cannot be divided among {processes} processes\nhint: choose a multiple of {processes}, or leave --tp \
             out and name the devices of each process with --devices"
        );
    }
    Ok(all.map(|ranks| ranks / processes))
}

/// Opens the devices of each engine in this process, or of `only` one of them; `own` is the number of its ranks, if the mesh says how
/// many. Returns also how many engines share a device at most.
fn open_groups(
    arguments: &DevicesArguments,
    replicas: usize,
    only: Option<usize>,
    launch: Option<&Launch>,
    own: Option<usize>,
    terminal: &Terminal,
) -> Result<(Vec<Ranks>, usize)> {
    let backend = find_backend(arguments.device.backend.as_deref())?;
    note_default(arguments, &*backend, terminal)?;
    let (place, local_processes) =
        launch.map_or((0, 1), |launch| (launch.local_process, launch.local_processes));
    let asked = Asked { tensor: arguments.tensor_ranks(), stages: arguments.pipeline_stages() };
    let start = arguments.device.device;
    let first = start + place * own.unwrap_or(1);
    let wanted = Wanted { first, listed: &arguments.devices, ranks: own, replicas, asked };
    let present: Vec<usize> = backend.devices()?.iter().map(|device| device.index).collect();
    let name = &backend.info().name;
    let distinct = wanted.distinct(&present, name)?;
    // A device whose memory is that of the host is a share of the host, and may be opened by every rank.
    let is_host = || -> Result<bool> {
        Ok(open(&*backend, start, &DeviceOptions::default())?.properties().unified_memory)
    };
    let processes_share = local_processes > 1 && arguments.devices.is_empty() && is_host()?;
    let (groups, processes_sharing) = match distinct {
        Some(groups) if !processes_share => (groups, 1),
        _ if processes_share || arguments.share_device || is_host()? => {
            (vec![vec![start; wanted.ranks()]; replicas], local_processes)
        }
        _ => return Err(wanted.too_few(&present, name)),
    };
    let uses = |index: usize| groups.iter().filter(|group| group.contains(&index)).count();
    let engines = groups.iter().flatten().map(|index| uses(*index)).max().unwrap_or(1);
    let open_group = |group: Vec<usize>| {
        let open_rank = |index: &usize| {
            let sharing = processes_sharing * group.iter().filter(|other| *other == index).count();
            let options = share(&*backend, *index, arguments, sharing, sharing > 1 && is_host()?)?;
            open(&*backend, *index, &options)
        };
        group.iter().map(open_rank).collect()
    };
    let first = only.unwrap_or(0);
    let opened = groups.into_iter().skip(first).take(only.map_or(replicas, |_| 1)).map(open_group);
    let opened = opened.collect::<Result<_>>()?;
    Ok((opened, engines))
}

/// Says which backend was chosen where none is named, unless it is the one of a machine without accelerators.
fn note_default(arguments: &DevicesArguments, backend: &dyn Backend, terminal: &Terminal) -> Result<()> {
    let linked = registry()?;
    let plain = &linked.backend(None)?.info().name;
    let name = &backend.info().name;
    if arguments.device.backend.is_none() && name != plain {
        terminal
            .note(&format!("backend {name}, because it finds a device; --backend {plain} runs without it"));
    }
    Ok(())
}

/// The options of one of `sharing` ranks on the same device: they divide its memory, and the threads of the host.
fn share(
    backend: &dyn Backend,
    index: usize,
    arguments: &DevicesArguments,
    sharing: usize,
    is_host: bool,
) -> Result<DeviceOptions> {
    let threads = arguments.device.threads.map(usize::from);
    let budget = arguments.device.gpu_memory.map(|size| size.0);
    let batch_invariant = arguments.batch_invariant;
    if sharing == 1 {
        return Ok(DeviceOptions {
            threads,
            memory_limit: budget,
            batch_invariant,
            ..DeviceOptions::default()
        });
    }
    let memory = backend.devices()?.into_iter().find(|device| device.index == index);
    let memory = memory.and_then(|device| device.memory_bytes);
    // What the driver and the ranks' exchange need is memory of the device as well.
    let usable = |bytes: u64| if is_host { bytes } else { bytes / 10 * 9 };
    Ok(DeviceOptions {
        threads: threads.map(|threads| (threads / sharing).max(1)),
        memory_limit: memory.map(|bytes| usable(bytes) / sharing as u64).into_iter().chain(budget).min(),
        compute_share: (is_host && threads.is_none()).then_some(1.0 / sharing as f32),
        batch_invariant,
    })
}

fn open(backend: &dyn Backend, index: usize, options: &DeviceOptions) -> Result<Arc<dyn Device>> {
    let device = backend.open(index, options);
    device.with_context(|| format!("cannot open device {index} of backend {}", backend.info().name))
}

/// The mesh that the user asks for, displayed as the flags that ask for it.
#[derive(Clone, Copy, Debug)]
struct Asked {
    /// The ranks of each stage, if given.
    tensor: Option<usize>,
    stages: usize,
}

impl Asked {
    /// The number of ranks, unless it is that of the devices or processes, which are counted elsewhere.
    fn ranks(self, counted: bool) -> Option<usize> {
        match self.tensor {
            Some(tensor) => Some(tensor * self.stages),
            None if self.stages == 1 || counted => None,
            None => Some(self.stages),
        }
    }
}

impl fmt::Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.tensor, self.stages) {
            (None, stages) => write!(f, "--pp {stages}"),
            (Some(tensor), 1) => write!(f, "--tp {tensor}"),
            (Some(tensor), stages) => write!(f, "--tp {tensor} --pp {stages}"),
        }
    }
}

/// The devices that the user asks for.
#[derive(Clone, Copy, Debug)]
struct Wanted<'a> {
    /// The first device, if none are listed.
    first: usize,
    /// The indices of --devices.
    listed: &'a [usize],
    /// The ranks of an engine in this process, if the mesh says how many.
    ranks: Option<usize>,
    /// Engines with the same model.
    replicas: usize,
    asked: Asked,
}

impl Wanted<'_> {
    /// The ranks of an engine.
    fn ranks(&self) -> usize {
        self.ranks.unwrap_or_else(|| (self.listed.len() / self.replicas).max(1))
    }

    /// The device of each rank of each replica, all ranks of a replica on different devices. `None` if there are too few devices
    /// from the first one on.
    fn distinct(&self, present: &[usize], backend: &str) -> Result<Option<Vec<Vec<usize>>>> {
        let (ranks, replicas) = (self.ranks(), self.replicas);
        if self.listed.is_empty() {
            let start = present.iter().position(|index| *index == self.first);
            let start = match start {
                Some(start) if start + ranks <= present.len() => start,
                None if ranks * replicas == 1 => return Ok(Some(vec![vec![self.first]])),
                _ => return Ok(None),
            };
            let device = |place: usize| present[(start + place) % present.len()];
            let group = |replica: usize| (0..ranks).map(|rank| device(replica * ranks + rank)).collect();
            return Ok(Some((0..replicas).map(group).collect()));
        }
        let mut seen = HashSet::new();
        if let Some(twice) = self.listed.iter().find(|index| !seen.insert(**index)) {
            bail!(
                "--devices names device {twice} twice, but every rank needs a device of its own\nhint: name each device once; \
                 --tp without --devices lets ranks share the host where the backend can"
            );
        }
        if let Some(absent) = self.listed.iter().find(|index| !present.contains(index)) {
            bail!("--devices names device {absent}, but backend {backend} has {}", list(present));
        }
        if ranks * replicas != self.listed.len() {
            let wanted = match (self.ranks, replicas) {
                (Some(ranks), 1) => format!("{} needs {ranks}", self.asked),
                (Some(ranks), _) => {
                    format!("{} with --replicas {replicas} needs {}", self.asked, ranks * replicas)
                }
                (None, _) => format!("--replicas {replicas} needs a multiple of {replicas}"),
            };
            bail!(
                "--devices names {}, but {wanted}\nhint: name as many devices as there are ranks",
                count(self.listed.len())
            );
        }
        Ok(Some(self.listed.chunks(ranks).map(<[usize]>::to_vec).collect()))
    }

    /// The error for more ranks than there are devices.
    fn too_few(&self, present: &[usize], backend: &str) -> anyhow::Error {
        let ranks = self.ranks();
        let from = if self.first == 0 { String::new() } else { format!(" from device {} on", self.first) };
        anyhow::anyhow!(
            "{} needs {}{from}, but backend {backend} has {}\nhint: choose fewer ranks, or let them share a device with --share-device to \
             try the split",
            self.asked,
            count(ranks),
            list(present)
        )
    }
}

fn count(devices: usize) -> String {
    if devices == 1 { "1 device".to_owned() } else { format!("{devices} devices") }
}

fn list(present: &[usize]) -> String {
    match present {
        [] => "no device".to_owned(),
        [only] => format!("device {only} only"),
        several => {
            let indices: Vec<String> = several.iter().map(usize::to_string).collect();
            format!("the devices {}", indices.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOUR: [usize; 4] = [0, 1, 2, 3];

    fn wanted(first: usize, listed: &[usize], ranks: Option<usize>, replicas: usize) -> Wanted<'_> {
        Wanted { first, listed, ranks, replicas, asked: Asked { tensor: ranks, stages: 1 } }
    }

    fn groups(
        first: usize,
        listed: &[usize],
        ranks: Option<usize>,
        replicas: usize,
    ) -> Option<Vec<Vec<usize>>> {
        wanted(first, listed, ranks, replicas).distinct(&FOUR, "cuda").expect("the arguments are valid")
    }

    #[test]
    fn ranks_take_consecutive_devices_and_replicas_the_next_ones() {
        assert_eq!(groups(1, &[], None, 1), Some(vec![vec![1]]));
        assert_eq!(groups(1, &[], Some(2), 1), Some(vec![vec![1, 2]]));
        assert_eq!(groups(0, &[], Some(2), 2), Some(vec![vec![0, 1], vec![2, 3]]));
        // Replicas start again at the first device where there are too few.
        assert_eq!(groups(3, &[], None, 3), Some(vec![vec![3], vec![0], vec![1]]));
        assert_eq!(groups(2, &[], Some(2), 2), Some(vec![vec![2, 3], vec![0, 1]]));
    }

    #[test]
    fn listed_devices_are_ranks_in_their_order() {
        assert_eq!(groups(0, &[3, 1], None, 1), Some(vec![vec![3, 1]]));
        assert_eq!(groups(0, &[3, 1, 0, 2], None, 2), Some(vec![vec![3, 1], vec![0, 2]]));
        assert_eq!(groups(0, &[2], Some(1), 1), Some(vec![vec![2]]));
    }

    #[test]
    fn ranks_that_find_too_few_devices_are_counted() {
        for (first, ranks) in [(0, 5), (3, 2)] {
            assert_eq!(groups(first, &[], Some(ranks), 1), None);
        }
        let wanted = wanted(3, &[], Some(2), 1);
        let message = wanted.too_few(&FOUR, "cuda").to_string();
        assert!(message.contains("--tp 2 needs 2 devices from device 3 on"), "{message}");
        assert!(message.contains("backend cuda has the devices 0, 1, 2, 3"), "{message}");
    }

    #[test]
    fn lists_that_do_not_fit_are_refused() {
        for (listed, ranks, replicas, part) in [
            (&[1, 1][..], None, 1, "names device 1 twice"),
            (&[0, 4], None, 1, "names device 4, but backend cuda has the devices 0, 1, 2, 3"),
            (&[0, 1, 2], Some(2), 1, "names 3 devices, but --tp 2 needs 2"),
            (&[0], Some(2), 1, "names 1 device, but --tp 2 needs 2"),
            (&[0, 1], Some(2), 2, "--tp 2 with --replicas 2 needs 4"),
            (&[0, 1, 2], None, 2, "--replicas 2 needs a multiple of 2"),
        ] {
            let wanted = wanted(0, listed, ranks, replicas);
            let message = wanted.distinct(&FOUR, "cuda").expect_err("it is refused").to_string();
            assert!(message.contains(part), "{message}");
        }
    }
}
