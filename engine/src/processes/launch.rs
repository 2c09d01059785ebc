//! Reads from a launcher's environment variables which of several processes this one is, and where they meet.

use std::fmt;

/// The default rendezvous port, that of torchrun.
const DEFAULT_PORT: u16 = 29500;

/// A program that starts several processes of a command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Launcher {
    /// The launcher whose variables are set.
    #[default]
    Auto,
    /// No launcher: this process is the only one.
    None,
    /// torchrun, or any launcher that sets `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`.
    Torchrun,
    /// A step of Slurm, started with `srun`.
    Slurm,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// Kubernetes' LeaderWorkerSet.
    LeaderWorkerSet,
}

/// Which of several processes this one is, and where they meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The number of this process.
    pub process: usize,
    /// The number of processes.
    pub processes: usize,
    /// The number of this process among those of its machine.
    pub local_process: usize,
    /// The number of processes on this machine, if the launcher says so.
    pub local_processes: usize,
    /// The host and port where the processes meet: process 0 listens there.
    pub meeting: String,
}

/// A launcher's variable is missing or invalid.
#[derive(Debug, thiserror::Error)]
#[error("{message}\nhint: {hint}")]
pub struct LaunchError {
    message: String,
    hint: &'static str,
}

/// The variables of a process.
type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

impl Launch {
    /// Reads the launch from the environment; `None` if this process is the only one. `meeting` is the user's rendezvous address
    /// (host and port), and `variable` looks up an environment variable.
    ///
    /// # Errors
    /// If a variable is missing, is no number, or is out of range.
    pub fn detect(
        launcher: Launcher,
        meeting: Option<&str>,
        variable: Variables<'_>,
    ) -> Result<Option<Self>, LaunchError> {
        let read = Read { meeting, variable };
        let set = |name: &str| variable(name).is_some_and(|value| !value.is_empty());
        let launch = match launcher {
            Launcher::None => return Ok(None),
            Launcher::Torchrun => read.torchrun()?,
            Launcher::Slurm => read.slurm()?,
            Launcher::OpenMpi => read.open_mpi()?,
            Launcher::LeaderWorkerSet => read.leader_worker_set()?,
            Launcher::Auto if ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"].into_iter().all(set) => {
                read.torchrun()?
            }
            Launcher::Auto if set("OMPI_COMM_WORLD_SIZE") => read.open_mpi()?,
            Launcher::Auto if ["LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE"].into_iter().all(set) => {
                read.leader_worker_set()?
            }
            // A batch script and a shell have Slurm's variables too, but only a step has this one.
            Launcher::Auto if set("SLURM_STEP_ID") && set("SLURM_STEP_NUM_TASKS") => read.slurm()?,
            Launcher::Auto => return Ok(None),
        };
        Ok((launch.processes > 1).then_some(launch))
    }
}

/// Reads the variables of a launcher.
struct Read<'a> {
    meeting: Option<&'a str>,
    variable: Variables<'a>,
}

/// Process, processes, process on this machine, processes on this machine.
type Numbers = [usize; 4];

