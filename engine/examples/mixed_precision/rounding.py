"""Rounds the linear layers of a sentence encoder, and says how far its results move."""

import re

import torch
from torch.nn import functional as F

# As dsrun tries them: shares of a group's range.
CLIPS = [1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.8, 0.75, 0.7]


def rounded(weight, name):
    """A weight in a symmetric format such as int4g64_f16, with the scale of each group, of a few, that has the least error."""
    bits, group = map(int, re.fullmatch(r"int([48])g(\d+)_f16", name).groups())
    groups, largest = weight.reshape(weight.shape[0], -1, group), 2 ** (bits - 1) - 1
    best, least = None, None
    for clip in CLIPS:
        scales = (groups.abs().amax(-1, keepdim=True) * clip / largest).half().float()
        values = (groups / torch.where(scales > 0, scales, torch.inf)).round().clamp(-largest, largest) * scales
        error = (values - groups).square().sum(-1, keepdim=True)
        better = error < (error + 1 if least is None else least)
        best = torch.where(better, values, values if best is None else best)
        least = torch.where(better, error, error if least is None else least)
    return best.reshape(weight.shape)


def linear_layers(model):
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]


def sequences(tokenizer, path):
    text = open(path, encoding="utf-8").read()
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]
    return [tokenizer(part, truncation=True, max_length=256, return_tensors="pt") for part in paragraphs[:64]]


@torch.no_grad()
def end_to_end(model, batches, expected=None):
    """The last hidden states and normalised means of them; if some are expected, relative squared distances from those."""
    states = [model(**batch).last_hidden_state[0].double() for batch in batches]
    means = torch.stack([F.normalize(state.mean(0), dim=-1) for state in states])
    found = (torch.cat(states), means)
    if expected is None:
        return found
    return tuple(((a - b).square().sum() / b.square().sum()).item() for a, b in zip(found, expected))
