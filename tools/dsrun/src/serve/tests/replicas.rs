//! Tests of several engines of which some fail or hang.

use super::support::{MODEL, PATIENCE, Running, Setup, completion, cpu, start, start_with, with};
use dsrun_core::Code;
use dsrun_test_support::faulty_device::{Fault, FaultyDevice, Operation};
use futures_util::future::join_all;
use hyper::Method;
use rstest::rstest;
use serde_json::{Value, json};
use std::{sync::Arc, time::Duration};

/// A server with two engines on devices that can be made to fail. Each runs one request at a time.
async fn two_engines(step_timeout: Option<u64>) -> (Running, [Arc<FaultyDevice>; 2]) {
    let devices = [cpu(), cpu()].map(FaultyDevice::new);
    let mut setup = Setup { replicas: 2, devices: devices.to_vec(), ..Setup::default() };
    setup.engine.max_requests = 1;
    setup.settings.step_timeout = step_timeout;
    (start_with(setup).await, devices)
}

async fn ready(server: &Running) -> (u16, Value) {
    let response = server.client.send(Method::GET, "/health/ready", None).await.expect("an answer");
    let status = response.status().as_u16();
    let body = axum::body::Body::new(response.into_body());
    let body = axum::body::to_bytes(body, usize::MAX).await.expect("a body");
    (status, serde_json::from_slice(&body).expect("JSON"))
}

/// The texts of the answers to a request.
fn texts(answer: &Value) -> Vec<String> {
    let choices = answer["choices"].as_array().expect("choices");
    choices.iter().map(|choice| choice["text"].as_str().expect("a text").to_owned()).collect()
}

#[rstest]
#[case::lost(Fault::Lost)]
#[case::panic(Fault::Panic)]
#[tokio::test(flavor = "multi_thread")]
async fn a_failed_engine_is_rebuilt_and_its_waiting_requests_move(#[case] fault: Fault) {
    let (server, [device, other]) = two_engines(None).await;
    let alone = start().await;
    let prompts: Vec<String> = (0..8).map(|index| format!("question {index}")).collect();
    let expected =
        texts(&alone.served("/v1/completions", &with(completion("", 12), json!({"prompt": prompts}))).await);
    // An idle server sends a request to the first engine.
    server.served("/v1/completions", &completion("a", 1)).await;
    server.reaches("dsrun_finished_total", 1.0).await;
    // The calls of both engines wait, so that on each one request begins and others wait behind it.
    let (held, other_held) = (device.hold(), other.hold());
    let asked: Vec<_> = prompts
        .iter()
        .map(|prompt| {
            let (client, request) = (server.client.clone(), completion(prompt, 12));
            tokio::spawn(async move {
                let response =
                    client.send(Method::POST, "/v1/completions", Some(&request)).await.expect("an answer");
                let status = response.status().as_u16();
                let body =
                    axum::body::to_bytes(axum::body::Body::new(response.into_body()), usize::MAX).await;
                (status, serde_json::from_slice::<Value>(&body.expect("a body")).expect("JSON"))
            })
        })
        .collect();
    server.reaches("dsrun_requests_waiting", 8.0).await;
    server.reaches("dsrun_engines_serving", 2.0).await;
    device.arm(Operation::Launch, 1, fault);
    drop((held, other_held));
    let mut failed = 0;
    for (asked, expected) in asked.into_iter().zip(expected) {
        let (status, body) = tokio::time::timeout(PATIENCE, asked).await.expect("it ends").expect("no panic");
        match status {
            200 => assert_eq!(texts(&body), [expected]),
            // The request that was in the step that failed.
            500 => failed += 1,
            status => panic!("{status}: {body}"),
        }
    }
    assert!(device.has_failed());
    assert_eq!(failed, 1);
    assert!(server.metric("dsrun_moved_requests_total").await >= 1.0);
    server.reaches("dsrun_engine_failures_total", 1.0).await;
    server.reaches("dsrun_engines_serving", 2.0).await;
    assert_eq!(ready(&server).await.0, 200);
    // What the failed engine had counted is not forgotten.
    assert_eq!(server.metric("dsrun_finished_total").await, 8.0);
    let served =
        server.served("/v1/completions", &with(completion("", 12), json!({"prompt": prompts}))).await;
    assert_eq!(texts(&served).len(), 8);
    assert!(!server.supervising.is_finished());
}

