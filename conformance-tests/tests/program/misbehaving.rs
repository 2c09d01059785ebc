//! The conformance program with backends linked in that misbehave, each in one way: the CPU backend with something in
//! front of it.

use dsrun_core::{
    Code, Error, Result,
    checked::{ValidArguments, ValidCall},
    collective::Collective,
    device::{Backend, BackendInfo, Device, DeviceInfo, DeviceOptions, Stream},
    kernels::{Binding, BoundCall, Plan, Support},
};
use dsrun_cpu::CpuBackend;
use dsrun_test_support::{Front, FrontDevice};
use std::{
    io::Write,
    process::{self, ExitCode},
    sync::Arc,
    thread,
    time::Duration,
};

/// How a backend misbehaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// Gives the wrong first element when there are at least 60 features.
    Wrong,
    /// The process ends when there are 61 rows.
    Crashes,
    /// The process ends whatever is run.
    AlwaysCrashes,
    /// Never comes back when there are 61 rows.
    Hangs,
    /// Panics when there are 61 rows.
    Panics,
    /// Runs no op at all.
    Declines,
    /// Prints what looks almost like the program's own lines.
    Noisy,
    /// The process ends when a device is opened.
    DiesOpening,
    /// No device can be opened.
    CannotOpen,
}

const ALL: &[(&str, Fault)] = &[
    ("wrong", Fault::Wrong),
    ("crashes", Fault::Crashes),
    ("always-crashes", Fault::AlwaysCrashes),
    ("hangs", Fault::Hangs),
    ("panics", Fault::Panics),
    ("declines", Fault::Declines),
    ("noisy", Fault::Noisy),
    ("dies-opening", Fault::DiesOpening),
    ("cannot-open", Fault::CannotOpen),
];

fn main() -> ExitCode {
    let backend = |(name, fault): &(&str, Fault)| {
        let info = BackendInfo {
            name: (*name).to_owned(),
            version: "1.0".into(),
            description: format!("misbehaves: {fault:?}"),
        };
        Arc::new(Misbehaving { info, fault: *fault, inner: CpuBackend::new() }) as Arc<dyn Backend>
    };
    let linked: Vec<Arc<dyn Backend>> = ALL.iter().map(backend).collect();
    dsrun_conformance::program::main(&linked)
}

#[derive(Debug)]
struct Misbehaving {
    info: BackendInfo,
    fault: Fault,
    inner: CpuBackend,
}

impl Backend for Misbehaving {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        self.inner.devices()
    }

    fn open(&self, index: usize, options: &DeviceOptions) -> Result<Arc<dyn Device>> {
        match self.fault {
            Fault::DiesOpening => die("the driver is not to my taste"),
            Fault::CannotOpen => Err(Error::new(Code::Unavailable, "the device is on holiday")),
            fault => {
                let inner = self.inner.open(index, options)?;
                Ok(Arc::new(FrontDevice(MisbehavingDevice { inner, fault })))
            }
        }
    }
}

fn die(why: &str) -> ! {
    let _ = writeln!(std::io::stderr(), "{why}");
    process::abort()
}

#[derive(Debug)]
struct MisbehavingDevice {
    inner: Arc<dyn Device>,
    fault: Fault,
}

impl Front for MisbehavingDevice {
    fn behind(&self) -> &dyn Device {
        &*self.inner
    }

    fn collective(&self) -> Option<&dyn Collective> {
        self.inner.collective()
    }

    fn query(&self, call: &ValidCall) -> Result<Support> {
        if self.fault == Fault::Declines {
            return Ok(Support::no("not today"));
        }
        self.inner.kernels().query(call)
    }

    fn plan(&self, call: &ValidCall) -> Result<Arc<dyn Plan>> {
        let shape = call.results.first().map_or(&[][..], |result| &result.shape);
        let (rows, features) = (shape.first().copied().unwrap_or(0), shape.last().copied().unwrap_or(0));
        let strikes = match self.fault {
            Fault::Wrong => rows > 0 && features >= 60,
            Fault::Noisy | Fault::AlwaysCrashes => true,
            _ => rows == 61,
        };
        let fault = strikes.then_some(self.fault);
        Ok(Arc::new(Planned { inner: self.inner.kernels().plan(call)?, fault }))
    }
}

#[derive(Debug)]
struct Planned {
    inner: Arc<dyn Plan>,
    fault: Option<Fault>,
}

impl Plan for Planned {
    fn workspace_bytes(&self) -> usize {
        self.inner.workspace_bytes()
    }

    fn bind(self: Arc<Self>, arguments: ValidArguments<'_>) -> Result<Box<dyn BoundCall>> {
        let inner = self.inner.clone().bind(arguments)?;
        Ok(Box::new(Bound {
            inner,
            fault: self.fault,
            result: arguments.arguments().results.first().cloned(),
        }))
    }
}

#[derive(Debug)]
struct Bound {
    inner: Box<dyn BoundCall>,
    fault: Option<Fault>,
    result: Option<Binding>,
}

impl BoundCall for Bound {
    fn enqueue(&self, stream: &mut dyn Stream) -> Result<()> {
        match self.fault {
            Some(Fault::Crashes | Fault::AlwaysCrashes) => die("sixty-one is too many"),
            Some(Fault::Hangs) => loop {
                thread::sleep(Duration::from_secs(3600));
            },
            Some(Fault::Panics) => panic!("sixty-one is too many"),
            Some(Fault::Noisy) => {
                let mut output = std::io::stdout();
                let _ = output
                    .write_all(b"no line break, and @dsrun-conformance {\"begin\":")
                    .and_then(|()| output.flush());
            }
            _ => {}
        }
        self.inner.enqueue(stream)?;
        let Some(result) = self.result.as_ref().filter(|_| self.fault == Some(Fault::Wrong)) else {
            return Ok(());
        };
        let first = result.slice.slice(0, 1)?;
        let mut byte = [0];
        stream.download(&first, &mut byte, "what to spoil", Duration::from_secs(10))?;
        // The lowest bit of the first byte only: it takes an exact op to see it.
        stream.upload(&[byte[0] ^ 1], &first)
    }
}
