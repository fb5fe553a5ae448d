"""Whether a server serves the base model that it is used for, and as it must."""

from pathlib import Path

from opentinker_core.errors import UsageError
from opentinker_core.models.fingerprint import fingerprint
from opentinker_core.models.source import ModelSource
from opentinker_core.sampling.vllm.command import served_name
from opentinker_core.sampling.vllm.endpoint import Endpoint, Served


def check_identity(endpoint: Endpoint, source: ModelSource, home: Path) -> Served:
    """What `endpoint` serves, if it is `source`.

    A server started by `opentinker vllm up` says the digest of its weights in its name; of others the
    directory is read, if it lies on this machine.

    Raises:
        UsageError: it serves another model, or does not say which.
        EndpointError: it does not answer.
    """
    served = endpoint.served()
    if any(name.endswith(f"@{source.digest[:16]}") for name in served.names):
        return served
    root = Path(served.root)
    if root.is_dir() and fingerprint(root, home / "models" / "digests") == source.digest:
        return served
    raise UsageError(
        f"runtime.vllm.urls: {endpoint.url} serves {', '.join(served.names)} (from {served.root}), and the "
        f"policy's base model is {source.name} with the digest {source.digest[:16]}; accepted: a server "
        f"started by `opentinker vllm up`, or with --served-model-name={served_name(source)}"
    )


def check_logprobs(endpoint: Endpoint, served: Served) -> None:
    """Make sure that logprobs are of the distribution that is sampled from.

    Where only the likeliest token is left, its probability is one: of the model's own distribution it is not.

    Raises:
        UsageError: they are of another distribution, or token ids are not given.
        EndpointError: it does not answer.
    """
    body = {"model": served.names[0], "prompt": [1], "max_tokens": 1, "temperature": 1.0, "top_k": 1}
    choice = endpoint.complete(
        body | {"seed": 0, "logprobs": 0, "return_token_ids": True, "ignore_eos": True}
    )
    if not choice.get("token_ids"):
        raise UsageError(f"{endpoint.url} gives no token ids; accepted: vLLM 0.11 or newer")
    logprob = choice["logprobs"]["token_logprobs"][0]
    if logprob < -1e-6:
        raise UsageError(
            f"{endpoint.url} gives logprobs of another distribution than it samples from ({logprob:.3g} of a "
            "token that is certain); accepted: a server with --logprobs-mode=processed_logprobs"
        )
