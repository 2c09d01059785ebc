#!/usr/bin/env python3
"""Measures PyTorch, cuBLAS, cuDNN and FlashAttention as baselines for dsrun's figures.

    python3 tools/baselines/baselines.py decode --shape llama-8b llama-1b
    python3 tools/baselines/baselines.py attention gemm bandwidth

Needs a CUDA device and PyTorch 2.6 or newer; nothing is downloaded, weights are random. Prints one JSON object.

decode      a model of the shape under torch.compile with CUDA graphs and a static cache: prefill, then greedy decode
attention   causal scaled_dot_product_attention by cuDNN and by FlashAttention
gemm        the matrix products of a layer of llama-8b by cuBLAS, each measured separately in short bursts
chain       the matrix products of all layers of llama-8b by cuBLAS in sequence, repeated like `bench prefill`: a lower bound for
            the time of a prefill, at the clock rates that a prefill runs at
bandwidth   a copy and a read of 2 GiB

Times are medians over repetitions, measured with CUDA events; a time of decode covers all tokens of a run.
"""

import argparse
import json
import statistics
import sys
import time

try:
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as missing:
    print(f"{missing}: this needs PyTorch 2.6 or newer, see https://pytorch.org/get-started", file=sys.stderr)
    sys.exit(2)

# Hidden size, intermediate size, layers, query heads, KV heads, head size, vocabulary size, and whether the model is like GPT-2:
# LayerNorm, biases, learned positions and an MLP without a gate.
SHAPES = {
    "smollm2-135m": (576, 1536, 30, 9, 3, 64, 49152, False),
    "llama-1b": (2048, 8192, 16, 32, 8, 64, 128256, False),
    "llama-8b": (4096, 14336, 32, 32, 8, 128, 128256, False),
    "gpt2-xl": (1600, 6400, 48, 25, 25, 64, 50257, True),
    "opt-13b": (5120, 20480, 40, 40, 40, 128, 50272, True),
}


class Layer(nn.Module):
    """A decoder layer with a static cache."""

    def __init__(self, shape, length):
        super().__init__()
        hidden, inner, _, heads, kv_heads, size, _, self.classic = shape
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        norm = nn.LayerNorm if self.classic else nn.RMSNorm
        self.norms = nn.ModuleList([norm(hidden), norm(hidden)])
        self.projection = nn.Linear(hidden, (heads + 2 * kv_heads) * size, bias=self.classic)
        self.output = nn.Linear(heads * size, hidden, bias=self.classic)
        self.up = nn.Linear(hidden, inner if self.classic else 2 * inner, bias=self.classic)
        self.down = nn.Linear(inner, hidden, bias=self.classic)
        self.register_buffer("keys", torch.zeros(1, kv_heads, length, size))
        self.register_buffer("values", torch.zeros(1, kv_heads, length, size))

    def forward(self, x, positions, mask, rotation):
        tokens = x.shape[1]
        split = [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size]
        query, key, value = self.projection(self.norms[0](x)).split(split, dim=-1)
        query, key, value = (part.view(1, tokens, -1, self.size).transpose(1, 2) for part in (query, key, value))
        if not self.classic:
            query, key = rotate(query, rotation), rotate(key, rotation)
        self.keys.index_copy_(2, positions, key)
        self.values.index_copy_(2, positions, value)
        group = self.heads // self.kv_heads
        keys, values = self.keys.repeat_interleave(group, dim=1), self.values.repeat_interleave(group, dim=1)
        y = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        x = x + self.output(y.transpose(1, 2).reshape(1, tokens, -1))
        inner = self.up(self.norms[1](x))
        if self.classic:
            return x + self.down(F.gelu(inner, approximate="tanh"))
        gate, up = inner.chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotate(x, rotation):
    """Rotary embedding that pairs the halves of a head."""
    cosines, sines = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


