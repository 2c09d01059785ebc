"""Writes `rounded.json`: how far logits move when weights, or weights and activations, are rounded.

The models are fixtures of the models' tests, run by transformers in f32 on the tokens of `quantize.rs`; all linear layers but
the head are rounded here. The figure is the sum of squared differences over that of squares.

    python rounded.py
"""

import json
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
FIXTURES = HERE / "../../../models/tests/fixtures"
TOKENS = [5, 17, 3, 88, 41, 9, 60, 2, 33, 71, 14, 6, 90, 25, 48, 7, 11, 52, 38, 19, 64, 80, 1, 30]
CLIPS = [1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.8, 0.75, 0.7]


def rounded(weight, bits, group, scale_type):
    """Symmetric integers with the scale, of a few, that has the least error in each group."""
    rows, columns = weight.shape
    groups, largest = weight.reshape(rows, -1, group or columns), 2 ** (bits - 1) - 1
    best, least = None, None
    for clip in CLIPS:
        scales = (groups.abs().amax(-1, keepdim=True) * clip / largest).to(scale_type).float()
        values = (groups / scales).round().clamp(-largest, largest) * scales
        error = (values - groups).square().sum(-1, keepdim=True)
        better = error < (error + 1 if least is None else least)
        best = torch.where(better, values, values if best is None else best)
        least = torch.where(better, error, error if least is None else least)
    return best.reshape(rows, columns)


def quantised_inputs(_, inputs):
    scales = inputs[0].abs().amax(-1, keepdim=True) / 127
    return (inputs[0] / scales).round() * scales


def relative_error(name, bits, group, scale_type, inputs):
    model = AutoModelForCausalLM.from_pretrained(FIXTURES / name, dtype=torch.float32).eval()
    logits = lambda: model(torch.tensor([TOKENS])).logits
    with torch.no_grad():
        expected = logits()
        for place, layer in model.named_modules():
            kind = type(layer).__name__
            if kind not in ("Linear", "Conv1D") or place == "lm_head":
                continue
            # GPT-2's layers hold their matrices the other way round.
            turned = layer.weight.data.T if kind == "Conv1D" else layer.weight.data
            values = rounded(turned, bits, group, scale_type)
            layer.weight.data = values.T if kind == "Conv1D" else values
            if inputs:
                layer.register_forward_pre_hook(quantised_inputs)
        found, expected = logits().double(), expected.double()
        return ((found - expected).square().sum() / expected.square().sum()).item()


def main():
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    ways = {
        "w8a16": (8, None, torch.float32, False),
        "w8a8": (8, None, torch.float32, True),
        "int4g32_f16": (4, 32, torch.float16, False),
    }
    errors = {
        name: {way: float(f"{relative_error(name, *arguments):.3e}") for way, arguments in ways.items()}
        for name in ("llama3", "gpt2", "opt")
    }
    (HERE / "rounded.json").write_text(json.dumps(errors, indent=2) + "\n")


if __name__ == "__main__":
    main()
