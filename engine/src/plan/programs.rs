//! Builds the programs of an engine's steps from a model: quantised, fused and pruned.

use super::{
    bucket::{Bucket, FixedSizes},
    calls::describe_call,
    host_caches::{caches, reads_caches_in_place},
    mesh_rank::MeshRank,
};
use crate::{
    error::{EngineError, Result},
    options::{CachePrecision, EngineOptions},
    passes::{
        Merger, fuse, prune_unused_rows,
        quantize::{Calibration, Policy, quantize, quantize_inputs, smooth},
        size_work_lists,
    },
};
use dsrun_core::{
    DType, Error, WeightExpr, WeightReader,
    device::Device,
    kernels::cache_support,
    op::Profile,
    program::{Call, Program},
};
use dsrun_models::{
    model::Model,
    step::{ProgramOptions, Storage},
    weights::ExprReader,
};
use std::{collections::HashMap, sync::Arc};

/// The programs of an engine's steps, after all passes. They have the same weights and states.
#[derive(Debug)]
pub(crate) struct StepPrograms {
    /// For steps in which every row is an output row, that is, decode-only steps.
    all_rows: Arc<Program>,
    /// For all other steps: computes the end of the last layer for the output rows only.
    pruned: Arc<Program>,
    /// Merge the calls of [`Self::all_rows`] and [`Self::pruned`] into larger regions, which depend on the size of the step; `None` if
    /// calls must not be merged. They keep the answers of the device, which is the same in every call.
    mergers: Option<[Merger; 2]>,
    /// The groups that collectives run over, if the programs are those of a rank.
    mesh: Option<MeshRank>,
    /// The layer of each weight that may be streamed, by the name of the weight; empty if none is.
    layers: HashMap<String, usize>,
    /// The largest number of tokens of a step that reads these weights in host memory.
    most_tokens_in_place: usize,
    /// The layer of each cache that may be in host memory, by the name of the cache; empty if none is.
    caches: HashMap<String, usize>,
}

impl StepPrograms {
    /// Builds a model's program and quantises it as the options ask. Activations have the preferred type of the device unless the
    /// options name one.
    ///
    /// # Errors
    /// If the model cannot be built, a weight does not fit its format, or the device or the model refuses the type of the KV cache.
    pub(crate) fn quantized(
        model: &Model,
        device: &DeviceNumbers,
        options: &EngineOptions,
    ) -> Result<Program> {
        check_cache(model, device, options)?;
        let activation = options.precision.dtype().unwrap_or(device.preferred);
        // 16 bits halve the cache and the time to read it.
        let keep = options.exact || options.precision.dtype().is_some() || activation != DType::F32;
        let cache = if keep || !device.has_f16 { activation } else { DType::F16 };
        let program = model.program(&ProgramOptions {
            activation,
            storage: options.precision.dtype().map_or(Storage::Keep, Storage::Cast),
            cache: options.kv_precision.dtype().unwrap_or(cache),
            block_size: options.block_size as u32,
            context: Some(options.rope_context(model.config().context)),
        })?;
        let program = quantized(&program, model, options)?;
        if options.exact || !device.quantises_inputs {
            return Ok(program);
        }
        Ok(quantize_inputs(&program).map_err(|error| error.in_op("quantize"))?)
    }

    /// Applies the passes for a device to a quantised program. With `mesh` it is the program of one rank.
    ///
    /// # Errors
    /// If the device refuses a query.
    pub(crate) fn build(
        mut program: Program,
        device: &dyn Device,
        options: &EngineOptions,
        limits: Bucket,
        fixed: FixedSizes,
        mesh: Option<MeshRank>,
    ) -> Result<Self> {
        size_work_lists(&mut program, device, &limits.sizes(fixed))?;
        if options.fuse {
            program =
                fuse_for_device(&program, device, options.batch_invariant, limits, fixed, mesh.as_ref())?;
        }
        let pruned = Arc::new(prune_unused_rows(&program)?);
        let all_rows = Arc::new(program);
        // A region may keep an intermediate value unrounded, so different regions in different steps would give different bits.
        let merges = options.fuse && !options.batch_invariant;
        let merger = |program: &Arc<Program>| Merger::new(program.clone());
        let mergers = if merges { Some([merger(&all_rows)?, merger(&pruned)?]) } else { None };
        Ok(Self {
            all_rows,
            pruned,
            mergers,
            mesh,
            layers: HashMap::new(),
            most_tokens_in_place: 0,
            caches: HashMap::new(),
        })
    }

