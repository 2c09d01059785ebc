#!/usr/bin/env python3
"""Measures one layer of experts by PyTorch and by Triton, as baselines for dsrun's figures.

    python3 tools/baselines/experts.py --time-limit 150
    python3 tools/baselines/experts.py --shape qwen3-30b-a3b --tokens 1 8 32 128 --by grouped triton

Needs a CUDA device of compute capability 9.0, and PyTorch 2.6 or newer with Triton; nothing is downloaded. Prints one
JSON object, and each result on standard error as soon as it is measured.

A layer is a router, a softmax over the chosen experts' logits, the products of gate and up, SiLU, the product of down,
and the weighted sum. Weights and inputs are random and in bf16, so that tokens choose experts about uniformly. Several
layers take turns, so that weights come from memory and not from the L2 cache.

einsum      one-hot masks for dispatch and combine, by einsum over a capacity (GShard; baseline of DeepSpeed's paper).
            The capacity is the largest number of tokens of an expert, rounded up to a multiple of 4: no token is
            dropped. The weights of all experts are read.
loop        the loop of transformers over the experts that have tokens; not in a CUDA graph, since it synchronises
grouped     tokens sorted by expert, and torch.nn.functional.grouped_mm (or torch._grouped_mm)
triton      the Triton kernels of experts_triton.py, with tile sizes chosen by measurement
compile     gathered weights and torch.bmm under torch.compile, where there are no more assignments than experts. Slow
            to compile, so measured after all others while time is left, first for 1 and 8 tokens.

Times are µs per layer: medians over replays of a CUDA graph of several layers, measured with CUDA events.

all_us          everything, the router included
experts_us      given the router's choice: grouping, both products and the weighted sum
products_us     given the choice and the grouping: gathering of inputs, both products and the weighted sum
gate_up_us      the product of gate and up, and the activation
down_us         the product of down
around_us       everything but both products: what DeepSpeed's paper calls MoE kernels

A share is the floor over the time; the floor is the weights of the distinct experts chosen over the read bandwidth of
the run. The error is the largest difference from a computation in float32 with the same choice of experts, over the
largest result.
"""

import argparse
import gc
import json
import math
import signal
import sys
import time

from baselines import bandwidth
from experts_layers import DEVICE, FAILURES, Routing, Shape, Variant, activated, build, message, route, timed
from experts_triton import Triton

try:
    import torch
    import triton
    from torch.nn import functional as F
except ImportError as missing:
    print(f"{missing}: this needs PyTorch 2.6 or newer with Triton; see https://pytorch.org", file=sys.stderr)
    sys.exit(2)

SHAPES = {
    "qwen3-30b-a3b": Shape(128, 2048, 768, 8),
    "mixtral-8x7b": Shape(8, 4096, 14336, 2),
    # https://github.com/vllm-project/vllm/issues/44818 gives times of Triton's kernels on an H200.
    "vllm-44818": Shape(128, 2816, 704, 8),
    "gpt-oss-20b": Shape(32, 2880, 2880, 4),
}

TOKENS = [1, 2, 4, 8, 16, 32, 64, 128]

# The floor of all layers in a CUDA graph, in µs: enough that the launch of the graph, about 10 µs, does not count.
GRAPH_US = 1000
# Largest relative error of bf16 that passes, and largest error of a logit or weight of the router.
TOLERANCE = 0.03
ROUTER_TOLERANCE = 0.06
# All layers are compared with float32 up to this many tokens; the first layer, with more.
FULL_CHECK_TOKENS = 8


