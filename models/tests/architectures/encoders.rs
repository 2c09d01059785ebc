//! Encoders: which heads are read, and what their configurations may not say.

use super::fixtures;
use dsrun_models::{
    model::Model,
    step::{ENCODER_OUTPUTS, ProgramOptions, TOKEN_TYPES},
};
use rstest::rstest;
use serde_json::{Value, json};

#[test]
fn every_fixture_becomes_a_program_without_states() {
    for name in fixtures::encoder_names() {
        let model = Model::open(fixtures::folder(&name)).unwrap();
        let encoder = model.config().encoder.unwrap();
        let program = model.program(&ProgramOptions::default()).unwrap();
        assert_eq!(encoder.classifier.is_some(), name.ends_with("_classifier"), "{name}");
        let outputs = 1 + usize::from(encoder.classifier.is_some());
        assert_eq!(program.outputs.len(), outputs, "{name}");
        assert!(outputs <= ENCODER_OUTPUTS.len());
        assert!(program.values.iter().any(|value| value.name == TOKEN_TYPES), "{name}");
        let text = program.to_string();
        assert!(text.contains("bidirectional") && !text.contains("state"), "{name}: {text}");
    }
}

/// The 4 layers of the fixture are applications of one set of weights, or of two.
#[rstest]
#[case("albert", 1)]
#[case("albert_classifier", 2)]
fn layers_that_share_weights_declare_them_once(#[case] name: &str, #[case] groups: usize) {
    let model = Model::open(fixtures::folder(&format!("encoders/{name}"))).unwrap();
    let program = model.program(&ProgramOptions::default()).unwrap();
    let named = |ending: &str| program.values.iter().filter(|value| value.name.ends_with(ending)).count();
    assert_eq!((named(".query"), named(".query.bias"), named(".mlp_norm.bias")), (groups, groups, groups));
}

fn refusal(name: &str, pointer: &str, value: Value) -> String {
    let mut config = fixtures::config(&format!("encoders/{name}"));
    config[pointer] = value;
    let folder = fixtures::with_config(&format!("encoders/{name}"), &config);
    Model::open(folder.path()).unwrap_err().to_string()
}

#[rstest]
#[case("bert", "position_embedding_type", json!("relative_key"), "learned vectors")]
#[case("bert", "is_decoder", json!(true), "is_decoder")]
#[case("bert", "type_vocab_size", json!(0), "type_vocab_size")]
#[case("bert", "architectures", json!(["BertForSequenceClassification"]), "classifier.weight")]
#[case("bert_classifier", "id2label", json!(["a"]), "an object with the labels")]
#[case("bert_classifier", "id2label", json!({}), "1 to 65536")]
#[case("bert_classifier", "architectures", json!(["BertModel"]), "classifier.weight is there")]
#[case("bert_classifier", "sbert_ce_default_activation_function", json!("torch.nn.Softmax"), "sigmoids")]
#[case("roberta", "pad_token_id", json!(0), "counted from 2")]
#[case("roberta", "max_position_embeddings", json!(2), "at least 3")]
#[case("albert", "num_hidden_groups", json!(3), "a divisor of 4")]
#[case("albert", "inner_group_num", json!(2), "one layer that is repeated")]
#[case("modernbert_classifier", "classifier_pooling", json!("max"), "cls or mean")]
fn fields_that_are_not_understood_are_named(
    #[case] name: &str,
    #[case] field: &str,
    #[case] value: Value,
    #[case] message: &str,
) {
    let refused = refusal(name, field, value);
    assert!(refused.contains(message), "{refused}");
}

#[test]
fn a_cross_encoder_says_whether_its_scores_are_sigmoids() {
    let sigmoid = |field: Option<(&str, Value)>| {
        let mut config = fixtures::config("encoders/roberta_classifier");
        if let Some((field, value)) = field {
            config[field] = value;
        }
        let folder = fixtures::with_config("encoders/roberta_classifier", &config);
        Model::open(folder.path()).unwrap().config().encoder.unwrap().classifier.unwrap().sigmoid
    };
    let identity = "torch.nn.modules.linear.Identity";
    assert!(sigmoid(None));
    assert!(!sigmoid(Some(("sbert_ce_default_activation_function", json!(identity)))));
    let of_library = json!({"version": "4.1.0", "activation_fn": identity});
    assert!(!sigmoid(Some(("sentence_transformers", of_library))));
}
