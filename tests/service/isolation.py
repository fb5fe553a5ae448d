"""The isolation matrix: how each route of the table is asked for what is another tenant's.

The cases are generated from the routes: their parameters, the fields of their bodies. Every field is known
here by its name, as one that names an object or as one that does not; a route with any other field cannot be
asked (`Unaskable`), so that whoever adds one has to say here what it is.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import quote

import httpx
from fastapi.routing import APIRoute
from pydantic import BaseModel

from opentinker_core.service.routes import METRICS, PUBLIC
from tests.service.estates import KEPT, Estate
from tests.service.raw import PROTOBUF, forward_backward


class Unaskable(Exception):  # noqa: N818 - what it says of the route
    """The matrix does not know a field of a route."""


_IDS: dict[str, tuple[str, ...]] = {
    "session_id": ("session",),
    "model_id": ("model",),
    "training_run_id": ("model",),
    "sampler_id": ("sampler",),
    "sampling_session_id": ("sampler",),
    "request_id": ("promise", "sample_promise"),
    "path": ("weights",),
    "source_path": ("weights", "sampler_weights"),
    "tinker_path": ("weights", "sampler_weights"),
    "model_path": ("sampler_weights",),
    "name": ("label",),
    "key_id": ("key",),
    "model": ("policy", "version", "alias"),
    "project_id": ("project",),
    "project_ids": ("project",),
    "cursor": ("session",),
}
"""Fields that name an object, and the kinds of objects."""

_WRAPPED: dict[str, Any] = {
    "project_ids": lambda value: [value],
    "cursor": lambda value: {"last_created_at": "2999-01-01T00:00:00Z", "last_session_id": value},
}

_NAMES_WHAT_IS_NEW = {
    ("/api/v1/save_weights", "path"),
    ("/api/v1/save_weights_for_sampler", "path"),
    ("/api/v1/save_weights_external", "path"),
    ("/api/v1/admin/keys", "name"),
    ("/api/v1/create_session", "project_id"),
    ("/api/v1/sessions/{session_id}/project", "project_id"),
}
"""Where such a field is not looked up."""

_NUMBERS = ("seq_id", "model_seq_id", "sampling_session_seq_id")
_PLAIN: dict[str, Any] = {
    "kind": "weights",
    "sdk_version": "0.38.0",
    "base_model": "tiny",
    "tags": [],
    "events": [],
    "file": "adapter_config.json",
    "starting_on": "2026-01-01T00:00:00Z",
    "ending_before": "2026-01-02T00:00:00Z",
    "name": "made-here",
    "path": "made-here",
    "project_id": "a-label",
    "destination_project_id": "a-label",
    "reason": {"type": "success"},
    "lora_config": {"rank": 2},
    "adam_params": {"learning_rate": 0.0},
    "optimizer": True,
    "ttl_seconds": 7200,
    "num_samples": 1,
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]},
    "sampling_params": {"max_tokens": 2},
    "messages": [{"role": "user", "content": "1+1="}],
}
"""Fields that name nothing, and what is sent in them where a body needs them."""
_OPTIONAL = """
    age_encryption_recipients allow_metadata_only before day detail display_name event_type expires_in_days
    ignore_eos key
    limit logprobs max_completion_tokens max_tokens min_p n offset optim_params optimizer_config
    optimizer_params
    overwrite owner prompt_alt_tokens_k prompt_logprobs prompt_logprobs_last_n record_stability_info
    return_token_ids role seed statuses stop stop_token_ids stream stream_options target_prompt_logprobs
    temperature top_k top_logprobs top_p topk_prompt_logprobs topk_sample_logprobs type user_metadata
    weights_access_token
