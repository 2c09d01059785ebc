//! The adapters of this machine, and the features and limits of one.

use dsrun_core::{Code, Error, Result};
use std::{fmt, sync::OnceLock};
use wgpu::{
    Adapter, AdapterInfo, Backends, CooperativeScalarType, DeviceType, Features, Instance,
    InstanceDescriptor, Limits,
};

/// The environment variable that selects adapters by a part of their name. Without it, software adapters are only offered
/// if there is no hardware adapter.
pub(crate) const ADAPTER: &str = "DSRUN_WGPU_ADAPTER";

/// The environment variable that selects how products of many rows are computed: `0` never uses cooperative matrices, `emulated`
/// replaces them by loops. Without it, they are used if the adapter has them.
const MATRICES: &str = "DSRUN_WGPU_MATRICES";

/// Threads of a subgroup in kernels with cooperative matrices.
const MATRIX_LANES: u32 = 32;

/// The APIs that the backend uses.
const APIS: Backends = Backends::VULKAN.union(Backends::METAL).union(Backends::DX12);

/// The features required for timestamps between the commands of a command buffer.
const TIMESTAMPS: Features = Features::TIMESTAMP_QUERY.union(Features::TIMESTAMP_QUERY_INSIDE_ENCODERS);

/// The instance of the process. Creating one loads the drivers, which takes tens of milliseconds.
fn instance() -> &'static Instance {
    static INSTANCE: OnceLock<Instance> = OnceLock::new();
    INSTANCE.get_or_init(|| {
        let mut descriptor = InstanceDescriptor::new_without_display_handle();
        descriptor.backends = APIS;
        Instance::new(descriptor)
    })
}

/// Whether an adapter computes on the CPU.
pub(crate) fn is_software(info: &AdapterInfo) -> bool {
    info.device_type == DeviceType::Cpu
}

/// The name of an adapter with its API, and a remark if it computes on the CPU.
pub(crate) fn display_name(info: &AdapterInfo) -> String {
    let software = if is_software(info) { ", software" } else { "" };
    format!("{} ({:?}{software})", info.name, info.backend)
}

/// All adapters that compute, hardware first.
pub(crate) fn all() -> Vec<Adapter> {
    let mut adapters = pollster::block_on(instance().enumerate_adapters(APIS));
    adapters.sort_by_key(|adapter| is_software(&adapter.get_info()));
    adapters
}

/// The adapters that the backend offers as devices, in the order of their indices.
///
/// # Errors
/// [`Code::Unavailable`] if there is none, or none matches the requested name; the message lists the available ones.
pub(crate) fn offered() -> Result<Vec<Adapter>> {
    let wanted = std::env::var(ADAPTER).ok().filter(|name| !name.is_empty());
    let adapters = all();
    let names: Vec<String> = adapters.iter().map(|adapter| display_name(&adapter.get_info())).collect();
    if adapters.is_empty() {
        let message = "no adapter of Vulkan, Metal or Direct3D 12 is present; install a driver (on Debian \
                       `mesa-vulkan-drivers`, which also has a software adapter)";
        return Err(Error::new(Code::Unavailable, message));
    }
    let software: Vec<bool> = adapters.iter().map(|adapter| is_software(&adapter.get_info())).collect();
    let kept = select(&names, &software, wanted.as_deref());
    if kept.is_empty() {
        let message = format!(
            "{ADAPTER} is {:?}, which matches no adapter's name; there are: {}",
            wanted.unwrap_or_default(),
            names.join(", ")
        );
        return Err(Error::new(Code::Unavailable, message));
    }
    let mut offered = Vec::new();
    for (index, adapter) in adapters.into_iter().enumerate() {
        if kept.contains(&index) {
            offered.push(adapter);
        }
    }
    Ok(offered)
}

/// The indices of the adapters to offer: those whose name contains `wanted`; without it, hardware adapters, or else all.
fn select(names: &[String], software: &[bool], wanted: Option<&str>) -> Vec<usize> {
    let all = 0..names.len();
    if let Some(wanted) = wanted {
        let wanted = wanted.to_lowercase();
        return all.filter(|index| names[*index].to_lowercase().contains(&wanted)).collect();
    }
    let any_hardware = software.contains(&false);
    all.filter(|index| !any_hardware || !software[*index]).collect()
}

/// How kernels multiply matrices of 16 x 16 f16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Matrices {
    /// By cooperative matrices of a subgroup of 32 threads.
    Cooperative,
    /// By loops, to test these kernels on adapters without such matrices.
    Emulated,
}

