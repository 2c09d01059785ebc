//! Readers against truncated, corrupt and hostile files.
//!
//! Whatever a file holds, opening it and reading all of it gives values or an error that names the file. It never
//! panics, and never takes much more memory than the file is long, which a counting allocator watches.
//!
//! Three sources of bad files: every prefix of a good one, every number of a header set to the values most likely to
//! overflow, and 500 saved mutants per reader in `hostile/`. A line there says what the reader answers (`ok` or
//! `refused`) and the edits that make the mutant out of the good file, so a reader that starts to accept a file it
//! refused is noticed. After a change that is meant to, write them anew with
//! `cargo test -p dsrun-models --test hostile_files -- --ignored write_mutants`.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

#[path = "support/gguf_writer.rs"]
mod gguf_writer;
#[path = "support/mutants.rs"]
mod mutants;
#[path = "support/safetensors_writer.rs"]
mod safetensors_writer;

use dsrun_core::{WeightExpr, WeightReader};
use dsrun_models::gguf::GgufFile;
use dsrun_models::safetensors_file::SafetensorsFiles;
use dsrun_models::weights::{ExprReader, TensorSource};
use dsrun_test_support::counting_allocator::{Counting, peak_of};
use mutants::Mutant;
use rstest::rstest;
use std::path::{Path, PathBuf};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Memory that a reader may take for a file: fixed for buffers and messages, and a multiple of the file's length for
/// its tables. The dearest thing in a file is a safetensors tensor: about 60 bytes of text for about 500 of tables.
fn allowed_memory(file: usize) -> usize {
    16 * 1024 + 16 * file
}

/// Reads every row of every tensor, as it is stored and decoded.
fn read_weights(source: &dyn TensorSource) -> Result<(), String> {
    for name in source.names() {
        let weight_type = match source.tensor_type(name) {
            Ok(weight_type) => weight_type,
            Err(error) => {
                named(&error.to_string());
                continue;
            }
        };
        let mut reader =
            ExprReader::new(source, &WeightExpr::tensor(name)).map_err(|error| error.to_string())?;
        for row in 0..weight_type.rows() {
            let bytes = reader.rows(row, 1).map_err(|error| error.to_string())?.len();
            assert_eq!(bytes, weight_type.row_bytes().unwrap());
            let values = reader.decoded_rows(row, 1).map_err(|error| error.to_string())?;
            assert_eq!(values.len(), weight_type.columns());
        }
        source.release(name);
    }
    Ok(())
}

/// Every error names the file.
fn named(error: &str) {
    assert!(error.contains("file-at-hand") && error.len() < 1000, "{error}");
}

#[derive(Clone, Copy, Debug)]
enum Reader {
    Gguf,
    Safetensors,
    Index,
}

const INDEX: &str = r#"{"metadata":{"total_size":56},"weight_map":{"a":"file-at-hand.safetensors","b":"file-at-hand.safetensors",
"c":"file-at-hand.safetensors","g":"file-at-hand.safetensors"},"other":[1,2,{"x":null}]}"#;

impl Reader {
    /// The name of its mutants.
    fn name(self) -> &'static str {
        match self {
            Self::Gguf => "gguf",
            Self::Safetensors => "safetensors",
            Self::Index => "index",
        }
    }

    /// A good file.
    fn sample(self) -> Vec<u8> {
        match self {
            Self::Gguf => gguf_writer::sample().finish(),
            Self::Safetensors => safetensors_writer::sample(),
            Self::Index => INDEX.as_bytes().to_vec(),
        }
    }

    /// Opens a file and reads all of it.
    fn read(self, bytes: Vec<u8>, folder: &Path) -> Result<(), String> {
        match self {
            Self::Gguf => {
                let file = GgufFile::from_bytes("file-at-hand", bytes).map_err(|error| error.to_string())?;
                for (key, value) in file.metadata().iter() {
                    assert!(!format!("{key} = {value}").is_empty());
                    drop(file.metadata().get::<Vec<String>>(key).map_err(|error| named(&error.to_string())));
                }
                for error in [file.vocabulary().err(), file.chat_template().err()].into_iter().flatten() {
                    named(&error.to_string());
                }
                read_weights(&file)
            }
            Self::Safetensors => {
                let files =
                    SafetensorsFiles::from_bytes("file-at-hand", bytes).map_err(|error| error.to_string())?;
                assert!(files.metadata().all(|(key, value)| key.len() + value.len() < 10_000));
                read_weights(&files)
            }
            Self::Index => {
                let path = folder.join("file-at-hand.index.json");
                std::fs::write(&path, bytes).unwrap();
                let files = SafetensorsFiles::open(&path).map_err(|error| error.to_string())?;
                read_weights(&files)
            }
        }
    }

    /// The same, and checks memory and message.
    fn check(self, bytes: Vec<u8>, folder: &Path, what: &dyn std::fmt::Display) -> bool {
        // The shard that an index leads to counts too.
        let length =
            bytes.len() + if matches!(self, Self::Index) { safetensors_writer::sample().len() } else { 0 };
        let (result, peak) = peak_of(|| self.read(bytes, folder));
        assert!(peak <= allowed_memory(length), "{what}: {peak} bytes of memory for a file of {length}");
        if let Err(error) = &result {
            named(error);
        }
        result.is_ok()
    }
}