"""
_LEFT_OUT = frozenset(_OPTIONAL.split())
"""Fields that name nothing and need not be sent."""
_PLAIN_BY_PATH: dict[tuple[str, str], Any] = {
    ("/v1/completions", "prompt"): [21, 15],
    ("/api/v1/save_weights_for_sampler", "kind"): "snapshot",
}

_WAYS: dict[str, tuple[tuple[str, ...], ...]] = {
    "/api/v1/load_weights": (
        ("model_id", "seq_id", "path", "optimizer"),
        ("session_id", "model_seq_id", "path", "optimizer"),
    ),
    "/api/v1/create_sampling_session": (
        ("session_id", "sampling_session_seq_id", "base_model"),
        ("session_id", "sampling_session_seq_id", "model_path"),
    ),
    "/api/v1/copy_weights": (
        ("source_path", "destination_project_id"),
        ("source_path", "session_id", "model_seq_id"),
    ),
    "/api/v1/asample": (
        ("sampling_session_id", "seq_id", "num_samples", "prompt", "sampling_params"),
        ("model_path", "seq_id", "num_samples", "prompt", "sampling_params"),
    ),
    "/api/v1/sessions/search": (("session_id",), ("project_ids",), ("cursor",)),
    "/api/v1/save_weights_for_sampler": (
        ("model_id", "seq_id", "path"),
        ("model_id", "seq_id", "sampling_session_seq_id", "kind"),
    ),
    "/api/v1/optim_step": (("model_id", "seq_id", "adam_params"),),
    "/api/v1/save_weights": (("model_id", "seq_id", "path"),),
    "/api/v1/save_weights_external": (("model_id", "seq_id", "path"),),
}
"""Routes whose fields exclude each other, or are optional in the schema alone: what is sent together."""

_RAW_BODIES = {"/api/v1/forward_backward", "/api/v1/forward"}
"""Routes that read their bodies themselves: protobuf with a `model_id` and `seq_id`."""
_READ_NO_MORE = {
    "/api/v1/admin/keys",
    "/api/v1/admin/keys/{key_id}",
    "/api/v1/admin/audit",
    "/api/v1/audit",
    "/api/v1/retrieve_future",
    "/api/v1/training_runs/{training_run_id}/checkpoints/{kind}/{name}/external_weights_urls",
    "/v1/completions",
    "/v1/chat/completions",
    *_WAYS,
}
"""Routes that take the whole request, but nothing of it that names an object beyond their parameters."""


@dataclass(frozen=True)
class Ask:
    """A call of a route; `asked`: the id in it that the case is about."""

    method: str
    url: str
    asked: str
    number: int
    params: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] | None = None
    content: bytes | None = None

    def send(self, client: httpx.Client, key: str) -> httpx.Response:
        headers = {"X-API-Key": key, "X-Idempotency-Key": f"{self.number}"}
        if self.content is not None:
            headers |= PROTOBUF
        return client.request(
            self.method,
            self.url,
            params=self.params or None,
            json=self.body,
            content=self.content,
            headers=headers,
        )


@dataclass(frozen=True)
class Case:
    """A route, asked with one field that names what is another's; the other fields name what is one's own."""

    route: APIRoute
    way: tuple[str, ...]
    field: str = ""
    """Empty: the route names nothing."""
    kind: str = ""

    @property
    def method(self) -> str:
        return min(self.route.methods or {"GET"})

    @property
    def path(self) -> str:
        return self.route.path

    def __str__(self) -> str:
        named = f" {self.field}={self.kind}" if self.field else ""
        return f"{self.method} {self.path}{named} ({','.join(self.way)})"

    @property
    def is_numbered(self) -> bool:
        """Whether it is a request of a model, with the model's next number."""
        return "seq_id" in self.way and "model_id" in self.way

    def ask(self, asker: Estate, named: str, number: int | None = None) -> Ask:
        """The call; `named`: the id for `field`; `number`: the model's next, if its estate does not count."""
        mine = self.is_numbered and (self.field != "model_id" or named == asker.ids["model"])
        if number is None or not mine:
            number = next(asker.numbers if mine else _counted)
        values = {name: self._value(name, asker.ids, named, number) for name in self.way}
        in_path = {one.name for one in self.route.dependant.path_params}
        in_query = {one.name for one in self.route.dependant.query_params}
        url = self.path.replace(":path}", "}")
        for name in in_path:
            url = url.replace(f"{{{name}}}", quote(values[name], safe=""))
        params = {name: value for name, value in values.items() if name in in_query}
        if self.path in _RAW_BODIES:
            content = forward_backward(values["model_id"], number)
            return Ask(self.method, url, named, number, params, content=content)
        has_body = bool(self.route.dependant.body_params)
        body = {name: value for name, value in values.items() if name not in in_path | in_query}
        return Ask(self.method, url, named, number, params, body if has_body else None)

    def _value(self, name: str, own: Mapping[str, str], named: str, number: int) -> Any:
        if name in _NUMBERS:
            return number
        if name == self.field:
            return _wrapped(name, named)
        kinds = _kinds(self.path, name)
        if name == "name" and kinds:
            return KEPT
        if kinds:
            return _wrapped(name, own[kinds[0]])
        return _PLAIN_BY_PATH.get((self.path, name), _PLAIN.get(name))