#[tokio::test(flavor = "multi_thread")]
async fn embeddings_move_to_another_engine() {
    let (server, [device, other]) = two_engines(None).await;
    let inputs: Vec<String> = (0..40).map(|index| format!("text {index}")).collect();
    let request = json!({"model": MODEL, "input": inputs});
    let expected = start().await.served("/v1/embeddings", &request).await;
    let held = device.hold();
    let (client, question) = (server.client.clone(), completion("a", 1));
    let begun =
        tokio::spawn(async move { client.send(Method::POST, "/v1/completions", Some(&question)).await });
    // The completion is in a step of the first engine, and texts wait behind it. It counts as waiting until its step ends, and so do
    // the admissions of the texts, one for each engine; 32 texts are asked for at a time.
    let begins = async {
        while server.metric("dsrun_step_age_seconds").await == 0.0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, begins).await.expect("the completion is in a step");
    let other_held = other.hold();
    let fail = async {
        server.reaches("dsrun_requests_waiting", 35.0).await;
        device.arm(Operation::Launch, 1, Fault::Lost);
        drop((held, other_held));
    };
    let (served, ()) = tokio::join!(server.served("/v1/embeddings", &request), fail);
    assert!(server.metric("dsrun_moved_requests_total").await >= 1.0);
    let begun = tokio::time::timeout(PATIENCE, begun).await.expect("it ends").expect("no panic");
    assert_eq!(begun.expect("an answer").status(), 500);
    assert_eq!(served["data"].as_array().expect("vectors").len(), 40);
    assert_eq!(served["data"], expected["data"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_whose_step_does_not_end_gets_no_requests() {
    let (server, [device, _]) = two_engines(Some(0)).await;
    let held = device.hold();
    // It goes to the first engine, and hangs there.
    let (client, request) = (server.client.clone(), completion("a", 3));
    let hangs =
        tokio::spawn(async move { client.send(Method::POST, "/v1/completions", Some(&request)).await });
    server.reaches("dsrun_engines_serving", 1.0).await;
    for _ in 0..4 {
        server.served("/v1/completions", &completion("b", 3)).await;
    }
    let (status, body) = ready(&server).await;
    assert_eq!((status, &body["engines"][0]["serving"]), (200, &json!(false)), "{body}");
    assert!(body["engines"][0]["step_seconds"].as_f64().is_some_and(|age| age > 0.0), "{body}");
    drop(held);
    let answer = tokio::time::timeout(PATIENCE, hangs).await.expect("it ends").expect("no panic");
    assert_eq!(answer.expect("an answer").status(), 200);
    server.reaches("dsrun_engines_serving", 2.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_whose_only_engine_hangs_is_not_ready() {
    let device = FaultyDevice::new(cpu());
    let mut setup = Setup { devices: vec![device.clone()], ..Setup::default() };
    setup.settings.step_timeout = Some(0);
    let server = start_with(setup).await;
    assert_eq!(ready(&server).await.0, 200);
    let held = device.hold();
    let (client, request) = (server.client.clone(), completion("a", 3));
    let hangs =
        tokio::spawn(async move { client.send(Method::POST, "/v1/completions", Some(&request)).await });
    server.reaches("dsrun_engines_serving", 0.0).await;
    let (status, body) = ready(&server).await;
    assert_eq!(status, 503);
    assert!(
        body["error"]["message"].as_str().expect("a text").contains("no engine has completed a step"),
        "{body}"
    );
    drop(held);
    let answer = tokio::time::timeout(PATIENCE, hangs).await.expect("it ends").expect("no panic");
    assert_eq!(answer.expect("an answer").status(), 200);
    server.reaches("dsrun_engines_serving", 1.0).await;
    assert_eq!(ready(&server).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_ends_when_no_engine_is_left() {
    let device = FaultyDevice::new(cpu());
    let mut server = start_with(Setup { devices: vec![device.clone()], ..Setup::default() }).await;
    device.arm(Operation::Launch, 1, Fault::Lost);
    let (status, _) = server.post("/v1/completions", &completion("a", 1)).await;
    assert_eq!(status, 500);
    let ended = tokio::time::timeout(PATIENCE, &mut server.supervising).await.expect("it ends");
    assert!(ended.expect("no panic").to_string().contains("took the device away"));
}

/// Wherever the device of an engine fails, each answer is right or an error, and the server goes on.
#[rstest]
#[case(Operation::Upload)]
#[case(Operation::Launch)]
#[case(Operation::Wait)]
#[case(Operation::Bind)]
#[tokio::test(flavor = "multi_thread")]
async fn a_fault_anywhere_loses_no_more_than_what_had_begun(#[case] operation: Operation) {
    let prompts: Vec<String> = (0..6).map(|index| format!("question {index}")).collect();
    let request = with(completion("", 8), json!({"prompt": prompts}));
    let expected = texts(&start().await.served("/v1/completions", &request).await);
    for nth in [1, 2, 3, 7, 20, 45] {
        let (server, [device, _]) = two_engines(None).await;
        device.arm(operation, nth, Fault::Error(Code::Internal));
        let ask = async |prompt: &String, expected: &String| {
            let (status, body) = server.post("/v1/completions", &completion(prompt, 8)).await;
            match status {
                200 => assert_eq!(texts(&body), std::slice::from_ref(expected), "{operation:?} {nth}"),
                status => assert_eq!(status, 500, "{operation:?} {nth}: {body}"),
            }
            usize::from(status != 200)
        };
        let asked = prompts.iter().zip(&expected).map(|(prompt, expected)| ask(prompt, expected));
        let failed: usize = join_all(asked).await.into_iter().sum();
        // One request runs at a time, so no more than one had begun.
        assert!(failed <= 1, "{operation:?} {nth}: {failed} failed");
        // The engine with the faulty device may have had fewer calls.
        if device.has_failed() {
            server.reaches("dsrun_engines_serving", 2.0).await;
            assert_eq!(texts(&server.served("/v1/completions", &request).await), expected);
        } else {
            assert!(nth > 2 && failed == 0, "{operation:?} {nth} does not come");
        }
    }
}