impl Read<'_> {
    fn text(&self, name: &str) -> Option<String> {
        (self.variable)(name).filter(|value| !value.is_empty())
    }

    fn needed(&self, name: &str) -> Result<String, LaunchError> {
        self.text(name).ok_or_else(|| LaunchError {
            message: format!("the launcher has not set {name}"),
            hint: "start the processes with the launcher, set its variables, or choose another with --launcher",
        })
    }

    fn number(&self, name: &str) -> Result<Option<usize>, LaunchError> {
        let parse = |text: String| {
            text.trim().parse().map_err(|_| LaunchError {
                message: format!("{name} is `{text}`, must be a number"),
                hint: "it is set by the launcher of several processes; --launcher none ignores it",
            })
        };
        self.text(name).map(parse).transpose()
    }

    fn needed_number(&self, name: &str) -> Result<usize, LaunchError> {
        self.needed(name)?;
        Ok(self.number(name)?.unwrap_or(0))
    }

    /// Makes the launch from these numbers. The rendezvous address is the user's, or else `host` and `port`.
    fn launch(
        &self,
        [process, processes, local_process, local_processes]: Numbers,
        host: impl FnOnce() -> Result<String, LaunchError>,
        port: usize,
    ) -> Result<Launch, LaunchError> {
        if process >= processes || local_process >= local_processes.max(1) {
            return Err(LaunchError {
                message: format!(
                    "the launcher says that this is process {process} of {processes}, and {local_process} of \
                     {local_processes} on its machine"
                ),
                hint: "processes are counted from 0; --launcher none ignores what the launcher says",
            });
        }
        let meeting = match self.meeting {
            Some(meeting) => meeting.to_owned(),
            None => {
                let host = host()?;
                // An IPv6 address takes brackets before a port.
                if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
            }
        };
        Ok(Launch { process, processes, local_process, local_processes: local_processes.max(1), meeting })
    }

    fn torchrun(&self) -> Result<Launch, LaunchError> {
        let (process, processes) = (self.needed_number("RANK")?, self.needed_number("WORLD_SIZE")?);
        let local = self.number("LOCAL_RANK")?.unwrap_or(0);
        let locals = self.number("LOCAL_WORLD_SIZE")?.unwrap_or(local + 1);
        let mut port = self.number("MASTER_PORT")?.unwrap_or(usize::from(DEFAULT_PORT));
        // torchrun's agent already listens on that port.
        if self.text("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|used| used.eq_ignore_ascii_case("true")) {
            port += 1;
        }
        self.launch([process, processes, local, locals], || self.needed("MASTER_ADDR"), port)
    }

    fn slurm(&self) -> Result<Launch, LaunchError> {
        let processes = match self.number("SLURM_STEP_NUM_TASKS")? {
            Some(processes) => processes,
            None => self.needed_number("SLURM_NTASKS")?,
        };
        let (process, local) =
            (self.needed_number("SLURM_PROCID")?, self.number("SLURM_LOCALID")?.unwrap_or(0));
        let host = || match self.text("MASTER_ADDR") {
            Some(host) => Ok(host),
            None => {
                let nodes = self.text("SLURM_STEP_NODELIST");
                let nodes = nodes.map_or_else(|| self.needed("SLURM_JOB_NODELIST"), Ok)?;
                Ok(first_node(&nodes))
            }
        };
        let locals = self.text("SLURM_STEP_TASKS_PER_NODE").as_deref().and_then(leading_number);
        let port = self.number("MASTER_PORT")?.unwrap_or(usize::from(DEFAULT_PORT));
        self.launch([process, processes, local, locals.unwrap_or(1).max(local + 1)], host, port)
    }

    fn open_mpi(&self) -> Result<Launch, LaunchError> {
        let [process, processes] =
            ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"].map(|name| self.needed_number(name));
        let (process, processes) = (process?, processes?);
        let local = self.number("OMPI_COMM_WORLD_LOCAL_RANK")?.unwrap_or(0);
        let locals = self.number("OMPI_COMM_WORLD_LOCAL_SIZE")?.unwrap_or(local + 1);
        let host = || match self.text("MASTER_ADDR") {
            // All run on this machine.
            None if locals == processes => Ok("127.0.0.1".into()),
            _ => self.needed("MASTER_ADDR"),
        };
        let port = self.number("MASTER_PORT")?.unwrap_or(usize::from(DEFAULT_PORT));
        self.launch([process, processes, local, locals], host, port)
    }

    fn leader_worker_set(&self) -> Result<Launch, LaunchError> {
        let processes = self.needed_number("LWS_GROUP_SIZE")?;
        let process = self.number("LWS_WORKER_INDEX")?.unwrap_or(0);
        let host = || self.needed("LWS_LEADER_ADDRESS");
        self.launch([process, processes, 0, 1], host, usize::from(DEFAULT_PORT))
    }
}

/// The first name of a list of nodes such as `gpu[003-006,9],login1`.
fn first_node(nodes: &str) -> String {
    let end = nodes.find(['[', ',']).unwrap_or(nodes.len());
    let (name, rest) = nodes.split_at(end);
    let number: String = match rest.strip_prefix('[') {
        Some(numbers) => numbers.chars().take_while(char::is_ascii_digit).collect(),
        None => String::new(),
    };
    name.to_owned() + &number
}

/// Parses the leading number of a text such as `2(x3),1`.
fn leading_number(text: &str) -> Option<usize> {
    text[..text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len())].parse().ok()
}

