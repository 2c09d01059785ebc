// The paged KV cache: writing keys and values, or P.head elements of each key from P.head_offset on, and moving pages. One thread
// per element.

#if WRITE
@compute @workgroup_size(64)
fn kv_write(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let index = flat_group(wid, nwg) * 64u + lid;
    let row = index / P.columns;
    let column = index % P.columns;
    if (row >= min(x_live(), slots_live())) { return; }
    let slot = slots_get(row * P.slots_stride);
    if (slot < 0) { return; }
    let page = u32(slot) / P.block;
    if (page >= cache_live()) { return; }
    let at = page * P.cache_stride + column / P.head * P.head_stride + u32(slot) % P.block * P.slot_stride + P.head_offset + column % P.head;
#if SAME
    cache_data[at] = x_data[row * P.x_stride + column];
#else
    cache_set(at, x_get(row * P.x_stride + column));
#endif
}
#endif

#if PAGES
@compute @workgroup_size(64)
fn move_pages(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
    let index = flat_group(wid, nwg) * 64u + lid;
    let row = index / P.columns;
    let column = index % P.columns;
    if (row >= min(x_live(), pages_live())) { return; }
    let page = pages_get(row * P.pages_stride);
    if (page < 0 || u32(page) >= cache_live()) { return; }
    let slot = column / P.head;
    let at = u32(page) * P.cache_stride + slot / P.block * P.head_stride + slot % P.block * P.slot_stride + column % P.head;
#if GATHER
    x_data[row * P.x_stride + column] = cache_data[at];
#else
    cache_data[at] = x_data[row * P.x_stride + column];
#endif
}
#endif
