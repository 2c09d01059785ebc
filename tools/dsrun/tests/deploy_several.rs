//! Tests of the files under `docs/deploy` for several processes and several servers, which are run as they are, on a tiny model.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![cfg(unix)]

#[path = "support/command.rs"]
mod command;

use dsrun_test_support::{Missing, TestResult, free_port, test_main};
use serde::Deserialize;
use snapbox::cmd::cargo_bin;
use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write},
    net::TcpStream,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

test_main![
    the_slurm_script_serves_over_its_tasks,
    the_leader_worker_set_serves_over_its_pods,
    haproxy_spreads_requests_and_survives_a_server,
];

/// The time limit of any wait.
const PATIENCE: Duration = Duration::from_secs(120);

fn deploy(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/deploy").join(name)
}

/// A process with all that it has started.
struct Group(Child);

impl Group {
    fn start(command: &mut Command) -> Self {
        let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Self(quiet.process_group(0).spawn().unwrap())
    }

    fn signal(&self, name: &str) {
        let group = format!("-{}", self.0.id());
        // All may have ended.
        let _ = Command::new("kill").args([&format!("-{name}"), "--", &group]).stderr(Stdio::null()).status();
    }

    /// Asks all to end, as launchers do. Returns the exit code of the first.
    fn end(&mut self) -> Option<i32> {
        self.signal("TERM");
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < end, "a process does not end");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.signal("KILL");
        let _ = self.0.wait();
    }
}

/// The status and the body of an answer; `None` if the server cannot be reached.
fn request(port: u16, method: &str, path: &str, key: Option<&str>, body: &str) -> Option<(u16, String)> {
    let mut connection = TcpStream::connect(("127.0.0.1", port)).ok()?;
    connection.set_read_timeout(Some(PATIENCE)).unwrap();
    let key = key.map(|key| format!("authorization: Bearer {key}\r\n")).unwrap_or_default();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{key}content-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    connection.write_all(head.as_bytes()).ok()?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer).ok()?;
    let status = answer.split_whitespace().nth(1)?.parse().ok()?;
    Some((status, answer))
}

fn wait_until_ready(port: u16) {
    let end = Instant::now() + PATIENCE;
    while request(port, "GET", "/health/ready", None, "").is_none_or(|(status, _)| status != 200) {
        assert!(Instant::now() < end, "no server gets ready at port {port}");
        thread::sleep(Duration::from_millis(50));
    }
}

fn complete(port: u16, key: Option<&str>) -> Option<(u16, String)> {
    let body = r#"{"model": "model", "prompt": "the sky", "max_tokens": 6, "temperature": 0}"#;
    request(port, "POST", "/v1/completions", key, body)
}

fn assert_completes(port: u16, key: Option<&str>) {
    let (status, answer) = complete(port, key).expect("the server is there");
    assert!(status == 200 && answer.contains("\"completion_tokens\":6"), "{answer}");
}

/// `dsrun` as a script or a manifest starts it, without the user's files.
fn environment(command: &mut Command) -> &mut Command {
    command.env("HF_HUB_OFFLINE", "1").env("DSRUN_NO_WARM_UP", "true")
}

