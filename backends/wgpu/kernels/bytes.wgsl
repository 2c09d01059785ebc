// move_bytes: copies or fills `count` bytes from byte `start` of the target on.
//
// One thread per word of the target. At the ends, bytes outside the range are kept.

@compute @workgroup_size(64)
fn move_bytes(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let first = P.start / 4u;
    let end = P.start + P.count;
    let word = first + flat_group(wid, nwg) * 64u + lid;
    if (word * 4u >= end) { return; }
    var mask = 0u;
    var value = 0u;
    for (var b = 0u; b < 4u; b += 1u) {
        let at = word * 4u + b;
        if (at < P.start || at >= end) { continue; }
        mask |= 0xffu << (8u * b);
#if COPY
        let at_source = P.source_start + (at - P.start);
        value |= ((source_data[at_source / 4u] >> (8u * (at_source % 4u))) & 0xffu) << (8u * b);
#else
        value |= P.fill & (0xffu << (8u * b));
#endif
    }
    target_data[word] = (target_data[word] & ~mask) | value;
}
