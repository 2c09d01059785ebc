//! Tests with the client of the crate `async-openai`.

use super::support::{MODEL, Running, Setup, start_with};
use async_openai::{
    Client,
    config::OpenAIConfig,
    error::OpenAIError,
    types::chat::{
        ChatCompletionRequestUserMessageArgs, CreateChatCompletionRequest, CreateChatCompletionRequestArgs,
        FinishReason,
    },
};
use futures_util::StreamExt;

async fn server() -> (Running, Client<OpenAIConfig>) {
    // Its HTTP client needs a cryptography provider, even without TLS.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let server = start_with(Setup { keys: vec!["secret"], ..Setup::default() }).await;
    let config = OpenAIConfig::new().with_api_base(format!("{}/v1", server.url)).with_api_key("secret");
    (server, Client::with_config(config))
}

fn request(text: &str) -> CreateChatCompletionRequestArgs {
    let message = ChatCompletionRequestUserMessageArgs::default().content(text).build().expect("a message");
    let mut request = CreateChatCompletionRequestArgs::default();
    request.model(MODEL).messages([message.into()]).max_completion_tokens(12_u32).temperature(0.0);
    request
}

fn built(request: &CreateChatCompletionRequestArgs) -> CreateChatCompletionRequest {
    request.build().expect("a request")
}

#[tokio::test(flavor = "multi_thread")]
async fn chats() {
    let (_server, client) = server().await;
    let answer = client.chat().create(built(&request("Hello"))).await.expect("an answer");
    let choice = &answer.choices[0];
    assert!(!choice.message.content.as_deref().unwrap_or_default().is_empty());
    assert!(matches!(choice.finish_reason, Some(FinishReason::Length | FinishReason::Stop)));
    assert!(answer.usage.expect("a usage").completion_tokens <= 12);
}

#[tokio::test(flavor = "multi_thread")]
async fn streams() {
    let (_server, client) = server().await;
    let whole = client.chat().create(built(&request("Hello"))).await.expect("an answer");
    let mut stream = client.chat().create_stream(built(&request("Hello"))).await.expect("a stream");
    let mut text = String::new();
    let mut finish = None;
    while let Some(chunk) = stream.next().await {
        for choice in chunk.expect("a piece").choices {
            text.push_str(choice.delta.content.as_deref().unwrap_or_default());
            finish = choice.finish_reason.or(finish);
        }
    }
    assert_eq!(whole.choices[0].message.content.as_deref(), Some(text.as_str()));
    assert_eq!(whole.choices[0].finish_reason, finish);
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_errors() {
    let (_server, client) = server().await;
    let error =
        client.chat().create(built(request("Hello").temperature(-1.0))).await.expect_err("it is refused");
    let OpenAIError::ApiError(error) = error else { panic!("{error}") };
    let error = format!("{error:?}");
    assert!(error.contains("temperature") && error.contains("invalid_request_error"), "{error}");
}
