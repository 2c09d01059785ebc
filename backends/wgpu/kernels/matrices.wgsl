// Linear layers of many rows by cooperative matrices: f16 factors, f32 sums. The epilogues are those of linear.wgsl.
//
// A workgroup computes a tile of TILE_ROWS rows by TILE_OUTPUTS outputs; each of its subgroups of 32 threads a part of WARP_ROWS
// by WARP_OUTPUTS, as fragments of 16 x 16. Where rows are few, SPLITS subgroups have the same part and divide the columns of a
// step, so that a small tile has many threads, which together ask for many bytes; their sums are added in the end. STEP columns of
// both factors are staged in workgroup memory: x as it is, the weight converted to f16. While a step is multiplied, the next AHEAD
// are loaded to registers; AHEAD divides the steps. Rows in workgroup memory are 16 bytes longer than the columns, so that eight
// rows of 16 bytes are in different banks.
//
// The weight is bound for writing although nothing writes it, for the order of loads: see `Launch::writable`.
//
// A weight that is not f16 is multiplied by a power of two for each of its rows (`half_scale`), as are rows of x that were bf16; the
// sums are divided by both.
//
// EMULATED replaces cooperative matrices by loops, so that the kernel runs, slowly, on adapters without them: a thread has eight
// sums of each fragment.

const X_CHUNKS: u32 = STEP / 8u;
const W_VECTORS: u32 = STEP / (4u * W_QUADS);
const PITCH: u32 = STEP / 4u + 2u;
const W_TILE: u32 = TILE_ROWS * PITCH;
const TILE: u32 = (TILE_ROWS + TILE_OUTPUTS) * PITCH;
const FRAGMENTS: u32 = ROW_FRAGMENTS * OUTPUT_FRAGMENTS;
const WARPS_ACROSS: u32 = TILE_OUTPUTS / (16u * OUTPUT_FRAGMENTS);
const STAGE_PITCH: u32 = 20u;
const STAGE: u32 = 16u * STAGE_PITCH;

// BUFFERS tiles of x and the weight.
var<workgroup> tiles: array<vec4<f16>, BUFFERS * TILE>;
// A fragment of sums of each subgroup, those of a part together.
var<workgroup> stage: array<f32, THREADS / 32u * STAGE>;

#if EMULATED
// Adds the product of the fragments of x and the weight at these places to eight sums of a thread.
fn multiplied(a: u32, b: u32, sums: array<f32, 8>, lane: u32) -> array<f32, 8> {
    var result = sums;
    for (var i = 0u; i < 8u; i += 1u) {
        for (var k = 0u; k < 4u; k += 1u) {
            let x = vec4<f32>(tiles[a + lane / 2u * PITCH + k]);
            result[i] += dot(x, vec4<f32>(tiles[b + (lane % 2u * 8u + i) * PITCH + k]));
        }
    }
    return result;
}
#endif

#if SCALED
fn inverse_of_power(power: f32) -> f32 {
    return bitcast<f32>(0x7f000000u - bitcast<u32>(power));
}
#endif

// The four f16 of two words.
fn halves_of(words: vec2<u32>) -> vec4<f16> {
    return vec4<f16>(vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y)));
}

// Applies the epilogue to a fragment, whose SPLITS parts of sums are in `stage` from `at` on. The subgroups that have them share the work.
fn finish_fragment(rows: u32, first_row: u32, first_unit: u32, at: u32, thread: u32) {
    for (var index = thread; index < 64u; index += 32u * SPLITS) {
        let row = first_row + index / 4u;
        let unit = first_unit + index % 4u;
        if (row >= rows || unit >= P.units) { continue; }
        var sums = vec4<f32>();
        for (var split = 0u; split < SPLITS; split += 1u) {
            let first = at + split * STAGE + index / 4u * STAGE_PITCH + index % 4u * 4u;
            sums += vec4<f32>(stage[first], stage[first + 1u], stage[first + 2u], stage[first + 3u]);
        }
#if SCALED
        let outputs = min(outputs_of(P.first_unit + unit), vec4<u32>(P.w_first + P.w_rows - 1u));
        for (var i = 0u; i < 4u; i += 1u) { sums[i] *= inverse_of_power(w_half_scale(outputs[i])); }
#if X_SCALED
        sums *= inverse_of_power(x_scales_get(row));
#endif
#endif
        finish(row, P.first_unit + unit, sums);
    }
}

