//! Tests that the program, systemd and Kubernetes accept the files under `docs/deploy`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use dsrun_test_support::{Missing, TestResult, test_main};
use serde::{Deserialize, de::DeserializeOwned};
use snapbox::cmd::cargo_bin;
use std::{collections::BTreeMap, fs, path::PathBuf, process::Command};

test_main![
    the_settings_are_those_of_the_program,
    systemd_takes_the_unit,
    kubernetes_takes_the_deployment,
    kubernetes_takes_service_and_autoscaler,
];

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/deploy").join(name)
}

fn read(name: &str) -> String {
    fs::read_to_string(path(name)).unwrap()
}

fn settings() -> toml::Table {
    read("serve.toml").parse().unwrap()
}

fn help() -> String {
    let output = Command::new(cargo_bin!("dsrun")).args(["serve", "--help"]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

fn the_settings_are_those_of_the_program() {
    // The missing model is the only error.
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("none.gguf");
    let output = Command::new(cargo_bin!("dsrun"))
        .args(["serve", "--config"])
        .arg(path("serve.toml"))
        .args(["--host", "127.0.0.1", "--port", "0"])
        .arg(&model)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains("none.gguf") && !said.contains("configuration"), "{said}");
}

fn systemd_takes_the_unit() -> TestResult {
    let unit = read("systemd/dsrun.service");
    let stop: i64 = value(&unit, "TimeoutStopSec").parse().unwrap();
    assert!(stop > settings()["drain-timeout"].as_integer().unwrap(), "answers have time to finish");
    let flags = help();
    for flag in value(&unit, "ExecStart").split_whitespace().filter(|word| word.starts_with("--")) {
        assert!(flags.contains(flag), "{flag}");
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("dsrun.service");
    // The unit names a path at which the program is not installed here.
    let program = cargo_bin!("dsrun").display().to_string();
    fs::write(&file, unit.replace("/usr/local/bin/dsrun", &program)).unwrap();
    let output = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&file).output();
    let output = output.map_err(|error| Missing::circumstance(format!("systemd-analyze: {error}")))?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !said.contains("dsrun.service"), "{said}");
    Ok(())
}

/// The value of a key of a unit.
fn value<'a>(unit: &'a str, key: &str) -> &'a str {
    unit.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('=')).unwrap()
}

