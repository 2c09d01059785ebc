//! Calls on activations that are quantised in groups, which run wrongly.

use crate::{
    change::{change_result, copied, result},
    wrap::Run,
};
use dsrun_core::{Affine, Result, device::Stream};

/// A row is quantised as a whole, and all its groups get the scale of the row.
pub(crate) fn one_scale_for_a_row(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    let Some(x) = copied(run, stream, 0)? else { return run.right(stream) };
    let width = x.width().max(1);
    let scale = |row: usize| {
        let of_row = (row * width..(row + 1) * width).map(|index| x.float(index).abs());
        of_row.fold(0f32, f32::max) / 127.0
    };
    result(run, stream, "quant_per_group", 0, |_, y| {
        for index in 0..y.count() {
            let integer = (x.float(index) / scale(index / width)).round_ties_even() as i8;
            y.set_bits(index, u32::from(integer as u8));
        }
    })?;
    if run.op() != "quant_per_group" {
        return Ok(());
    }
    change_result(run, stream, 1, |_, scales| {
        let groups = scales.width().max(1);
        (0..scales.count()).for_each(|index| scales.set_float(index, scale(index / groups)));
    })
}

/// The minima of weights are not added.
pub(crate) fn minima_forgotten(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    summed(run, stream, |scale, products| {
        products.iter().map(|(x, q, map)| scale * map.scale * (*x as f32) * (f32::from(*q) - map.zero)).sum()
    })
}

/// The integers of a group are summed in 16 bits.
pub(crate) fn sums_of_16_bits(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    summed(run, stream, |scale, products| {
        let product = |(x, q, map): &(i32, u8, Affine)| *x * (i32::from(*q) - map.zero as i32);
        let sum: i32 = products.iter().map(product).sum();
        let map = products.first().map_or_else(Affine::default, |(_, _, map)| *map);
        scale * map.scale * f32::from(sum as i16)
    })
}

/// The products of a group: activations, and the integers of a weight with their maps.
type Products = [(i32, u8, Affine)];

/// Runs `linear_a8` with its own sum of a group, which is given the scale of the activations.
fn summed(run: &Run, stream: &mut dyn Stream, sum: impl Fn(f32, &Products) -> f32) -> Result<()> {
    let (x, scales, bias) = (copied(run, stream, 0)?, copied(run, stream, 1)?, copied(run, stream, 3)?);
    let (Some(x), Some(scales), Some(weight)) = (x, scales, run.weight_integers(2)) else {
        return run.right(stream);
    };
    result(run, stream, "linear_a8", 0, |_, y| {
        let (outputs, inputs, groups) = (y.width(), x.width(), scales.width());
        let size = inputs / groups.max(1);
        for index in 0..y.count() {
            let (row, output) = (index / outputs, index % outputs);
            let product = |input: usize| {
                let (q, map) = weight[output * inputs + input];
                (i32::from(x.bits(row * inputs + input) as u8 as i8), q, map)
            };
            let of_group = |group: usize| {
                let products: Vec<_> = (group * size..(group + 1) * size).map(product).collect();
                sum(scales.float(row * groups + group), &products)
            };
            let total: f32 = (0..groups).map(of_group).sum();
            y.set_float(index, total + bias.as_ref().map_or(0.0, |bias| bias.float(output)));
        }
    })
}
