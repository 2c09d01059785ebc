"""The perplexity of a text by Hugging Face transformers in f32, window by window as `dsrun eval perplexity` defines it.

    python perplexity.py MODEL TEXT [--context 512] [--chunks N] [--stride N]

MODEL is a GGUF file, whose weights are dequantised to f32, or a folder that transformers loads. Needs `torch`,
`transformers`, and for GGUF files `gguf` and `accelerate`.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--chunks", type=int)
    parser.add_argument("--stride", type=int)
    arguments = parser.parse_args()

    source, options = arguments.model, {}
    if arguments.model.suffix == ".gguf":
        source, options = arguments.model.parent, {"gguf_file": arguments.model.name}
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options).eval()

    text = arguments.text.read_text(encoding="utf-8").removesuffix("\n")
    tokens = tokenizer(text, split_special_tokens=True).input_ids
    begins = tokenizer("").input_ids[:1]

    context, stride = arguments.context, arguments.stride
    if stride is None:
        starts = range(0, len(tokens) - context + 1, context)
        first = context // 2
    else:
        starts = range(0, len(tokens) - context, stride)
        first = context - stride - 1
    starts = list(starts)[: arguments.chunks]

    losses = []
    for start in starts:
        window = torch.tensor(tokens[start : start + context])
        inputs = window.clone()
        if begins:
            inputs[0] = begins[0]
        with torch.no_grad():
            logits = model(inputs[None]).logits[0]
        loss = torch.nn.functional.cross_entropy(
            logits[first:-1].double(), window[first + 1 :], reduction="none"
        )
        losses.append(loss)
    losses = torch.cat(losses)
    mean = losses.mean().item()
    error = math.sqrt((losses.square().mean().item() - mean * mean) / (len(losses) - 1))
    result = {
        "windows": len(starts),
        "predictions": len(losses),
        "mean_nll": mean,
        "perplexity": math.exp(mean),
        "standard_error": math.exp(mean) * error,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
