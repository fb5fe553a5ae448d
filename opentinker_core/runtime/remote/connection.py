"""The connection of a run to a service: the SDK's client, and what the SDK has no call for."""

import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

import httpx
import tinker

from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.names import check_name

KEY = "TINKER_API_KEY"
_CLOSING = 5
"""Seconds that a service may take to hear that a session is over; it notices by itself too."""
_TIMEOUT = httpx.Timeout(60, connect=5)


class Connection:
    """A client of the service at `url`, with the key of the environment."""

    def __init__(self, url: str) -> None:
        """
        Raises:
            UsageError: there is no key, the service does not answer, or it does not accept the key.
        """
        self.url = url.rstrip("/")
        key = os.environ.get(KEY)
        if not key:
            raise UsageError(
                f"{KEY}: not set; accepted: a key of {url}, as `opentinker keys create` shows it"
            )
        self._http = httpx.Client(base_url=f"{self.url}/api/v1", headers={"X-API-Key": key}, timeout=_TIMEOUT)
        self.models = self._models()
        """Context lengths by the names of the base models that are served."""
        with service_errors():
            self.client = tinker.ServiceClient(base_url=self.url, api_key=key)

    def download(self, path: str, directory: Path) -> None:
        """Write the files of a checkpoint `tinker://run/kind/name` below `directory`.

        Raises:
            OpenTinkerError: the service does not give them.
        """
        with TemporaryFile() as file:
            try:
                with self._http.stream("GET", f"{_place(path)}/archive") as response:
                    response.raise_for_status()
                    for piece in response.iter_bytes():
                        file.write(piece)
            except httpx.HTTPError as error:
                raise OpenTinkerError(f"{self.url}: no archive of {path}: {error}") from error
            file.seek(0)
            with tarfile.open(fileobj=file) as archive:
                _extract(archive, directory)

    def has(self, path: str) -> bool:
        """Whether the service has a checkpoint `tinker://run/kind/name`.

        Raises:
            OpenTinkerError: it does not answer.
        """
        try:
            response = self._http.post("weights_info", json={"tinker_path": path})
            return response.status_code != 404 and response.raise_for_status().is_success
        except httpx.HTTPError as error:
            raise OpenTinkerError(f"{self.url}: does not say whether it has {path}: {error}") from error

    def delete(self, path: str) -> None:
        """Delete a checkpoint `tinker://run/kind/name`.

        Raises:
            OpenTinkerError: the service does not.
        """
        try:
            self._http.delete(_place(path)).raise_for_status()
        except httpx.HTTPError as error:
            raise OpenTinkerError(f"{self.url}: {path} is not deleted: {error}") from error

    def close(self) -> None:
        """Say that the session is over, so that the service frees what it holds."""
        self._http.close()
        with service_errors():
            self.client.close("success").result(timeout=_CLOSING)

    def _models(self) -> dict[str, int | None]:
        try:
            response = self._http.get("get_server_capabilities")
        except httpx.HTTPError as error:
            raise UsageError(
                f"runtime.url: {self.url} does not answer ({error}); accepted: the address of a running "
                "service, as `opentinker serve` shows it"
            ) from error
        if response.status_code in (401, 403):
            raise UsageError(f"{KEY}: not accepted by {self.url}; accepted: a key of that service")
        try:
            models = response.raise_for_status().json()["supported_models"]
            return {model["model_name"]: model.get("max_context_length") for model in models}
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"runtime.url: {self.url} is no Tinker service ({error}); accepted: the address of one"
            ) from error


@contextmanager
def service_errors() -> Iterator[None]:
    """Errors of the SDK in the block are raised as ours."""
    try:
        yield
    except (tinker.TinkerError, ValueError, TimeoutError) as error:  # the SDK raises ValueError for HTTP 4xx
        raise OpenTinkerError(f"the service: {error}") from error


def _place(path: str) -> str:
    run, kind, name = path.removeprefix("tinker://").split("/")
    return f"training_runs/{run}/checkpoints/{kind}/{name}"


def _extract(archive: tarfile.TarFile, directory: Path) -> None:
    for member in archive:
        content = archive.extractfile(member) if member.isfile() else None
        if content is None:
            raise OpenTinkerError(f"an archive holds {member.name!r:.80}; accepted: plain files")
        check_name("a file's name in an archive", member.name)
        with (directory / member.name).open("wb") as file:
            while piece := content.read(1 << 20):
                file.write(piece)
