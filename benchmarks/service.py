"""The service under many tenants: all at once, against one after the other, by the official SDK.

A Qwen3 of 3.3 M parameters (hidden 256, 4 layers, 8/4 heads of 32, MLP 768, vocabulary 258, untied) with
random weights is served by `opentinker serve` in a process of its own; each tenant has its own API key and
client. A step is a `forward_backward` of 2 sequences of 64 tokens (cross entropy) and an `optim_step`, both
submitted and then waited for, on a rank-8 LoRA.

- `tenants_8_vs_serial`: steps a second of 8 tenants at once ÷ of the same 8 one after the other. The two take
  turns, and the ratio is the median over them.
- sampling: every tenant saves its weights for a sampler and draws 8 completions of 64 tokens, all at once;
  tokens a second, of completions.
- start: seconds from the command to the answer of a first training client, on the bundled model.
- slots: 50 tenants take steps at once while the pool has 8 slots a rank (`runtime.adapter_slots=8`).

    python benchmarks/service.py [--json] [--turns 5] [--steps 20] [--tenants 8] [--many 50]
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tinker

from benchmarks.report import show
from benchmarks.served import served
from opentinker_core.config.settings import Settings
from opentinker_core.models.source import resolve
from opentinker_core.service.keys import Keys
from opentinker_core.service.principal import Role

ROWS, TOKENS, RANK, SLOTS = 2, 64, 8, 8
SAMPLES = 8
VOCABULARY = 258
BASE = "qwen3-3m"


def write_model(directory: Path) -> None:
    """Write the model, with a tokenizer of one token a byte."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=VOCABULARY - 1,
        bos_token_id=None,
        pad_token_id=VOCABULARY - 2,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: index for index, token in enumerate([*alphabet, "<pad>", "<eos>"])}
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": "<eos>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(directory)


@contextmanager
def server(home: Path, model: str, name: str) -> Iterator[str]:
    """A server with nothing but its model; gives its URL."""
    settings = {"models": [{"model": model, "name": name}], "runtime": {"adapter_slots": SLOTS}}
    with served(home, settings) as (url, process):
        try:
            yield url
        finally:
            process.terminate()
            process.wait(60)


def new_keys(count: int) -> list[str]:
    """Keys of as many tenants."""
    keys = Keys(Settings().resolved_catalog_url)
    try:
        return [keys.create(f"tenant-{index}", "benchmark", Role.MEMBER, None)[0] for index in range(count)]
    finally:
        keys.close()


class Tenant:
    """One user of the service, with one policy in training."""

    def __init__(self, url: str, key: str, index: int) -> None:
        self._service = tinker.ServiceClient(base_url=url, api_key=key)
        made = self._service.create_lora_training_client(base_model=BASE, rank=RANK, seed=index)
        self.training = made.result()
        draw = np.random.default_rng(index)
        self._data = [self._datum(draw.integers(0, VOCABULARY - 2, TOKENS + 1)) for _ in range(ROWS)]
        self.losses: list[float] = []

    @staticmethod
    def _datum(tokens: np.ndarray) -> tinker.Datum:
        return tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1].tolist()),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData.from_numpy(tokens[1:]),
                "weights": tinker.TensorData.from_numpy(np.ones(TOKENS, np.float32)),
            },
        )

    def steps(self, count: int) -> None:
        """Take steps, each waited for."""
        for _ in range(count):
            update = self.training.forward_backward(self._data, "cross_entropy")
            step = self.training.optim_step(tinker.AdamParams(learning_rate=1e-3))
            self.losses.append(update.result().metrics["loss:sum"])
            step.result()

    def sampler(self) -> Any:
        """A sampler of the weights as they are."""
        return self.training.save_weights_and_get_sampling_client().result()

    def sample(self, sampler: Any) -> int:
        """Draw; gives the number of tokens."""
        params = tinker.SamplingParams(max_tokens=TOKENS, temperature=1.0, stop=[], seed=1)
        prompt = tinker.ModelInput.from_ints(list(b"Once upon a time"))
        drawn = sampler.sample(prompt=prompt, num_samples=SAMPLES, sampling_params=params).result()
        return sum(len(sequence.tokens) for sequence in drawn.sequences)

    def close(self) -> None:
        """End the session."""
        self._service.close("success").result()


