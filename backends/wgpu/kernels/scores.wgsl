// What all kernels of attention share: the sequences of a call, and the score of a key.

// The number of sequences that exist.
fn sequences() -> u32 {
    let count = min(start_live(), queries_live());
#if PAGED
    return min(count, min(lengths_live(), tables_live()));
#else
    return count;
#endif
}

// The window in positions, so that the sum with a position stays within 32 bits; 0 if all keys are seen.
fn window() -> i32 {
    return i32(min(P.window, 0x3fffffffu));
}

// The score of a key that the row sees, from its product with the query.
fn score_of_product(product: f32, position: i32, key: i32, head: u32) -> f32 {
    var score = P.scale * product;
    if (P.softcap > 0.0) { score = P.softcap * tanh_of(score / P.softcap); }
    if (alibi_here) {
        var distance = position - key;
#if BOTH_SIDES
        distance = abs(distance);
#endif
        score -= alibi_get(head) * f32(distance);
    }
    return score;
}
