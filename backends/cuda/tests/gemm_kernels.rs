//! Which kernels run a matrix product: a table over calls, devices and rows, held to `gemm_kernels/kernels.txt`.
//!
//! A change of a kernel, or of a rule that chooses between kernels, shows there. `UPDATE_SNAPSHOTS=1` writes the file.

#![allow(clippy::unwrap_used, reason = "a test, with helpers outside of test functions")]

#[path = "gemm_kernels/calls.rs"]
mod calls;

use dsrun_core::kernels::CallDesc;
use dsrun_cuda::{DeviceSpec, KernelSpec, kernel_specs};
use std::{env, fs, path::Path};

/// Row counts on both sides of every bound that a kernel has.
const ROWS: [usize; 40] = [
    0, 1, 2, 3, 4, 5, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 96, 100, 127, 128, 129, 192,
    255, 256, 257, 300, 511, 512, 1023, 1024, 1025, 2047, 2048, 2049, 4096,
];

/// Devices by what differs between them: generation, multiprocessors, and whose kernels multiply dense weights.
fn devices() -> Vec<(&'static str, DeviceSpec)> {
    let device = DeviceSpec::usual;
    vec![
        ("sm_75", device(75, 40)),
        ("sm_80", device(80, 108)),
        ("sm_86", device(86, 84)),
        ("sm_90", device(90, 132)),
        ("sm_100", device(100, 148)),
        ("sm_120", device(120, 170)),
        ("sm_75 without cuBLASLt", DeviceSpec { blas: false, ..device(75, 40) }),
        ("sm_80 without cuBLASLt", DeviceSpec { blas: false, ..device(80, 108) }),
        ("sm_90 without cuBLASLt", DeviceSpec { blas: false, ..device(90, 132) }),
        ("sm_90 without custom GEMM", DeviceSpec { custom_gemm: false, ..device(90, 132) }),
    ]
}

/// The kernels of a call, each named once; `cuBLASLt` where it needs none of ours.
fn kernels(call: CallDesc, device: &DeviceSpec) -> String {
    match call.validate().and_then(|call| kernel_specs(&call, device)) {
        Ok(specs) if specs.is_empty() => "cuBLASLt".to_owned(),
        Ok(specs) => {
            let mut entries: Vec<_> = specs.iter().map(|spec| spec.entry).collect();
            entries.dedup();
            entries.join(" ")
        }
        Err(_) => "refused".to_owned(),
    }
}

/// The kernels for every number of rows, in ranges: `1-16 decode_gemm; 17-128 ..`.
fn kernels_by_rows(family: &calls::Family, device: &DeviceSpec) -> String {
    let mut ranges: Vec<(usize, usize, String)> = Vec::new();
    for rows in ROWS {
        let kernels = kernels((family.call)(rows), device);
        match ranges.last_mut() {
            Some((_, last, known)) if *known == kernels => *last = rows,
            _ => ranges.push((rows, rows, kernels)),
        }
    }
    let ranges = ranges.into_iter().map(|(first, last, kernels)| match first == last {
        true => format!("{first} {kernels}"),
        false => format!("{first}-{last} {kernels}"),
    });
    ranges.collect::<Vec<_>>().join("; ")
}

/// A line for every set of devices that run a family alike.
fn kernels_by_device(family: &calls::Family) -> Vec<String> {
    let mut alike: Vec<(String, Vec<&str>)> = Vec::new();
    for (name, device) in devices() {
        let kernels = kernels_by_rows(family, &device);
        match alike.iter_mut().find(|(known, _)| *known == kernels) {
            Some((_, names)) => names.push(name),
            None => alike.push((kernels, vec![name])),
        }
    }
    let all = alike.len() == 1;
    let lines = alike.into_iter().map(|(kernels, names)| match all {
        true => format!("    all: {kernels}\n"),
        false => format!("    {}: {kernels}\n", names.join(", ")),
    });
    lines.collect()
}

#[test]
fn kernels_are_chosen_as_listed() {
    // Families with the same kernels share an entry.
    let mut entries: Vec<(Vec<String>, Vec<String>)> = Vec::new();
    for family in calls::families() {
        let lines = kernels_by_device(&family);
        match entries.iter_mut().find(|(_, known)| *known == lines) {
            Some((names, _)) => names.push(family.name),
            None => entries.push((vec![family.name], lines)),
        }
    }
    let entries = entries.iter().map(|(names, lines)| format!("{}\n{}", names.join("\n"), lines.concat()));
    let table = entries.collect::<Vec<_>>().join("\n");
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gemm_kernels/kernels.txt");
    if env::var_os("UPDATE_SNAPSHOTS").is_some() {
        fs::write(&file, &table).unwrap();
    }
    let expected = fs::read_to_string(&file).unwrap_or_default();
    let differs = table.lines().zip(expected.lines()).find(|(found, expected)| found != expected);
    assert!(
        table == expected,
        "other kernels than in tests/gemm_kernels/kernels.txt, first {differs:?}; run with UPDATE_SNAPSHOTS=1 if that is \
         meant, and read the difference"
    );
}

/// On a device opened to be batch-invariant, all numbers of rows have the same kernels, with the same constants where those have a part
/// in the order of sums. `batch_wgmma` and `tile_wgmma` count as one: they add in the same order.
#[test]
fn batch_invariant_products_have_one_kernel_for_all_rows() {
    let of_sums = |spec: KernelSpec| -> (&str, Vec<_>) {
        let named = |names: &[&str]| {
            let defines = spec.defines.iter().filter(|(name, _)| names.contains(name));
            defines.map(|(name, value)| (*name, value.clone())).collect()
        };
        match spec.entry {
            "batch_wgmma" => {
                assert!(spec.defines.contains(&("SPLIT", "1".to_owned())), "{spec:?}");
                ("wgmma", Vec::new())
            }
            "tile_wgmma" => ("wgmma", Vec::new()),
            // Sums of bytes are exact.
            "int8_wgmma" => ("int8_wgmma", Vec::new()),
            "packed_wgmma" => {
                let tokens = spec.defines.iter().find(|(name, _)| *name == "TOKENS");
                // With more, groups of inputs are not summed up by themselves.
                assert!(tokens.is_some_and(|(_, tokens)| tokens.parse::<usize>().unwrap() <= 64));
                ("packed_wgmma", named(&["GROUPS", "SPLIT"]))
            }
            entry => (entry, spec.defines),
        }
    };
    for (name, device) in devices() {
        let device = DeviceSpec { batch_invariant: true, ..device };
        for family in calls::families() {
            let kernels = |rows| -> Option<Vec<_>> {
                let call = (family.call)(rows).validate().ok()?;
                Some(kernel_specs(&call, &device).ok()?.into_iter().map(of_sums).collect())
            };
            let of_one = kernels(1);
            for rows in ROWS.into_iter().filter(|rows| *rows > 0) {
                assert_eq!(kernels(rows), of_one, "{} of {rows} rows on {name}", family.name);
            }
        }
    }
}
