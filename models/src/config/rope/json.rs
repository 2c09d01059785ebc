//! Reads rotary embeddings from `config.json`.

use super::{
    super::{
        ConfigError, DecoderConfig, Result,
        fields::{Fields, shortened},
        limits,
    },
    BETA_FAST, BETA_SLOW, Rope, RopeScaling, RopesByKind, long_attention_factor, yarn_attention_factor,
    yarn_gain,
};
use dsrun_core::op::RopePairing;

/// The fields that a table may have; each kind of scaling reads some of them.
const KNOWN: [&str; 14] = [
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "short_factor",
    "long_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "truncate",
];

/// The gains that tables of some families have besides.
pub(crate) const GAINS: &[&str] = &["mscale", "mscale_all_dim", "short_mscale", "long_mscale"];

/// The facts about a model that reading its rotary embedding depends on.
#[derive(Clone, Debug)]
pub(crate) struct RopeDefaults {
    pub(crate) architecture: &'static str,
    pub(crate) head_dim: usize,
    pub(crate) context: usize,
    /// The base if no field holds one.
    pub(crate) theta: f64,
    /// The context length of the pre-training, in families that have a separate field for it.
    pub(crate) original_context: Option<usize>,
    /// The part of each head that is rotated if no field says; `None` in families that rotate whole heads only.
    pub(crate) partial: Option<f64>,
    /// The fields that a table may have besides those that all families have.
    pub(crate) more: &'static [&'static str],
    /// The scaling if there is no table.
    pub(crate) scaling: Option<RopeScaling>,
}

impl RopeDefaults {
    /// Returns the defaults of most families: whole heads, a base of 10000.
    pub(crate) fn of(config: &DecoderConfig) -> Self {
        let DecoderConfig { architecture, head_dim, context, .. } = *config;
        Self {
            architecture,
            head_dim,
            context,
            theta: 10_000.0,
            original_context: None,
            partial: None,
            more: &[],
            scaling: None,
        }
    }
}

/// Reads the rotary embedding of a model that has the same one in all layers.
///
/// There are two spellings: `rope_theta` beside the table `rope_scaling`, and the table `rope_parameters`, which holds
/// everything. A `rope_scaling` that is not empty replaces `rope_parameters`, and a theta inside the table wins over the one
/// beside it.
pub(crate) fn read(fields: &Fields<'_>, defaults: RopeDefaults) -> Result<Rope> {
    let theta = fields.positive("rope_theta")?.unwrap_or(defaults.theta);
    let part = rotated_part(fields, &defaults)?.or(defaults.partial).unwrap_or(1.0);
    of_table(table(fields)?, theta, part, &defaults)
}

/// Returns the table of a model that has the same rotary embedding in all layers.
pub(crate) fn table<'a>(fields: &Fields<'a>) -> Result<Option<Fields<'a>>> {
    let (scaling, parameters) = (fields.object("rope_scaling")?, fields.object("rope_parameters")?);
    Ok(scaling.or(parameters))
}

impl RopesByKind {
    /// Reads the rotary embeddings of a model that has one per kind of attention.
    ///
    /// There are two spellings: `rope_parameters` with one table per kind; or `rope_theta` and `rope_scaling` for full
    /// attention, and `sliding_theta` for layers with a sliding window, which defaults to the same theta.
    pub(crate) fn read(
        fields: &Fields<'_>,
        sliding_theta: Option<f64>,
        defaults: RopeDefaults,
    ) -> Result<Self> {
        let theta = fields.positive("rope_theta")?.unwrap_or(defaults.theta);
        let (scaling, parameters) = (fields.object("rope_scaling")?, fields.object("rope_parameters")?);
        let [full, sliding] = match (scaling, parameters) {
            (Some(_), Some(_)) => {
                let [first, second] = ["rope_scaling", "rope_parameters"].map(|field| fields.path(field));
                return Err(ConfigError::Contradiction { first, second });
            }
            (None, Some(tables)) => {
                let kinds = [tables.object("full_attention")?, tables.object("sliding_attention")?];
                tables.refuse_unread(defaults.architecture, |_, _| false)?;
                kinds
            }
            (scaling, None) => [scaling, None],
        };
        let full = of_table(full, theta, 1.0, &defaults)?;
        let sliding = of_table(sliding, sliding_theta.unwrap_or(theta), 1.0, &defaults)?;
        Ok(Self { full, sliding })
    }
}

