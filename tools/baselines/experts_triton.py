"""A layer of experts by Triton kernels, with tile sizes chosen by measurement."""

import functools
import sys
from dataclasses import dataclass
from typing import NamedTuple

from experts_layers import FAILURES, Routing, Variant, message, timed

try:
    import torch
    import triton
    import triton.language as tl
except ImportError as missing:
    print(f"{missing}: this needs PyTorch 2.6 or newer with Triton; see https://pytorch.org", file=sys.stderr)
    sys.exit(2)


@triton.jit
def route_kernel(logits, weights, ids, experts, TOP: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr):
    """Chooses the `TOP` best experts of a token, and their weights: the softmax over their logits.

    Grid: tokens. `WIDTH` and `PLACES` are powers of two, not below `experts` and `TOP`.
    """
    token = tl.program_id(0)
    expert = tl.arange(0, WIDTH)
    place = tl.arange(0, PLACES)
    left = tl.load(logits + token * experts + expert, mask=expert < experts, other=-float("inf")).to(tl.float32)
    chosen = tl.zeros([PLACES], dtype=tl.int32)
    score = tl.full([PLACES], -float("inf"), dtype=tl.float32)
    for at in tl.static_range(TOP):
        best = tl.max(left, axis=0)
        winner = tl.argmax(left, axis=0)
        chosen = tl.where(place == at, winner, chosen)
        score = tl.where(place == at, best, score)
        left = tl.where(expert == winner, -float("inf"), left)
    power = tl.exp(score - tl.max(score, axis=0))
    inside = place < TOP
    tl.store(weights + token * TOP + place, power / tl.sum(power, axis=0), mask=inside)
    tl.store(ids + token * TOP + place, chosen, mask=inside)