    /// The program that a device runs for the steps of a bucket: that of [`Self::of`], with neighbouring calls
    /// [merged](Merger) into the regions that the device has kernels for at these sizes. The device is the one that the programs were
    /// built for: its earlier answers are used.
    ///
    /// # Errors
    /// If the device refuses a query.
    pub(crate) fn merged(
        &self,
        device: &dyn Device,
        bucket: Bucket,
        fixed: FixedSizes,
    ) -> Result<Arc<Program>> {
        let Some([all_rows, pruned]) = &self.mergers else { return Ok(self.of(bucket).clone()) };
        let sizes = bucket.sizes(fixed);
        // A rank with a launch of its own for some collectives would wait for ranks without.
        let alike = |call: &Call| {
            let axis = call.op.mesh_axis();
            axis.is_none_or(|axis| self.mesh().is_some_and(|mesh| mesh.decides_for_all(axis)))
        };
        // Other ranks may stream other layers, or none.
        let weights_in_place = bucket.tokens <= self.most_tokens_in_place;
        let may_span = |call: &Call| weights_in_place && call.op.mesh_axis().is_none();
        let caches_in_place = self.caches.is_empty() || reads_caches_in_place(bucket);
        let mut native = |program: &Program, call: &Call| {
            Ok(alike(call)
                && (may_span(call) || self.is_in_one_layer(program, call)?)
                && (caches_in_place || self.has_one_cache(program, call)?)
                && device.kernels().query(&describe_call(program, call, &sizes, self.mesh())?)?.native)
        };
        let merger = if bucket.all_rows { all_rows } else { pruned };
        Ok(merger.merge(&sizes, &[weights_in_place, caches_in_place], &mut native)?)
    }

    /// Prevents regions that read weights of several layers, because the weights of streamed layers are not on the device at the
    /// same time. `layers` has the layer of each weight, by name. Steps of at most `most_tokens_in_place` tokens may have such regions:
    /// they read the weights where they are.
    pub(super) fn keep_layers_apart(&mut self, layers: HashMap<String, usize>, most_tokens_in_place: usize) {
        (self.layers, self.most_tokens_in_place) = (layers, most_tokens_in_place);
        self.forget_answers();
    }

    /// Prevents regions with the caches of several layers in steps that copy caches from host memory, because those are not on the device
    /// at the same time. `caches` has the layer of each cache, by name.
    pub(super) fn keep_caches_apart(&mut self, caches: HashMap<String, usize>) {
        self.caches = caches;
        self.forget_answers();
    }

    /// Drops the answers about regions, which were given under other conditions.
    fn forget_answers(&mut self) {
        self.mergers.iter_mut().flatten().for_each(Merger::forget);
    }

    /// Whether a call uses the caches of at most one layer.
    fn has_one_cache(&self, program: &Program, call: &Call) -> Result<bool, Error> {
        let mut layers = caches(program, call)?.into_iter().filter_map(|value| self.caches.get(&value.name));
        let first = layers.next();
        Ok(layers.all(|layer| Some(layer) == first))
    }

