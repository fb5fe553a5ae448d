"""Tenants that have something of every kind."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count

from tests.service.live import Live
from tests.service.raw import Raw

KEPT = "kept"
"""A name that every tenant gives to a checkpoint of each kind."""


@dataclass(frozen=True)
class Estate:
    """What a tenant has: an id of each kind."""

    tenant: str
    key: str
    ids: Mapping[str, str]
    numbers: Iterator[int]
    """The next of its model."""

    def secrets(self) -> set[str]:
        """What no other tenant may ever read."""
        return {self.tenant, *self.ids.values()}


def estate(live: Live, tenant: str, policy: str = "") -> Estate:
    """A tenant with something of every kind."""
    key = live.key(tenant)
    raw = Raw(live.url, key)
    project, policy = f"project-{tenant}", policy or f"policy-{tenant}"
    about = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0", "project_id": project}
    session = str(raw.ok("create_session", **about)["session_id"])
    made = raw.ok(
        "create_model",
        session_id=session,
        model_seq_id=0,
        base_model="tiny",
        lora_config={"rank": 2, "seed": 1},
        user_metadata={"policy": policy},
    )
    model = str(raw.result(made["request_id"])["model_id"])
    raw.result(raw.forward_backward(model, 1).json()["request_id"])
    paths = {}
    saves = [("save_weights", KEPT), ("save_weights", f"label-{tenant}"), ("save_weights_for_sampler", KEPT)]
    for seq, (call, name) in enumerate(saves, 2):
        promise = raw.ok(call, model_id=model, seq_id=seq, path=name)
        paths[call, name] = str(raw.result(promise["request_id"])["path"])
    path = paths["save_weights_for_sampler", KEPT]
    sampler = raw.ok(
        "create_sampling_session", session_id=session, sampling_session_seq_id=0, model_path=path
    )
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]}
    sample = {"num_samples": 1, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
    sampled = raw.ok("asample", sampling_session_id=sampler["sampling_session_id"], seq_id=1, **sample)
    number = live.service.catalog(tenant).version(policy).number
    ids = {
        "session": session,
        "model": model,
        "sampler": str(sampler["sampling_session_id"]),
        "promise": f"{model}:1",
        "sample_promise": str(sampled["request_id"]),
        "weights": paths["save_weights", KEPT],
        "sampler_weights": path,
        "label": f"label-{tenant}",
        "key": str(raw.post("admin/keys", name="spare").json()["key_id"]),
        "policy": policy,
        "version": f"{policy}@{number}",
        "alias": f"{policy}@latest",
        "project": project,
    }
    return Estate(tenant, key, ids, count(5))
