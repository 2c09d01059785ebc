"""A layer of experts, its weights and the ways to compute it: what the files that measure experts share."""

import sys
from dataclasses import dataclass
from typing import NamedTuple

from baselines import milliseconds

try:
    import torch
    from torch.nn import functional as F
    from triton.errors import TritonError
except ImportError as missing:
    print(f"{missing}: this needs PyTorch 2.6 or newer with Triton; see https://pytorch.org", file=sys.stderr)
    sys.exit(2)

DEVICE = "cuda"

# Weights of distinct experts that layers read in turn, in bytes: several times what an L2 cache holds.
ROTATED = 200 << 20
MIN_LAYERS = 3

FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, TritonError)


class Shape(NamedTuple):
    experts: int
    hidden: int
    inner: int
    top: int


@dataclass
class Layer:
    router: torch.Tensor  # [experts, hidden]
    gate_up: torch.Tensor  # [experts, 2 * inner, hidden], gate before up
    down: torch.Tensor  # [experts, hidden, inner]


@dataclass
class Routing:
    weights: torch.Tensor  # [tokens, top]
    ids: torch.Tensor  # [tokens, top]


def build(shape):
    """Layers with random weights."""
    experts, hidden, inner, top = shape
    fewest_bytes = top * 3 * hidden * inner * 2
    count = max(MIN_LAYERS, -(-ROTATED // fewest_bytes))

    def normal(*sizes, scale):
        return torch.empty(*sizes, device=DEVICE, dtype=torch.bfloat16).normal_(0, scale)

    return [
        Layer(
            normal(experts, hidden, scale=hidden**-0.5),
            normal(experts, 2 * inner, hidden, scale=hidden**-0.5),
            normal(experts, hidden, inner, scale=inner**-0.5),
        )
        for _ in range(count)
    ]


def route(x, router, top):
    """The router of transformers: softmax in float32, the best experts, and weights that add up to 1."""
    scores = torch.softmax(F.linear(x, router), dim=-1, dtype=torch.float32)
    weights, ids = torch.topk(scores, top, dim=-1)
    return (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype), ids


def activated(inner):
    gate, up = inner.chunk(2, dim=-1)
    return F.silu(gate) * up


class Variant:
    """A way to compute a layer, in steps."""

    # Whether it runs in a CUDA graph.
    captured = True
    # Whether grouping, both products and the weighted sum are steps of their own.
    in_steps = True

    # How often a CUDA graph goes through all layers.
    rounds = 1

    def __init__(self, shape, tokens):
        self.shape, self.tokens = shape, tokens

    def prepare(self, x, layers):
        """Chooses what depends on the inputs; returns fields for the report."""
        return {}

    def route(self, x, layer):
        return Routing(*route(x, layer.router, self.shape.top))

    def experts(self, x, layer, routing):
        return self.products(x, layer, routing, self.plan(routing))

    def products(self, x, layer, routing, plan):
        inner = self.gate_up(self.dispatch(x, plan), layer, plan)
        return self.combine(self.down(inner, layer, routing, plan), routing, plan)

    def around(self, x, layer, y):
        """Everything but the products, given a result `y` of `down`."""
        routing = self.route(x, layer)
        plan = self.plan(routing)
        return self.dispatch(x, plan), self.combine(y, routing, plan)

    def everything(self, x, layer):
        routing = self.route(x, layer)
        return routing, self.experts(x, layer, routing)


def message(error):
    # A failure within a capture makes the end of the capture fail, too.
    causes = [error] + ([error.__context__] if error.__context__ else [])
    return "; after ".join(f"{type(cause).__name__}: {cause}"[:400] for cause in causes)


def timed(step, count, rounds=1, captured=True, repeats=10):
    """The median time of `step` for each of `count` layers, `rounds` times, in milliseconds, and what it returned."""

    def run():
        for _ in range(rounds):
            results = [step(at) for at in range(count)]
        return results

    results = run()
    replay = run
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run()
        replay = graph.replay
    return milliseconds(replay, repeats=repeats), results
