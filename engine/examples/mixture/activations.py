"""Writes what the linear layers of a sentence encoder read, for `cargo run -p dsrun-engine --example mixture`.

    python activations.py MODEL_FOLDER CALIBRATION.txt HELD_OUT.txt OUT.safetensors

For every linear layer `NAME` the file has `NAME.energy`, the mean square of each channel over the first text, and `NAME.x`,
rows of activations of the second. Needs torch, transformers and safetensors.
"""

import sys

import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer

ROWS = 512


def sequences(tokenizer, path):
    text = open(path, encoding="utf-8").read()
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]
    return [tokenizer(part, truncation=True, max_length=256, return_tensors="pt") for part in paragraphs[:64]]


def observe(model, batches):
    """What each linear layer reads, by its name."""
    seen = {}

    def hook(name):
        return lambda _, inputs: seen.setdefault(name, []).append(inputs[0].detach().reshape(-1, inputs[0].shape[-1]))

    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    hooks = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers]
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    for handle in hooks:
        handle.remove()
    return {name: torch.cat(rows) for name, rows in seen.items()}


def main():
    folder, calibration, held_out, out = sys.argv[1:]
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval().float()
    tensors = {}
    for name, rows in observe(model, sequences(tokenizer, calibration)).items():
        tensors[f"{name}.energy"] = rows.square().mean(0).contiguous()
    for name, rows in observe(model, sequences(tokenizer, held_out)).items():
        step = max(1, rows.shape[0] // ROWS)
        tensors[f"{name}.x"] = rows[::step][:ROWS].contiguous()
    save_file(tensors, out)


if __name__ == "__main__":
    main()