class Einsum(Variant):
    """Dispatch and combine by one-hot masks, with a place for each token in the capacity of an expert."""

    def prepare(self, x, layers):
        loads = [torch.bincount(self.route(x, layer).ids.flatten()).max().item() for layer in layers]
        # DeepSpeed's smallest capacity is 4.
        self.capacity = -(-max(loads) // 4) * 4
        return {"capacity": self.capacity}

    def plan(self, routing):
        tokens, top = routing.ids.shape
        numbers = torch.arange(max(self.shape.experts, self.capacity), device=routing.ids.device)
        # First choices of all tokens are placed before second choices.
        chosen = routing.ids.T[:, :, None] == numbers[: self.shape.experts]
        flat = chosen.reshape(top * tokens, -1)
        place = ((flat.cumsum(dim=0) - 1) * flat).sum(dim=-1).view(top, tokens)
        placed = place[:, :, None] == numbers[: self.capacity]
        weighted = chosen * routing.weights.T[:, :, None]
        combine = torch.einsum("kte,ktc->tec", weighted, placed.to(weighted.dtype))
        return (combine != 0).to(combine.dtype), combine

    def dispatch(self, x, plan):
        return torch.einsum("tec,th->ech", plan[0], x)

    def gate_up(self, inputs, layer, plan):
        return activated(torch.bmm(inputs, layer.gate_up.transpose(1, 2)))

    def down(self, inner, layer, routing, plan):
        return torch.bmm(inner, layer.down.transpose(1, 2))

    def combine(self, y, routing, plan):
        return torch.einsum("tec,ech->th", plan[1], y)


class Loop(Variant):
    """The eager loop of transformers 5 (Qwen3MoeExperts and others)."""

    captured = False
    in_steps = False

    def experts(self, x, layer, routing):
        result = torch.zeros_like(x)
        mask = F.one_hot(routing.ids, num_classes=self.shape.experts + 1).permute(2, 1, 0)
        for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            expert = expert[0]
            if expert == self.shape.experts:
                continue
            place, token = torch.where(mask[expert])
            inner = activated(F.linear(x[token], layer.gate_up[expert]))
            y = F.linear(inner, layer.down[expert]) * routing.weights[token, place, None]
            result.index_add_(0, token, y.to(result.dtype))
        return result


def grouped_mm(x, weights, ends):
    product = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return product(x, weights.transpose(1, 2), offs=ends)


class Grouped(Variant):
    """PyTorch's grouped matrix product over assignments that are sorted by expert."""

    def plan(self, routing):
        ids, order = routing.ids.flatten().sort()
        experts = torch.arange(self.shape.experts, device=ids.device)
        ends = torch.searchsorted(ids, experts, right=True, out_int32=True)
        return order, order.argsort(), ends

    def dispatch(self, x, plan):
        return x[plan[0] // self.shape.top]

    def gate_up(self, inputs, layer, plan):
        return activated(grouped_mm(inputs, layer.gate_up, plan[2]))

    def down(self, inner, layer, routing, plan):
        return grouped_mm(inner, layer.down, plan[2])

    def combine(self, y, routing, plan):
        return (y[plan[1]].view(*routing.ids.shape, -1) * routing.weights[..., None]).sum(dim=1)


def gathered(x, weights, ids, gate_up, down):
    """A layer that gathers the weights of each assignment; torch.compile fuses the gathering with the products."""
    tokens, top = ids.shape
    flat = ids.flatten()
    inputs = x[:, None].expand(tokens, top, -1).reshape(tokens * top, -1, 1)
    inner = activated(torch.bmm(gate_up[flat], inputs).squeeze(-1))
    y = torch.bmm(down[flat], inner.unsqueeze(-1)).squeeze(-1)
    return (y.view(tokens, top, -1) * weights[..., None]).sum(dim=1)


class Compile(Variant):
    """Gathered weights under torch.compile."""

    in_steps = False

    def prepare(self, x, layers):
        torch._dynamo.reset()
        self.compiled = torch.compile(gathered, mode="max-autotune-no-cudagraphs", fullgraph=True, dynamic=False)
        self.compiled_route = torch.compile(route, fullgraph=True, dynamic=False)
        return {}

    def route(self, x, layer):
        return Routing(*self.compiled_route(x, layer.router, self.shape.top))

    def experts(self, x, layer, routing):
        return self.compiled(x, routing.weights, routing.ids, layer.gate_up, layer.down)


BY = {"einsum": Einsum, "loop": Loop, "grouped": Grouped, "triton": Triton, "compile": Compile}


def reference(x, layer, routing):
    """A layer in float32, for the given choice of experts."""
    ids, weights = routing.ids.long(), routing.weights.float()
    result = torch.zeros(x.shape, device=x.device, dtype=torch.float32)
    for expert in ids.unique().tolist():
        token, place = torch.where(ids == expert)
        inner = activated(x[token].float() @ layer.gate_up[expert].float().T)
        result.index_add_(0, token, inner @ layer.down[expert].float().T * weights[token, place, None])
    return result


def relative_error(x, layer, routing, result):
    expected = reference(x, layer, routing)
    return ((result.float() - expected).abs().max() / expected.abs().max()).item()


def router_error(x, layer, routing):
    """The largest error of a weight, or of a chosen logit against the best in float32; infinite for repeated ids."""
    logits = x.float() @ layer.router.float().T
    ids = routing.ids.long()
    ordered = ids.sort(dim=-1).values
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        return float("inf")
    chosen = logits.gather(1, ids)
    best = logits.topk(ids.shape[1], dim=-1).values
    of_choice = (chosen.sort(dim=-1, descending=True).values - best).abs().max()
    of_weights = (torch.softmax(chosen, dim=-1) - routing.weights.float()).abs().max()
    return torch.maximum(of_choice, of_weights).item()


def steps(variant, x, layers):
    """What is measured, by name: functions of a layer's index."""

    def everything(at):
        return variant.everything(x, layers[at])

    yield "all", everything
    routings = [variant.route(x, layer) for layer in layers]

    def experts(at):
        return variant.experts(x, layers[at], routings[at])

    yield "experts", experts
    if not variant.in_steps:
        return
    plans = [variant.plan(routing) for routing in routings]
    inputs = [variant.dispatch(x, plan) for plan in plans]
    inners = [variant.gate_up(*given) for given in zip(inputs, layers, plans, strict=True)]
    ys = [variant.down(*given) for given in zip(inners, layers, routings, plans, strict=True)]

    def products(at):
        return variant.products(x, layers[at], routings[at], plans[at])

    def gate_up(at):
        return variant.gate_up(inputs[at], layers[at], plans[at])

    def down(at):
        return variant.down(inners[at], layers[at], routings[at], plans[at])

    def around(at):
        return variant.around(x, layers[at], ys[at])

    yield "products", products
    yield "gate_up", gate_up
    yield "down", down
    yield "around", around


def check(x, layers, results):
    """Fields that compare the results of `everything` with float32."""
    checked = list(zip(layers, results, strict=True))[: None if x.shape[0] <= FULL_CHECK_TOKENS else 1]
    error = max(relative_error(x, layer, routing, y) for layer, (routing, y) in checked)
    of_router = max(router_error(x, layer, routing) for layer, (routing, _) in checked)
    return {
        "max_relative_error": round(error, 5),
        "max_router_error": round(of_router, 5),
        "correct": error <= TOLERANCE and of_router <= ROUTER_TOLERANCE,
    }


def floors(x, layers, shape, read):
    """The number of distinct experts chosen and the µs to read their weights, as means over the layers."""
    distinct = sum(route(x, layer.router, shape.top)[1].unique().numel() for layer in layers) / len(layers)
    size = 3 * shape.hidden * shape.inner * 2
    return distinct, distinct * size / read / 1e6


def measure(variant, x, layers, read, options):
    """The report of a variant, without its names."""
    distinct, floor = floors(x, layers, variant.shape, read)
    report = {"distinct_experts": round(distinct, 1), "floor_us": round(floor, 2), "read_tb_per_s": round(read, 3)}
    if variant.captured:
        variant.rounds = max(1, math.ceil(GRAPH_US / (floor * len(layers))))
    report.update(variant.prepare(x, layers))
    # The share of the floor that concerns each time; there is none for what reads no weights of experts.
    shares = {"all": 1, "experts": 1, "products": 1, "gate_up": 2 / 3, "down": 1 / 3}
    for name, step in steps(variant, x, layers):
        repeats = options.repeat if variant.captured else min(options.repeat, 5)
        ms, results = timed(step, len(layers), variant.rounds, variant.captured, repeats)
        us = ms * 1e3 / variant.rounds / len(layers)
        report[f"{name}_us"] = round(us, 2)
        if name in shares:
            report[f"{name}_share"] = round(shares[name] * floor / us, 3)
        if name == "all":
            report.update(check(x, layers, results))
    return report


def jobs(options):
    """What to measure: shape, number of tokens and variant; torch.compile last, with the most useful first."""
    quick = [by for by in options.by if by != "compile"]
    listed = [(name, tokens, by) for name in options.shape for tokens in options.tokens for by in quick]
    if "compile" in options.by:
        for tokens in sorted(options.tokens, key=lambda tokens: (tokens not in (1, 8), tokens)):
            for name in options.shape:
                if tokens * SHAPES[name].top <= SHAPES[name].experts:
                    listed.append((name, tokens, "compile"))
    return listed


@torch.inference_mode()
def run(options, pending, results):
    """Measures what is `pending`, from its front, and moves it to `results`."""
    read = options.read_bandwidth or bandwidth(None)["read_tb_per_s"]
    # Each capture collects garbage; without what is loaded now, that takes less time.
    gc.collect()
    gc.freeze()
    built, layers = None, []
    while pending:
        name, tokens, by = pending[0]
        shape = SHAPES[name]
        result = {"shape": name, "tokens": tokens, "by": by}
        begin = time.monotonic()
        try:
            if built != name:
                built = None
                layers.clear()
                torch.cuda.empty_cache()
                torch.manual_seed(1)
                layers, built = build(shape), name
            torch.manual_seed(tokens)
            x = torch.randn(tokens, shape.hidden, device=DEVICE, dtype=torch.bfloat16)
            result.update(measure(BY[by](shape, tokens), x, layers, read, options))
        except FAILURES as error:
            result["error"] = message(error)
        result["seconds"] = round(time.monotonic() - begin, 1)
        results.append(result)
        pending.pop(0)
        print(json.dumps(result), file=sys.stderr, flush=True)


class OutOfTime(BaseException):
    """The time limit; nothing that catches exceptions should hold it up."""


def end(*_):
    raise OutOfTime


def main():
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES), help="shapes of layers")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="numbers of tokens")
    parser.add_argument("--by", nargs="+", choices=BY, default=list(BY), help="what computes the layer")
    parser.add_argument("--repeat", type=int, default=10, help="replays of each CUDA graph; the median counts")
    parser.add_argument("--time-limit", type=float, default=150, help="seconds after which the run ends")
    parser.add_argument(
        "--read-bandwidth", type=float, help="TB/s for floors, such as that of `dsrun bench kernels`; else measured"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("PyTorch finds no CUDA device; install a driver, or a PyTorch that is built with CUDA")
    properties = torch.cuda.get_device_properties(0)
    report = {
        "device": properties.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }
    pending, results = jobs(options), []
    report["results"] = results
    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, options.time_limit)
    try:
        run(options, pending, results)
    except OutOfTime:
        report["not_measured"] = [dict(zip(("shape", "tokens", "by"), left, strict=True)) for left in pending]
    signal.setitimer(signal.ITIMER_REAL, 0)
    report["seconds"] = round(time.monotonic() - start, 1)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