class Decoder(nn.Module):
    """A decoder with a cache for `length` tokens of one sequence."""

    def __init__(self, shape, length):
        super().__init__()
        hidden, _, layers, _, _, size, vocabulary, self.classic = shape
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(length, hidden) if self.classic else None
        self.layers = nn.ModuleList([Layer(shape, length) for _ in range(layers)])
        self.norm = (nn.LayerNorm if self.classic else nn.RMSNorm)(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.register_buffer("seen", torch.ones(length, length, dtype=torch.bool).tril())
        angles = torch.outer(torch.arange(length), 500000.0 ** -(torch.arange(0, size, 2) / size))
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cosines", angles.cos())
        self.register_buffer("sines", angles.sin())

    def forward(self, ids, positions):
        x = self.embedding(ids)
        if self.positions is not None:
            x = x + self.positions(positions)
        mask = self.seen[positions][None, None]
        rotation = (self.cosines[positions], self.sines[positions])
        for layer in self.layers:
            x = layer(x, positions, mask, rotation)
        return self.head(self.norm(x[:, -1:])).argmax(-1)


def build(shape, length, dtype):
    """A decoder with random weights."""
    with torch.device("meta"):
        model = Decoder(shape, length)
    model = model.to(dtype).to_empty(device="cuda").eval().requires_grad_(False)
    for name, tensor in list(model.named_parameters()) + list(model.named_buffers()):
        if name.endswith(("keys", "values")):
            tensor.zero_()
        elif "norm" in name and name.endswith("weight"):
            tensor.fill_(1)
        elif name == "seen":
            tensor.copy_(torch.ones_like(tensor).tril())
        elif name in ("cosines", "sines"):
            tensor.uniform_(-1, 1)
        else:
            tensor.normal_(0, 0.02)
    return model


def milliseconds(run, repeats=20, warm=3, pause=0):
    """The median time of `run` in milliseconds, with `pause` seconds of idle time before each repetition."""
    for _ in range(warm):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        time.sleep(pause)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


@torch.inference_mode()
def decode(options):
    results = []
    for name in options.shape:
        torch._dynamo.reset()
        model = build(SHAPES[name], options.prompt + options.generated, getattr(torch, options.dtype))
        step = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        prompt = torch.randint(0, SHAPES[name][6], (1, options.prompt), device="cuda")
        before = torch.arange(options.prompt, device="cuda")

        def first():
            return model(prompt, before)

        def generate():
            # Positions are prepared in advance, so that the loop only launches.
            token = first_token.clone()
            for position in positions:
                token = step(token, position).clone()

        first_token = first()
        last = options.prompt + options.generated
        positions = [torch.tensor([at], device="cuda") for at in range(options.prompt, last)]
        per_token = milliseconds(generate, repeats=3, warm=2) / options.generated
        weights = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if "embedding" not in n)
        results.append(
            {
                "shape": name,
                "dtype": options.dtype,
                "prompt": options.prompt,
                "generated": options.generated,
                "ms_per_token": round(per_token, 4),
                "first_token_ms_eager": round(milliseconds(first, repeats=5), 3),
                "weight_bytes_read": weights,
            }
        )
        del model, step
        torch.cuda.empty_cache()
    return results


