//! The router: selects the experts of each token, and their weights.

use crate::{
    driver::{
        kernel_spec::KernelSpec,
        kernel_struct::{Pointer, declaration, header, kernel_struct, params_header},
        launch::{LaunchOp, MAX_GRID},
    },
    ops::{
        KernelPlan, operand,
        params::{ExtentParams, MatrixParams},
        type_of,
    },
};
use dsrun_core::{
    Error, Result,
    kernels::CallDesc,
    op::{GroupScore, MoeRoute, RouterNorm},
};

/// The maximum number of experts of a router: their logits and keys are in the shared memory of a block.
const MAX_EXPERTS: usize = 2048;
/// Experts per thread if one warp owns a token; with more experts, several warps do.
const EXPERTS_EACH: usize = 16;
/// Threads of a block of `moe_route` if each token has one warp.
const ROUTE_THREADS: usize = 128;

kernel_struct! {
    /// The rule by which a router chooses; see `moe_route`.
    pub(in crate::ops) struct RouteRule {
        experts: i64 = "i64",
        /// Experts of a token.
        slots: i64 = "i64",
        groups: i64 = "i64",
        top_groups: i64 = "i64",
        eps: f32 = "float",
        scale: f32 = "float",
        threshold: f32 = "float",
        /// What weights are divided by: 0 nothing, 1 their sum plus `eps`, 2 their sum or `eps` if that is larger.
        divisor: i32 = "int",
        /// Whether the score of a group is the sum of its best two experts, instead of the best.
        group_sum: i32 = "int",
        /// Whether experts are selected by logits, which have the order of the scores.
        by_logit: i32 = "int",
    }
}

kernel_struct! {
    /// Per expert: the bias added to logits, the selection bias added to scores, and the factors of the weights; may be null.
    pub(in crate::ops) struct RouterVectors {
        pub(in crate::ops) bias: Pointer = "const float*",
        pub(in crate::ops) selection_bias: Pointer = "const float*",
        pub(in crate::ops) scale: Pointer = "const float*",
    }
}

kernel_struct! {
    /// Parameters of `moe_route`.
    struct MoeRouteParams {
        extent: ExtentParams = "Extent",
        logits: MatrixParams = "Matrix<const X>",
        vectors: RouterVectors = "RouterVectors",
        /// Experts that were chosen in advance; absent if the router chooses.
        ids: MatrixParams = "Matrix<const int>",
        experts: MatrixParams = "Matrix<int>",
        weights: MatrixParams = "Matrix<float>",
        rule: RouteRule = "RouteRule",
    }
}

/// The generated headers of the router's parameters.
pub(super) fn params_headers() -> [(String, String); 2] {
    let rule = [declaration::<RouteRule>(), declaration::<RouterVectors>()];
    let rule = ("experts/rule.cuh".to_owned(), header("The rule by which a router chooses.", &rule));
    [rule, params_header("experts/route", &[declaration::<MoeRouteParams>()])]
}

/// The configuration of a kernel with a router: `experts/choose.cuh`.
pub(in crate::ops) struct RouterKernel {
    /// The constants of every kernel with a router.
    pub(in crate::ops) constants: Vec<(&'static str, String)>,
    /// The constants that kernels may leave to their parameters.
    pub(in crate::ops) of_rule: Vec<(&'static str, String)>,
    pub(in crate::ops) rule: RouteRule,
    /// Words of shared memory for a token.
    pub(in crate::ops) words: usize,
    /// Threads of a token.
    team: usize,
}

impl RouterKernel {
    /// The configuration for a number of experts; the flags say whether there is a selection bias, and whether experts are given.
    /// `None` if there are too many experts.
    pub(in crate::ops) fn new(
        op: &MoeRoute,
        experts: usize,
        selection_bias: bool,
        given: bool,
    ) -> Option<Self> {
        let (slots, groups) = (op.top_k as usize, op.groups as usize);
        let team = if experts <= 32 * EXPERTS_EACH { 32 } else { ROUTE_THREADS };
        // Logits and keys of experts, experts and weights of slots, keys of groups.
        let words = 2 * experts + 2 * slots + groups;
        let divisor = match op.norm {
            RouterNorm::None => 0,
            RouterNorm::Sum => 1,
            RouterNorm::ClampedSum => 2,
        };
        let by_logit = i32::from(groups == 1 && !selection_bias);
        let group_sum = i32::from(op.group_score == GroupScore::TopTwoSum);
        let constants = [
            ("ROUTE_TEAM", team),
            ("EXPERTS_EACH", experts.div_ceil(team).max(1)),
            ("SCORE", op.score as usize),
        ];
        let of_rule = [
            ("GIVEN", i32::from(given)),
            ("BY_LOGIT", by_logit),
            ("GROUP_SUM", group_sum),
            ("DIVISOR", divisor),
        ];
        let rule = RouteRule {
            experts: experts as i64,
            slots: slots as i64,
            groups: groups as i64,
            top_groups: i64::from(op.top_groups),
            eps: op.eps,
            scale: op.scale,
            threshold: op.threshold,
            divisor,
            group_sum,
            by_logit,
        };
        let constants = constants.map(|(name, value)| (name, value.to_string())).to_vec();
        let of_rule = of_rule.map(|(name, value)| (name, value.to_string())).to_vec();
        (experts <= MAX_EXPERTS).then_some(Self { constants, of_rule, rule, words, team })
    }

    /// Whether one warp owns a token.
    pub(in crate::ops) fn is_one_warp(&self) -> bool {
        self.team == 32
    }
}

pub(in crate::ops) fn moe_route(op: &MoeRoute, call: &CallDesc) -> Result<KernelPlan> {
    let experts = operand(call, 0)?.shape[1];
    let router = RouterKernel::new(op, experts, call.tensor(2).is_some(), call.tensor(4).is_some());
    let Some(RouterKernel { mut constants, rule, words, team, .. }) = router else {
        let message = format!("CUDA routes among at most {MAX_EXPERTS} experts, not {experts}");
        return Err(Error::unsupported(message).at("logits").field("shape[1]"));
    };
    constants.push(("X", type_of(call, 0)?.to_owned()));
    let teams = ROUTE_THREADS / team;
    let shared = (teams * words + team / 32) * size_of::<u32>();
    let spec = KernelSpec::of("experts/route.cu", "moe_route", constants).with_shared(shared);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (logits, experts, weights) = (frame.tensor(0)?, frame.result(0)?, frame.result(1)?);
        let ids = frame.optional(4);
        let rows = logits.size(0);
        let mut bounds = vec![logits, experts, weights];
        bounds.extend(ids);
        let [bias, selection_bias, scale] = [1, 2, 3].map(|operand| frame.address(operand));
        let params = MoeRouteParams {
            extent: ExtentParams::of(rows, &bounds),
            logits: MatrixParams::of(logits),
            vectors: RouterVectors { bias, selection_bias, scale },
            ids: MatrixParams::optional(ids),
            experts: MatrixParams::of(experts),
            weights: MatrixParams::of(weights),
            rule,
        };
        let grid = [rows.div_ceil(teams).min(MAX_GRID), 1, 1];
        Ok(LaunchOp::kernel(function, grid, team * teams, &params))
    }))
}