/// A folder with the shard that the index names.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("file-at-hand.safetensors"), safetensors_writer::sample()).unwrap();
    folder
}

#[rstest]
fn good_files_are_read(#[values(Reader::Gguf, Reader::Safetensors, Reader::Index)] reader: Reader) {
    assert!(reader.check(reader.sample(), folder().path(), &"the good file"));
}

#[rstest]
fn every_prefix_is_refused(#[values(Reader::Gguf, Reader::Safetensors, Reader::Index)] reader: Reader) {
    let (whole, folder) = (reader.sample(), folder());
    for length in 0..whole.len() {
        let accepted =
            reader.check(whole[..length].to_vec(), folder.path(), &format_args!("cut at {length}"));
        assert!(!accepted, "{reader:?} accepts the first {length} of {} bytes", whole.len());
    }
}

/// 0, 1, the largest, and those around which lengths and products overflow, in every number of the header.
#[test]
fn every_gguf_number() {
    const VALUES: [u64; 17] = [
        0,
        1,
        2,
        5,
        0x7F,
        0xFF,
        0xFFFF,
        0x7FFF_FFFF,
        0x8000_0000,
        0xFFFF_FFFF,
        1 << 32,
        1 << 56,
        1 << 61,
        i64::MAX as u64,
        1 << 63,
        u64::MAX - 31,
        u64::MAX,
    ];
    let mut writer = gguf_writer::sample();
    let whole = writer.finish();
    let folder = folder();
    let mut refused = 0;
    assert!(writer.fields.len() > 100);
    for field in &writer.fields {
        let place = field.offset..field.offset + field.width;
        for value in VALUES {
            let mut bytes = whole.clone();
            bytes[place.clone()].copy_from_slice(&value.to_le_bytes()[..field.width]);
            let what = format!("{} = {value}", field.label);
            let accepted = Reader::Gguf.check(bytes, folder.path(), &what);
            refused += usize::from(!accepted);
            let length =
                ["count", "length", "dimension", "offset"].iter().any(|word| field.label.contains(word));
            let huge = value >= 1 << 32 && field.width == 8;
            // Only the sizes of a tensor of unknown type are not followed into the file.
            assert!(
                !(accepted && length && huge && field.label != "dimension 0 of future"),
                "{what} is accepted"
            );
        }
    }
    assert!(refused > 1000, "{refused}");
}

/// The same in every number of a safetensors header, as text.
#[test]
fn every_safetensors_number() {
    const VALUES: [&str; 16] = [
        "0",
        "1",
        "2",
        "255",
        "4294967295",
        "4294967296",
        "1152921504606846976",
        "9223372036854775807",
        "9223372036854775808",
        "18446744073709551615",
        "18446744073709551616",
        "1e400",
        "-1",
        "0.5",
        "null",
        "[]",
    ];
    let (header, folder) = (safetensors_writer::SAMPLE_HEADER, folder());
    let data = &safetensors_writer::sample()[8 + header.len()..];
    let digits = |at: usize| header.as_bytes()[at].is_ascii_digit();
    // Numbers that stand in brackets, not digits of names of types.
    let starts: Vec<usize> = (1..header.len())
        .filter(|at| digits(*at) && matches!(header.as_bytes()[at - 1], b'[' | b','))
        .collect();
    assert_eq!(starts.len(), 2 * 7 + 10);
    for start in starts {
        let end = (start..).find(|at| !digits(*at)).unwrap();
        for value in VALUES {
            let changed = [&header[..start], value, &header[end..]].concat();
            let what = format!("{value} at {start} of the header");
            let accepted =
                Reader::Safetensors.check(safetensors_writer::file(&changed, data), folder.path(), &what);
            // The second size of a tensor whose first is 0 may be anything that a size may be.
            let free =
                header[..start].ends_with("[0,") && header[end..].starts_with("],\"data_offsets\":[53,53]");
            assert!(!accepted || free || value == &header[start..end], "{what} is accepted");
        }
    }
    for length in [0, 1, 2, 100_000_000, 100_000_001, i64::MAX as u64, u64::MAX - 7, u64::MAX] {
        let mut bytes = safetensors_writer::sample();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        assert!(!Reader::Safetensors.check(bytes, folder.path(), &format_args!("header length {length}")));
    }
}

