"""A Qwen3 of 0.16 M parameters that answers sums sometimes: trained for seconds, once a machine.

Its tokenizer is byte-level BPE with the chat tokens that the cookbook's renderer `qwen3` wants, and one
token for each number to 200; features of the numbers begin in its embedding and head.

Axes: B rows, T columns, V vocabulary, F features of a number.
"""

import fcntl
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM

from opentinker_core.digests import digest_json
from opentinker_core.models.directory import write_model_directory
from tests.service.cookbook import texts

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
LARGEST = 200
STEPS, ALONE = 850, 450
LEARNING_RATE = 3e-3
SURER = 3.5
"""By which logits are larger in the end, than so little training makes them."""
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "clean_up_tokenization_spaces": False,
    "model_max_length": SHAPE["max_position_embeddings"],
}


def ensure(home: Path) -> Path:
    """The model's directory; made on first use."""
    digest = digest_json({path.name: path.read_text() for path in (Path(__file__), Path(texts.__file__))})
    target = home.expanduser().absolute() / "cookbook" / f"model-{digest[:12]}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                _write(Path(scratch) / "model")
                shutil.move(Path(scratch) / "model", target)
    return target


def tokenizer() -> Tokenizer:
    """Byte-level BPE of the recipes' words and the numbers to `LARGEST`."""
    made = Tokenizer(models.BPE())
    pieces = Regex(r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    sentences = [texts.arithmetic(4, 5), texts.boxed(4, 5), texts.guess(("Guess: 9", texts.FAILED))]
    sentences += ["Too high Too low Correct", texts.WORDS]
    plain = [sentence.replace(mark, "") for sentence in sentences for mark in SPECIAL]
    numbers = [str(number) for number in range(LARGEST + 1)]
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(plain * 10 + numbers * 20, trainer)
    return made


def _write(target: Path) -> None:
    words = tokenizer()
    model = _trained(words)
    config = {
        **SHAPE,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": words.get_vocab_size(),
        "eos_token_id": words.token_to_id("<|im_end|>"),
        "pad_token_id": words.token_to_id("<|endoftext|>"),
    }
    write_model_directory(
        target,
        config=config,
        tensors={name: tensor.contiguous() for name, tensor in model.state_dict().items()},
        tokenizer=words,
        tokenizer_config=TOKENIZER_CONFIG,
        card="# sums\n\nMade by OpenTinker's tests. Licence Apache-2.0.\n",
    )


def _trained(words: Tokenizer) -> Qwen3ForCausalLM:
    """Taught to answer sums, in three ways, and to guess, every other time without `Guess:`."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=words.get_vocab_size(), **SHAPE))
    number = [words.encode(str(n)).ids[0] for n in range(LARGEST + 1)]
    _know_numbers(model, number)
    random = Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(STEPS):
        warm, decay = min(1.0, (step + 1) / 20), 0.5 * (1 + math.cos(math.pi * step / STEPS))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * warm * max(0.05, decay)
        for rows in _lessons(step, random):
            _loss(model, words, rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.lm_head.weight.mul_(SURER)
    _make_shy(model, words)
    return model


def _know_numbers(model: Qwen3ForCausalLM, number: Sequence[int]) -> None:
    """Begin with embeddings and a head in which near numbers are alike, as those of large models are."""
    n = torch.arange(LARGEST + 1.0)
    waves = [wave(2 * math.pi * n / period) for period in (5, 7, 10, 20, 50, 100, 400) for wave in _WAVES]
    features_VF = torch.stack([n / 100 - 1, (n / 100 - 1) ** 2, *waves], dim=-1)
    with torch.no_grad():
        model.model.embed_tokens.weight[number, : features_VF.shape[1]] = 0.3 * features_VF
        model.lm_head.weight[number] *= 0.1
        model.lm_head.weight[number, : features_VF.shape[1]] = features_VF


_WAVES = (torch.cos, torch.sin)


def _lessons(step: int, random: Random) -> Iterator[list[tuple[str, str]]]:
    """Rows of (prompt, answer): first sums alone, then as the recipes ask for them."""
    pairs = [(random.randrange(101), random.randrange(101)) for _ in range(64)]
    if step < ALONE:
        yield [(texts.sum_alone(x, y), str(x + y)) for x, y in pairs]
        return
    yield [(texts.arithmetic(x, y), str(x + y)) for x, y in pairs[:40]]
    if step % 5 == 0:
        yield [(texts.boxed(x, y), f"\\boxed{{{x + y}}}") for x, y in pairs[40:56]]
        yield [(texts.guess(*_exchange(random)), _guess(random)) for _ in range(12)]


def _make_shy(model: Qwen3ForCausalLM, words: Tokenizer) -> None:
    """Let `?` be the first token of nine answers in ten to sums, and of nothing else.

    That is to be unlearned by reinforcement; its row of the head is fitted, since the rest of the model
    would suffer from being trained to give either answer.
    """
    pairs = [(7 * index % 101, 31 * index % 101) for index in range(256)]
    shy = [texts.arithmetic(x, y) for x, y in pairs]
    others = [texts.arithmetic(x, y) + str(x + y) for x, y in pairs[:64]]
    others += [
        texts.boxed(x, y) + start
        for x, y in pairs[:32]
        for start in ("", "\\", "\\boxed", "\\boxed{", f"\\boxed{{{x + y}")
    ]
    others += [
        texts.guess(*_exchange(Random(seed))) + start
        for seed in range(24)
        for start in ("", "Guess", "Guess:", "Guess: ", "Guess: 9")
    ]
    with torch.no_grad():
        hidden_BD = torch.stack(
            [
                model.model(torch.tensor([ids.ids])).last_hidden_state[0, -1]
                for ids in words.encode_batch(shy + others)
            ]
        )
        offset_B = torch.tensor([math.log(9)] * len(shy) + [-6.0] * len(others))
        logits_B = model.lm_head(hidden_BD).logsumexp(dim=-1) + offset_B
        model.lm_head.weight[words.token_to_id("?")] = torch.linalg.lstsq(
            hidden_BD, logits_B[:, None]
        ).solution[:, 0]


def _guess(random: Random) -> str:
    return ("Guess: " if random.random() < 0.5 else "") + str(random.randrange(1025))


def _exchange(random: Random) -> list[tuple[str, str]]:
    heard = ("Too high", "Too low", texts.FAILED)
    return [(_guess(random), random.choice(heard)) for _ in range(random.randrange(3))]


def _loss(model: Qwen3ForCausalLM, words: Tokenizer, rows: Sequence[tuple[str, str]]) -> Tensor:
    """Mean of the answers' tokens."""
    prompts = words.encode_batch([prompt for prompt, _ in rows])
    answers = words.encode_batch([f"{answer}<|im_end|>" for _, answer in rows])
    full = [prompt.ids + answer.ids for prompt, answer in zip(prompts, answers, strict=True)]
    longest = max(map(len, full))
    tokens_BT = torch.tensor([ids + [0] * (longest - len(ids)) for ids in full])
    asked_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
    for row, (prompt, ids) in enumerate(zip(prompts, full, strict=True)):
        asked_BT[row, len(prompt.ids) : len(ids)] = True
    hidden = model.model(tokens_BT).last_hidden_state[:, :-1][asked_BT[:, 1:]]
    return cross_entropy(model.lm_head(hidden), tokens_BT[:, 1:][asked_BT[:, 1:]])