@triton.jit(do_not_specialize=["count", "slots", "rows"])
def plan_kernel(
    ids, order, expert_of, first_of, end_of, count, slots, rows,
    BY_EXPERT: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Sorts assignments by expert, and divides those of each expert into slots of at most `rows`.

    A slot is what a block of `experts_kernel` computes: its expert, or -1 if it is empty, and a range of `order`.

    By expert (grid: experts), expert e owns the slots from b // rows + e up to the first of expert e + 1, where b is
    the number of assignments of lower experts. They are always enough, and some may stay empty. By assignment (grid:
    assignments), for at most `rows` tokens, slot a belongs to the expert of assignment a, and is empty if an earlier
    assignment has the same expert. Each program derives its part from all ids, so programs do not wait for each other.
    """
    at = tl.program_id(0)
    index = tl.arange(0, WIDTH)
    # Padding is above every expert.
    chosen = tl.load(ids + index, mask=index < count, other=1 << 30)
    if BY_EXPERT:
        expert = at
    else:
        expert = tl.load(ids + at)
    same = chosen == expert
    before = tl.sum((chosen < expert).to(tl.int32), axis=0)
    number = tl.sum(same.to(tl.int32), axis=0)
    rank = tl.cumsum(same.to(tl.int32), axis=0) - 1
    end = before + number
    tl.store(order + before + rank, index, mask=same)
    if BY_EXPERT:
        slot = tl.arange(0, SLOTS)
        place = slot - (before // rows + expert)
        own = (place >= 0) & (slot < end // rows + expert + 1) & (slot < slots)
        filled = place * rows < number
        tl.store(expert_of + slot, tl.where(filled, expert, -1), mask=own)
        tl.store(first_of + slot, before + place * rows, mask=own)
        tl.store(end_of + slot, tl.where(filled, end, before), mask=own)
    else:
        earliest = tl.min(tl.where(same, index, WIDTH), axis=0)
        tl.store(expert_of + at, tl.where(earliest == at, expert, -1))
        tl.store(first_of + at, before)
        tl.store(end_of + at, end)


@triton.jit(do_not_specialize=["top"])
def experts_kernel(
    x, weight, y, factors, order, expert_of, first_of, end_of, inputs, outputs, top,
    GATED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of `COLUMNS` outputs for the assignments of a slot, as `weight @ x.T`.

    Grid: slots, tiles of outputs. `GATED` computes silu(gate) * up for rows of tokens; else the product of rows of
    assignments, times `factors`. `ROWS` of 1 means that slot a is assignment a, and uses no tensor cores. `inputs` and
    `outputs` are multiples of 16.
    """
    slot = tl.program_id(0)
    expert = tl.load(expert_of + slot).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    # Columns beyond the last read its weights, and are not stored.
    row_of_weight = tl.minimum(column, outputs - 1)
    if GATED:
        matrix = weight + expert * (2 * inputs * outputs)
    else:
        matrix = weight + expert * (inputs * outputs)
    first = matrix + row_of_weight[:, None] * inputs + depth[None, :]
    second = first + inputs * outputs
    if ROWS == 1:
        if GATED:
            source = x + (slot // top) * inputs + depth
        else:
            source = x + slot * inputs + depth
        product = tl.zeros([COLUMNS, DEPTH], dtype=tl.float32)
        other = tl.zeros([COLUMNS, DEPTH], dtype=tl.float32)
        for at in tl.range(0, inputs, DEPTH, num_stages=STAGES):
            inside = at + depth < inputs
            values = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)[None, :]
            product += tl.load(first + at, mask=inside[None, :], other=0.0).to(tl.float32) * values
            if GATED:
                other += tl.load(second + at, mask=inside[None, :], other=0.0).to(tl.float32) * values
        result = tl.sum(product, axis=1)
        if GATED:
            result = result / (1.0 + tl.exp(-result)) * tl.sum(other, axis=1)
        else:
            result *= tl.load(factors + slot)
        tl.store(y + slot * outputs + column, result.to(y.dtype.element_ty), mask=column < outputs)
    elif expert >= 0:
        index = tl.load(first_of + slot) + tl.arange(0, ROWS)
        live = index < tl.load(end_of + slot)
        assignment = tl.load(order + index, mask=live, other=0)
        if GATED:
            row = assignment // top
        else:
            row = assignment
        source = x + row[None, :] * inputs + depth[:, None]
        product = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
        other = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
        for at in tl.range(0, inputs, DEPTH, num_stages=STAGES):
            inside = at + depth < inputs
            values = tl.load(source + at, mask=inside[:, None] & live[None, :], other=0.0)
            product = tl.dot(tl.load(first + at, mask=inside[None, :], other=0.0), values, product)
            if GATED:
                other = tl.dot(tl.load(second + at, mask=inside[None, :], other=0.0), values, other)
        if GATED:
            result = product / (1.0 + tl.exp(-product)) * other
        else:
            result = product * tl.load(factors + assignment, mask=live, other=0.0)[None, :]
        target = y + assignment[None, :] * outputs + column[:, None]
        tl.store(target, result.to(y.dtype.element_ty), mask=live[None, :] & (column < outputs)[:, None])


@triton.jit
def combine_kernel(y, result, hidden, TOP: tl.constexpr, WIDTH: tl.constexpr):
    """The sum over the experts of a token. Grid: tokens, tiles of `WIDTH` columns."""
    token = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < hidden
    total = tl.zeros([WIDTH], dtype=tl.float32)
    for at in tl.static_range(TOP):
        total += tl.load(y + (token * TOP + at) * hidden + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + token * hidden + column, total.to(result.dtype.element_ty), mask=inside)


class Tile(NamedTuple):
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


TILES = [
    Tile(1, 8, 512, 4, 2),
    Tile(1, 16, 256, 4, 2),
    Tile(1, 16, 512, 8, 1),
    Tile(1, 32, 256, 8, 1),
    Tile(16, 32, 128, 4, 4),
    Tile(16, 64, 64, 4, 5),
    Tile(16, 64, 128, 4, 3),
    Tile(16, 128, 64, 4, 4),
    Tile(32, 64, 128, 4, 3),
    Tile(32, 128, 64, 4, 4),
    Tile(64, 64, 64, 4, 4),
    Tile(64, 128, 64, 8, 3),
]


@dataclass
class Slots:
    """What `experts_kernel` computes: see `plan_kernel`."""

    order: torch.Tensor
    expert: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor
    count: int


class Triton(Variant):
    """The kernels above. For few tokens each assignment is a slot of its own, and nothing is sorted."""

    # Tiles for gate and up, and for down; of the same number of rows.
    tiles = (Tile(16, 64, 64, 4, 5), Tile(16, 64, 64, 4, 5))

    def usable(self):
        """The tiles worth a trial, by number of rows."""
        mean = self.tokens * self.shape.top / self.shape.experts
        limits = {1: self.tokens <= 8, 16: True, 32: mean > 8, 64: mean > 16}
        return {rows: [tile for tile in TILES if tile.rows == rows] for rows, worth in limits.items() if worth}

    def prepare(self, x, layers):
        """Measures tiles, and keeps the fastest pair."""
        routings = [self.route(x, layer) for layer in layers]
        failed = {}

        def fastest(tiles, launch):
            times = []
            for tile in tiles:
                try:
                    ms, _ = timed(functools.partial(launch, tile), len(layers), self.rounds, repeats=5)
                    times.append((ms, tile))
                except FAILURES as error:
                    failed["x".join(map(str, tile))] = message(error)
            if not times:
                raise RuntimeError(f"no tile runs: {failed}")
            return min(times)

        best = None
        for tiles in self.usable().values():
            self.tiles = (tiles[0], tiles[0])
            plans = [self.plan(routing) for routing in routings]

            def gate_up(tile, at, plans=plans):
                return self.launch(x, layers[at].gate_up, plans[at].order, plans[at], tile, gated=True)

            first_ms, first = fastest(tiles, gate_up)
            inners = [gate_up(first, at) for at in range(len(layers))]

            def down(tile, at, plans=plans, inners=inners):
                weight, factors = layers[at].down, routings[at].weights
                return self.launch(inners[at], weight, factors, plans[at], tile, gated=False)

            second_ms, second = fastest(tiles, down)
            if best is None or first_ms + second_ms < best[0]:
                best = (first_ms + second_ms, (first, second))
        self.tiles = best[1]
        report = {f"{name}_tile": tile._asdict() for name, tile in zip(("gate_up", "down"), self.tiles, strict=True)}
        if failed:
            report["tiles_that_failed"] = failed
        return report

    def route(self, x, layer):
        experts, top = self.shape.experts, self.shape.top
        tokens = x.shape[0]
        logits = torch.mm(x, layer.router.T)
        weights = torch.empty(tokens, top, device=x.device, dtype=torch.float32)
        ids = torch.empty(tokens, top, device=x.device, dtype=torch.int32)
        width, places = triton.next_power_of_2(experts), triton.next_power_of_2(top)
        route_kernel[(tokens,)](logits, weights, ids, experts, TOP=top, WIDTH=width, PLACES=places, num_warps=1)
        return Routing(weights, ids)

    def plan(self, routing):
        rows, ids = self.tiles[0].rows, routing.ids
        count, experts = ids.numel(), self.shape.experts
        if rows == 1:
            return Slots(ids, ids, ids, ids, count)
        divided = count // rows + experts
        by_expert = ids.shape[0] > rows or divided < count
        slots = divided if by_expert else count
        order, expert, first, end = (
            torch.empty(size, device=ids.device, dtype=torch.int32) for size in (count, slots, slots, slots)
        )
        plan_kernel[(experts if by_expert else count,)](
            ids, order, expert, first, end, count, slots, rows,
            BY_EXPERT=by_expert,
            WIDTH=128 if count <= 128 else max(1024, triton.next_power_of_2(count)),
            SLOTS=max(256, triton.next_power_of_2(slots)),
        )  # fmt: skip
        return Slots(order, expert, first, end, slots)

    def launch(self, x, weight, factors, slots, tile, gated):
        count = slots.order.numel()
        outputs, inputs = weight.shape[1] // 2 if gated else weight.shape[1], weight.shape[2]
        y = torch.empty(count, outputs, device=x.device, dtype=x.dtype)
        experts_kernel[(slots.count, triton.cdiv(outputs, tile.columns))](
            x, weight, y, factors, slots.order, slots.expert, slots.first, slots.end,
            inputs, outputs, self.shape.top,
            GATED=gated, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, STAGES=tile.stages,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return y

    def dispatch(self, x, plan):
        return x

    def gate_up(self, inputs, layer, plan):
        # Gate and up have no factors, so any tensor will do.
        return self.launch(inputs, layer.gate_up, plan.order, plan, self.tiles[0], gated=True)

    def down(self, inner, layer, routing, plan):
        return self.launch(inner, layer.down, routing.weights, plan, self.tiles[1], gated=False)

    def combine(self, y, routing, plan):
        tokens, top = routing.ids.shape
        hidden = y.shape[1]
        result = torch.empty(tokens, hidden, device=y.device, dtype=y.dtype)
        combine_kernel[(tokens, triton.cdiv(hidden, 1024))](y, result, hidden, TOP=top, WIDTH=1024, num_warps=4)
        return result
