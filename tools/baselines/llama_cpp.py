#!/usr/bin/env python3
"""Measures dsrun and llama.cpp on the same CPU, with the same files, in turn.

    cargo build --release -p dsrun
    python3 tools/baselines/llama_cpp.py --dsrun target/release/dsrun --model SmolLM2-135M-Instruct.Q4_1.gguf
    python3 tools/baselines/llama_cpp.py --dsrun target/release/dsrun --shape llama-1b --type q4_k q6_k q8_0 f16

Builds llama.cpp for the processor at hand, from the sources in the package llama-cpp-python on PyPI, into --work (needs CMake, a
C++ compiler and pip). With --shape, writes random weights to a GGUF file that both read; the tokenizer is that of --model. Needs the
packages gguf and numpy for that. Both programs use --threads threads. Every measurement runs --repeat times, the programs in turn, and
medians are compared. Nothing else should run on the machine. Prints a table, or JSON with --json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
from pathlib import Path

# Hidden size, intermediate size, layers, query heads, KV heads, head size.
SHAPES = {"llama-1b": (2048, 8192, 16, 32, 8, 64)}

TOOLS = ["llama-bench", "llama-batched-bench", "llama-quantize"]


def run(command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def build(work):
    """The folder of llama.cpp's programs, built for this processor if they are not there yet."""
    programs = work / "build" / "bin"
    if all((programs / tool).exists() for tool in TOOLS):
        return programs
    work.mkdir(parents=True, exist_ok=True)
    package = "llama-cpp-python"
    run([sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", package, "--dest", work, package])
    archive = sorted(work.glob("llama_cpp_python-*.tar.gz"))[-1]
    with tarfile.open(archive) as sources:
        sources.extractall(work, filter="data")
    sources = work / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
    switches = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF"]
    # GCC 12 believes that ldtilecfg reads 8 bytes and drops the stores of all others, so that a program with AMX faults.
    switches += ["-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse"]
    unused = ["CURL", "OPENSSL", "BUILD_TESTS", "BUILD_SERVER", "BUILD_EXAMPLES", "BUILD_UI"]
    switches += [f"-DLLAMA_{name}=OFF" for name in unused]
    run(["cmake", "-S", sources, "-B", work / "build", *switches])
    run(["cmake", "--build", work / "build", "--parallel", os.cpu_count(), "--target", *TOOLS])
    return programs


def random_model(shape, tokenizer, path):
    """Writes a GGUF file with random weights in f16, and the tokenizer of another file."""
    import gguf
    import numpy as np

    hidden, inner, layers, heads, kv_heads, size = SHAPES[shape]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(500000.0)
    reader = gguf.GGUFReader(tokenizer)
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    vocabulary = len(reader.fields["tokenizer.ggml.tokens"].data)
    random = np.random.default_rng(0)

    def add(name, *dimensions):
        values = random.standard_normal(dimensions, dtype=np.float32) / np.sqrt(dimensions[-1])
        writer.add_tensor(name, values.astype(np.float16))

    add("token_embd.weight", vocabulary, hidden)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(layers):
        for norm in ["attn_norm", "ffn_norm"]:
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(hidden, np.float32))
        add(f"blk.{layer}.attn_q.weight", heads * size, hidden)
        add(f"blk.{layer}.attn_k.weight", kv_heads * size, hidden)
        add(f"blk.{layer}.attn_v.weight", kv_heads * size, hidden)
        add(f"blk.{layer}.attn_output.weight", hidden, heads * size)
        add(f"blk.{layer}.ffn_gate.weight", inner, hidden)
        add(f"blk.{layer}.ffn_up.weight", inner, hidden)
        add(f"blk.{layer}.ffn_down.weight", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def models(options, programs):
    """The files to measure, by name."""
    if not options.shape:
        return {Path(options.model).stem: options.model}
    files = {}
    for shape in options.shape:
        source = options.work / f"{shape}-f16.gguf"
        if not source.exists():
            random_model(shape, options.model, source)
        for kind in options.type:
            file = options.work / f"{shape}-{kind}.gguf"
            if not file.exists():
                run([programs / "llama-quantize", "--pure", "--allow-requantize", source, file, kind.upper(), os.cpu_count()])
            files[f"{shape} {kind}"] = file
    return files


class Dsrun:
    """Tokens per second of dsrun."""

    def __init__(self, options):
        self.command = [options.dsrun, "bench"]
        self.flags = ["--threads", options.threads, "--json", *options.dsrun_flags]
        self.shares = []

    def latency(self, model, prompt, generate):
        flags = ["--repeat", 1, "--model", model, "--prompt", prompt, "--gen", generate, "--step-tokens", 512]
        return json.loads(run([*self.command, "latency", *flags, "--context", prompt + generate, *self.flags]))

    def prompt(self, model, tokens):
        return self.latency(model, tokens, 2)["prompt_tokens_per_second"]

    def decode(self, model, past):
        found = self.latency(model, past, 64)
        self.shares.append(found["share_of_bandwidth"])
        return found["decode_tokens_per_second"]

    def batch(self, model, requests):
        flags = ["--model", model, "--requests", requests, "--prompt", 128, "--gen", 64]
        found = json.loads(run([*self.command, "throughput", *flags, *self.flags]))
        return found["output_tokens_per_second"]


class LlamaCpp:
    """Tokens per second of llama.cpp."""

    def __init__(self, options, programs):
        self.programs, self.threads = programs, options.threads

    def bench(self, model, *flags):
        command = [self.programs / "llama-bench", "-m", model, "-t", self.threads, "-r", 1, "-o", "json", *flags]
        return json.loads(run(command))[0]["avg_ts"]

    def prompt(self, model, tokens):
        return self.bench(model, "-p", tokens, "-n", 0)

    def decode(self, model, past):
        return self.bench(model, "-p", 0, "-n", 64, "-d", past)

    def batch(self, model, requests):
        sizes = ["-npp", 128, "-ntg", 64, "-npl", requests, "-c", requests * 256]
        command = [self.programs / "llama-batched-bench", "-m", model, "-t", self.threads, *sizes]
        lines = run([*command, "--output-format", "jsonl"]).splitlines()
        found = json.loads(next(line for line in lines if line.startswith("{")))
        return requests * 64 / (found["t_pp"] + found["t_tg"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dsrun", required=True, help="the program to measure, built for release")
    parser.add_argument("--dsrun-flags", nargs="*", default=[], help="further flags of dsrun, such as -- --exact")
    parser.add_argument("--model", required=True, help="a GGUF file to measure, or with --shape the source of the tokenizer")
    parser.add_argument("--shape", nargs="*", choices=SHAPES, help="measure random weights of this shape")
    parser.add_argument("--type", nargs="*", default=["q8_0", "q4_0", "q4_k", "q6_k", "f16", "bf16"], help="types of weights")
    parser.add_argument("--prompt", nargs="*", type=int, default=[128, 512, 4096], help="tokens of prompts to measure")
    parser.add_argument("--past", nargs="*", type=int, default=[128, 4096], help="tokens before those that are generated")
    parser.add_argument("--batch", nargs="*", type=int, default=[8], help="requests at once, of 128 and 64 tokens")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path("target/llama.cpp"), help="folder for llama.cpp and files")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    programs = build(options.work)
    pair = {"dsrun": Dsrun(options), "llama.cpp": LlamaCpp(options, programs)}
    measures = [("prompt", count) for count in options.prompt]
    measures += [("decode", count) for count in options.past] + [("batch", count) for count in options.batch]
    labels = {"prompt": "prompt of {}", "decode": "decode behind {}", "batch": "{} requests at once"}
    rows = []
    for name, file in models(options, programs).items():
        for measure, count in measures:
            found = {program: [] for program in pair}
            pair["dsrun"].shares.clear()
            for _ in range(options.repeat):
                for program, runner in pair.items():
                    found[program].append(getattr(runner, measure)(file, count))
            ours, theirs = (statistics.median(found[program]) for program in pair)
            row = {"model": name, "measure": labels[measure].format(count), "runs": found, "ratio": ours / theirs}
            line = f"{name} | {row['measure']} | {ours:.1f} | {theirs:.1f} | {row['ratio']:.2f}"
            if shares := pair["dsrun"].shares:
                # Of weights and of keys and values that a step reads.
                row["share_of_bandwidth"] = statistics.median(shares)
                line += f" | {100 * row['share_of_bandwidth']:.0f}% of the read bandwidth"
            rows.append(row)
            if not options.json:
                print(line, flush=True)
    if options.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
