//! The steps that only encoders have: token types, pooling, the classification head.

use super::Builder;
use crate::{
    config::{Classifier, Encoder},
    tensor_names::Part,
};
use dsrun_core::{
    Error, Result,
    op::Activation,
    program::{Program, ValueId},
};

impl Builder<'_> {
    /// The parts that only encoders have.
    fn encoder(&self) -> Result<Encoder> {
        self.config.encoder.ok_or_else(|| Error::internal("a decoder is built as an encoder"))
    }

    /// Whether the current layer is the first.
    pub(crate) fn is_first_layer(&self) -> bool {
        self.layer == 0
    }

    /// Looks up the embeddings of the tokens, adds those of their positions if `positions`, and those of their types if the model has
    /// any, and normalises the sum if the model does.
    pub(crate) fn embed_text(&mut self, table: ValueId, positions: bool) -> Result<ValueId> {
        let encoder = self.encoder()?;
        let mut x = if positions { self.embed_with_positions(table)? } else { self.embed(table)? };
        if encoder.token_types > 0 {
            let types = self.matrix(Part::TokenTypes)?;
            let types = self.step.embed_token_types(types)?;
            x = self.add(x, types, 1.0)?;
        }
        if encoder.embedding_norm { self.norm(x, Part::EmbeddingNorm) } else { Ok(x) }
    }

    /// Computes `norm(x + attention(x))`, then `norm(x + mlp(x))`: the layer of the original transformer.
    pub(crate) fn post_norm_layer(&mut self, x: ValueId) -> Result<ValueId> {
        let x = self.residual(x, |build, x| {
            let heads = build.heads(x)?;
            build.attend(heads)
        })?;
        let x = self.norm(x, Part::AttentionNorm)?;
        let x = self.residual(x, |build, x| build.mlp(x))?;
        self.norm(x, Part::MlpNorm)
    }

    /// Ends the program of an encoder, whose last layer gave `x`.
    pub(super) fn finish_encoder(mut self, x: ValueId) -> Result<Program> {
        let encoder = self.encoder()?;
        let hidden = match self.config.final_norm {
            true => self.norm(x, Part::FinalNorm)?,
            false => x,
        };
        let scores = encoder.classifier.map(|classifier| self.classify(hidden, classifier)).transpose()?;
        self.step.finish_encoder(hidden, scores)
    }

    /// Computes `classifier(norm(f(dense(x))))` of one row of each text that is to be classified.
    fn classify(&mut self, hidden: ValueId, classifier: Classifier) -> Result<ValueId> {
        let pooled = match classifier.mean {
            true => self.step.mean_of_sequence(hidden, self.config.heads)?,
            false => hidden,
        };
        let x = self.step.wanted(pooled)?;
        let x = self.linear(x, Part::Pooler)?;
        let activation = Activation { function: classifier.function, limit: 0.0 };
        let mut x = self.step.program.call(activation, [Some(x), None])?;
        if classifier.norm {
            x = self.norm(x, Part::PoolerNorm)?;
        }
        let (matrix, bias) = (self.matrix(Part::Classifier)?, self.bias(Part::Classifier)?);
        self.step.scores(x, matrix, bias)
    }
}