/// Large files of the densest headers: what they cost in memory is seen only when there are many.
#[rstest]
#[case::safetensors_tensors(Reader::Safetensors, many_safetensors_tensors(20_000), true)]
#[case::safetensors_sizes(Reader::Safetensors, deep_shape(200_000), false)]
#[case::safetensors_texts(Reader::Safetensors, many_safetensors_texts(50_000), true)]
#[case::safetensors_nesting(Reader::Safetensors, nested_json(100_000), false)]
#[case::index_nesting(Reader::Index, "[".repeat(100_000).into_bytes(), false)]
#[case::index_tensors(Reader::Index, many_index_tensors(20_000), false)]
#[case::gguf_keys(Reader::Gguf, many_gguf_keys(50_000), true)]
#[case::gguf_tensors(Reader::Gguf, many_gguf_tensors(20_000), true)]
#[case::gguf_texts(Reader::Gguf, many_gguf_texts(100_000), true)]
#[case::gguf_long_name(Reader::Gguf, long_gguf_name(1_000_000), false)]
fn large_headers_cost_in_proportion(#[case] reader: Reader, #[case] bytes: Vec<u8>, #[case] accepted: bool) {
    assert_eq!(reader.check(bytes, folder().path(), &"a large file"), accepted);
}

fn many_safetensors_tensors(count: usize) -> Vec<u8> {
    let entry = |i| format!(r#""{i}":{{"dtype":"U8","shape":[],"data_offsets":[{i},{}]}}"#, i + 1);
    let entries: Vec<String> = (0..count).map(entry).collect();
    safetensors_writer::file(&format!("{{{}}}", entries.join(",")), &vec![0; count])
}

fn deep_shape(count: usize) -> Vec<u8> {
    let shape = vec!["1"; count].join(",");
    safetensors_writer::file(
        &format!(r#"{{"a":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,1]}}}}"#),
        &[0],
    )
}

fn many_safetensors_texts(count: usize) -> Vec<u8> {
    let entries: Vec<String> = (0..count).map(|i| format!(r#""{i}":"""#)).collect();
    safetensors_writer::file(&format!(r#"{{"__metadata__":{{{}}}}}"#, entries.join(",")), &[])
}

fn nested_json(depth: usize) -> Vec<u8> {
    safetensors_writer::file(&r#"{"a":"#.repeat(depth), &[])
}

fn many_index_tensors(count: usize) -> Vec<u8> {
    let entries: Vec<String> = (0..count).map(|i| format!(r#""{i}":"file-at-hand.safetensors""#)).collect();
    format!(r#"{{"weight_map":{{{}}}}}"#, entries.join(",")).into_bytes()
}

fn many_gguf_keys(count: usize) -> Vec<u8> {
    let mut writer = gguf_writer::Writer::new(3);
    for index in 0..count {
        writer.scalar(&index.to_string(), 0, &[1]);
    }
    writer.finish()
}

fn many_gguf_tensors(count: usize) -> Vec<u8> {
    let mut writer = gguf_writer::Writer::new(3);
    for index in 0..count {
        writer.tensor(&index.to_string(), &[1], 1, &[0; 2]);
    }
    writer.finish()
}

fn many_gguf_texts(count: usize) -> Vec<u8> {
    let mut writer = gguf_writer::Writer::new(3);
    writer.array("texts", 8, count as u64);
    writer.bytes.resize(writer.bytes.len() + 8 * count, 0);
    writer.finish()
}

fn long_gguf_name(length: usize) -> Vec<u8> {
    gguf_writer::Writer::new(3).tensor(&"n".repeat(length), &[0], 0, &[]).finish()
}

fn saved(reader: Reader) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/hostile/{}.mutants", reader.name()))
}

#[rstest]
fn saved_mutants(#[values(Reader::Gguf, Reader::Safetensors, Reader::Index)] reader: Reader) {
    let (whole, folder) = (reader.sample(), folder());
    let text = std::fs::read_to_string(saved(reader)).unwrap();
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(lines.len(), 500);
    for line in lines {
        let (verdict, edits) = line.split_once(' ').unwrap();
        let bytes = edits.parse::<Mutant>().unwrap().apply(&whole);
        let accepted = reader.check(bytes, folder.path(), &line);
        assert_eq!(if accepted { "ok" } else { "refused" }, verdict, "{line}");
    }
}

/// Writes the saved mutants anew.
#[rstest]
#[ignore = "overwrites the saved mutants"]
fn write_mutants(#[values(Reader::Gguf, Reader::Safetensors, Reader::Index)] reader: Reader) {
    let (whole, folder) = (reader.sample(), folder());
    let mut text = format!("# Mutants of the sample of hostile_files.rs for its {} reader.\n", reader.name());
    for seed in 0..500 {
        let mutant = Mutant::from_seed(seed, whole.len());
        let accepted = reader.check(mutant.apply(&whole), folder.path(), &mutant);
        text += &format!("{} {mutant}\n", if accepted { "ok" } else { "refused" });
    }
    std::fs::write(saved(reader), text).unwrap();
}
