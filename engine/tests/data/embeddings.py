"""Writes embeddings.json: what transformers makes of some texts with the tiny models in models/tests/fixtures, in float32.

The hidden states are those of the last layer after the final norm (`last_hidden_state`); "mean" is their mean over all tokens and
"last" that of the last token, both scaled to length 1. Run with the packages of models/tests/fixtures/requirements.txt.
"""

import json
from pathlib import Path

import torch
from transformers import AutoModel

HERE = Path(__file__).resolve().parent
FIXTURES = HERE / "../../../models/tests/fixtures"
MODELS = ["llama3", "mistral", "qwen3", "gpt2", "opt", "opt_350m"]
LENGTHS = [1, 7, 23]


def unit(vector):
    return [round(float(value), 7) for value in vector / vector.norm()]


def main():
    expected = {}
    for name in MODELS:
        model = AutoModel.from_pretrained(FIXTURES / name, dtype=torch.float32).eval()
        texts = []
        for length in LENGTHS:
            tokens = [(index * 17 + length * 31 + 5) % 96 for index in range(length)]
            with torch.no_grad():
                states = model(torch.tensor([tokens])).last_hidden_state[0].double()
            texts.append({"tokens": tokens, "mean": unit(states.mean(0)), "last": unit(states[-1])})
        expected[name] = texts
    (HERE / "embeddings.json").write_text(json.dumps(expected) + "\n")


main()