@compute @workgroup_size(THREADS)
#if EMULATED
fn linear_matrices(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let warp = lid / 32u;
    let lane = lid % 32u;
#else
fn linear_matrices(
    @builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32,
    @builtin(subgroup_id) warp: u32, @builtin(subgroup_invocation_id) lane: u32,
) {
#endif
    // Tiles that share rows of the weight follow each other.
    let tile = flat_group(wid, nwg);
    let row_tiles = (P.x_rows + TILE_ROWS - 1u) / TILE_ROWS;
    let first_row = tile % row_tiles * TILE_ROWS;
    let first_unit = tile / row_tiles * (TILE_OUTPUTS / 4u);
    let rows = shared_rows(lid);
    // A tile past the last row runs no loop. It cannot return instead, because WGSL does not see that this is uniform.
    let empty = first_row >= rows;
    let last_row = max(rows, 1u) - 1u;
    // Rows and outputs past the last are loaded as the last.
#each N X_LOADS
    let x_row_$N = lid / X_CHUNKS + $Nu * (THREADS / X_CHUNKS);
    let x_from_$N = min(first_row + x_row_$N, last_row) * (P.x_stride / 8u) + lid % X_CHUNKS;
    let x_to_$N = x_row_$N * PITCH + lid % X_CHUNKS * 2u;
#each A AHEAD
    var x_$N_$A = x_data[x_from_$N + $Au * STEP / 8u];
#endeach
#endeach
#each N W_LOADS
    let w_index_$N = lid + $Nu * THREADS;
    let w_row_$N = w_index_$N / W_VECTORS;
    let output_$N = min(outputs_of(P.first_unit + first_unit + w_row_$N / 4u)[w_row_$N % 4u], P.w_first + P.w_rows - 1u);
    let w_from_$N = w_index_$N % W_VECTORS;
    let w_to_$N = W_TILE + w_row_$N * PITCH + w_from_$N * W_QUADS;
#if SCALED
    let w_scale_$N = w_half_scale(output_$N);
#endif
#each A AHEAD
    var w_$N_$A = w_vector(output_$N, w_from_$N + $Au * STEP / (4u * W_QUADS));
#if SCALED
    var affine_$N_$A = w_affine(output_$N, $Au * STEP + w_from_$N * 4u * W_QUADS);
#endif
#endeach
#endeach
#each I ROW_FRAGMENTS
#each J OUTPUT_FRAGMENTS
#if EMULATED
    var sums_$I_$J = array<f32, 8>();
#else
    var sums_$I_$J = coop_mat16x16<f32, C>();
#endif
#endeach
#endeach
    let part = warp / SPLITS;
    let split = warp % SPLITS;
    let warp_row = part / WARPS_ACROSS * ROW_FRAGMENTS * 16u;
    let warp_output = part % WARPS_ACROSS * OUTPUT_FRAGMENTS * 16u;
    var buffer = 0u;
    let inputs = select(P.inputs, 0u, empty);
    for (var first = 0u; first < inputs; first += AHEAD * STEP) {
#each A AHEAD
        {
#if !DOUBLE
            workgroupBarrier();
#endif
#each N X_LOADS
            tiles[buffer + x_to_$N] = halves_of(x_$N_$A.xy);
            tiles[buffer + x_to_$N + 1u] = halves_of(x_$N_$A.zw);
#endeach
#each N W_LOADS
#if PARTIAL
            if (w_index_$N < TILE_OUTPUTS * W_VECTORS) {
#else
            {
#endif
#if SCALED
#each Q W_QUADS
                tiles[buffer + w_to_$N + $Qu] = vec4<f16>(w_scaled_quad(w_$N_$A, $Qu, affine_$N_$A, w_scale_$N));
#endeach
#else
                tiles[buffer + w_to_$N] = halves_of(w_$N_$A.xy);
                tiles[buffer + w_to_$N + 1u] = halves_of(w_$N_$A.zw);
#endif
            }
#endeach
            workgroupBarrier();
            // The last steps load columns again, which is simpler than not to.
            let next_$A = min(first + (AHEAD + $Au) * STEP, P.inputs - STEP);
#each N X_LOADS
            x_$N_$A = x_data[x_from_$N + next_$A / 8u];
#endeach
#each N W_LOADS
            w_$N_$A = w_vector(output_$N, w_from_$N + next_$A / (4u * W_QUADS));
#if SCALED
            affine_$N_$A = w_affine(output_$N, next_$A + w_from_$N * 4u * W_QUADS);
#endif
#endeach
            let x_at = buffer + warp_row * PITCH + split * SPLIT_FRAGMENTS * 4u;
            let w_at = buffer + W_TILE + warp_output * PITCH + split * SPLIT_FRAGMENTS * 4u;
#each K SPLIT_FRAGMENTS
#each I ROW_FRAGMENTS
#if EMULATED
            let a_$K_$I = x_at + $Iu * 16u * PITCH + $Ku * 4u;
#else
            let a_$K_$I = coopLoadT<coop_mat16x16<f16, A>>(&tiles[x_at + $Iu * 16u * PITCH + $Ku * 4u], PITCH);
#endif
#endeach
#each J OUTPUT_FRAGMENTS
#if EMULATED
            let b_$K_$J = w_at + $Ju * 16u * PITCH + $Ku * 4u;
#else
            let b_$K_$J = coopLoad<coop_mat16x16<f16, B>>(&tiles[w_at + $Ju * 16u * PITCH + $Ku * 4u], PITCH);
#endif
#each I ROW_FRAGMENTS
#if EMULATED
            sums_$I_$J = multiplied(a_$K_$I, b_$K_$J, sums_$I_$J, lane);
#else
            sums_$I_$J = coopMultiplyAdd(a_$K_$I, b_$K_$J, sums_$I_$J);
#endif
#endeach
#endeach
#endeach
#if DOUBLE
            buffer = TILE - buffer;
#endif
        }
#endeach
    }
    let place = warp * STAGE;
    let fragments = select(FRAGMENTS, 0u, empty);
    for (var fragment = 0u; fragment < fragments; fragment += 1u) {
        workgroupBarrier();
#each I ROW_FRAGMENTS
#each J OUTPUT_FRAGMENTS
        if (fragment == $Iu * OUTPUT_FRAGMENTS + $Ju) {
#if EMULATED
            for (var i = 0u; i < 8u; i += 1u) { stage[place + lane / 2u * STAGE_PITCH + lane % 2u * 8u + i] = sums_$I_$J[i]; }
#else
            coopStoreT(sums_$I_$J, &stage[place], STAGE_PITCH);
#endif
        }
#endeach
#endeach
        workgroupBarrier();
        let row = first_row + warp_row + fragment / OUTPUT_FRAGMENTS * 16u;
        let unit = first_unit + (warp_output + fragment % OUTPUT_FRAGMENTS * 16u) / 4u;
        finish_fragment(rows, row, unit, part * SPLITS * STAGE, split * 32u + lane);
    }
}