impl Matrices {
    /// The matrices that an adapter says it has, and the user has not ruled out.
    fn of(adapter: &Adapter, features: Features, subgroup: Option<u32>) -> Option<Self> {
        let f16 = features.contains(Features::SHADER_F16);
        match std::env::var(MATRICES).as_deref() {
            Ok("0") => return None,
            Ok("emulated") => return f16.then_some(Self::Emulated),
            _ => {}
        }
        let (half, single) = (CooperativeScalarType::F16, CooperativeScalarType::F32);
        let there = || {
            adapter.cooperative_matrix_properties().iter().any(|shape| {
                [shape.m_size, shape.n_size, shape.k_size] == [16; 3]
                    && (shape.ab_type, shape.cr_type) == (half, single)
            })
        };
        let enabled = features.contains(Features::EXPERIMENTAL_COOPERATIVE_MATRIX);
        (enabled && f16 && subgroup == Some(MATRIX_LANES) && there()).then_some(Self::Cooperative)
    }
}

/// The features and limits of an open device, by which kernels are chosen.
#[derive(Clone, Debug)]
pub(crate) struct DeviceSpec {
    /// The name of the adapter with its API.
    pub(crate) name: String,
    /// Whether shaders can load, store and convert f16.
    pub(crate) f16: bool,
    /// Whether shaders can load and store 16-bit integers, which represent bf16.
    pub(crate) i16: bool,
    /// The number of lanes of every subgroup, if the adapter has subgroups and all are equal. It is reported; no kernel uses it.
    pub(crate) subgroup: Option<u32>,
    /// How kernels multiply matrices of f16, if at all.
    pub(crate) matrices: Option<Matrices>,
    /// Whether command buffers can write timestamps.
    pub(crate) timestamps: bool,
    /// Whether the adapter computes on the CPU.
    pub(crate) software: bool,
    /// The alignment of the offsets of bindings, in bytes.
    pub(crate) alignment: usize,
    /// The maximum size of a part of a weight, in bytes.
    pub(crate) part_bytes: usize,
    /// The limits of the device.
    pub(crate) limits: Limits,
}

impl DeviceSpec {
    /// The features to request: those that the kernels can use and the adapter has.
    pub(crate) fn features(adapter: &Adapter) -> Features {
        let wanted = Features::SHADER_F16
            | Features::SHADER_I16
            | Features::SUBGROUP
            | Features::EXPERIMENTAL_COOPERATIVE_MATRIX
            | TIMESTAMPS
            | Features::PIPELINE_CACHE;
        adapter.features() & wanted
    }

    /// The spec of a device opened on `adapter` with [`Self::features`].
    pub(crate) fn new(adapter: &Adapter, features: Features) -> Self {
        let (info, limits) = (adapter.get_info(), adapter.limits());
        let same =
            info.subgroup_min_size == info.subgroup_max_size && info.subgroup_min_size.is_power_of_two();
        let subgroup = features.contains(Features::SUBGROUP) && same && info.subgroup_min_size >= 4;
        let subgroup = subgroup.then_some(info.subgroup_min_size);
        Self {
            name: display_name(&info),
            f16: features.contains(Features::SHADER_F16),
            i16: features.contains(Features::SHADER_I16),
            subgroup,
            matrices: Matrices::of(adapter, features, subgroup),
            timestamps: features.contains(TIMESTAMPS),
            software: is_software(&info),
            alignment: (limits.min_storage_buffer_offset_alignment as usize).max(16),
            part_bytes: binding_bytes(&limits),
            limits,
        }
    }

    /// The longest range in bytes that one binding can have.
    pub(crate) fn binding_bytes(&self) -> usize {
        binding_bytes(&self.limits)
    }
}

/// The longest range in bytes that one binding can have; a binding lies in one buffer.
fn binding_bytes(limits: &Limits) -> usize {
    let bytes = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size);
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let have = |present: bool| if present { "yes" } else { "no" };
        let subgroup = self.subgroup.map_or("no".to_owned(), |lanes| format!("{lanes} lanes"));
        let matrices = match self.matrices {
            Some(Matrices::Cooperative) => "yes",
            Some(Matrices::Emulated) => "emulated",
            None => "no",
        };
        write!(
            f,
            "f16: {}, bf16: {}, subgroups: {subgroup}, matrices: {matrices}, bindings up to {} MiB, buffers up to {} MiB",
            have(self.f16),
            have(self.i16),
            self.binding_bytes() >> 20,
            self.limits.max_buffer_size >> 20,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::hardware_only(&[false, false, true], None, &[0, 1])]
    #[case::software_alone(&[true], None, &[0])]
    #[case::software_by_name(&[false, false, true], Some("LLVM"), &[2])]
    #[case::one_by_name(&[false, false, true], Some("b (vul"), &[1])]
    #[case::none_by_name(&[false, false, true], Some("radeon"), &[])]
    fn adapters_are_selected(
        #[case] software: &[bool],
        #[case] wanted: Option<&str>,
        #[case] expected: &[usize],
    ) {
        let names = ["GPU a (Vulkan)", "GPU b (Vulkan)", "llvmpipe (Vulkan, software)"].map(String::from);
        assert_eq!(select(&names[..software.len()], software, wanted), expected);
    }
}