    /// Whether a call reads streamable weights of at most one layer.
    fn is_in_one_layer(&self, program: &Program, call: &Call) -> Result<bool, Error> {
        let mut first = None;
        for id in call.operands.iter().flatten() {
            let Some(layer) = self.layers.get(&program.value(*id)?.name) else { continue };
            if *first.get_or_insert(layer) != layer {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The program of the steps of a bucket, before size-dependent merging.
    pub(crate) fn of(&self, bucket: Bucket) -> &Arc<Program> {
        if bucket.all_rows { &self.all_rows } else { &self.pruned }
    }

    /// The rank that the programs are for, if the model is split over several.
    pub(crate) fn mesh(&self) -> Option<&MeshRank> {
        self.mesh.as_ref()
    }

    /// The program of steps in which every row is an output row.
    pub(crate) fn all_rows(&self) -> &Arc<Program> {
        &self.all_rows
    }

    /// The program of all other steps.
    pub(crate) fn pruned(&self) -> &Arc<Program> {
        &self.pruned
    }
}

/// What a device says of the numbers it computes with, as far as programs depend on it.
#[derive(Clone, Debug)]
pub(crate) struct DeviceNumbers {
    /// The type of activations that the device computes best in.
    pub(crate) preferred: DType,
    /// Whether the device computes with f16.
    pub(crate) has_f16: bool,
    /// Whether the device multiplies quantised weights with activations that are quantised in groups.
    pub(crate) quantises_inputs: bool,
    /// Why the device does not keep the KV cache in i8; `None` if it does.
    pub(crate) no_i8_cache: Option<String>,
}

impl DeviceNumbers {
    /// Those of a device: the preferred type is the first of its list.
    ///
    /// # Errors
    /// If a query fails.
    pub(crate) fn of(device: &dyn Device) -> Result<Self> {
        let properties = device.properties();
        let i8_cache = cache_support(device.kernels(), DType::I8)?;
        Ok(Self {
            preferred: properties.dtypes.first().copied().unwrap_or(DType::F32),
            has_f16: properties.dtypes.contains(&DType::F16),
            quantises_inputs: properties.profiles.contains(&Profile::LlmQuant2),
            no_i8_cache: (!i8_cache.native).then_some(i8_cache.reason),
        })
    }
}

/// Checks that device and model can keep the KV cache in the type that the options ask for.
fn check_cache(model: &Model, device: &DeviceNumbers, options: &EngineOptions) -> Result<()> {
    if options.kv_precision != CachePrecision::Int8 || model.config().encoder.is_some() {
        return Ok(());
    }
    let refused = |rule: String| Err(EngineError::option("kv-dtype", "int8", rule));
    if let Some(reason) = &device.no_i8_cache {
        return refused(format!("must be keep, f32, bf16 or f16 on this device, which says: {reason}"));
    }
    if model.config().latent.is_some() {
        return refused("must be keep, f32, bf16 or f16 for models with latent attention (MLA)".into());
    }
    Ok(())
}

/// Quantises a program by the policy, smoothed first if the policy says so; without a policy as the checkpoint intends.
fn quantized(program: &Program, model: &Model, options: &EngineOptions) -> Result<Program> {
    let source = &**model.weights();
    let read = |expr: &WeightExpr| {
        let reader = ExprReader::new(source, expr)?;
        reader.decoded_rows(0, reader.weight_type().rows())
    };
    let in_pass = |error: Error| error.in_op("quantize");
    let (keep, unseen) = (Policy::default(), Calibration::default());
    let policy = options.quantize.as_ref().unwrap_or(&keep);
    let calibration = options.calibration.as_deref().unwrap_or(&unseen);
    let smoothed = smooth(program, policy, calibration, &read).map_err(in_pass)?;
    Ok(quantize(&smoothed, policy, &|tensor| source.quantises_inputs(tensor)).map_err(in_pass)?)
}

/// Fuses calls into regions that the device has kernels for in both the largest and the smallest step. With `invariant`, the
/// kernels must be batch-invariant, too.
fn fuse_for_device(
    program: &Program,
    device: &dyn Device,
    invariant: bool,
    limits: Bucket,
    fixed: FixedSizes,
    mesh: Option<&MeshRank>,
) -> Result<Program> {
    let smallest = Bucket { tokens: 1, sequences: 1, rows: 1, ..limits };
    let mut native = |program: &Program, call: &Call| {
        for bucket in [limits, smallest] {
            let desc = describe_call(program, call, &bucket.sizes(fixed), mesh)?;
            let support = device.kernels().query(&desc)?;
            if !support.native || (invariant && !support.batch_invariant) {
                return Ok(false);
            }
        }
        Ok(true)
    };
    Ok(fuse(program, &mut native)?)
}