_counted = count(100)
KINDS = frozenset(kind for kinds in _IDS.values() for kind in kinds)
"""All kinds of objects."""


def _takes_away(case: Case) -> int:
    """Calls after which there is less to ask for, by how much less."""
    return 2 * case.path.endswith("/finish") or int(case.method == "DELETE" and case.path[-1] == "}")


def cases(table: list[APIRoute]) -> list[Case]:
    """All of them; those that take something away are the last.

    Raises:
        Unaskable: a route has a field that is not known here.
    """
    found = [case for route in table if route.path not in PUBLIC | {METRICS} for case in _cases(route)]
    return sorted(found, key=_takes_away)


def _cases(route: APIRoute) -> Iterator[Case]:
    for way in _ways(route):
        named = [name for name in way if _kinds(route.path, name)]
        for name in named:
            for kind in _kinds(route.path, name):
                yield Case(route, way, name, kind)
        if not named:
            yield Case(route, way)


def _ways(route: APIRoute) -> list[tuple[str, ...]]:
    """The fields that are sent together."""
    dependant = route.dependant
    if dependant.request_param_name and route.path not in _RAW_BODIES | _READ_NO_MORE:
        raise Unaskable(f"{route.path} takes the whole request")
    always = [one.name for one in dependant.path_params]
    for one in (*dependant.query_params, *dependant.header_params, *dependant.cookie_params):
        _check_known(route, one.name)
    filters = [one.name for one in dependant.query_params if _kinds(route.path, one.name)]
    always += filters
    always += [one.name for one in dependant.query_params if one.field_info.is_required()]
    if route.path in _RAW_BODIES:
        return [(*always, "model_id", "seq_id")]
    needed: list[str] = []
    optional: list[str] = []
    for parameter in dependant.body_params:
        model = parameter.field_info.annotation
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            raise Unaskable(f"{route.path}: the body is {model}")
        for name, one in model.model_fields.items():
            _check_known(route, name)
            (needed if one.is_required() else optional).append(name)
    for name in always:
        _check_known(route, name)
    ways = _WAYS.get(route.path)
    if ways is None:
        looked_up = [name for name in optional if _kinds(route.path, name)]
        ways = ((*needed, *looked_up),)
    missed = {name for name in needed + optional if _kinds(route.path, name)} - {*sum(ways, ())}
    if missed:
        raise Unaskable(f"{route.path}: no case sends {', '.join(sorted(missed))}")
    return [(*always, *way) for way in ways]


def _kinds(path: str, name: str) -> tuple[str, ...]:
    return () if (path, name) in _NAMES_WHAT_IS_NEW else _IDS.get(name, ())


def _wrapped(name: str, value: str) -> Any:
    wrap = _WRAPPED.get(name)
    return wrap(value) if wrap else value


