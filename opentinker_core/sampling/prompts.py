"""What is asked about a prompt, answered chunk by chunk while it is prefilled.

Axes: M positions of a chunk, V vocabulary, K tokens a position.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from opentinker_core.sampling.draws import Weights
from opentinker_core.sampling.protocol import PromptAnswer, PromptQuestion, SampleRequest
from opentinker_core.sampling.token_logprobs import token_logprobs
from opentinker_core.seeds import derive_seed


def is_asked(request: SampleRequest) -> bool:
    """Whether logits are wanted at every position of the prompt."""
    return request.prompt_logprobs or request.about_prompt is not None


@dataclass(eq=False)
class PromptScores:
    """Of one run of a request; used by the sampler's thread."""

    request: SampleRequest
    _logprobs: list[np.ndarray] = field(default_factory=list)
    _columns: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def note(self, logits_MV: Tensor, first: int) -> None:
        """Take in the logits behind the prompt's tokens from `first` on, of its last token too."""
        targets = self.request.prompt_tokens[first + 1 : first + 1 + len(logits_MV)]
        if not targets:
            return
        logits_MV = logits_MV[: len(targets)].float()
        if self.request.about_prompt is not None:
            self._answer(self.request.about_prompt, logits_MV, first)
        if self.request.prompt_logprobs:  # last: it writes into the logits
            targets_M = torch.tensor(targets, device=logits_MV.device)
            self._logprobs.append(token_logprobs(logits_MV, targets_M, 1.0).cpu().numpy())

    @property
    def logprobs(self) -> np.ndarray | None:
        """float32 (P,), if asked for; 0 for the first."""
        if not self.request.prompt_logprobs:
            return None
        return np.concatenate([[0.0], *self._logprobs]).astype(np.float32)

    @property
    def answer(self) -> PromptAnswer | None:
        """The answer, once the whole prompt was noted."""
        if self.request.about_prompt is None:
            return None
        return PromptAnswer(**{name: np.concatenate(parts) for name, parts in self._columns.items()})

    def _answer(self, question: PromptQuestion, logits_MV: Tensor, first: int) -> None:
        weights = Weights.of(logits_MV)
        rows = slice(first, first + len(logits_MV))
        if question.likeliest:
            tokens_MK = logits_MV.topk(min(question.likeliest, logits_MV.shape[1]), dim=-1).indices
            self._add("likeliest_tokens", tokens_MK, np.int32)
            self._add("likeliest_logprobs", _logprobs(weights, tokens_MK), np.float32)
        if question.targets:
            targets_MK = torch.tensor(question.targets[rows], device=logits_MV.device)
            logprobs_MK = _logprobs(weights, targets_MK.clamp(min=0)).masked_fill(targets_MK < 0, 0.0)
            self._add("target_logprobs", logprobs_MK, np.float32)
        if question.drawn:
            tokens_MK = self._draw(question.drawn, logits_MV, first)
            self._add("drawn_tokens", tokens_MK, np.int32)
            self._add("drawn_logprobs", _logprobs(weights, tokens_MK), np.float32)

    def _draw(self, count: int, logits_MV: Tensor, first: int) -> Tensor:
        """Tokens (M, count), each row's by a generator of its own: chunks do not matter."""
        temperature = self.request.params.temperature
        if temperature == 0:
            return logits_MV.argmax(-1, keepdim=True).expand(-1, count)
        scaled = Weights.of(logits_MV / temperature)
        seed = self.request.seeds[0]
        uniform_MK = np.stack(
            [
                np.random.Generator(np.random.Philox(derive_seed(seed, "prompt", row))).random(count)
                for row in range(first, first + len(logits_MV))
            ]
        )
        columns = [scaled.pick(uniform_M.tolist()) for uniform_M in uniform_MK.T]
        return torch.cat(columns, dim=1).clamp(max=logits_MV.shape[1] - 1)

    def _add(self, name: str, values_MK: Tensor, dtype: type) -> None:
        self._columns.setdefault(name, []).append(values_MK.cpu().numpy().astype(dtype))


def _logprobs(weights: Weights, tokens_MK: Tensor) -> Tensor:
    return weights.logprobs(tokens_MK).reshape(tokens_MK.shape)