/// Reads a table; `theta` and `part` are the values of the fields beside it.
fn of_table(table: Option<Fields<'_>>, theta: f64, part: f64, defaults: &RopeDefaults) -> Result<Rope> {
    let rotated = |part: f64| (defaults.head_dim as f64 * part) as usize;
    let Some(table) = table else {
        let scale = match &defaults.scaling {
            Some(RopeScaling::Yarn { factor, .. }) => yarn_attention_factor(*factor) as f32,
            _ => 1.0,
        };
        let scaling = defaults.scaling.clone().unwrap_or(RopeScaling::None);
        let plain = Rope::plain(theta, defaults.head_dim);
        return Ok(Rope { dimensions: rotated(part), scaling, scale, ..plain });
    };
    let kind = kind(&table)?;
    let known = |field: &str| KNOWN.contains(&field) || defaults.more.contains(&field);
    table.refuse_unread(defaults.architecture, |field, _| known(field))?;
    let theta = table.positive("rope_theta")?.unwrap_or(theta);
    let dimensions = rotated(rotated_part(&table, defaults)?.unwrap_or(part));
    let original_context = || match defaults.original_context {
        Some(original) => Ok(original),
        None => {
            let original = table.size("original_max_position_embeddings", 1, limits::CONTEXT)?;
            Ok(original.unwrap_or(defaults.context))
        }
    };
    let attention_factor =
        |default: f64| -> Result<f32> { Ok(table.positive("attention_factor")?.unwrap_or(default) as f32) };
    let (scaling, scale) = match kind {
        Kind::Default => (RopeScaling::None, 1.0),
        Kind::Linear => (RopeScaling::Linear { factor: table.required_positive("factor")? }, 1.0),
        Kind::Llama3 => {
            let scaling = RopeScaling::Llama3 {
                factor: table.required_positive("factor")?,
                low_frequency_factor: table.required_positive("low_freq_factor")?,
                high_frequency_factor: table.required_positive("high_freq_factor")?,
                original_context: original_context()?,
            };
            (scaling, 1.0)
        }
        Kind::Yarn => {
            let factor = table.required_positive("factor")?;
            let scaling = RopeScaling::Yarn {
                factor,
                beta_fast: table.positive("beta_fast")?.unwrap_or(BETA_FAST),
                beta_slow: table.positive("beta_slow")?.unwrap_or(BETA_SLOW),
                truncate: table.flag("truncate")?.unwrap_or(true),
                original_context: original_context()?,
            };
            (scaling, attention_factor(table_attention_factor(&table, factor)?)?)
        }
        Kind::Long => {
            let (pairs, original_context) = (dimensions / 2, original_context()?);
            let ratio = defaults.context as f64 / original_context as f64;
            let factor = table.positive("factor")?.unwrap_or(ratio);
            let scaling = RopeScaling::Long {
                short: table.required_list("short_factor", pairs)?,
                long: table.required_list("long_factor", pairs)?,
                original_context,
            };
            let factor = long_attention_factor(factor, original_context);
            (scaling, attention_factor(common_mscale(&table)?.unwrap_or(factor))?)
        }
    };
    Ok(Rope { theta, dimensions, scaling, pairing: RopePairing::Halves, scale })
}

