//! Tests of answers, whole and streamed.

use super::{
    model,
    support::{MODEL, completion, question, start, with},
};
use base64::{Engine, prelude::BASE64_STANDARD};
use hyper::Method;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const EMBEDDINGS: &str = "/v1/embeddings";

#[tokio::test(flavor = "multi_thread")]
async fn a_chat_answer_has_the_fields_of_openai() {
    let server = start().await;
    let answer = server.served(CHAT, &question("Hello", 12)).await;
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], MODEL);
    let choice = &answer["choices"][0];
    assert_eq!(choice["index"], 0);
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(choice["finish_reason"], "length");
    assert!(!choice["message"]["content"].as_str().expect("a text").is_empty());
    assert_eq!(choice["message"].get("tool_calls"), None);
    // `<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n`: one token for each byte, three control tokens.
    assert_eq!(answer["usage"], usage(24, 12));
    let again = server.served(CHAT, &question("Hello", 12)).await;
    assert_ne!(answer["id"], again["id"]);
    assert_eq!(answer["choices"], again["choices"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn streamed_pieces_join_to_the_whole_and_end_with_the_usage() {
    let server = start().await;
    let whole = server.served(CHAT, &question("Hello", 20)).await;
    let stream = json!({"stream": true, "stream_options": {"include_usage": true}});
    let events = server.events(CHAT, &with(question("Hello", 20), stream)).await;
    let (last, pieces) = events.split_last().expect("there are events");
    assert_eq!(last["choices"], json!([]));
    for count in ["prompt_tokens", "completion_tokens", "total_tokens"] {
        assert_eq!(last["usage"][count], whole["usage"][count]);
    }
    // The first whole block of the prompt is in the cache now.
    assert_eq!(last["usage"]["prompt_tokens_details"]["cached_tokens"], 16);
    assert!(
        pieces.iter().all(|piece| piece["object"] == "chat.completion.chunk" && piece.get("usage").is_none())
    );
    assert_eq!(pieces[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let text: String =
        pieces.iter().filter_map(|piece| piece["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(whole["choices"][0]["message"]["content"], text);
    let finish = &pieces.last().expect("a piece")["choices"][0];
    assert_eq!((&finish["finish_reason"], &finish["delta"]), (&json!("length"), &json!({})));
}

#[tokio::test(flavor = "multi_thread")]
async fn completions_accept_texts_and_tokens() {
    let server = start().await;
    let text = server.served(COMPLETIONS, &completion("ab", 8)).await;
    let tokens = server.served(COMPLETIONS, &with(completion("", 8), json!({"prompt": [97, 98]}))).await;
    assert_eq!(text["choices"], tokens["choices"]);
    assert_eq!(text["object"], "text_completion");
    let many = server.served(COMPLETIONS, &with(completion("", 8), json!({"prompt": ["ab", "xyz"]}))).await;
    assert_eq!(many["choices"][0]["text"], text["choices"][0]["text"]);
    assert_eq!(many["choices"][1]["index"], 1);
    assert_eq!(many["usage"], usage(5, 16));
    let many =
        server.served(COMPLETIONS, &with(completion("", 8), json!({"prompt": [[97, 98], [97]]}))).await;
    assert_eq!(many["choices"][0]["text"], text["choices"][0]["text"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn token_ids_are_returned_on_request() {
    let server = start().await;
    let plain = server.served(COMPLETIONS, &completion("ab", 8)).await;
    assert_eq!(plain["choices"][0].get("token_ids"), None);
    let request = with(completion("ab", 8), json!({"return_token_ids": true}));
    let ids = &server.served(COMPLETIONS, &request).await["choices"][0]["token_ids"];
    assert_eq!(ids.as_array().map(Vec::len), Some(8));
    let text = server.served("/detokenize", &json!({"tokens": ids})).await;
    assert_eq!(text["prompt"], plain["choices"][0]["text"]);
    let events = server.events(COMPLETIONS, &with(request, json!({"stream": true}))).await;
    let ids_of = |event: &Value| event["choices"][0]["token_ids"].as_array().cloned();
    assert_eq!(&Value::from(events.iter().filter_map(ids_of).flatten().collect::<Vec<_>>()), ids);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_echo_starts_with_the_prompt_whole_and_streamed() {
    let server = start().await;
    let plain = server.served(COMPLETIONS, &completion("ab", 8)).await;
    let expected = format!("ab{}", plain["choices"][0]["text"].as_str().expect("a text"));
    let echo = with(completion("ab", 8), json!({"echo": true}));
    assert_eq!(server.served(COMPLETIONS, &echo).await["choices"][0]["text"], expected);
    let events = server.events(COMPLETIONS, &with(echo, json!({"stream": true}))).await;
    let text: String = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_string_ends_no_answer_before_its_fewest_tokens() {
    let server = start().await;
    let whole = server.served(COMPLETIONS, &completion("ab", 40)).await;
    let whole = whole["choices"][0]["text"].as_str().expect("a text").to_owned();
    // A token is a character here.
    let stop = whole.chars().next().expect("a character").to_string();
    let request = with(completion("ab", 40), json!({"stop": stop, "min_tokens": 10}));
    let answer = server.served(COMPLETIONS, &request).await;
    let text = answer["choices"][0]["text"].as_str().expect("a text");
    let length = whole.char_indices().nth(10).map_or(whole.len(), |(at, _)| at);
    let end = whole[length..].find(&stop).map_or(whole.len(), |at| length + at);
    assert_eq!(text, &whole[..end]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_string_ends_the_answer_before_it() {
    let server = start().await;
    let whole = server.served(COMPLETIONS, &completion("ab", 40)).await;
    let whole: Vec<char> = whole["choices"][0]["text"].as_str().expect("a text").chars().collect();
    let stop: String = whole[10..13].iter().collect();
    let whole: String = whole.iter().collect();
    let expected = &whole[..whole.find(&stop).expect("it is in there")];
    let request = with(completion("ab", 40), json!({"stop": [stop, "never that"]}));
    let answer = server.served(COMPLETIONS, &request).await;
    assert_eq!(answer["choices"][0]["text"], expected);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let events = server.events(COMPLETIONS, &with(request, json!({"stream": true}))).await;
    let text: String = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, expected);
    // The engine generated beyond the stop string and is cancelled.
    server.reaches("dsrun_requests_running", 0.0).await;
    server.reaches("dsrun_kv_blocks_in_use", 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_seeds_repeat_answers_and_choices_differ() {
    let server = start().await;
    let request = with(completion("ab", 16), json!({"temperature": 1.5, "seed": -7, "n": 3}));
    let first = server.served(COMPLETIONS, &request).await;
    let again = server.served(COMPLETIONS, &request).await;
    assert_eq!(first["choices"], again["choices"]);
    let texts: Vec<&Value> = (0..3).map(|index| &first["choices"][index]["text"]).collect();
    assert!(texts[0] != texts[1] && texts[1] != texts[2] && texts[0] != texts[2], "{texts:?}");
    assert_eq!(first["usage"], usage(2, 48));
    let unseeded = with(completion("ab", 16), json!({"temperature": 1.5}));
    let (a, b) = (server.served(COMPLETIONS, &unseeded).await, server.served(COMPLETIONS, &unseeded).await);
    assert_ne!(a["choices"], b["choices"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn choices_of_a_stream_have_their_index() {
    let server = start().await;
    let request = with(question("Hello", 10), json!({"temperature": 1.0, "seed": 3, "n": 3}));
    let whole = server.served(CHAT, &request).await;
    let events = server.events(CHAT, &with(request, json!({"stream": true}))).await;
    for index in 0..3 {
        let own =
            || events.iter().map(|event| &event["choices"][0]).filter(|choice| choice["index"] == index);
        let text: String = own().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        assert_eq!(whole["choices"][index]["message"]["content"], text);
        assert_eq!(own().filter(|choice| !choice["finish_reason"].is_null()).count(), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn shorter_vectors_are_the_first_elements_where_the_model_has_them() {
    let server = start().await;
    let vector = |fields: Value| {
        let server = &server;
        async move {
            let request = with(json!({"model": MODEL, "input": "Hello"}), fields);
            let answer = server.served(EMBEDDINGS, &request).await;
            let vector = answer["data"][0]["embedding"].as_array().expect("a vector").clone();
            vector.iter().map(|value| value.as_f64().expect("a number")).collect::<Vec<f64>>()
        }
    };
    let whole = vector(json!({"normalize": false})).await;
    assert_eq!(vector(json!({"normalize": false, "dimensions": 16})).await, whole[..16]);
    assert_eq!(vector(json!({"normalize": false, "dimensions": whole.len()})).await, whole);
    let short = vector(json!({"dimensions": 8})).await;
    let norm = whole[..8].iter().map(|value| value * value).sum::<f64>().sqrt();
    assert_eq!(short.len(), 8);
    assert!(short.iter().zip(&whole).all(|(short, whole)| (short - whole / norm).abs() < 1e-5), "{short:?}");
    for length in [0, 9, 33] {
        let request = json!({"model": MODEL, "input": "a", "dimensions": length});
        let (field, message) = server.refused(EMBEDDINGS, &request).await;
        assert!(field == "dimensions" && message.contains("[8, 16]"), "{message}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn embeddings_are_those_of_the_model() {
    let server = start().await;
    let request = json!({"model": MODEL, "input": ["abc", "abd", "abc"]});
    let answer = server.served(EMBEDDINGS, &request).await;
    assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!(MODEL)));
    assert_eq!(answer["usage"], json!({"prompt_tokens": 9, "total_tokens": 9}));
    let vectors: Vec<Vec<f64>> = (0..3)
        .map(|index| {
            let item = &answer["data"][index];
            assert_eq!((&item["object"], &item["index"]), (&json!("embedding"), &json!(index)));
            serde_json::from_value(item["embedding"].clone()).expect("numbers")
        })
        .collect();
    let product =
        |a: usize, b: usize| -> f64 { vectors[a].iter().zip(&vectors[b]).map(|(a, b)| a * b).sum() };
    assert!((product(0, 0) - 1.0).abs() < 1e-5 && (product(0, 2) - 1.0).abs() < 1e-5);
    assert!(product(0, 1) < 0.999, "{}", product(0, 1));

    // Tokens as input, base64 as output, a long text over many steps, and pooling by the last token.
    let tokens = json!({"model": MODEL, "input": [[97, 98, 99]], "encoding_format": "base64"});
    let written = server.served(EMBEDDINGS, &tokens).await;
    let bytes =
        BASE64_STANDARD.decode(written["data"][0]["embedding"].as_str().expect("a text")).expect("base64");
    let values: Vec<f64> =
        bytes.as_chunks::<4>().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes))).collect();
    assert_eq!(values.len(), vectors[0].len());
    assert!(values.iter().zip(&vectors[0]).all(|(a, b)| (a - b).abs() < 1e-6));
    let long = json!({"model": MODEL, "input": "x".repeat(model::CONTEXT)});
    assert_eq!(server.served(EMBEDDINGS, &long).await["usage"]["total_tokens"], model::CONTEXT);
    let last = with(request, json!({"pooling": "last"}));
    assert_ne!(server.served(EMBEDDINGS, &last).await["data"][0], answer["data"][0]);
    // The text of a control token is plain text.
    let control = json!({"model": MODEL, "input": "<|im_end|>"});
    assert_eq!(server.served(EMBEDDINGS, &control).await["usage"]["total_tokens"], 10);

    assert_eq!(server.metric("dsrun_embeddings_total").await, 9.0);
    assert_eq!(server.metric("dsrun_generated_tokens_total").await, 0.0);
    assert_eq!(server.metric("dsrun_kv_blocks_in_use").await, 0.0);
    assert_eq!(server.metric("dsrun_answers_open").await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn tokenize_and_detokenize_are_inverse() {
    let server = start().await;
    let tokens = server.served("/tokenize", &json!({"prompt": "Grüße<|im_end|>"})).await;
    assert_eq!(tokens["count"], 8);
    let text = server.served("/detokenize", &json!({"tokens": tokens["tokens"]})).await;
    assert_eq!(text["prompt"], "Grüße<|im_end|>");
    let messages = json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]});
    assert_eq!(server.served("/tokenize", &messages).await["count"], 24);
    let (field, _) = server.refused("/detokenize", &json!({"tokens": [1_000_000]})).await;
    assert_eq!(field, "tokens");
}

#[tokio::test(flavor = "multi_thread")]
async fn models_are_listed() {
    let server = start().await;
    let list = server.client.json("/v1/models").await.expect("a list");
    assert_eq!(list["data"][0]["id"], MODEL);
    assert_eq!(server.client.json("/v1/models/tiny").await.expect("a model")["object"], "model");
    assert!(server.client.json("/v1/models/some/other").await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_count_requests_and_tokens() {
    let server = start().await;
    server.served(COMPLETIONS, &completion("ab", 8)).await;
    assert_eq!(server.metric("dsrun_generated_tokens_total").await, 8.0);
    assert_eq!(server.metric("dsrun_prompt_tokens_total").await, 2.0);
    assert_eq!(server.metric("dsrun_first_token_seconds_count").await, 1.0);
    assert_eq!(server.metric("dsrun_token_seconds_count").await, 7.0);
    assert_eq!(server.metric("dsrun_answer_seconds_count").await, 1.0);
    assert_eq!(server.metric("dsrun_requests_total{path=\"/v1/completions\",status=\"200\"}").await, 1.0);
    assert_eq!(server.metric("dsrun_answers_open").await, 0.0);
    assert_eq!(server.metric("dsrun_disconnects_total").await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_described_path_exists() {
    let server = start().await;
    let document = server.client.json("/openapi.json").await.expect("a document");
    let response = json!({"model": MODEL, "input": "Hello", "max_output_tokens": 1});
    for (path, operations) in document["paths"].as_object().expect("there are paths") {
        for method in operations.as_object().expect("there are operations").keys() {
            let method: Method = method.to_uppercase().parse().expect("a method");
            let stored = server.served("/v1/responses", &response).await;
            let id = stored["id"].as_str().expect("an id");
            let path = path.replace("{model}", MODEL).replace("{id}", id);
            let body = (method == Method::POST).then(|| json!({}));
            let answer = server.client.send(method.clone(), &path, body.as_ref()).await.expect("an answer");
            // The endpoint refuses an empty request.
            assert_eq!(answer.status(), if method == Method::POST { 400 } else { 200 }, "{method} {path}");
        }
    }
}

/// The usage of a request none of whose prompt tokens was cached.
fn usage(prompt: usize, completion: usize) -> Value {
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
    })
}
