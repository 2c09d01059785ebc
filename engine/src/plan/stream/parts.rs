//! Divides a step into parts, each launched when its streamed weights, and keys and values, have arrived.

/// A run of calls that is launched as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// The streamed layer whose weights the calls read.
    pub(crate) layer: Option<usize>,
    /// The layer, of those whose keys and values are copied to the device, that the calls use.
    pub(crate) caches: Option<usize>,
    /// The calls, by their position among those that were given.
    pub(crate) calls: Vec<usize>,
}

/// What a call reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reads {
    /// No packed weights.
    NoWeights,
    /// Packed weights that stay on the device.
    Resident,
    /// Packed weights of a streamed layer.
    Streamed(usize),
}

/// Divides calls into parts: one for each streamed layer, from the first call that reads its weights to the last, and others for
/// calls that read resident weights only. Calls without weights belong to the part before them: they are short, and a separate
/// part would cost a launch.
pub(crate) fn parts(reads: impl IntoIterator<Item = Reads>) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    // Calls after the last part that are not assigned yet, and whether any of them reads resident weights.
    let (mut open, mut resident) = (Vec::new(), false);
    for (call, reads) in reads.into_iter().enumerate() {
        let Reads::Streamed(layer) = reads else {
            open.push(call);
            resident |= reads == Reads::Resident;
            continue;
        };
        match parts.last_mut() {
            Some(part) if part.layer == Some(layer) => part.calls.append(&mut open),
            _ => {
                close(&mut parts, &mut open, resident);
                parts.push(Part { layer: Some(layer), caches: None, calls: Vec::new() });
            }
        }
        resident = false;
        if let Some(part) = parts.last_mut() {
            part.calls.push(call);
        }
    }
    close(&mut parts, &mut open, resident);
    parts
}

/// Divides parts further, so that each uses the caches of at most one layer. `caches` has the layer of each call that uses some.
pub(crate) fn parts_by_caches(parts: Vec<Part>, caches: &[Option<usize>]) -> Vec<Part> {
    let mut divided: Vec<Part> = Vec::new();
    for part in parts {
        let mut open = Part { calls: Vec::new(), ..part };
        for call in part.calls {
            let layer = caches.get(call).copied().flatten();
            if layer.is_some() && open.caches.is_some() && open.caches != layer {
                let next = Part { calls: Vec::new(), caches: None, ..open };
                divided.push(std::mem::replace(&mut open, next));
            }
            open.caches = open.caches.or(layer);
            open.calls.push(call);
        }
        divided.push(open);
    }
    divided
}

fn close(parts: &mut Vec<Part>, open: &mut Vec<usize>, resident: bool) {
    match parts.last_mut() {
        Some(part) if !resident => part.calls.append(open),
        _ if !open.is_empty() => parts.push(Part { layer: None, caches: None, calls: std::mem::take(open) }),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(reads: &str) -> Vec<(Option<usize>, Vec<usize>)> {
        let read = |letter: char| match letter {
            '.' => Reads::NoWeights,
            'r' => Reads::Resident,
            digit => Reads::Streamed(digit.to_digit(10).expect("a digit") as usize),
        };
        parts(reads.chars().map(read)).into_iter().map(|part| (part.layer, part.calls)).collect()
    }

    #[test]
    fn each_streamed_layer_is_a_part_from_its_first_weight_to_its_last() {
        assert_eq!(
            split("r.0.00.1.1"),
            [(None, vec![0, 1]), (Some(0), vec![2, 3, 4, 5, 6]), (Some(1), vec![7, 8, 9])]
        );
    }

    #[test]
    fn layers_that_stay_are_parts_of_their_own() {
        assert_eq!(split("0.0.r.1"), [(Some(0), vec![0, 1, 2]), (None, vec![3, 4, 5]), (Some(1), vec![6])]);
        assert_eq!(split("0r0"), [(Some(0), vec![0, 1, 2])]);
        assert_eq!(split("0..r"), [(Some(0), vec![0]), (None, vec![1, 2, 3])]);
    }

    #[test]
    fn each_layer_of_caches_is_a_part_of_its_own() {
        let divided = |reads: &str, caches: &str| -> Vec<_> {
            let whole = split(reads).into_iter().map(|(layer, calls)| Part { layer, caches: None, calls });
            let caches: Vec<_> = caches.chars().map(|c| c.to_digit(10).map(|c| c as usize)).collect();
            let parts = parts_by_caches(whole.collect(), &caches);
            parts.into_iter().map(|part| (part.layer, part.caches, part.calls)).collect()
        };
        // Caches of three layers in a part without streamed weights.
        assert_eq!(
            divided("r.......", ".0.0.1.2"),
            [(None, Some(0), vec![0, 1, 2, 3, 4]), (None, Some(1), vec![5, 6]), (None, Some(2), vec![7])]
        );
        // Layers whose weights are streamed: only the second one's keys and values are copied.
        assert_eq!(
            divided("0.01.1", "....0."),
            [(Some(0), None, vec![0, 1, 2]), (Some(1), Some(0), vec![3, 4, 5])]
        );
        assert_eq!(divided("00", "01"), [(Some(0), Some(0), vec![0]), (Some(0), Some(1), vec![1])]);
    }

    #[test]
    fn without_streamed_layers_there_is_one_part() {
        assert_eq!(split("r..r."), [(None, vec![0, 1, 2, 3, 4])]);
        assert!(split("").is_empty());
    }
}