impl fmt::Display for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} of {}, which meet at {}", self.process, self.processes, self.meeting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn detect(
        launcher: Launcher,
        meeting: Option<&str>,
        variables: &[(&str, &str)],
    ) -> Result<Option<Launch>, LaunchError> {
        let find = |name: &str| variables.iter().find(|(known, _)| *known == name);
        Launch::detect(launcher, meeting, &|name| find(name).map(|(_, value)| (*value).to_owned()))
    }

    const TORCHRUN: &[(&str, &str)] = &[
        ("RANK", "3"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "node1"),
        ("MASTER_PORT", "29400"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
    ];
    const SLURM: &[(&str, &str)] = &[
        ("SLURM_STEP_ID", "0"),
        ("SLURM_STEP_NUM_TASKS", "6"),
        ("SLURM_PROCID", "4"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x3)"),
        ("SLURM_STEP_NODELIST", "gpu[003-006,9],login1"),
    ];
    const OPEN_MPI: &[(&str, &str)] = &[
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ];
    const LEADER_WORKER_SET: &[(&str, &str)] =
        &[("LWS_LEADER_ADDRESS", "fd00::7"), ("LWS_GROUP_SIZE", "2"), ("LWS_WORKER_INDEX", "1")];

    #[rstest]
    #[case(TORCHRUN, [3, 4, 1, 2], "node1:29401")]
    #[case(SLURM, [4, 6, 0, 2], "gpu003:29500")]
    #[case(OPEN_MPI, [1, 2, 1, 2], "127.0.0.1:29500")]
    #[case(LEADER_WORKER_SET, [1, 2, 0, 1], "[fd00::7]:29500")]
    fn launchers_are_detected(
        #[case] variables: &[(&str, &str)],
        #[case] numbers: Numbers,
        #[case] meeting: &str,
    ) {
        let [process, processes, local_process, local_processes] = numbers;
        let meeting = meeting.to_owned();
        let expected = Launch { process, processes, local_process, local_processes, meeting };
        assert_eq!(detect(Launcher::Auto, None, variables).unwrap(), Some(expected));
        let named = detect(Launcher::Auto, Some("here:1"), variables).unwrap();
        assert_eq!(named.unwrap().meeting, "here:1");
        assert_eq!(detect(Launcher::None, None, variables).unwrap(), None);
    }

    #[test]
    fn one_process_needs_no_other() {
        assert_eq!(detect(Launcher::Auto, None, &[]).unwrap(), None);
        // A batch script, before `srun`.
        assert_eq!(
            detect(Launcher::Auto, None, &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")]).unwrap(),
            None
        );
        let alone = [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "x"), ("MASTER_PORT", "1")];
        assert_eq!(detect(Launcher::Auto, None, &alone).unwrap(), None);
    }

    #[rstest]
    #[case(Launcher::Torchrun, &[("RANK", "0")], "WORLD_SIZE")]
    #[case(Launcher::Torchrun, &[("RANK", "x"), ("WORLD_SIZE", "2")], "RANK is `x`")]
    #[case(Launcher::Torchrun, &[("RANK", "2"), ("WORLD_SIZE", "2")], "process 2 of 2")]
    #[case(Launcher::Torchrun, &[("RANK", "0"), ("WORLD_SIZE", "2")], "MASTER_ADDR")]
    #[case(Launcher::Slurm, &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2")], "SLURM_JOB_NODELIST")]
    #[case(Launcher::OpenMpi, &[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2")], "MASTER_ADDR")]
    #[case(Launcher::LeaderWorkerSet, &[("LWS_GROUP_SIZE", "2")], "LWS_LEADER_ADDRESS")]
    fn what_is_missing_or_wrong_is_named(
        #[case] launcher: Launcher,
        #[case] variables: &[(&str, &str)],
        #[case] part: &str,
    ) {
        let message = detect(launcher, None, variables).unwrap_err().to_string();
        assert!(message.contains(part) && message.contains("hint:"), "{message}");
    }

    #[rstest]
    #[case("gpu1", "gpu1")]
    #[case("gpu1,gpu2", "gpu1")]
    #[case("gpu[3,5-6]", "gpu3")]
    fn the_first_node_of_a_list_is_found(#[case] nodes: &str, #[case] first: &str) {
        assert_eq!(first_node(nodes), first);
    }
}
