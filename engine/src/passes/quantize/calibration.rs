//! Statistics of a model's activations, by channel.

use dsrun_core::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Statistics of the activations of one product, by channel.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Channels {
    /// The largest absolute value of each channel.
    pub largest: Vec<f32>,
    /// The sum of squares of each channel.
    pub energy: Vec<f64>,
    /// The number of rows observed.
    pub rows: usize,
}

impl Channels {
    /// Adds rows of `columns` channels.
    pub fn add(&mut self, rows: &[f32], columns: usize) {
        self.largest.resize(columns, 0.0);
        self.energy.resize(columns, 0.0);
        for row in rows.chunks_exact(columns.max(1)) {
            for ((x, largest), energy) in row.iter().zip(&mut self.largest).zip(&mut self.energy) {
                *largest = largest.max(x.abs());
                *energy += f64::from(*x) * f64::from(*x);
            }
            self.rows += 1;
        }
    }

    /// The mean square of each channel.
    pub fn mean_squares(&self) -> Vec<f64> {
        self.energy.iter().map(|energy| energy / self.rows.max(1) as f64).collect()
    }
}

/// Statistics of the activations of every product of a model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Calibration {
    /// The statistics of each product, by the name of its weight.
    pub products: BTreeMap<String, Channels>,
}

impl Calibration {
    /// Adds rows of the activations that are multiplied with a weight.
    pub fn add(&mut self, weight: &str, rows: &[f32], columns: usize) {
        self.products.entry(weight.to_owned()).or_default().add(rows, columns);
    }

    /// The mean squares of the activations that are multiplied with a weight.
    ///
    /// # Errors
    /// If the activations were not observed.
    pub fn mean_squares(&self, weight: &str) -> Result<Vec<f64>> {
        let channels = self.products.get(weight);
        let missing = || Error::invalid("the activations of this product were not observed").at(weight);
        Ok(channels.ok_or_else(missing)?.mean_squares())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_keep_the_largest_value_and_the_mean_square() {
        let mut calibration = Calibration::default();
        calibration.add("w", &[1.0, -3.0, 2.0, 1.0], 2);
        calibration.add("w", &[0.0, 2.0], 2);
        let channels = &calibration.products["w"];
        assert_eq!((channels.largest.as_slice(), channels.rows), (&[2.0, 3.0][..], 3));
        assert_eq!(channels.mean_squares(), [5.0 / 3.0, 14.0 / 3.0]);
    }
}
