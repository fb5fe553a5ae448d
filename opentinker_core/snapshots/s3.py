"""A blob store on S3 or a server that speaks its protocol."""

import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    EndpointConnectionError,
    NoCredentialsError,
    PartialCredentialsError,
)

from opentinker_core.errors import UsageError
from opentinker_core.snapshots.blobs import BlobError, BlobMissingError, check_key

_PART = 8 << 20
_TRANSFER = TransferConfig(multipart_threshold=_PART, multipart_chunksize=_PART, max_concurrency=4)
_CHECKSUM = {"ChecksumAlgorithm": "SHA256"}
_MISSING = {"404", "NoSuchKey", "NotFound"}
_REFUSED = {"401", "403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"}
_CONFLICT_TRIES = 5


class S3BlobStore:
    """Objects below `bucket/prefix`. `put_if_absent` stands on `If-None-Match: *`."""

    def __init__(self, bucket: str, prefix: str = "", endpoint_url: str = "") -> None:
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._endpoint = (
            endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        )
        self._conditions_checked = False
        self._lock = threading.Lock()
        with self._translated("open", ""):
            self._s3: Any = _client(self._endpoint)

    def put(self, key: str, source: Path | bytes) -> None:
        with self._translated("write", key):
            if isinstance(source, bytes):
                self._s3.put_object(Bucket=self._bucket, Key=self._name(key), Body=source, **_CHECKSUM)
                return
            with _opened(source) as stream:
                self._s3.upload_fileobj(
                    stream, self._bucket, self._name(key), ExtraArgs=_CHECKSUM, Config=_TRANSFER
                )

    def put_if_absent(self, key: str, source: Path | bytes) -> bool:
        check_key(key)
        self._check_conditions()
        return self._put_if_absent(key, source)

    def read(self, key: str) -> bytes:
        with self._translated("read", key):
            answer = self._s3.get_object(Bucket=self._bucket, Key=self._name(key), ChecksumMode="ENABLED")
            content: bytes = answer["Body"].read()
        return content

    def get(self, key: str, target: Path) -> None:
        with self._translated("read", key):
            try:
                with target.open("wb") as stream:
                    self._s3.download_fileobj(self._bucket, self._name(key), stream, Config=_TRANSFER)
            except OSError as error:
                raise BlobError(f"cannot write {target}: {error.strerror or error}") from error

    def exists(self, key: str) -> bool:
        try:
            with self._translated("read", key):
                self._s3.head_object(Bucket=self._bucket, Key=self._name(key))
        except BlobMissingError:
            return False
        return True

    def delete(self, key: str) -> None:
        with self._translated("delete", key):
            self._s3.delete_object(Bucket=self._bucket, Key=self._name(key))

    def local_path(self, key: str) -> None:
        """None: what an S3 store holds lies on no local disk."""

    def list(self, folder: str = "") -> list[str]:
        prefix = f"{self._name(folder)}/" if folder else self._prefix
        with self._translated("list", folder):
            pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix)
            names = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        return sorted(name.removeprefix(self._prefix) for name in names)

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _put_if_absent(self, key: str, source: Path | bytes) -> bool:
        for attempt in range(_CONFLICT_TRIES):
            try:
                with self._translated("write", key), _opened(source) as body:
                    self._s3.put_object(
                        Bucket=self._bucket, Key=self._prefix + key, Body=body, IfNoneMatch="*", **_CHECKSUM
                    )
                return True
            except BlobError as error:
                code = _code(error.__cause__)
                if code in ("PreconditionFailed", "412"):
                    return False
                # AWS answers 409 while another conditional write of the key is under way.
                if code not in ("ConditionalRequestConflict", "409") or attempt == _CONFLICT_TRIES - 1:
                    raise
        raise AssertionError("unreachable")

    def _check_conditions(self) -> None:
        """Once an instance: does the server honour `If-None-Match`? Some ignore it silently."""
        with self._lock:
            if self._conditions_checked:
                return
            probe = f".condition-probe-{secrets.token_hex(8)}"  # not a safe name: no key can be it
            first, second = self._put_if_absent(probe, b"1"), self._put_if_absent(probe, b"2")
            with self._translated("delete", probe):
                self._s3.delete_object(Bucket=self._bucket, Key=self._prefix + probe)
            if not first or second:
                raise BlobError(
                    f"{self.uri}: the server at {self._endpoint or 'AWS'} ignores the condition "
                    "'If-None-Match: *', so concurrent writers could overwrite each other; "
                    "accepted: S3 itself, or a server that honours conditional writes"
                )
            self._conditions_checked = True

    @contextmanager
    def _translated(self, action: str, key: str) -> Iterator[None]:
        place = f"{self.uri}/{key}".rstrip("/")
        server = self._endpoint or "AWS"
        try:
            yield
        except ClientError as error:
            code = _code(error)
            if code == "NoSuchBucket":
                raise BlobError(f"cannot {action} {place}: there is no bucket {self._bucket!r}") from error
            if code in _MISSING:
                raise BlobMissingError(f"cannot {action} {place}: there is no such file") from error
            if code in _REFUSED:
                raise BlobError(
                    f"cannot {action} {place}: {server} refused the credentials ({code}); "
                    "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and their permissions"
                ) from error
            raise BlobError(f"cannot {action} {place}: {error}") from error
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise BlobError(
                f"cannot {action} {place}: no S3 credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            ) from error
        except EndpointConnectionError as error:
            raise BlobError(f"cannot {action} {place}: {server} cannot be reached") from error
        except BotoCoreError as error:
            raise BlobError(f"cannot {action} {place} at {server}: {error}") from error


def _client(endpoint: str | None) -> Any:
    config = Config(
        retries={"mode": "standard", "total_max_attempts": 4},
        connect_timeout=10,
        read_timeout=60,
        s3={"addressing_style": "path"} if endpoint else {},
    )
    try:
        return boto3.session.Session().client("s3", endpoint_url=endpoint or None, config=config)
    except ValueError as error:
        raise UsageError(f"S3 endpoint: {endpoint!r:.200}; accepted: an http(s) URL ({error})") from error


@contextmanager
def _opened(source: Path | bytes) -> Iterator[Any]:
    if isinstance(source, bytes):
        yield source
        return
    try:
        stream = source.open("rb")
    except OSError as error:
        raise BlobError(f"cannot read {source}: {error.strerror or error}") from error
    with stream:
        yield stream


def _code(error: BaseException | None) -> str:
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""
