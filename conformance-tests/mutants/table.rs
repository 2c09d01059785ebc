//! The mutants: what each does wrong, and the case or check that claims to catch it. The test runs this table, and the book
//! shows it.

/// A backend with one fault.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mutant {
    /// What `DSRUN_MUTANT` has to be.
    pub(crate) name: &'static str,
    /// What is wrong with it.
    pub(crate) fault: &'static str,
    /// The id of the case or check that claims to catch it.
    pub(crate) caught_by: &'static str,
}

/// The name of the mutant without a fault.
pub(crate) const FAULTLESS: &str = "none";

const fn mutant(name: &'static str, fault: &'static str, caught_by: &'static str) -> Mutant {
    Mutant { name, fault, caught_by }
}

/// Every mutant with a fault.
pub(crate) const MUTANTS: &[Mutant] = &[
    // Wrong numbers.
    mutant("truncating_cast", "casts to bf16 cut bits off instead of rounding", "cast_to_bf16/f32/prime"),
    mutant("bf16_sums", "sums of products of bf16 are kept in bf16", "linear_bf16/bf16/prime"),
    mutant("bias_dropped", "a linear layer of bf16 forgets its bias", "linear_bf16/bf16/below_a_tile"),
    mutant("eps_outside", "the norm adds eps behind the root", "rms_norm/f32/prime"),
    mutant("other_pairing", "rope rotates the other pairs", "rope_halves/f32/head_80"),
    mutant("residual_twice", "the residual is added twice", "add/f32/prime"),
    mutant("nan_swallowed", "NaN in a sum comes out as 0", "add/f32/random_special_0"),
    mutant("argmax_last", "argmax takes the last of equal numbers", "argmax/f32/prime"),
    mutant("fusion_rounds_more", "a region rounds its result to bf16 on the way", "add_rms_norm/f32/prime"),
    mutant(
        "quantises_down",
        "activations are cut off to integers instead of rounded",
        "quant_per_token/f32/random_uniform_0",
    ),
    mutant(
        "cache_quantised_down",
        "keys are cut off to bytes of an i8 cache instead of rounded",
        "kv_write/i8/decode",
    ),
    mutant(
        "cache_scale_ignored",
        "attention takes the scales of keys in an i8 cache for 1",
        "paged_attention/i8/group_of_three",
    ),
    mutant(
        "cache_scale_of_next_row",
        "attention multiplies values of an i8 cache by the scale of the row behind",
        "paged_attention/i8/group_of_three",
    ),
    mutant(
        "scale_of_row_0",
        "every row of a quantised product has the first row's scale",
        "linear_w8a8/f32/prime",
    ),
    mutant("byte_clipped", "the byte -128 is multiplied as -127", "linear_w8a8/f32/many_rows"),
    mutant(
        "one_scale_for_a_row",
        "all groups of a row have one scale, and integers that fit it",
        "quant_per_group_32/f32/prime",
    ),
    mutant(
        "scale_of_next_group",
        "a group of activations is multiplied by the scale of the next",
        "linear_a8_q4_0/f32/seven_rows",
    ),
    mutant(
        "last_group_dropped",
        "products leave out the last group of a row",
        "linear_a8_q8_0/f32/seven_rows",
    ),
    mutant(
        "group_bias_dropped",
        "products of activations in groups forget their bias",
        "linear_a8_q4_k/f32/seven_rows",
    ),
    mutant("minima_forgotten", "products leave out the minima of weights", "linear_a8_q4_1/f32/seven_rows"),
    mutant("sums_of_16_bits", "the sum of a group wraps to 16 bits", "linear_a8_int8/f32/extremes"),
    mutant("ranks_differ", "one rank of an all-reduce has another last bit", "all_reduce_sum/f32/odd_over_3"),
    mutant("narrow_layers_rounded", "layers of few inputs round to bf16", "check/ways_shards"),
    mutant("partial_sums_rounded", "an all-reduce rounds sums of f32 to bf16", "check/ranks_sharded"),
    mutant("large_gathers_changed", "an all-gather of many rows changes a bit", "check/ranks_replayed"),
    // Wrong places.
    mutant(
        "page_off_by_one",
        "attention reads the page behind the right one",
        "paged_attention/f32/group_of_three",
    ),
    mutant("slot_off_by_one", "keys and values are written a slot too late", "kv_write/f32/prompt"),
    mutant("skip_is_row_0", "index -1 is row 0 instead of nothing", "gather_rows/f32/some"),
    mutant("slot_unchecked", "a slot just behind the cache is written", "check/indices"),
    mutant("pages_in_order", "pages are taken to follow each other", "check/ways_pages"),
    mutant("offset_ignored", "an operand is read at the start of its buffer", "check/claims_alignment"),
    // Attention.
    mutant("mask_missing", "the first query of a chunk sees all keys", "paged_attention/f32/group_of_three"),
    mutant("groups_swapped", "query head h reads KV head h % kv_heads", "paged_attention/f32/group_of_three"),
    mutant(
        "masked_values_multiplied",
        "values behind the causal mask are multiplied by a weight of 0",
        "paged_attention/f32/special_masked_values",
    ),
    mutant(
        "masked_keys_multiplied",
        "NaN of keys behind the causal mask reaches scores",
        "paged_attention/f32/special_masked_keys",
    ),
    mutant(
        "left_values_multiplied",
        "values that have left the window are multiplied by a weight of 0",
        "paged_attention/f32/special_window_values",
    ),
    mutant(
        "left_keys_multiplied",
        "NaN of keys that have left the window reaches scores",
        "paged_attention/f32/special_window_keys",
    ),
    mutant(
        "scores_overflow",
        "exponentials of scores are not shifted by the largest",
        "paged_attention/f32/special_large_scores",
    ),
    mutant("softcap_ignored", "scores are not bounded", "paged_attention/f32/softcap"),
    mutant("window_off_by_one", "the window is one key too wide", "paged_attention/f32/window"),
    mutant("chunks_start_over", "every chunk of a prompt is taken for its beginning", "check/ways_chunks"),
    mutant("decode_rotates_on", "a single token is rotated one position too far", "check/tiny_llama"),
    // Sampling.
    mutant("seed_ignored", "draws do not depend on the seed", "sample_plain/f32/odd"),
    mutant("top_p_stops_early", "top-p leaves a token out too early", "sample_distribution/f32/top_p"),
    mutant("mask_ignored", "masked tokens stay", "check/sampling_masked"),
    mutant("row_in_the_draw", "a draw depends on its row", "check/sampling_order"),
    // Mixtures of experts.
    mutant(
        "not_renormalised",
        "the weights of a token's experts are not divided by their sum",
        "moe_route_renormalised/f32/one_row",
    ),
    mutant(
        "router_scale_ignored",
        "the weights of experts are not scaled",
        "moe_route_groups_max/f32/one_row",
    ),
    mutant(
        "router_eps_ignored",
        "the sum of weights has no least value",
        "moe_route_clamped/f32/many_experts",
    ),
    mutant("groups_ignored", "experts are chosen from all groups", "moe_route_groups_max/f32/many_experts"),
    mutant(
        "groups_by_their_best",
        "groups are ranked by their best expert, not by the two best",
        "moe_route_groups_sum/f32/many_experts",
    ),
    mutant(
        "sparse_mixer_drops_all",
        "no expert is near the chosen one",
        "moe_route_sparse_mixer/f32/many_experts",
    ),
    mutant("router_bias_dropped", "the router forgets its bias", "moe_route_selected/f32/one_row"),
    mutant(
        "expert_scale_dropped",
        "the router forgets the factors of experts",
        "moe_route_sigmoid/f32/one_row",
    ),
    mutant(
        "selection_bias_weighs",
        "the bias that experts are chosen by is in their weights",
        "moe_route_groups_sum/f32/many_experts",
    ),
    mutant(
        "skipped_weight_multiplied",
        "the weight of a skipped slot is multiplied by 0",
        "moe_combine/f32/special_rare",
    ),
    mutant("zeros_in_order", "logits of minus zero are below zero", "moe_route_softmax/f32/special_zeros"),
    mutant("region_swallows_nan", "a region writes 0 in place of NaN", "norm_linear/f32/special_nan"),
    mutant("ties_to_the_last", "of equal experts the last is chosen", "moe_route_softmax/f32/many_experts"),
    mutant(
        "skipped_slot_written",
        "a skipped slot is computed by expert 0",
        "grouped_linear_f32/f32/many_experts",
    ),
    mutant("skipped_slot_summed", "a skipped slot is in the weighted sum", "moe_combine/f32/many_experts"),
    mutant(
        "bias_of_expert_0",
        "all experts have the bias of the first",
        "grouped_linear_f32/f32/many_experts",
    ),
    mutant(
        "expert_bias_dropped",
        "the linear layers of experts forget their bias",
        "grouped_linear_f32/f32/many_experts",
    ),
    mutant(
        "first_expert_ignored",
        "a device with some of the experts takes them for the first",
        "moe_group/i32/extent",
    ),
    mutant("routes_past_extent", "a row past the extent is routed", "moe_route_softmax/f32/extent"),
    // Latent attention.
    mutant(
        "rest_not_scored",
        "scores leave out the part of a key that is behind its value",
        "paged_attention/f32/shared_values",
    ),
    mutant("rest_dropped", "the rest of a head is not copied", "head_linear_f32/f32/latent"),
    mutant("heads_rotated", "every head has the matrix of the next", "head_linear_f32/f32/latent"),
    mutant("latent_slot_off_by_one", "latents are written a slot too late", "latent_write/f32/prompt"),
    mutant(
        "rest_before_value",
        "the rest of a key is written in front of its value",
        "latent_write/f32/prompt",
    ),
    // Memory.
    mutant("unwritten_row", "the last row of a result is not written", "add/f32/prime"),
    mutant("writes_behind", "one element behind the result is written", "add/f32/prime"),
    mutant("writes_gaps", "the gap between rows is written", "add/f32/strided"),
    mutant("writes_past_extent", "rows past the extent are written", "rms_norm/f32/extent"),
    mutant("operand_changed", "an operand is changed", "add/f32/prime"),
    mutant("workspace_overrun", "a byte behind the workspace is written", "add/f32/prime"),
    mutant("workspace_stale", "what stood in the workspace shows in the result", "check/memory_workspace"),
    mutant("workspace_misreported", "a plan needs more workspace than was said", "check/memory_workspace"),
    mutant("leak_per_call", "every call holds a little more memory", "check/memory_growth"),
    mutant("weights_leak", "packed weights are never given back", "check/memory_given_back"),
    mutant("packed_short", "a copy of a packed weight lacks the last byte", "check/packed_moved"),
    mutant("adopted_early", "an adopted weight is read at the start of its buffer", "check/packed_moved"),
    mutant(
        "pinned_copied",
        "a weight in pinned memory keeps the bytes that it had when it was adopted",
        "check/packed_pinned",
    ),
    mutant(
        "pinned_operand_copied",
        "an operand in pinned memory keeps the bytes that it had when the call was bound",
        "check/cache_pinned",
    ),
    mutant("memory_not_zeroed", "new memory holds something", "check/memory_zeroed"),
    mutant("limit_ignored", "the memory limit is not kept", "check/memory_limit"),
    mutant("handles_leak", "every handle of the device leaves memory behind", "check/memory_reopened"),
    // Streams, threads, plans and graphs.
    mutant("wavers", "the last bit differs from run to run", "add/f32/prime"),
    mutant("shared_scratch", "calls on two streams share scratch memory", "check/replay_side_by_side"),
    mutant("second_stream_differs", "a second stream gives other bits", "check/replay_elsewhere"),
    mutant("stale_plan", "a second plan of an op takes the place of the first", "check/replay_plans"),
    mutant("graph_of_old_data", "a graph replays the data of its first launch", "check/replay_graph"),
    mutant("copies_go_astray", "a copy to the host goes where the one before it went", "check/replay_copies"),
    mutant(
        "region_misses_a_key",
        "attention in a region does not see the token's own key",
        "check/replay_decoder",
    ),
    mutant(
        "region_flushes_weights",
        "attention in a region keeps weights of f16 as parts of the largest of 16 keys, where small ones are lost",
        "check/replay_decoder",
    ),
    mutant(
        "region_pads_a_head",
        "attention in a region leaves out the last element of heads that are no power of two",
        "check/replay_decoder_heads",
    ),
    mutant(
        "region_halves_capped",
        "attention with soft caps gives half of every other element in a region",
        "check/replay_decoder_large_heads",
    ),
    mutant(
        "region_shifts_windows",
        "attention in a region has its window a key too early",
        "check/replay_decoder_variants",
    ),
    mutant(
        "region_enlarges_parallel",
        "the result of an MLP beside attention is a quarter larger in a region",
        "check/replay_decoder_parallel",
    ),
    mutant(
        "region_loses_scales",
        "products by weights of integers are a quarter larger in a region",
        "check/replay_decoder_integers",
    ),
    mutant(
        "region_enlarges_experts",
        "the linear layers of experts by weights of integers are a quarter larger in a region",
        "check/replay_decoder_integer_experts",
    ),
    mutant("region_loses_sinks", "attention in a region leaves out sinks", "check/replay_decoder_bounds"),
    mutant(
        "region_enlarges_floats",
        "products by weights of mxfp4 are a quarter larger in a region",
        "check/replay_decoder_floats",
    ),
    mutant(
        "region_forgets_weights",
        "experts in a region all have the weight of the first",
        "check/replay_decoder_experts",
    ),
    mutant(
        "region_enlarges_sums",
        "sums over ranks are a quarter larger in a region",
        "check/replay_decoder_ranks",
    ),
    mutant("region_records_another", "a region records another token than it samples", "check/replay_token"),
    mutant(
        "region_scales_a_part",
        "scales of quantised rows are a bit apart in a region",
        "check/replay_quantised",
    ),
    mutant("batch_matters", "the last bit of a row depends on how many rows there are", "check/batch_rows"),
    mutant(
        "split_by_batch",
        "the last bit of a sequence depends on how many others there are",
        "check/batch_attention",
    ),
    mutant("bound_to_a_thread", "a call runs only on the thread that bound it", "check/threads_moved"),
    mutant("disturbed_by_others", "calls that run at the same time give other bits", "check/threads_eight"),
    mutant(
        "sums_of_another_stream",
        "products of long rows take up sums that another stream left",
        "check/crowd_streams",
    ),
    mutant(
        "handles_share_sums",
        "products of long rows of two handles share memory for their sums",
        "check/crowd_handles",
    ),
    // Promises and errors.
    mutant("claimed_not_had", "a profile is claimed without one of its ops", "check/claims_profiles"),
    mutant("native_not_planned", "an op is said to run, and is not planned", "check/claims_no"),
    mutant("alignment_overstated", "memory is not as aligned as is said", "check/claims_properties"),
    mutant("error_swallowed", "arguments that are refused are bound all the same", "check/raw_arguments"),
    mutant("answers_too_long", "an answer is written to behind the size stated", "check/raw_sizes"),
    mutant("checks_nothing", "a query for nonsense is answered", "check/raw_descriptions"),
    mutant("status_without_message", "an error says nothing", "check/faults_opening"),
    mutant("size_wraps", "an allocation of 2^62 bytes wraps around", "check/raw_resources"),
    mutant("out_of_memory_misnamed", "no memory is an internal error", "check/faults_out_of_memory"),
    mutant("every_index_opens", "a device that is not there is opened", "check/faults_opening"),
    mutant("copies_overlap", "a copy onto itself is not refused", "check/faults_ranges"),
    mutant("events_refused", "streams refuse the events of their device", "check/events"),
    mutant("nameless", "a device has no name", "check/device_listing"),
    mutant("timeout_misnamed", "a rank that does not come is an internal error", "check/ranks_missing"),
    mutant("abort_without_reason", "ranks that wait are not told why they are woken", "check/ranks_abort"),
    mutant("ranks_wrap", "rank 2 of 2 is taken for rank 0", "check/ranks_wrong"),
    // Order and copies.
    mutant("copies_words", "a copy has a multiple of four bytes", "check/order_copies"),
    mutant("copies_from_words", "a copy begins at a multiple of four bytes", "check/order_copies"),
    mutant("fills_words", "a fill has a multiple of four bytes", "check/order_copies"),
    mutant("uploads_to_words", "an upload begins at a multiple of four bytes", "check/order_copies"),
    mutant("uploads_late", "uploads come after the calls behind them", "check/order_uploads"),
    mutant(
        "freed_calls_forgotten",
        "what is pending when its call is freed is never done",
        "check/order_freed",
    ),
    mutant("waits_ignored", "a stream does not wait for another", "check/order_streams"),
    mutant(
        "events_early",
        "an event is reached before the work in front of it is done",
        "check/order_events",
    ),
    // Accounts.
    mutant("weights_uncounted", "packed weights are not counted as used memory", "check/memory_accounts"),
    mutant("buffers_kept", "buffers are never freed", "check/memory_accounts"),
    mutant("handles_share_an_account", "a handle counts what other handles allocate", "check/memory_handles"),
    mutant("sets_environment", "a call sets a variable of the environment", "check/process_untouched"),
    mutant("changes_folder", "a call changes the working directory", "check/process_untouched"),
    mutant("ignores_a_signal", "a call ignores a signal", "check/process_untouched"),
    // Sampling off the presets.
    mutant("temperature_at_least_a_tenth", "a temperature below 0.1 is 0.1", "sample_freezing/f32/few"),
    mutant("temperature_of_two_at_most", "a temperature above 2 is 2", "sample_boiling/f32/few"),
    mutant("top_k_of_256_at_most", "top-k keeps at most 256 tokens", "sample_top_k_of_257/f32/flat"),
    mutant(
        "min_p_alone_ignored",
        "min-p does nothing without top-k and top-p",
        "sample_min_p_of_half/f32/few",
    ),
    mutant("top_k_drops_min_p", "min-p does nothing beside top-k", "sample_top_k_and_min_p/f32/flat"),
    mutant("top_p_of_most_is_all", "top-p above 0.9 keeps all tokens", "sample_unusual/f32/rows_1025"),
    mutant("counts_of_a_byte", "tokens are counted in a byte", "logit_process/f32/special_rare"),
    mutant(
        "padding_ends_the_batch",
        "rows behind a tile of padding are not sampled",
        "sample_unusual/f32/padded_in_the_middle",
    ),
    // Processes.
    mutant("panics", "taking columns panics", "columns/f32/prime"),
    mutant("aborts", "a norm of no rows ends the process", "rms_norm/f32/no_rows"),
    mutant("hangs", "a norm of seven rows never returns", "layer_norm/f32/seven"),
];