/// The default attention factor of YaRN in a table that may have two numbers of which it is the quotient.
fn table_attention_factor(table: &Fields<'_>, factor: f64) -> Result<f64> {
    Ok(match (gain(table, "mscale")?, gain(table, "mscale_all_dim")?) {
        (Some(own), Some(all)) => yarn_gain(factor, own) / yarn_gain(factor, all),
        _ => yarn_attention_factor(factor),
    })
}

/// Reads a gain of YaRN, a number from 0 on; 0 stands for none.
fn gain(table: &Fields<'_>, field: &str) -> Result<Option<f64>> {
    let zero = table.value(field).and_then(|value| value.as_f64()) == Some(0.0);
    if zero { Ok(None) } else { table.positive(field) }
}

/// Returns the factor of attention scores that DeepSeek derives from the scaling of its rotary embedding: the square of the gain
/// `mscale_all_dim`.
pub(crate) fn score_factor(fields: &Fields<'_>) -> Result<f64> {
    let Some(table) = table(fields)? else { return Ok(1.0) };
    if matches!(kind(&table)?, Kind::Default) {
        return Ok(1.0);
    }
    let gain =
        gain(&table, "mscale_all_dim")?.map(|gain| Ok(yarn_gain(table.required_positive("factor")?, gain)));
    Ok(gain.transpose()?.map_or(1.0, |gain: f64| gain * gain))
}

/// Reads the attention factors of short and of long texts, which Phi-3.5-MoE has in its table and which must be the same.
fn common_mscale(table: &Fields<'_>) -> Result<Option<f64>> {
    match (table.positive("short_mscale")?, table.positive("long_mscale")?) {
        (Some(short), Some(long)) if short != long => {
            let reason = format!("it must be {short} (short_mscale): texts of all lengths share their keys");
            Err(ConfigError::unsupported(table.path("long_mscale"), long, reason))
        }
        (Some(_), None) => Err(ConfigError::Missing { field: table.path("long_mscale") }),
        (None, Some(_)) => Err(ConfigError::Missing { field: table.path("short_mscale") }),
        (short, _) => Ok(short),
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Default,
    Linear,
    Llama3,
    Yarn,
    Long,
}

/// Reads the kind of scaling. If a table has both of its names, they must agree.
fn kind(table: &Fields<'_>) -> Result<Kind> {
    let (new, old) = (table.text("rope_type")?, table.text("type")?);
    if let (Some(new), Some(old)) = (new, old)
        && new != old
    {
        return Err(ConfigError::Contradiction {
            first: format!("{} = \"{new}\"", table.path("rope_type")),
            second: format!("{} = \"{old}\"", table.path("type")),
        });
    }
    match new.or(old) {
        None | Some("default") => Ok(Kind::Default),
        Some("linear") => Ok(Kind::Linear),
        Some("llama3") => Ok(Kind::Llama3),
        // The first revisions of Phi-3 use other names for LongRoPE.
        Some("longrope" | "su") => Ok(Kind::Long),
        Some("yarn") if table.value("long_factor").is_some() => Ok(Kind::Long),
        Some("yarn") => Ok(Kind::Yarn),
        Some(other) => {
            let field = table.path(if new.is_some() { "rope_type" } else { "type" });
            let reason = "rotary embeddings can be scaled as default, linear, llama3, yarn or longrope";
            Err(ConfigError::unsupported(field, shortened(&other.into()), reason))
        }
    }
}

/// Reads which part of each head is rotated.
fn rotated_part(fields: &Fields<'_>, defaults: &RopeDefaults) -> Result<Option<f64>> {
    let part = fields.positive("partial_rotary_factor")?;
    match part {
        Some(factor) if factor != 1.0 && defaults.partial.is_none() => {
            let reason = format!("{} rotates whole heads (1)", defaults.architecture);
            Err(ConfigError::unsupported(fields.path("partial_rotary_factor"), factor, reason))
        }
        Some(factor) if factor > 1.0 => {
            Err(ConfigError::value(fields.path("partial_rotary_factor"), factor, "above 0 and at most 1"))
        }
        part => Ok(part),
    }
}
