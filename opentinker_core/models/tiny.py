"""A two-layer Llama over characters: untrained, deterministic, for tests and first steps.

The head is untied, so that a LoRA on `lm_head` can sharpen it, and the frozen matrices have the
standard deviation hidden size ** -1/2: over the customary 0.02 an adapter of rank 8 hardly learns.
Weights come from raw bits of a PCG64 generator, whose stream is fixed for good, and not from a
normal distribution, whose last bits depend on library and processor.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from opentinker_core.digests import digest_json
from opentinker_core.models.progress import Report

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

SEED = 0
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
VOCABULARY = (PAD, EOS, UNKNOWN, "\n", *(chr(code) for code in range(32, 127)))
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + '\\n' + message['content'] + '<eos>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.125,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": VOCABULARY.index(EOS),
    "pad_token_id": VOCABULARY.index(PAD),
}
TOKENIZER_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": EOS,
    "pad_token": PAD,
    "unk_token": UNKNOWN,
    "chat_template": CHAT_TEMPLATE,
    "clean_up_tokenization_spaces": False,
    "model_max_length": CONFIG["max_position_embeddings"],
}
RECIPE = digest_json(
    {
        "config": CONFIG,
        "tokenizer": TOKENIZER_CONFIG,
        "vocabulary": VOCABULARY,
        "seed": SEED,
        "revision": 1,
    }
)
CARD = "# tiny\n\nAn untrained two-layer character model, made by OpenTinker for tests. Licence Apache-2.0.\n"


def build(target: Path, scratch: Path, report: Report) -> None:
    """Write the model to the new directory `target`; `scratch` is not used."""
    from opentinker_core.models.directory import write_model_directory

    report("building tiny", 0, 0)
    write_model_directory(
        target,
        config=CONFIG,
        tensors=_tensors(),
        tokenizer=_tokenizer(),
        tokenizer_config=TOKENIZER_CONFIG,
        card=CARD,
    )


def _shapes() -> dict[str, tuple[int, ...]]:
    hidden, mlp, vocabulary = (CONFIG[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (mlp, hidden) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, mlp)
        shapes |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def _tensors() -> "dict[str, torch.Tensor]":
    """Norms of one, matrices uniform with the standard deviation `initializer_range`."""
    import numpy as np
    import torch

    bits = np.random.PCG64(SEED)
    bound = CONFIG["initializer_range"] * 3**0.5

    def uniform(shape: tuple[int, ...]) -> torch.Tensor:
        unit = (bits.random_raw(int(np.prod(shape))) >> 40) * 2.0**-23 - 1.0  # exact, in [-1, 1)
        return torch.from_numpy((unit * bound).astype(np.float32).reshape(shape))

    return {
        name: torch.ones(shape) if len(shape) == 1 else uniform(shape) for name, shape in _shapes().items()
    }


def _tokenizer() -> "Tokenizer":
    """One token a character of printable ASCII and newline; anything else is `<unk>`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    ids = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = (PAD, EOS, UNKNOWN)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer
