//! Reads the sizes of latent attention from `config.json` and from the metadata of GGUF files.

use super::{
    ConfigError, Result,
    fields::Fields,
    gguf::Keys,
    latent::{Latent, LatentNames},
    limits,
};

/// The eps of the norms of latents, which no field holds.
const EPS: f32 = 1e-6;

/// Reads the sizes of latent attention from `config.json`, with the defaults of DeepSeek.
pub(crate) fn read(fields: &Fields<'_>) -> Result<Latent> {
    let names = LatentNames::HUGGING_FACE;
    let size = |field: &str, most: usize, default: usize| Ok(fields.size(field, 1, most)?.unwrap_or(default));
    let query_rank = fields.size(names.query_rank, 1, limits::HIDDEN)?;
    Ok(Latent {
        query_rank: query_rank.or((!fields.is_null(names.query_rank)).then_some(1536)),
        rank: size(names.rank, limits::HEAD_DIM, 512)?,
        plain: size(names.plain, limits::HEAD_DIM, 128)?,
        rotated: size(names.rotated, limits::HEAD_DIM, 64)?,
        value: size(names.value, limits::HEAD_DIM, 128)?,
        eps: EPS,
    })
}

/// Reads the sizes of latent attention from the metadata of a GGUF file, whose head size has been read.
pub(crate) fn from_gguf(keys: &Keys<'_>, head_dim: usize) -> Result<Latent> {
    let names = LatentNames::GGUF;
    let rotated = keys.required_size(names.rotated, limits::HEAD_DIM)?;
    let plain = head_dim.checked_sub(rotated).filter(|plain| *plain > 0).ok_or_else(|| {
        let expected = format!("below {head_dim} ({})", keys.path(names.plain));
        ConfigError::value(keys.path(names.rotated), rotated, expected)
    })?;
    let latent = Latent {
        query_rank: keys.size(names.query_rank, limits::HIDDEN)?,
        rank: keys.required_size(names.rank, limits::HEAD_DIM)?,
        plain,
        rotated,
        value: keys.required_size(names.value, limits::HEAD_DIM)?,
        eps: EPS,
    };
    // The sizes of the one cached head follow from the others.
    for (key, size) in [("attention.key_length", latent.cached()), ("attention.value_length", latent.rank)] {
        if let Some(found) = keys.size(key, limits::HEAD_DIM)?.filter(|found| *found != size) {
            let reason = format!("it must be {size}, as cached heads hold latents");
            return Err(ConfigError::unsupported(keys.path(key), found, reason));
        }
    }
    Ok(latent)
}