/// A folder with programs of these names.
fn programs(folder: &Path, programs: &[(&str, &str)]) {
    for (name, script) in programs {
        let path = folder.join(name);
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    std::os::unix::fs::symlink(cargo_bin!("dsrun"), folder.join("dsrun")).unwrap();
}

/// What Slurm's `srun` does on two nodes of one machine: starts the command once per node, with the variables of a step.
const SRUN: &str = r#"#!/bin/bash
while [ "${1#--}" != "$1" ]; do shift; done
for task in 0 1; do
    SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=$task SLURM_LOCALID=0 SLURM_STEP_NODELIST=127.0.0.1 \
        SLURM_STEP_TASKS_PER_NODE='1(x2)' "$@" &
done
wait -n
exit $?
"#;

fn the_slurm_script_serves_over_its_tasks() {
    let folder = tempfile::tempdir().unwrap();
    programs(folder.path(), &[("srun", SRUN)]);
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let (port, meeting) = (free_port(), free_port());
    let mut script = Command::new("bash");
    script.arg(deploy("slurm/serve.sbatch")).arg(command::tiny()).env("PATH", path);
    script
        .env("DSRUN_PORT", port.to_string())
        .env("DSRUN_MESH", "pp=2")
        .env("MASTER_PORT", meeting.to_string());
    let mut job = Group::start(environment(&mut script));
    wait_until_ready(port);
    assert_completes(port, None);
    job.end();
    // The signal ends bash at once, while the server completes its answers first.
    let end = Instant::now() + PATIENCE;
    while complete(port, None).is_some() {
        assert!(Instant::now() < end, "the server does not end");
        thread::sleep(Duration::from_millis(10));
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Manifest {
    api_version: String,
    kind: String,
    #[expect(dead_code, reason = "only its type counts")]
    metadata: BTreeMap<String, String>,
    spec: Spec,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Spec {
    #[expect(dead_code, reason = "only its type counts")]
    replicas: u32,
    leader_worker_template: Templates,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Templates {
    size: usize,
    restart_policy: String,
    leader_template: Template,
    worker_template: Template,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Template {
    #[expect(dead_code, reason = "only its type counts")]
    metadata: BTreeMap<String, BTreeMap<String, String>>,
    spec: Pod,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Pod {
    #[expect(dead_code, reason = "only its type counts")]
    termination_grace_period_seconds: u32,
    containers: Vec<Container>,
    #[expect(dead_code, reason = "only its type counts")]
    volumes: Vec<serde_json::Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Container {
    #[expect(dead_code, reason = "only its type counts")]
    name: String,
    #[expect(dead_code, reason = "only its type counts")]
    image: String,
    args: Vec<String>,
    #[serde(default)]
    ports: Vec<serde_json::Value>,
    resources: BTreeMap<String, BTreeMap<String, String>>,
    readiness_probe: Option<serde_json::Value>,
    #[expect(dead_code, reason = "only its type counts")]
    volume_mounts: Vec<serde_json::Value>,
}

fn the_leader_worker_set_serves_over_its_pods() {
    let text = fs::read_to_string(deploy("kubernetes/leader-worker-set.yaml")).unwrap();
    let manifest: Manifest = serde_saphyr::from_str(&text).unwrap();
    assert_eq!(
        (manifest.api_version.as_str(), manifest.kind.as_str()),
        ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    );
    let Templates { size, restart_policy, leader_template, worker_template } =
        manifest.spec.leader_worker_template;
    assert_eq!(restart_policy, "RecreateGroupOnPodRestart");
    let [leader, worker] = [leader_template, worker_template].map(|template| {
        let [container] = <[Container; 1]>::try_from(template.spec.containers).ok().unwrap();
        container
    });
    assert_eq!(leader.args, worker.args, "all processes run the same command");
    assert_eq!(leader.resources, worker.resources);
    let probe = leader.readiness_probe.unwrap();
    assert_eq!(probe["httpGet"]["path"], "/health/ready");
    assert_eq!(leader.ports[0]["containerPort"], 8000);
    assert!(worker.readiness_probe.is_none() && worker.ports.is_empty(), "only the leader serves");
    let ranks: usize = leader.resources["limits"]["nvidia.com/gpu"].parse::<usize>().unwrap() * size;
    assert!(leader.args.contains(&format!("--mesh=tp={},pp={size}", ranks / size)), "{:?}", leader.args);

    // The pods as processes of this machine, with a small mesh and a small model.
    let (port, meeting) = (free_port(), free_port());
    let pod = |index: usize| {
        let mut command = Command::new(cargo_bin!("dsrun"));
        for argument in &leader.args[1..] {
            match argument.split_once('=') {
                Some(("--config", _)) => command.arg("--config").arg(deploy("serve.toml")),
                Some(("--mesh", _)) => command.arg(format!("--mesh=pp={size}")),
                _ => command.arg(argument),
            };
        }
        command.arg(command::tiny());
        command.args(["--host", "127.0.0.1", "--port", &port.to_string()]);
        command.args(["--served-model-name", "model"]);
        // Pods have an address of their own; processes of a machine must not all meet at the default port.
        command.args(["--rendezvous", &format!("127.0.0.1:{meeting}")]);
        command.env("LWS_LEADER_ADDRESS", "127.0.0.1").env("LWS_GROUP_SIZE", size.to_string());
        command.env("LWS_WORKER_INDEX", index.to_string());
        Group::start(environment(&mut command))
    };
    let mut pods: Vec<Group> = (0..size).map(pod).collect();
    wait_until_ready(port);
    assert_completes(port, None);
    // Without the worker the leader ends, and Kubernetes starts the group anew.
    pods[1].signal("KILL");
    let end = Instant::now() + PATIENCE;
    let code = loop {
        match pods[0].0.try_wait().unwrap() {
            Some(status) => break status.code(),
            None => assert!(Instant::now() < end, "the leader does not end"),
        }
        thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(code, Some(1));
}

/// The answers that a server has completed.
fn answered(port: u16) -> f64 {
    let (_, page) = request(port, "GET", "/metrics", None, "").expect("the server is there");
    let name = "dsrun_requests_total{path=\"/v1/completions\",status=\"200\"} ";
    page.lines().find_map(|line| line.strip_prefix(name)).map_or(0.0, |count| count.parse().unwrap())
}

fn haproxy_spreads_requests_and_survives_a_server() -> TestResult {
    let missing = |error: std::io::Error| Missing::circumstance(format!("haproxy: {error}"));
    Command::new("haproxy").arg("-v").output().map_err(missing)?;
    let [router, one, two] = [free_port(), free_port(), free_port()];
    let server = |port: u16| {
        let mut command = Command::new(cargo_bin!("dsrun"));
        command.args(["serve", "--host", "127.0.0.1", "--port", &port.to_string(), "--threads", "1"]);
        Group::start(environment(command.arg(command::tiny())))
    };
    let mut servers = [server(one), server(two)];
    let mut haproxy = Command::new("haproxy");
    haproxy.arg("-f").arg(deploy("haproxy/haproxy.cfg"));
    let address = |port: u16| format!("127.0.0.1:{port}");
    haproxy.env("ROUTER_ADDRESS", address(router));
    haproxy.env("SERVER_ONE", address(one)).env("SERVER_TWO", address(two));
    let _router = Group::start(&mut haproxy);
    [one, two, router].into_iter().for_each(wait_until_ready);
    // HAProxy needs a second check until it takes a server that was not ready at first.
    thread::sleep(Duration::from_secs(3));

    for _ in 0..8 {
        assert_completes(router, None);
    }
    let spread = [one, two].map(answered);
    assert!(spread.iter().all(|count| *count > 0.0) && spread.iter().sum::<f64>() == 8.0, "{spread:?}");
    for _ in 0..6 {
        assert_completes(router, Some("a user's key"));
    }
    let added = [answered(one) - spread[0], answered(two) - spread[1]];
    assert!(added == [6.0, 0.0] || added == [0.0, 6.0], "requests with a key go to one server: {added:?}");

    // The user's server dies, and no request is lost.
    let users = usize::from(added[1] > 0.0);
    servers[users].signal("KILL");
    for _ in 0..6 {
        assert_completes(router, Some("a user's key"));
        assert_completes(router, None);
    }
    // The other one ends after its answers, and with it the service.
    assert_eq!(servers[1 - users].end(), Some(0));
    assert!(complete(router, None).is_none_or(|(status, _)| status >= 500));
    Ok(())
}
