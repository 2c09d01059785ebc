use super::super::{GroupFormat, WeightFormat};
use super::{encode_body, reference};

fn values(count: usize) -> Vec<f32> {
    let mut state = 7u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.4
    };
    (0..count).map(|_| next() * next() * next()).collect()
}

fn round_trip(format: GroupFormat, values: &[f32], search: bool) -> Vec<f32> {
    let format_of_weight = WeightFormat::Group(format);
    let mut row = vec![0xAA; format_of_weight.row_bytes(values.len()).unwrap()];
    format.quantise_row(values, search, &mut row).unwrap();
    let mut out = vec![0.0; values.len()];
    format_of_weight.decode_row(&row, &mut out).unwrap();
    out
}

fn error(values: &[f32], found: &[f32]) -> f32 {
    values.iter().zip(found).map(|(value, found)| (value - found).powi(2)).sum()
}

#[test]
fn every_format_is_within_half_a_step() {
    let values = values(256);
    let (low, high) =
        values.iter().fold((0f32, 0f32), |(low, high), value| (low.min(*value), high.max(*value)));
    for format in GroupFormat::all() {
        let steps = ((1 << format.bits.bits()) - 2) as f32;
        // Rounding changes a stored scale or minimum by up to 2^-9 of the range; a minimum shifts the whole grid.
        let limit = 2.0 * low.abs().max(high) * (0.5 / steps + 2f32.powi(-8));
        let found = round_trip(format, &values, false);
        for (value, found) in values.iter().zip(&found) {
            assert!((value - found).abs() <= limit, "{format}: {found} for {value}");
        }
        let searched = error(&values, &round_trip(format, &values, true));
        assert!(searched <= error(&values, &found) * 1.0001, "{format}: searching makes it worse");
    }
}

#[test]
fn values_on_the_grid_are_exact() {
    for (name, scale) in [("int4g32", 7), ("int8", 127), ("int4g32z", 15), ("int8g32m_f16", 255)] {
        let format = GroupFormat::from_name(name).unwrap();
        let signed = matches!(name, "int4g32" | "int8");
        let values: Vec<f32> = (0..32)
            .map(|index| match (index % 7, signed) {
                (0, true) => -scale,
                (0, false) => 0,
                (1, _) => scale,
                (other, _) => other,
            })
            .map(|integer| integer as f32 * 0.25)
            .collect();
        assert_eq!(round_trip(format, &values, true), values, "{name}");
    }
}

#[test]
fn rows_of_one_value_stay_near_it() {
    for format in GroupFormat::all() {
        assert_eq!(round_trip(format, &[0.0; 128], true), [0.0; 128], "{format}");
        let ones = round_trip(format, &[1.0; 128], true);
        assert!(ones.iter().all(|one| (one - 1.0).abs() < 0.01), "{format}: {}", ones[0]);
    }
}

#[test]
fn rows_of_the_wrong_length_or_with_nan_are_refused() {
    let mut row = [0; 32];
    let error = GroupFormat::INT8.quantise_row(&[1.0, f32::NAN], false, &mut row).unwrap_err();
    assert!(error.to_string().contains("element 1 of the row is NaN"), "{error}");
    assert!(GroupFormat::INT8.quantise_row(&[1.0; 17], false, &mut row).is_err());
}

/// Rows of `columns` values with everything that is special.
fn special_rows(columns: usize) -> Vec<Vec<f32>> {
    let of = |value: &dyn Fn(usize) -> f32| (0..columns).map(value).collect::<Vec<f32>>();
    let random = values(columns);
    let scaled = |factor: f32| random.iter().map(|value| value * factor).collect::<Vec<f32>>();
    vec![
        of(&|_| 0.0),
        of(&|_| -0.0),
        of(&|index| if index % 3 == 0 { -0.0 } else { 0.0 }),
        of(&|index| if index % 3 == 1 { -0.0 } else { 0.0 }),
        of(&|_| 0.1),
        of(&|_| -3.7),
        of(&|_| 1e-30),
        of(&|_| f32::MAX),
        of(&|_| f32::MIN),
        of(&|index| f32::from_bits(index as u32)),
        of(&|index| if index % 2 == 0 { f32::MAX } else { f32::MIN }),
        // One outlier, one sign, and ties between integers.
        of(&|index| if index == columns / 2 { 1000.0 } else { 0.01 * index as f32 }),
        of(&|index| 5.0 + (index % 7) as f32),
        of(&|index| -5.0 - (index % 7) as f32),
        of(&|index| (index % 15) as f32 - 7.0),
        of(&|index| if index == 0 { 7.0 } else { (index % 14) as f32 - 6.5 }),
        of(&|index| if index == 0 { 127.0 } else { (index % 254) as f32 - 126.5 }),
        of(&|index| if index == 0 { 15.0 } else { (index % 15) as f32 + 0.5 }),
        // Scales that overflow f16, that are subnormal in f16, and that are zero in it.
        scaled(1e6),
        scaled(1e30),
        scaled(1e-4),
        scaled(1e-6),
        scaled(1e-9),
        scaled(1e-38),
        random,
    ]
}

#[test]
fn rows_are_those_of_the_definition_bit_for_bit() {
    for format in GroupFormat::all() {
        for columns in [2, 6, 32, 64, 128, 134, 256, 384] {
            let Some(parts) = format.row(columns) else { continue };
            for (index, values) in special_rows(columns).iter().enumerate() {
                for search in [false, true] {
                    let mut row = vec![0xAA; parts.bytes];
                    format.quantise_row(values, search, &mut row).unwrap();
                    let expected = reference::quantise_row(format, values, search);
                    assert_eq!(row, expected, "{format}, row {index} of {columns} columns, search {search}");
                }
            }
        }
    }
}

#[test]
fn random_rows_are_those_of_the_definition_bit_for_bit() {
    let all = values(64 * 1024);
    for name in ["int4g128_f16", "int4g32z_bf16", "int4g64m_f16", "int8", "int8g128_f16", "int4"] {
        let format = GroupFormat::from_name(name).unwrap();
        for values in all.chunks(1024) {
            let parts = format.row(1024).unwrap();
            let (mut row, mut portable) = (vec![0; parts.bytes], vec![0; parts.bytes]);
            format.quantise_row(values, true, &mut row).unwrap();
            // The form for processors without AVX2.
            encode_body(format, values, true, &parts, &mut portable);
            let expected = reference::quantise_row(format, values, true);
            assert_eq!((&row, &portable), (&expected, &expected), "{name}");
        }
    }
}
