// Sums and maxima over the THREADS threads of a workgroup. A shader that has this file names the type of the values, `Reduced`, and
// the number of sums that are added up together, SUMS.
//
// ADDERS threads add up the values of every ADDERS-th thread, then every thread that asks adds up theirs: two barriers, where a
// tree has one for each of its levels.

const ADDERS: u32 = 16u;

// The values of the threads, those of each sum together.
var<workgroup> reduced: array<Reduced, SUMS * THREADS>;
var<workgroup> subtotals: array<Reduced, SUMS * ADDERS>;

// Adds up the values in `reduced`.
fn add_up(lid: u32) {
    workgroupBarrier();
    for (var i = lid; i < SUMS * ADDERS; i += THREADS) {
        let first = i / ADDERS * THREADS;
        var subtotal = reduced[first + i % ADDERS];
        for (var j = i % ADDERS + ADDERS; j < THREADS; j += ADDERS) { subtotal += reduced[first + j]; }
        subtotals[i] = subtotal;
    }
    workgroupBarrier();
}

// A sum, after `add_up`.
fn total_of(sum: u32) -> Reduced {
    var total = subtotals[sum * ADDERS];
    for (var i = 1u; i < ADDERS; i += 1u) { total += subtotals[sum * ADDERS + i]; }
    return total;
}

// The sum of a value of all threads.
fn sum_of_group(value: Reduced, lid: u32) -> Reduced {
    reduced[lid] = value;
    add_up(lid);
    return total_of(0u);
}

#if MAXIMA
// The largest of a value of all threads.
fn largest_of_group(value: Reduced, lid: u32) -> Reduced {
    reduced[lid] = value;
    workgroupBarrier();
    if (lid < ADDERS) {
        var largest = reduced[lid];
        for (var i = lid + ADDERS; i < THREADS; i += ADDERS) { largest = max(largest, reduced[i]); }
        subtotals[lid] = largest;
    }
    workgroupBarrier();
    var largest = subtotals[0];
    for (var i = 1u; i < ADDERS; i += 1u) { largest = max(largest, subtotals[i]); }
    return largest;
}
#endif