def _check_known(route: APIRoute, name: str) -> None:
    if name not in _IDS and name not in _PLAIN and name not in _LEFT_OUT and name not in _NUMBERS:
        raise Unaskable(f"{route.path}: {name!r} is in none of the lists of tests/service/isolation.py")


SAME_FOR_ALL = {
    ("/api/v1/telemetry", "session_id"),
    ("/api/v1/cancel_future", "request_id"),
    ("/api/v1/asample", "model_path"),
}
"""Fields that nobody learns anything from: owners get the same answer as strangers."""
_FILTERS = {
    ("/api/v1/training_runs", "project_id"),
    ("/api/v1/billing/usage/checkpoints/current", "project_id"),
    ("/api/v1/sessions/search", "session_id"),
    ("/api/v1/sessions/search", "project_ids"),
    ("/api/v1/sessions/search", "cursor"),
}
"""Fields that choose from what is one's own: 200 with nothing, rather than 404."""
_LATER = {("/api/v1/load_weights", "path")}
"""Fields that are looked up when the turn of a model's request comes: the future is an error."""
_OTHER_STATUS = {("/api/v1/session_heartbeat", "session_id"): 410}
"""The protocol has it so."""


@dataclass(frozen=True)
class Told:
    """All that an answer tells, but for the id that was asked for and those of the request itself."""

    status: int
    text: str
    headers: Mapping[str, str]

    @classmethod
    def by(cls, answer: httpx.Response, ask: Ask) -> "Told":
        text = answer.text.replace(json.dumps(answer.headers["x-request-id"]), "<request>")
        owner, _, last = ask.asked.rpartition(":")  # a future's is named by its model or sampler, too
        text = text.replace(ask.asked, "<id>") if ask.asked else text
        text = text.replace(owner, "<id>") if last.isdecimal() else text
        headers = {name: value for name, value in answer.headers.items() if name not in _OF_EACH_ANSWER}
        return cls(answer.status_code, text, headers)


_OF_EACH_ANSWER = ("x-request-id", "date")


def told(client: httpx.Client, key: str, ask: Ask) -> Told:
    """What a key is told: by the answer, or by the future that it promises."""
    answer = ask.send(client, key)
    promise = answer.json().get("request_id") if answer.status_code == 200 and _is_json(answer) else None
    if promise is None or "type" in answer.json():
        return Told.by(answer, ask)
    headers = {"X-API-Key": key}
    while True:
        result = client.post("/api/v1/retrieve_future", json={"request_id": promise}, headers=headers)
        if not (_is_json(result) and result.json().get("type") == "try_again"):
            return Told.by(result, ask)


def _is_json(answer: httpx.Response) -> bool:
    return answer.headers.get("content-type") == "application/json" and answer.text[:1] == "{"


def findings(
    case: Case, client: httpx.Client, asker: Estate, theirs: Estate, unknown: Mapping[str, str]
) -> list[str]:
    """What is wrong with the answers to a stranger; empty: nothing."""

    def asked(named: str) -> Told:
        return told(client, asker.key, case.ask(asker, named))

    got = asked(theirs.ids.get(case.kind, ""))
    wrong = [f"{case}: shows {secret} in {got.text}" for secret in theirs.secrets() if secret in got.text]
    if not case.field:
        return wrong if got.status < 500 else [*wrong, f"{case}: {got}"]
    expected = asked(unknown[case.kind])
    if got != expected:
        wrong.append(f"{case}: {got} for what is another's, {expected} for what never was")
    at = (case.path, case.field)
    is_later = case.is_numbered and at in _LATER
    accepted = (200,) if is_later or at in _FILTERS else (_OTHER_STATUS.get(at, 404), 403)
    if at not in SAME_FOR_ALL and got.status not in accepted:
        wrong.append(f"{case}: {got}; accepted: {accepted}")
    if is_later and "path: there is no <id>" not in got.text:
        wrong.append(f"{case}: {got}; accepted: an error")
    return wrong