def start(home: Path, models: Path) -> float:
    """Seconds until the first client of a new server on SmolLM2-135M has its policy."""
    resolve("smollm2-135m", models)
    (home / "models").symlink_to(models / "models")
    key = new_keys(1)[0]
    began = time.perf_counter()
    with server(home, "smollm2-135m", "smollm2-135m") as url:
        client = tinker.ServiceClient(base_url=url, api_key=key)
        client.create_lora_training_client(base_model="smollm2-135m", rank=RANK).result()
        seconds = time.perf_counter() - began
        client.close("success").result()
    return seconds


def at_once(calls: Sequence[Callable[[], Any]]) -> tuple[float, list[Any]]:
    """Seconds until all are done, each on a thread of its own, and what they gave."""
    with ThreadPoolExecutor(len(calls)) as pool:
        started = time.perf_counter()
        futures = [pool.submit(call) for call in calls]
        results = [future.result() for future in futures]
        return time.perf_counter() - started, results


def in_turn(calls: Sequence[Callable[[], Any]]) -> float:
    """Seconds for one after the other."""
    started = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - started


def training(tenants: Sequence[Tenant], turns: int, steps: int) -> tuple[list[float], list[float]]:
    """Steps a second in every turn: one after the other, and at once."""
    serial, together = [], []
    calls = [partial(tenant.steps, steps) for tenant in tenants]
    at_once([partial(tenant.steps, 3) for tenant in tenants])
    for _ in range(turns):
        serial.append(len(tenants) * steps / in_turn(calls))
        together.append(len(tenants) * steps / at_once(calls)[0])
    return serial, together


def sampling(tenants: Sequence[Tenant], turns: int) -> list[float]:
    """Tokens a second of all tenants' snapshots at once."""
    samplers = [tenant.sampler() for tenant in tenants]
    calls = [partial(t.sample, s) for t, s in zip(tenants, samplers, strict=True)]
    at_once(calls)
    speeds = []
    for _ in range(turns):
        seconds, tokens = at_once(calls)
        speeds.append(sum(tokens) / seconds)
    return speeds


def main() -> None:
    """Measure, and print the table or the object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="of each tenant in a turn")
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--many", type=int, default=50, help="tenants on the slots of the pool; 0: leave out")
    parser.add_argument("--start", action=argparse.BooleanOptionalAction, default=True, help="measure it")
    arguments = parser.parse_args()
    models = Settings().home
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        os.environ |= {"OPENTINKER_HOME": scratch, "TINKER_TELEMETRY": "0", "OMP_WAIT_POLICY": "passive"}
        write_model(home / BASE)
        started = start(home, models) if arguments.start else None
        with server(home, str(home / BASE), BASE) as url:
            keys = new_keys(max(arguments.tenants, arguments.many))
            tenants = [Tenant(url, keys[index], index) for index in range(arguments.tenants)]
            serial, together = training(tenants, arguments.turns, arguments.steps)
            tokens = sampling(tenants, arguments.turns)
            rows = [
                (f"{arguments.tenants} tenants, one after the other", median(serial), "steps/s"),
                (f"{arguments.tenants} tenants at once", median(together), "steps/s"),
                (f"{arguments.tenants} tenants' snapshots sampled at once", median(tokens), "tokens/s"),
            ]
            if started is not None:
                rows.append(("from the command to the first client, SmolLM2-135M", started, "s"))
            if arguments.many:
                tenants += [Tenant(url, keys[index], index) for index in range(len(tenants), arguments.many)]
                seconds, _ = at_once([partial(tenant.steps, 5) for tenant in tenants])
                speed = len(tenants) * 5 / seconds
                rows.append((f"{len(tenants)} tenants at once on {SLOTS} slots", speed, "steps/s"))
            for tenant in tenants:
                if not tenant.losses[-1] < tenant.losses[0]:
                    raise SystemExit(f"a tenant did not learn: {tenant.losses}")
                tenant.close()
    ratio = median(b / a for a, b in zip(serial, together, strict=True))
    show("service", rows, {f"tenants_{arguments.tenants}_vs_serial": ratio}, as_json=arguments.json)


if __name__ == "__main__":
    main()
