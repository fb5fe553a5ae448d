"""`opentinker sample POLICY[@VERSION] PROMPT`: generate text with a version, or with a base model."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from opentinker_core.errors import UsageError

if TYPE_CHECKING:
    from opentinker_core.runtime.engine import Engine
    from opentinker_core.sampling.protocol import SampledSequence, SamplingParams

_BASE = "base"


def sample(
    version: Annotated[
        str, typer.Argument(metavar="POLICY[@VERSION]", help="Or 'base', with --model.", show_default=False)
    ],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", show_default=False)],
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, max=1024)] = 1,
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0)] = 1.0,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0: no limit.")] = 0,
    min_p: Annotated[float, typer.Option(min=0, max=1, help="0: no limit.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop after this text; may be given again.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Render PROMPT with the chat template.")] = False,
    model: Annotated[str, typer.Option(help="Base model, for 'base'.")] = "smollm2-135m",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Generate text with a policy version, from its published snapshot."""
    if not prompt:
        raise UsageError("PROMPT: empty; accepted: some text")
    if stop and "" in stop:
        raise UsageError("--stop: empty; accepted: some text")
    engine, ref = _open(version, model)
    from envs.protocol import Observation
    from opentinker_core.models.renderer import Renderer
    from opentinker_core.sampling.protocol import SampleRequest, SamplingParams
    from opentinker_core.seeds import derive_seed

    renderer = Renderer(engine.tokenizer, "chat" if chat else "plain")
    stops = tuple(stop or ())
    params = SamplingParams(max_tokens, temperature, top_p, top_k, renderer.stop_token_ids, stops, min_p)
    tokens = tuple(renderer.initial(Observation.user(prompt)))
    seeds = tuple(derive_seed(seed, index) for index in range(samples))
    sequences = engine.sampler.sample([SampleRequest(tokens, params, ref, seeds)])[0]
    texts = [renderer.action_text(sequence.tokens.tolist(), stops) for sequence in sequences]
    if as_json:
        typer.echo(json.dumps(_result(ref, params, tokens, sequences, texts)))
        return
    for text in texts:
        typer.echo(text)


def _open(version: str, model: str) -> "tuple[Engine, str]":
    """The engine of the version's base model, with the version ready to be sampled."""
    from opentinker_core.config.schema import RuntimeConfig
    from opentinker_core.runtime.workspace import Workspace

    workspace = Workspace()
    found = None if version == _BASE else workspace.catalog.version(version)
    base_model = model if found is None else workspace.catalog.policy(found.policy_name).base_model
    from opentinker_core.runtime.engine import open_engine  # takes seconds: a wrong name is told before

    engine = open_engine(base_model, RuntimeConfig(), workspace.home, workspace.snapshots.fetch)
    if found is None:
        return engine, _BASE
    engine.sampler.refresh(found.ref, found.sampler.uri, found.sampler.digest)
    return engine, found.ref


def _result(
    ref: str,
    params: "SamplingParams",
    prompt_tokens: tuple[int, ...],
    sequences: "list[SampledSequence]",
    texts: list[str],
) -> dict[str, object]:
    completions = [
        {
            "text": text,
            "tokens": sequence.tokens.tolist(),
            "logprobs": [float(value) for value in sequence.logprobs],
            "stop_reason": str(sequence.stop_reason),
        }
        for sequence, text in zip(sequences, texts, strict=True)
    ]
    sampling = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
    return {
        "version": ref,
        "sampling": sampling | {"max_tokens": params.max_tokens},
        "prompt_tokens": list(prompt_tokens),
        "completions": completions,
    }
