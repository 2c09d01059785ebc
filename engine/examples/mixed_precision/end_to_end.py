"""The error of a sentence encoder with the formats that `cargo run -p dsrun-engine --example mixed_precision` chose.

    cargo run --release -p dsrun-engine --example mixed_precision -- MODEL.safetensors ACTIVATIONS.safetensors > chosen.txt
    python end_to_end.py MODEL_FOLDER HELD_OUT.txt chosen.txt

Prints, for each uniform format and for each choice of that size, the squared distance of the last hidden states from those of the
original model, and that of the normalised means, over their squares. Needs torch and transformers.
"""

import sys

from rounding import end_to_end, linear_layers, rounded, sequences
from transformers import AutoModel, AutoTokenizer


def main():
    folder, held_out, chosen = sys.argv[1:]
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval().float()
    batches = sequences(tokenizer, held_out)
    weights = {name: layer.weight.data for name, layer in linear_layers(model)}
    expected = end_to_end(model, batches)
    # Lines of size, weighting, layer, format.
    choices = {}
    for line in open(chosen, encoding="utf-8"):
        size, weighting, name, format = (line.split() + [None] * 4)[:4]
        if name in weights:
            choices.setdefault((size, weighting), {})[name] = format
    for (size, weighting), formats in choices.items():
        for name, layer in linear_layers(model):
            layer.weight.data = rounded(weights[name], formats[name])
        states, means = end_to_end(model, batches, expected)
        print(f"{size:>14} {weighting:>12} {states:.3e} {means:.3e}")


if __name__ == "__main__":
    main()
