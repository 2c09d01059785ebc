//! Compute pipelines, created once per shader and constants and shared by all plans of a device handle.

use super::{context::Context, shader::Shader};
use dsrun_core::{Error, Result};
use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};
use wgpu::{
    Adapter, BindGroupLayout, BindGroupLayoutDescriptor, BindGroupLayoutEntry, BindingType,
    BufferBindingType, ComputePipeline, ComputePipelineDescriptor, Device, Features,
    PipelineCompilationOptions, PipelineLayoutDescriptor, ShaderModule, ShaderModuleDescriptor,
    ShaderRuntimeChecks, ShaderSource, ShaderStages,
};

/// The environment variable that keeps the bounds checks of loops and indices in shaders, for debugging.
const CHECKED: &str = "DSRUN_WGPU_CHECKED";

/// A compute pipeline and the layout of its bindings.
#[derive(Debug)]
pub(crate) struct Pipeline {
    pub(crate) pipeline: ComputePipeline,
    pub(crate) layout: BindGroupLayout,
}

/// A compiled shader, before its `override` constants are set.
#[derive(Clone)]
struct Module {
    module: ShaderModule,
    layout: BindGroupLayout,
}

type Key = (Shader, Vec<u32>);

/// The pipelines of a device handle.
pub(crate) struct Pipelines {
    modules: Mutex<HashMap<Shader, Module>>,
    pipelines: Mutex<HashMap<Key, Arc<Pipeline>>>,
    cache: Option<super::disk_cache::DiskCache>,
    checked: bool,
}

impl Pipelines {
    /// An empty set of pipelines, with the user's disk cache if the driver can use one.
    pub(crate) fn open(device: &Device, adapter: &Adapter, features: Features) -> Self {
        let cache = super::disk_cache::DiskCache::open(device, adapter, features);
        let checked = std::env::var_os(CHECKED).is_some_and(|value| value != "0");
        Self { modules: Mutex::default(), pipelines: Mutex::default(), cache, checked }
    }

    /// The pipeline of a shader with these values of its `override` constants.
    ///
    /// # Errors
    /// [`dsrun_core::Code::Internal`] if the driver refuses the shader.
    pub(crate) fn get(&self, context: &Context, shader: &Shader, values: &[u32]) -> Result<Arc<Pipeline>> {
        let key = (shader.clone(), values.to_vec());
        if let Some(known) = lock(&self.pipelines).get(&key) {
            return Ok(known.clone());
        }
        // Two threads may create the same pipeline concurrently; the first one is kept.
        let made = Arc::new(self.make(context, shader, values)?);
        Ok(lock(&self.pipelines).entry(key).or_insert(made).clone())
    }

    fn make(&self, context: &Context, shader: &Shader, values: &[u32]) -> Result<Pipeline> {
        let module = self.module(context, shader)?;
        let constants: Vec<(&str, f64)> =
            shader.overrides.iter().copied().zip(values.iter().copied().map(f64::from)).collect();
        let what = format!("compiling the shader `{}`", shader.entry);
        let pipeline = context.scoped(&what, || {
            let layout = context.device.create_pipeline_layout(&PipelineLayoutDescriptor {
                label: Some(shader.entry),
                bind_group_layouts: &[Some(&module.layout)],
                immediate_size: 0,
            });
            context.device.create_compute_pipeline(&ComputePipelineDescriptor {
                label: Some(shader.entry),
                layout: Some(&layout),
                module: &module.module,
                entry_point: Some(shader.entry),
                compilation_options: PipelineCompilationOptions {
                    constants: &constants,
                    zero_initialize_workgroup_memory: false,
                },
                cache: self.cache.as_ref().map(super::disk_cache::DiskCache::cache),
            })
        })?;
        if let Some(cache) = &self.cache {
            cache.note();
        }
        Ok(Pipeline { pipeline, layout: module.layout })
    }

    fn module(&self, context: &Context, shader: &Shader) -> Result<Module> {
        if let Some(known) = lock(&self.modules).get(shader) {
            return Ok(known.clone());
        }
        let source = shader.source();
        let layout = layout(context, shader)?;
        let descriptor = ShaderModuleDescriptor {
            label: Some(shader.entry),
            source: ShaderSource::Wgsl(source.as_str().into()),
        };
        let what = format!("parsing the shader `{}`", shader.entry);
        let module = context.scoped(&what, || {
            if self.checked {
                return context.device.create_shader_module(descriptor);
            }
            // SAFETY: the shaders are those of this crate. Each bounds its indices by the sizes of its tensors, which binding
            // has checked against the buffers, and its loops by sizes. `DSRUN_WGPU_CHECKED=1` keeps the checks, to find faults.
            unsafe {
                context.device.create_shader_module_trusted(descriptor, ShaderRuntimeChecks::unchecked())
            }
        });
        let module = module.inspect_err(|_| tracing::debug!(%source, "the source of the refused shader"))?;
        let made = Module { module, layout };
        Ok(lock(&self.modules).entry(shader.clone()).or_insert(made).clone())
    }
}

impl fmt::Debug for Pipelines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pipelines").field("pipelines", &lock(&self.pipelines).len()).finish_non_exhaustive()
    }
}

/// Locks a map, whose entries are complete whenever the lock is free.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The layout of a shader's bindings: its tensors, the extents, the parameters.
fn layout(context: &Context, shader: &Shader) -> Result<BindGroupLayout> {
    let storage = |read_only| BufferBindingType::Storage { read_only };
    let tensors = shader.bound().map(|tensor| storage(tensor.read_only));
    let extents = shader.has_extents().then(|| storage(false));
    let all: Vec<BufferBindingType> = tensors.chain(extents).chain([BufferBindingType::Uniform]).collect();
    let limit = context.spec.limits.max_storage_buffers_per_shader_stage as usize;
    if all.len() - 1 > limit {
        let message = format!("needs {} buffers, the adapter binds {limit}", all.len() - 1);
        return Err(Error::unsupported(message));
    }
    let entries: Vec<BindGroupLayoutEntry> = all
        .into_iter()
        .zip(0..)
        .map(|(kind, binding)| BindGroupLayoutEntry {
            binding,
            visibility: ShaderStages::COMPUTE,
            ty: BindingType::Buffer { ty: kind, has_dynamic_offset: false, min_binding_size: None },
            count: None,
        })
        .collect();
    let descriptor = BindGroupLayoutDescriptor { label: Some(shader.entry), entries: &entries };
    context.scoped("making a binding layout", || context.device.create_bind_group_layout(&descriptor))
}