def attention(_):
    results = []
    for heads, kv_heads, size in ((32, 8, 128), (32, 8, 64)):
        for length in (512, 1024, 2048, 4096, 8192):
            query = torch.randn(1, heads, length, size, device="cuda", dtype=torch.bfloat16)
            key, value = (torch.randn(1, kv_heads, length, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
                with sdpa_kernel(backend):
                    ms = milliseconds(
                        lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
                    )
                operations = 2 * heads * size * length * (length + 1)
                results.append(
                    {
                        "by": backend.name,
                        "query_heads": heads,
                        "kv_heads": kv_heads,
                        "head_size": size,
                        "tokens": length,
                        "ms": round(ms, 4),
                        "tflops": round(operations / ms / 1e9, 1),
                    }
                )
    return results


def gemm(options):
    results = []
    for rows in (1, 8, 32, 128, 512, 2048):
        total = 0.0
        for name, outputs, inputs in (
            ("query_key_value", 6144, 4096),
            ("output", 4096, 4096),
            ("gate_up", 28672, 4096),
            ("down", 4096, 14336),
        ):
            # Cycle through several weights, more than the L2 cache holds.
            count = max(2, (256 << 20) // (outputs * inputs * 2))
            weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(count)]
            x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
            y = torch.empty(rows, outputs, device="cuda", dtype=torch.bfloat16)

            def run():
                for weight in weights:
                    torch.mm(x, weight.T, out=y)

            graph = torch.cuda.CUDAGraph()
            run()
            with torch.cuda.graph(graph):
                run()
            ms = milliseconds(graph.replay) / count
            total += ms
            results.append(
                {
                    "product": name,
                    "rows": rows,
                    "outputs": outputs,
                    "inputs": inputs,
                    "us": round(ms * 1e3, 2),
                    "tflops": round(2 * rows * outputs * inputs / ms / 1e9, 1),
                    "weights_tb_per_s": round(outputs * inputs * 2 / ms / 1e9, 2),
                }
            )
        results.append({"product": "all 32 layers of llama-8b", "rows": rows, "ms": round(total * 32, 3)})
    return results


def chain(options):
    hidden, inner, layers, heads, kv_heads, size, _, _ = SHAPES["llama-8b"]
    shapes = {
        "query_key_value": ((heads + 2 * kv_heads) * size, hidden),
        "output": (hidden, heads * size),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }

    def normal(*sizes, scale):
        return torch.empty(*sizes, device="cuda", dtype=torch.bfloat16).normal_(0, scale)

    weights = [{name: normal(*shape, scale=0.02) for name, shape in shapes.items()} for _ in range(layers)]
    results = []
    for rows in options.rows:
        x = {name: normal(rows, inputs, scale=1) for name, (_, inputs) in shapes.items()}
        y = {name: torch.empty(rows, outputs, device="cuda", dtype=torch.bfloat16) for name, (outputs, _) in shapes.items()}

        def run():
            for layer in weights:
                for name, weight in layer.items():
                    torch.mm(x[name], weight.T, out=y[name])

        graph = torch.cuda.CUDAGraph()
        run()
        with torch.cuda.graph(graph):
            run()
        torch.cuda.synchronize()
        # Like `bench prefill`: a pause while its step is compiled, a warm-up run, and runs that each end with a synchronisation.
        time.sleep(2)
        ms = milliseconds(graph.replay, repeats=options.repeat, warm=1, pause=options.pause)
        operations = 2 * rows * layers * sum(outputs * inputs for outputs, inputs in shapes.values())
        results.append({"rows": rows, "ms": round(ms, 3), "tflops": round(operations / ms / 1e9, 1)})
    return results


def bandwidth(_):
    source = torch.rand(1 << 29, device="cuda")
    target = torch.empty_like(source)
    size = source.numel() * source.element_size()
    copy = milliseconds(lambda: target.copy_(source))
    read = milliseconds(lambda: torch.sum(source))
    return {
        "bytes": size,
        "copy_tb_per_s_read_and_written": round(2 * size / copy / 1e9, 3),
        "read_tb_per_s": round(size / read / 1e9, 3),
    }


COMMANDS = {"decode": decode, "attention": attention, "gemm": gemm, "chain": chain, "bandwidth": bandwidth}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=COMMANDS, help="measurements to run")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["llama-8b"], help="shapes for decode")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16", help="element type for decode")
    parser.add_argument("--prompt", type=int, default=512, help="prompt length in tokens for decode")
    parser.add_argument("--generated", type=int, default=128, help="number of tokens to generate for decode")
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 2048], help="prompt lengths in tokens for chain")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions for chain")
    parser.add_argument("--pause", type=float, default=0, help="seconds of idle time before each repetition of chain")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("PyTorch finds no CUDA device; install a driver, or a PyTorch that is built with CUDA")
    properties = torch.cuda.get_device_properties(0)
    report = {"device": properties.name, "torch": torch.__version__, "cuda": torch.version.cuda}
    for what in options.what:
        report[what] = COMMANDS[what](options)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
