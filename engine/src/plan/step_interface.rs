//! The interface between the engine and programs: named sizes, segments, inputs, outputs and states.
//!
//! Programs name these by strings, which [`dsrun_models::step`] defines. The engine parses each name once, when it lays out a
//! step, and then uses the enums of this module.

use dsrun_core::{
    Size,
    program::{Origin, Program, Value, ValueId},
};
use dsrun_models::step::{ENCODER_OUTPUTS, OUTPUTS, TOKEN_TYPES};

/// Declares an enum whose variants each stand for a name in programs.
macro_rules! names {
    ($(#[$attribute:meta])* enum $type:ident { $($(#[$documentation:meta])* $variant:ident = $name:literal,)* }) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
        pub(crate) enum $type {
            $($(#[$documentation])* $variant,)*
        }

        impl $type {
            /// Every variant, in the order of the declaration.
            pub(crate) const ALL: [Self; [$(Self::$variant),*].len()] = [$(Self::$variant),*];

            /// The name in programs.
            pub(crate) const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }

            /// The variant with this name.
            pub(crate) fn from_name(name: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|known| known.name() == name)
            }
        }
    };
}

names! {
    /// A size that a step is compiled for.
    enum StepSize {
        /// Tokens of the step.
        Tokens = "tokens",
        /// Sequences of the step.
        Sequences = "sequences",
        /// Output rows of the step: rows whose logits are needed.
        Rows = "rows",
        /// Rows of the request table.
        Requests = "requests",
        /// Pages that one request can have.
        Blocks = "blocks",
        /// Pages of the KV cache.
        Pages = "pages",
        /// Tokens that finish a request.
        StopIds = "stop_ids",
    }
}

impl StepSize {
    /// The size of a tensor's first dimension, if it has a name.
    pub(crate) fn of_rows(value: &Value) -> Option<Self> {
        value.tensor_type()?.shape.first().and_then(Size::symbol).and_then(Self::from_name)
    }
}

names! {
    /// A segment: a part of a step that is launched as one.
    enum StepSegment {
        /// All layers, up to the logits of the output rows.
        Forward = "forward",
        /// The hidden states of all tokens.
        Embed = "embed",
        /// Samples a token for each output row.
        Sample = "sample",
        /// As `Sample`, with a bias and a mask of allowed tokens.
        SampleLimited = "sample_limited",
    }
}

/// Segments that are launched together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct SegmentSet(u8);

impl SegmentSet {
    /// The set of these segments.
    pub(crate) const fn new(segments: &[StepSegment]) -> Self {
        let (mut bits, mut index) = (0, 0);
        while index < segments.len() {
            bits |= 1 << segments[index] as u8;
            index += 1;
        }
        Self(bits)
    }

    /// Whether a segment is one of the set.
    pub(crate) const fn contains(self, segment: StepSegment) -> bool {
        self.0 & (1 << segment as u8) != 0
    }

    /// A name for people.
    pub(crate) fn label(self) -> &'static str {
        match self.contains(StepSegment::Forward) && self.contains(StepSegment::Sample) {
            true => "forward and sample",
            false => self.iter().next().map_or("nothing", StepSegment::name),
        }
    }

    /// The segments of the set, in the order of a step.
    pub(crate) fn iter(self) -> impl Iterator<Item = StepSegment> {
        StepSegment::ALL.into_iter().filter(move |segment| self.contains(*segment))
    }
}

names! {
    /// An input that the host uploads before a step.
    enum StepInput {
        /// The row of the request table of each sequence; -1 marks a padding sequence.
        Requests = "step_request",
        /// The number of tokens of each sequence.
        Lengths = "step_length",
        /// Where the tokens of each sequence start in `PromptIds`; -1 stands for the token that was sampled last.
        Sources = "step_source",
        /// Tokens that the host sends.
        PromptIds = "prompt_ids",
        /// The output rows.
        Rows = "rows",
        /// The request that each output row samples for; -1 if only its logits are needed.
        RowRequests = "row_request",
        /// The request whose last token on the device is set to the sampled one; -1 if the token is only reported.
        CommitRequests = "commit_request",
        /// Where the output rows of each sequence start in `Rows`.
        RowStarts = "wanted_start",
        /// The number of output rows of each sequence.
        RowLengths = "wanted_length",
        /// The position of each token in its sequence, in encoders.
        Positions = "step_positions",
        /// The part of its sequence that each token belongs to, in encoders.
        TokenTypes = "step_token_types",
        /// Where the tokens of each sequence start, in encoders.
        Starts = "step_start",
        /// Tokens that may be sampled, as bits. The last input: it is uploaded only where a segment reads it.
        Mask = "mask",
    }
}

