"""Records the activations of a sentence encoder's linear layers, for `cargo run -p dsrun-engine --example mixed_precision`.

    python activations.py MODEL_FOLDER CALIBRATION.txt HELD_OUT.txt OUT.safetensors

For every linear layer `NAME` the file has `NAME.energy`, the mean square of each channel over the first text, `NAME.sensitivity`,
the change of that text's last hidden states when the layer's weight alone is rounded to `PROBE`, and `NAME.x`, rows of activations
of the second text. Needs torch, transformers and safetensors.
"""

import sys

import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer

from rounding import end_to_end, linear_layers, rounded, sequences

ROWS = 512
PROBE = "int4g128_f16"


def observe(model, batches):
    """The inputs of each linear layer, by its name."""
    seen = {}

    def hook(name):
        return lambda _, inputs: seen.setdefault(name, []).append(inputs[0].detach().reshape(-1, inputs[0].shape[-1]))

    hooks = [layer.register_forward_pre_hook(hook(name)) for name, layer in linear_layers(model)]
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    for handle in hooks:
        handle.remove()
    return {name: torch.cat(rows) for name, rows in seen.items()}


def main():
    folder, calibration, held_out, out = sys.argv[1:]
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval().float()
    tensors, seen = {}, sequences(tokenizer, calibration)
    for name, rows in observe(model, seen).items():
        tensors[f"{name}.energy"] = rows.square().mean(0).contiguous()
    expected = end_to_end(model, seen)
    for name, layer in linear_layers(model):
        weight = layer.weight.data
        layer.weight.data = rounded(weight, PROBE)
        (sensitivity, _) = end_to_end(model, seen, expected)
        layer.weight.data = weight
        tensors[f"{name}.sensitivity"] = torch.tensor([sensitivity])
    for name, rows in observe(model, sequences(tokenizer, held_out)).items():
        step = max(1, rows.shape[0] // ROWS)
        tensors[f"{name}.x"] = rows[::step][:ROWS].contiguous()
    save_file(tensors, out)


if __name__ == "__main__":
    main()
