"""One vLLM server over HTTP: what it serves, its adapters, and completions of token ids."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from opentinker_core.errors import OpenTinkerError, UsageError

_CONNECT_TIMEOUT_S = 5.0
_SHORT_TIMEOUT_S = 30.0
_LOAD_TIMEOUT_S = 300.0


class EndpointError(OpenTinkerError):
    """The server cannot be reached, or failed at a request: it may work again, or elsewhere."""


class EndpointGoneError(EndpointError):
    """The server cannot be reached, so the request was not begun."""


class AdapterMissingError(EndpointError):
    """The server does not know the adapter: it was started anew, or somebody unloaded it."""


@dataclass(frozen=True)
class Served:
    """A base model as a server lists it."""

    names: tuple[str, ...]
    root: str
    """The path or hub id it was loaded from."""
    max_model_len: int


class Endpoint:
    """A server at `url`. Its methods may be called from many threads."""

    def __init__(self, url: str, request_timeout_s: float, connections: int) -> None:
        self.url = url.rstrip("/")
        self._request_timeout = httpx.Timeout(request_timeout_s, connect=_CONNECT_TIMEOUT_S, pool=None)
        self._client = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(_SHORT_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S, pool=None),
            limits=httpx.Limits(
                max_connections=connections,
                max_keepalive_connections=connections,
                keepalive_expiry=2.0,  # before the server closes an idle one, at 5 s
            ),
            trust_env=False,  # a proxy has nothing to do with a server of this machine or cluster
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def served(self) -> Served:
        """The base model.

        Raises:
            EndpointError: the server does not answer, or not as vLLM does.
        """
        answer = self._call("GET", "/v1/models")
        try:
            cards = [card for card in answer.json()["data"] if card.get("parent") is None]
            return Served(
                tuple(str(card["id"]) for card in cards),
                str(cards[0]["root"]),
                int(cards[0]["max_model_len"]),
            )
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise EndpointError(f"{self.url}/v1/models does not answer as vLLM does") from error

    def check_health(self) -> None:
        """Make sure that the server answers and its engine runs.

        Raises:
            EndpointError: not so.
        """
        self._call("GET", "/health")

    def load(self, name: str, directory: Path) -> None:
        """Load the adapter in `directory`, a path that the server can read too, under `name`.

        Raises:
            UsageError: the server refuses the adapter, or adapters altogether.
            EndpointError: it does not answer.
        """
        body = {"lora_name": name, "lora_path": str(directory)}
        answer = self._send("POST", "/v1/load_lora_adapter", body, timeout=_LOAD_TIMEOUT_S)
        if answer.status_code < 400 or "already been loaded" in answer.text:
            return
        message = _message(answer)
        if answer.status_code == 404 and message == "Not Found":
            raise UsageError(
                f"{self.url} loads no adapters; accepted: a server started by `opentinker vllm up`, or with "
                "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            )
        self.check_health()  # else it is the server's fault
        raise UsageError(f"{self.url} refuses the adapter {name}: {message}")

    def unload(self, name: str) -> None:
        """Forget an adapter; one it does not know is none to forget.

        Raises:
            EndpointError: it does not answer.
        """
        answer = self._send("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        if answer.status_code not in (200, 404):
            raise EndpointError(f"{self.url}: {_message(answer)}")

    def adapters(self) -> set[str]:
        """The names of the loaded adapters."""
        return {card["id"] for card in self._call("GET", "/v1/models").json()["data"] if card.get("parent")}

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """One completion: the choice that `/v1/completions` gives.

        Raises:
            AdapterMissingError: the server does not know the model that `body` names.
            UsageError: it refuses the request.
            EndpointError: it does not answer, or failed.
        """
        answer = self._send("POST", "/v1/completions", body, timeout=self._request_timeout)
        if answer.status_code == 404:
            raise AdapterMissingError(f"{self.url}: {_message(answer)}")
        if answer.status_code >= 500:
            raise EndpointError(f"{self.url} failed: {answer.status_code} {_message(answer)}")
        if answer.status_code >= 400:
            raise UsageError(f"{self.url} refuses the request: {_message(answer)}")
        try:
            choice: dict[str, Any] = answer.json()["choices"][0]
        except (ValueError, KeyError, IndexError) as error:
            raise EndpointError(f"{self.url}: an answer that is not vLLM's: {answer.text:.100}") from error
        return choice

    def _call(self, method: str, path: str) -> httpx.Response:
        answer = self._send(method, path)
        if answer.status_code >= 400:
            raise EndpointError(f"{self.url}{path}: {answer.status_code} {_message(answer)}")
        return answer

    def _send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: float | httpx.Timeout | None = None,
    ) -> httpx.Response:
        try:
            wait = self._client.timeout if timeout is None else timeout
            return self._client.request(method, path, json=body, timeout=wait)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise EndpointGoneError(f"{self.url} cannot be reached: {error}") from error
        except httpx.TimeoutException as error:
            raise EndpointError(f"{self.url}{path} did not answer in time") from error
        except httpx.HTTPError as error:
            raise EndpointError(f"{self.url}{path} broke off: {error or type(error).__name__}") from error


def _message(answer: httpx.Response) -> str:
    """What an error says, in vLLM's form or FastAPI's."""
    try:
        content = answer.json()
        error = content.get("error", content)
        return str(error.get("message") or error.get("detail") or answer.text)[:400]
    except (ValueError, AttributeError):
        return answer.text[:400] or f"status {answer.status_code}"