names! {
    /// An output that the host reads after a segment.
    enum StepOutput {
        /// The logits of the output rows.
        Logits = "logits",
        /// The hidden states of all tokens.
        Hidden = "hidden",
        /// The logits that `Sample` draws from.
        Processed = "processed",
        /// The tokens that `Sample` drew.
        Ids = "ids",
        /// The logarithms of their probabilities.
        LogProbabilities = "log_probability",
        /// The logits that `SampleLimited` draws from.
        LimitedProcessed = "limited_processed",
        /// The tokens that `SampleLimited` drew.
        LimitedIds = "limited_ids",
        /// The logarithms of their probabilities.
        LimitedLogProbabilities = "limited_log_probability",
        /// The scores that the classification head of an encoder computes for the output rows.
        Scores = "scores",
    }
}

/// Whether a program is that of an encoder.
pub(crate) fn is_encoder(program: &Program) -> bool {
    program.values_from(|origin| *origin == Origin::Input).any(|(_, value)| value.name == TOKEN_TYPES)
}

impl StepOutput {
    /// The output's value in a program, if the program has it: a stage of a pipeline that does not sample has none.
    pub(crate) fn value(self, program: &Program) -> Option<ValueId> {
        let samples = program.segments.iter().any(|segment| segment.name == StepSegment::Sample.name());
        let outputs: &[&str] = match samples {
            true => &OUTPUTS,
            false if is_encoder(program) => &ENCODER_OUTPUTS,
            false => return None,
        };
        let index = outputs.iter().position(|name| Self::from_name(name) == Some(self))?;
        program.outputs.get(index).copied()
    }
}

names! {
    /// A state that the host writes: a column of the request table, or a separate vector.
    enum StepState {
        /// Tokens of each request in the KV cache.
        Length = "length",
        /// Sampling parameters of each request.
        Parameters = "parameters",
        /// Seeds of each request.
        Seeds = "seeds",
        /// Pages of each request.
        BlockTable = "block_table",
        /// The token of each request that was sampled last.
        LastToken = "last_token",
        /// How often each token occurred in each request, for penalties.
        Counts = "counts",
        /// The bias on the logits of each request.
        Bias = "bias",
        /// Tokens that finish a request.
        StopIds = "stop_ids",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsrun_models::step::WANTED;

    #[test]
    fn every_output_and_range_of_output_rows_is_one_of_the_models() {
        for output in StepOutput::ALL {
            let names = OUTPUTS.iter().chain(&ENCODER_OUTPUTS);
            assert!(names.into_iter().any(|name| *name == output.name()), "{}", output.name());
        }
        assert_eq!([StepInput::RowStarts, StepInput::RowLengths].map(StepInput::name), WANTED);
        assert_eq!(StepInput::TokenTypes.name(), TOKEN_TYPES);
    }

    #[test]
    fn names_are_parsed_back() {
        assert_eq!(StepSegment::from_name("sample_limited"), Some(StepSegment::SampleLimited));
        assert_eq!(StepSegment::from_name("samples"), None);
        assert!(StepInput::ALL.iter().all(|input| StepInput::from_name(input.name()) == Some(*input)));
    }

    #[test]
    fn a_set_holds_its_segments_in_the_order_of_a_step() {
        let set = SegmentSet::new(&[StepSegment::Sample, StepSegment::Forward]);
        assert_eq!(set.iter().collect::<Vec<_>>(), [StepSegment::Forward, StepSegment::Sample]);
        assert!(!set.contains(StepSegment::Embed));
    }
}
