//! Every field of `switches.json`, changed: the program changes, stays the same, or cannot be built.

use super::fixtures::{self, Effect, Flip};
use dsrun_models::{model::Model, step::ProgramOptions};

fn program(folder: &std::path::Path) -> Result<String, String> {
    let model = Model::open(folder).map_err(|error| error.to_string())?;
    let program = model.program(&ProgramOptions::default()).map_err(|error| error.to_string())?;
    Ok(program.to_string())
}

/// Where we are stricter than transformers, what the message must name.
fn refused(flip: &Flip) -> Option<&'static [&'static str]> {
    match flip.pointer.as_str() {
        // Tensors that nobody reads are most likely a mistake in the configuration.
        _ if flip.leaves_tensors => Some(&[" is there"]),
        "/tie_word_embeddings" if flip.disputed => Some(&["lm_head.weight", "model.embed_tokens.weight"]),
        // No op attends within chunks that are shorter than the context.
        "/attention_chunk_size" => Some(&["chunks of 7"]),
        "/rope_scaling/rope_type" if flip.disputed => Some(&["rope_type = \"default\"", "type = \"linear\""]),
        _ => None,
    }
}

#[test]
fn every_switch_does_what_transformers_does_or_is_refused_by_name() {
    let mut counts = [0; 4];
    for flip in fixtures::flips() {
        let folder = fixtures::with_config(&flip.fixture, &flip.apply());
        let changed = program(folder.path());
        if let Some(names) = refused(&flip) {
            let message = changed.expect_err(&format!("{flip:?} must be refused"));
            assert!(names.iter().all(|name| message.contains(name)), "{flip:?}: {message}");
            counts[3] += 1;
            continue;
        }
        let original = program(&fixtures::folder(&flip.fixture)).unwrap();
        // A window that is longer than the prompts of the fixture is a window all the same.
        let longer_than_prompts = flip.note.contains("no key is dropped");
        match flip.effect {
            Effect::Error => assert!(changed.is_err(), "{flip:?} must be an error"),
            Effect::None if longer_than_prompts => assert!(changed.unwrap().contains("window=24")),
            Effect::None => assert_eq!(changed.unwrap(), original, "{flip:?} must change nothing"),
            Effect::Changes => assert_ne!(changed.unwrap(), original, "{flip:?} must change the program"),
        }
        counts[flip.effect as usize] += 1;
    }
    assert!(counts.iter().all(|count| *count > 10), "too few of a kind: {counts:?}");
}
