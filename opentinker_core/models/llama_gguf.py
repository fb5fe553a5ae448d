"""Convert a Llama GGUF file with a SmolLM tokenizer to an ordinary Hugging Face directory.

transformers can read such a file itself, but its tokenizer lacks the pre-split into single digits
that this model was trained with.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from opentinker_core.errors import OpenTinkerError
from opentinker_core.models.directory import write_model_directory
from opentinker_core.models.progress import Report

_CONTROL_TOKEN = 3
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def convert(gguf: Path, target: Path, card: str, report: Report) -> None:
    """Write the model of the file `gguf` as bfloat16 to the new directory `target`.

    Raises:
        OpenTinkerError: the file holds another architecture or tokenizer than the ones known here.
    """
    reader = GGUFReader(gguf)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    kind = tuple(
        fields.get(f"{key}") for key in ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre")
    )
    if kind != ("llama", "gpt2", "smollm"):
        raise OpenTinkerError(f"{gguf.name}: architecture and tokenizer {kind} are not llama, gpt2, smollm")
    config = _config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    tensors = {}
    for index, tensor in enumerate(reader.tensors):
        tensors[_name(tensor.name)] = _weight(tensor, config)
        report("converting tensors", index + 1, len(reader.tensors))
    report("writing", 0, 0)
    write_model_directory(
        target,
        config=config,
        tensors=tensors,
        tokenizer=_tokenizer(fields),
        tokenizer_config=_tokenizer_config(fields),
        card=card,
    )


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        # stored as float32; its shortest decimal is the number that was meant
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    prefix, _, rest = name.partition(".")
    block, _, suffix = rest.partition(".")
    if prefix != "blk" or suffix not in _BLOCK:
        raise OpenTinkerError(f"unknown tensor {name!r}: not a plain Llama model")
    return f"model.layers.{block}.{_BLOCK[suffix]}"


def _weight(tensor: ReaderTensor, config: dict[str, Any]) -> torch.Tensor:
    weight = dequantize(tensor.data, tensor.tensor_type)
    if tensor.name.endswith("attn_q.weight"):
        weight = _rotary_halves(weight, config["num_attention_heads"])
    elif tensor.name.endswith("attn_k.weight"):
        weight = _rotary_halves(weight, config["num_key_value_heads"])
    return torch.from_numpy(np.array(weight)).to(torch.bfloat16)


def _rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows (out, in) from GGUF's rotary layout (pairs side by side) to Hugging Face's (two halves)."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=fields["tokenizer.ggml.add_space_prefix"]),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
    }
