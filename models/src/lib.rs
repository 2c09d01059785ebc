//! Models of dsrun: from files to programs, and from text to tokens and back.
//!
//! [`model::Model`] is the way in: it opens a GGUF file or a folder of safetensors files, checks that every weight is
//! there, and builds the [`dsrun_core::program::Program`] that an engine compiles.
//!
//! | module | holds |
//! |---|---|
//! | [`fetch`] | names of models to files on this machine |
//! | [`model`] | an opened model: configuration, weights, tokenizer, program |
//! | [`config`] | what a model is, from `config.json` or GGUF metadata |
//! | [`presets`] | configurations of well-known models |
//! | [`step`] | the part of a program that all models share; of decoders request table, KV cache, sampling |
//! | `families` | a file for each model family: where adding a model starts |
//! | `layers` | what families write their layers with |
//! | [`weights`] | named tensors and expressions over them; random weights |
//! | [`gguf`], [`safetensors_file`] | the file formats |
//! | [`quantised`] | checkpoints in the layouts of GPTQ, AWQ and compressed-tensors |
//! | [`export`] | writing a model as a folder that others open |
//! | [`tokenizer`], [`chat`], [`stop`] | text to tokens and back, conversations, where a text ends |
//! | [`generation`] | how a model wants to be sampled |
//! | [`sentence_transformers`] | how a model embeds texts |

pub mod chat;
pub mod config;
mod declare;
mod error;
pub mod export;
mod families;
pub mod fetch;
pub mod generation;
pub mod gguf;
mod guarded;
mod layers;
pub mod model;
pub mod presets;
pub mod quantised;
pub mod safetensors_file;
pub mod sentence_transformers;
pub mod step;
pub mod stop;
mod tensor_names;
pub mod tokenizer;
pub mod weights;
