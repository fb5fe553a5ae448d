"""Logprobs of given tokens without a second matrix over the vocabulary.

Axes: M positions, K tokens a position, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

_ROWS = 64
"""Rows that are worked on at once, so that they stay in the processor's cache."""


def token_logprobs(logits_MV: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Logprobs, float32, of each row's token (M,) or tokens (M, K) at `temperature`, without truncation.

    It uses the logits' own memory, so the caller must not read them afterwards; their gradient too is
    written there in the backward pass.
    """
    return _TokenLogprobs.apply(logits_MV, tokens, temperature)


class _TokenLogprobs(torch.autograd.Function):
    """log p(token) = z[token] - logsumexp(z) with z = logits / T; d/dlogits = (onehot - softmax(z)) / T."""

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        z_MV = logits_MV.detach().float()
        if temperature != 1.0:
            z_MV.div_(temperature)
        lse_M = torch.cat([part.logsumexp(-1) for part in z_MV.split(_ROWS)])
        tokens_MK = tokens.reshape(len(tokens), -1)
        ctx.save_for_backward(tokens_MK, lse_M)
        ctx.z_MV, ctx.temperature, ctx.dtype = z_MV, temperature, logits_MV.dtype
        return (z_MV.gather(1, tokens_MK) - lse_M[:, None]).view(tokens.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        tokens_MK, lse_M = ctx.saved_tensors
        scale_MK = grad.reshape(tokens_MK.shape) / ctx.temperature
        scale_M = scale_MK[:, 0]
        for column_M in scale_MK.unbind(1)[1:]:  # not `sum`, whose order may depend on the number of rows
            scale_M = scale_M + column_M
        z_MV = ctx.z_MV
        del ctx.z_MV
        parts = zip(z_MV.split(_ROWS), lse_M.split(_ROWS), scale_M.split(_ROWS), strict=True)
        for z, lse, scale in parts:
            z.sub_(lse[:, None]).exp_().mul_(-scale[:, None])
        z_MV.scatter_add_(1, tokens_MK, scale_MK)
        return z_MV.to(ctx.dtype), None, None
