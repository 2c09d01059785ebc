"""Writes a model that gives one of two answers, whatever the conversation is: so a coding agent can be run to its end.

Every token decides the next one alone: the embedding of a token is a unit vector, attention and MLP add nothing, and the head
maps it to the token that follows. The chat template ends a prompt with the token before the first answer, or with the token before the
second one if the last message is the result of a tool. An answer is a token of its own, and the end follows it.
"""

import json
import struct
from pathlib import Path

END, FIRST, SECOND = "<|end|>", "<|first|>", "<|second|>"
# Agents' system prompts have up to 100,000 bytes, each of which is a token.
CONTEXT = 262_144
TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|second|>' if messages[-1].role == 'tool' else '<|first|>' }}{% endif %}"""


def characters_of_bytes():
    """The character by which a byte-level tokenizer names each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [names[byte] for byte in range(256)]


def write(folder: Path, first: str, second: str):
    """Writes the model into a folder."""
    added = [END, FIRST, SECOND, first, second]
    vocabulary = characters_of_bytes() + added
    size = 320
    follows = {FIRST: first, first: END, SECOND: second, second: END}
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": size, "hidden_size": size,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16,
        "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": None, "eos_token_id": vocabulary.index(END),
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [
            {"id": vocabulary.index(token), "content": token, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": token in (END, FIRST, SECOND)}
            for token in added
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "BPE", "vocab": {token: index for index, token in enumerate(vocabulary[:256])}, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": TEMPLATE}))

    def matrix(rows, columns, ones=()):
        values = bytearray(4 * rows * columns)
        for row, column in ones:
            struct.pack_into("<f", values, 4 * (row * columns + column), 1.0)
        return [rows, columns], bytes(values)

    pairs = [(vocabulary.index(next_one), vocabulary.index(token)) for token, next_one in follows.items()]
    ones = [size], struct.pack(f"<{size}f", *[1.0] * size)
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": matrix(size, size, [(index, index) for index in range(size)]),
        "lm_head.weight": matrix(size, size, pairs),
        "model.norm.weight": ones,
        layer + "input_layernorm.weight": ones,
        layer + "post_attention_layernorm.weight": ones,
        layer + "self_attn.q_proj.weight": matrix(16, size),
        layer + "self_attn.k_proj.weight": matrix(16, size),
        layer + "self_attn.v_proj.weight": matrix(16, size),
        layer + "self_attn.o_proj.weight": matrix(size, 16),
        layer + "mlp.gate_proj.weight": matrix(64, size),
        layer + "mlp.up_proj.weight": matrix(64, size),
        layer + "mlp.down_proj.weight": matrix(size, 64),
    }
    header, at = {}, 0
    for name, (shape, values) in tensors.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + len(values)]}
        at += len(values)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, values in tensors.values():
            file.write(values)
