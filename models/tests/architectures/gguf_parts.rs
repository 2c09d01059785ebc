//! GGUF models in several parts: a fixture, taken apart.

use super::fixtures;
use dsrun_models::{gguf::GgufFile, model::Model};
use rstest::rstest;
use std::{
    fs,
    path::{Path, PathBuf},
};

const ALIGNMENT: usize = 32;

/// Writes the fixture in parts, of which the first has no tensors, as llama.cpp's `--no-tensor-first-split` does, and returns their
/// paths.
fn split(folder: &Path, name: &str, parts: usize) -> Vec<PathBuf> {
    let source = fixtures::gguf(name);
    let bytes = fs::read(&source).unwrap();
    let file = GgufFile::open(&source).unwrap();
    let tensors: Vec<_> = file.tensors().collect();
    // The metadata ends where the list of tensors begins, with the length and the name of the first.
    let mut entry = (tensors[0].name.len() as u64).to_le_bytes().to_vec();
    entry.extend_from_slice(tensors[0].name.as_bytes());
    let list = bytes.windows(entry.len()).position(|window| window == entry).unwrap();
    let keys = u64::from_le_bytes(bytes[16..24].try_into().unwrap());
    let metadata = &bytes[24..list];

    let share = tensors.len().div_ceil(parts - 1);
    (0..parts)
        .map(|number| {
            let (keys, metadata) = if number == 0 { (keys, metadata) } else { (0, &[][..]) };
            let own = if number == 0 { &[][..] } else { tensors.chunks(share).nth(number - 1).unwrap() };
            let mut part = bytes[..8].to_vec();
            part.extend((own.len() as u64).to_le_bytes());
            part.extend((keys + 3).to_le_bytes());
            part.extend(metadata);
            let fields: [(&str, u32, Vec<u8>); 3] = [
                ("split.no", 2, (number as u16).to_le_bytes().to_vec()),
                ("split.count", 2, (parts as u16).to_le_bytes().to_vec()),
                ("split.tensors.count", 5, (tensors.len() as i32).to_le_bytes().to_vec()),
            ];
            for (key, kind, value) in fields {
                part.extend((key.len() as u64).to_le_bytes());
                part.extend(key.as_bytes());
                part.extend(kind.to_le_bytes());
                part.extend(value);
            }
            let mut data = Vec::new();
            for tensor in own {
                part.extend((tensor.name.len() as u64).to_le_bytes());
                part.extend(tensor.name.as_bytes());
                part.extend((tensor.shape.len() as u32).to_le_bytes());
                tensor.shape.iter().rev().for_each(|size| part.extend((*size as u64).to_le_bytes()));
                // The type stands behind the sizes in the original, too.
                let place = bytes[list..]
                    .windows(tensor.name.len())
                    .position(|window| window == tensor.name.as_bytes());
                let kind = list + place.unwrap() + tensor.name.len() + 4 + 8 * tensor.shape.len();
                part.extend(&bytes[kind..kind + 4]);
                part.extend((data.len() as u64).to_le_bytes());
                data.extend(&bytes[tensor.offset..tensor.offset + tensor.bytes.unwrap()]);
                data.resize(data.len().next_multiple_of(ALIGNMENT), 0);
            }
            part.resize(part.len().next_multiple_of(ALIGNMENT), 0);
            part.extend(data);
            let path = folder.join(format!("m-{:05}-of-{parts:05}.gguf", number + 1));
            fs::write(&path, part).unwrap();
            path
        })
        .collect()
}

#[rstest]
#[case(2)]
#[case(4)]
fn a_model_in_parts_is_the_model(#[case] parts: usize) {
    let folder = tempfile::tempdir().unwrap();
    let paths = split(folder.path(), "smollm2_q4_1", parts);
    let whole = Model::open(fixtures::gguf("smollm2_q4_1")).unwrap();
    for path in paths.iter().map(PathBuf::as_path).chain([folder.path()]) {
        let model = Model::open(path).unwrap();
        assert_eq!(model.config(), whole.config());
        assert!(model.tokenizer().is_some() && model.chat_template().is_ok());
        for name in whole.weights().names() {
            let kind = whole.weights().tensor_type(name).unwrap();
            assert_eq!(model.weights().tensor_type(name).unwrap(), kind);
            let rows = kind.rows();
            let read = |model: &Model| model.weights().rows(name, 0, rows).unwrap().into_owned();
            assert_eq!(read(&model), read(&whole), "{name}");
        }
    }
}

#[test]
fn parts_that_are_missing_or_mixed_up_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let paths = split(folder.path(), "smollm2_q4_1", 3);
    let error = |path: &Path| Model::open(path).err().unwrap().to_string();

    fs::copy(&paths[1], folder.path().join("kept")).unwrap();
    fs::copy(&paths[2], &paths[1]).unwrap();
    let message = error(&paths[0]);
    assert!(message.contains("split.no is 2, but must be 1"), "{message}");

    fs::remove_file(&paths[1]).unwrap();
    let message = error(&paths[2]);
    assert!(message.contains("m-00002-of-00003.gguf is missing"), "{message}");

    let alone = folder.path().join("alone.gguf");
    fs::copy(&paths[0], &alone).unwrap();
    let message = error(&alone);
    assert!(message.contains("one of 3 parts") && message.contains("00001-of-00003"), "{message}");
}