/// A manifest. Every type below has exactly the fields of Kubernetes that the manifests use.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Manifest<Spec> {
    api_version: String,
    kind: String,
    metadata: Metadata,
    spec: Spec,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Metadata {
    name: Option<String>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Deployment {
    #[expect(dead_code, reason = "only its type counts")]
    replicas: u32,
    selector: Selector,
    #[expect(dead_code, reason = "only its type counts")]
    strategy: Strategy,
    template: Template,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Selector {
    match_labels: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[expect(dead_code, reason = "only its type counts")]
struct Strategy {
    rolling_update: RollingUpdate,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[expect(dead_code, reason = "only its type counts")]
struct RollingUpdate {
    max_surge: u32,
    max_unavailable: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Template {
    metadata: Metadata,
    spec: Pod,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Pod {
    termination_grace_period_seconds: i64,
    #[expect(dead_code, reason = "only its type counts")]
    security_context: PodSecurity,
    containers: Vec<Container>,
    volumes: Vec<Volume>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[expect(dead_code, reason = "only its type counts")]
struct PodSecurity {
    run_as_non_root: bool,
    run_as_user: u32,
    fs_group: u32,
    seccomp_profile: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Container {
    #[expect(dead_code, reason = "only its type counts")]
    name: String,
    #[expect(dead_code, reason = "only its type counts")]
    image: String,
    args: Vec<String>,
    ports: Vec<ContainerPort>,
    #[expect(dead_code, reason = "only its type counts")]
    resources: Resources,
    startup_probe: Probe,
    readiness_probe: Probe,
    liveness_probe: Probe,
    lifecycle: Lifecycle,
    #[expect(dead_code, reason = "only its type counts")]
    security_context: ContainerSecurity,
    env: Vec<Variable>,
    volume_mounts: Vec<Mount>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct ContainerPort {
    name: String,
    container_port: i64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its type counts")]
struct Resources {
    requests: BTreeMap<String, String>,
    limits: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[expect(dead_code, reason = "only its type counts")]
struct ContainerSecurity {
    allow_privilege_escalation: bool,
    read_only_root_filesystem: bool,
    capabilities: BTreeMap<String, Vec<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Probe {
    http_get: HttpGet,
    #[expect(dead_code, reason = "only its type counts")]
    period_seconds: u32,
    #[expect(dead_code, reason = "only its type counts")]
    timeout_seconds: Option<u32>,
    #[expect(dead_code, reason = "only its type counts")]
    failure_threshold: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HttpGet {
    path: String,
    port: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Lifecycle {
    pre_stop: PreStop,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PreStop {
    sleep: Sleep,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Sleep {
    seconds: i64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Variable {
    name: String,
    #[expect(dead_code, reason = "only its type counts")]
    value: Option<String>,
    #[expect(dead_code, reason = "only its type counts")]
    value_from: Option<ValueFrom>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[expect(dead_code, reason = "only its type counts")]
struct ValueFrom {
    secret_key_ref: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Mount {
    name: String,
    #[expect(dead_code, reason = "only its type counts")]
    mount_path: String,
    #[expect(dead_code, reason = "only its type counts")]
    read_only: Option<bool>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[expect(dead_code, reason = "only the types count")]
struct Volume {
    name: String,
    config_map: Option<BTreeMap<String, String>>,
    persistent_volume_claim: Option<Claim>,
    empty_dir: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[expect(dead_code, reason = "only the types count")]
struct Claim {
    claim_name: String,
    read_only: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Service {
    selector: BTreeMap<String, String>,
    ports: Vec<ServicePort>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct ServicePort {
    #[expect(dead_code, reason = "only its type counts")]
    name: String,
    #[expect(dead_code, reason = "only its type counts")]
    port: u16,
    target_port: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Autoscaler {
    scale_target_ref: Target,
    min_replicas: u32,
    max_replicas: u32,
    metrics: Vec<Metric>,
    #[expect(dead_code, reason = "only its type counts")]
    behavior: Behavior,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Target {
    api_version: String,
    kind: String,
    name: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Metric {
    r#type: String,
    pods: PodsMetric,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PodsMetric {
    metric: MetricName,
    #[expect(dead_code, reason = "only its type counts")]
    target: MetricTarget,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MetricName {
    name: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[expect(dead_code, reason = "only the types count")]
struct MetricTarget {
    r#type: String,
    average_value: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[expect(dead_code, reason = "only the types count")]
struct Behavior {
    scale_down: ScalingRules,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[expect(dead_code, reason = "only the types count")]
struct ScalingRules {
    stabilization_window_seconds: u32,
    policies: Vec<ScalingPolicy>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[expect(dead_code, reason = "only the types count")]
struct ScalingPolicy {
    r#type: String,
    value: u32,
    period_seconds: u32,
}

fn manifest<Spec: DeserializeOwned>(name: &str, api_version: &str, kind: &str) -> Manifest<Spec> {
    let manifest: Manifest<Spec> = serde_saphyr::from_str(&read(&format!("kubernetes/{name}.yaml"))).unwrap();
    assert_eq!((manifest.api_version.as_str(), manifest.kind.as_str()), (api_version, kind));
    assert_eq!(manifest.metadata.name.as_deref(), Some("dsrun"));
    manifest
}

fn kubernetes_takes_the_deployment() {
    let deployment: Manifest<Deployment> = manifest("deployment", "apps/v1", "Deployment");
    let template = &deployment.spec.template;
    assert_eq!(deployment.spec.selector.match_labels, template.metadata.labels);
    let pod = &template.spec;
    let [container] = pod.containers.as_slice() else { panic!("one container") };

    let settings = settings();
    let port = settings["port"].as_integer().unwrap();
    assert_eq!(container.ports[0].container_port, port);
    assert_eq!(template.metadata.annotations["prometheus.io/port"], port.to_string());
    let pause = container.lifecycle.pre_stop.sleep.seconds + settings["drain-timeout"].as_integer().unwrap();
    assert!(pod.termination_grace_period_seconds > pause, "answers have time to finish");

    let probes = [&container.startup_probe, &container.readiness_probe, &container.liveness_probe];
    assert!(probes.iter().all(|probe| probe.http_get.port == container.ports[0].name));
    assert_eq!(
        probes.map(|probe| probe.http_get.path.as_str()),
        ["/health/ready", "/health/ready", "/health/live"]
    );

    assert_eq!(container.args[..2], ["dsrun", "serve"]);
    let flags = help();
    for flag in &container.args[2..] {
        assert!(flags.contains(flag.split('=').next().unwrap()), "{flag}");
    }
    assert!(container.env.iter().any(|variable| variable.name == "DSRUN_API_KEYS"));
    let volumes: Vec<&str> = pod.volumes.iter().map(|volume| volume.name.as_str()).collect();
    let mounts: Vec<&str> = container.volume_mounts.iter().map(|mount| mount.name.as_str()).collect();
    assert_eq!(volumes, mounts);
}

fn kubernetes_takes_service_and_autoscaler() {
    let deployment: Manifest<Deployment> = manifest("deployment", "apps/v1", "Deployment");
    let service: Manifest<Service> = manifest("service", "v1", "Service");
    assert_eq!(service.spec.selector, deployment.spec.selector.match_labels);
    assert_eq!(service.spec.ports[0].target_port, deployment.spec.template.spec.containers[0].ports[0].name);

    let autoscaler: Manifest<Autoscaler> =
        manifest("autoscaler", "autoscaling/v2", "HorizontalPodAutoscaler");
    let target = &autoscaler.spec.scale_target_ref;
    assert_eq!((target.api_version.as_str(), target.kind.as_str()), ("apps/v1", "Deployment"));
    assert_eq!(Some(&target.name), deployment.metadata.name.as_ref());
    assert!(autoscaler.spec.min_replicas <= autoscaler.spec.max_replicas);
    assert_eq!(autoscaler.spec.metrics[0].r#type, "Pods");
    // The metric is one of the server's.
    let metrics = include_str!("../src/serve/metrics.rs");
    assert!(metrics.contains(&format!("\"{}\"", autoscaler.spec.metrics[0].pods.metric.name)));
    assert_eq!(autoscaler.metadata.labels, service.metadata.labels);
}
