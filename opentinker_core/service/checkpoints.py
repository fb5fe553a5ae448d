"""Named checkpoints: `tinker://<model>/<kind>/<name>` for versions in the catalog."""

import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta

from opentinker_core.digests import digest_json
from opentinker_core.errors import NotFoundError, OpenTinkerError, UsageError
from opentinker_core.names import check_name
from opentinker_core.policies.catalog import Catalog
from opentinker_core.policies.tables import utc_now
from opentinker_core.policies.types import PolicyVersion
from opentinker_core.service.records import Records
from opentinker_core.service.types import CheckpointKind, ModelStatus, NamedCheckpoint, SessionStatus
from opentinker_core.snapshots.protocol import Snapshot, SnapshotStore

_LOG = logging.getLogger(__name__)

_SCHEME = "tinker://"
_SHORTEST, _LONGEST = 3600, 10 * 366 * 86400


def parse_path(path: str) -> tuple[str, CheckpointKind, str]:
    """The model id, kind and name of a `tinker://` path.

    Raises:
        UsageError: it is none.
    """
    parts = path.removeprefix(_SCHEME).split("/")
    kinds = tuple(kind.value for kind in CheckpointKind)
    if not path.startswith(_SCHEME) or len(parts) != 3 or parts[1] not in kinds:
        raise UsageError(
            f"path: {path!r:.200}; accepted: tinker://<training run>/<{' or '.join(kinds)}>/<name>"
        )
    return parts[0], CheckpointKind(parts[1]), check_name("path", parts[2])


def check_kind(kind: str) -> CheckpointKind:
    """The kind of this name; raises UsageError."""
    try:
        return CheckpointKind(kind)
    except ValueError as error:
        accepted = ", ".join(CheckpointKind)
        raise UsageError(f"checkpoint: {kind!r:.80} is no kind; accepted: {accepted}") from error


def expiry(ttl_seconds: int | None) -> datetime | None:
    """When a checkpoint with this time to live expires; None: never.

    Raises:
        UsageError: it is too short or too long.
    """
    if ttl_seconds is None:
        return None
    if not _SHORTEST <= ttl_seconds <= _LONGEST:
        raise UsageError(
            f"ttl_seconds: {ttl_seconds}; accepted: {_SHORTEST} (an hour) to {_LONGEST} (ten years), or none"
        )
    return utc_now() + timedelta(seconds=ttl_seconds)


class Checkpoints:
    """See the module. All methods wait for the database: not for the event loop."""

    def __init__(
        self, records: Records, catalog: Callable[[str], Catalog], snapshots: Callable[[], SnapshotStore]
    ) -> None:
        """`catalog(tenant)`: a tenant's view of the catalog."""
        self._records, self._catalog, self._snapshots = records, catalog, snapshots

    def resolve(self, tenant: str, path: str) -> NamedCheckpoint:
        """The checkpoint at a `tinker://` path.

        Raises:
            UsageError: it is no such path.
            NotFoundError: the tenant has no such checkpoint, or it has expired.
        """
        return self._records.checkpoint(tenant, *parse_path(path))

    def latest(self, tenant: str, model_id: str) -> NamedCheckpoint | None:
        """The last checkpoint from which the training of a model can be gone on with."""
        found, _ = self._records.checkpoints(tenant, model_id)
        return next((one for one in found if one.kind is CheckpointKind.WEIGHTS), None)

    def delete(self, tenant: str, model_id: str, kind: CheckpointKind, name: str) -> None:
        """Forget a named checkpoint, and those files of its version that are not needed by anybody else.

        The version itself stays in the catalog, and so do the sampler weights of one that an alias refers to.

        Raises:
            NotFoundError: the tenant has no such checkpoint.
        """
        self.unnamed(tenant, self._records.delete_checkpoint(tenant, model_id, kind, name).version, kind)

    def unnamed(self, tenant: str, version: PolicyVersion, kind: CheckpointKind) -> None:
        """Delete what is not needed any more of a version that has lost a name of this kind."""
        others = self._records.names_of(tenant, (version.policy_id, version.number))
        if kind is CheckpointKind.WEIGHTS and not any(one.kind is kind for one in others):
            self._delete_files(self._catalog(tenant).forget_checkpoint(version.policy_id, version.number))
        self.release(tenant, version)

    def release(self, tenant: str, version: PolicyVersion) -> None:
        """Delete the sampler weights of a version that was made for one sampler, if nobody needs them."""
        if not self._records.is_used(tenant, (version.policy_id, version.number)):
            self._delete_files(self._catalog(tenant).forget_sampler(version.policy_id, version.number))

    def copy(
        self,
        tenant: str,
        path: str,
        *,
        session_id: str,
        seq: int,
        project_id: str | None,
        expires_at: datetime | None,
    ) -> NamedCheckpoint:
        """Give a checkpoint a second name, below a training run of its own that is not trained.

        Args:
            session_id: of the new run; made if there is none. Repeated, nothing is copied twice.

        Raises:
            UsageError: `path` is no checkpoint's path, or the session has another run of this number.
            NotFoundError: the tenant has no such checkpoint.
        """
        source, records = self.resolve(tenant, path), self._records
        model_id, digest = f"{session_id}:train:{seq}", digest_json(["copy", path])
        with suppress(NotFoundError):
            if records.model(tenant, model_id).digest == digest:
                return records.checkpoint(tenant, model_id, source.kind, source.name)
        origin = records.model(tenant, source.model_id)
        made = not records.has_session(tenant, session_id)
        if made:
            records.add_session(tenant, session_id, project_id=project_id)
        records.add_model(
            tenant,
            model_id,
            session_id,
            policy_id=origin.policy_id,
            run_id=origin.run_id,
            base_model=origin.base_model,
            lora=origin.lora,
            user_metadata=origin.user_metadata,
            digest=digest,
        )
        records.set_model_status(tenant, model_id, ModelStatus.RELEASED)
        version = source.version
        copy = records.add_checkpoint(
            tenant,
            model_id,
            source.kind,
            source.name,
            version=(version.policy_id, version.number),
            size_bytes=source.size_bytes,
            user_metadata=source.user_metadata,
            expires_at=expires_at,
        )
        if made:
            records.end_session(tenant, session_id, SessionStatus.FINISHED, "success")
        return copy

    def _delete_files(self, snapshot: Snapshot | None) -> None:
        if snapshot is not None:
            self._snapshots().delete(snapshot.uri)

    def delete_expired(self) -> int:
        """Delete what has expired, of all tenants; gives how many."""
        expired = self._records.expired_checkpoints()
        for one in expired:
            try:
                self.delete(one.tenant, one.model_id, one.kind, one.name)
            except NotFoundError:
                _LOG.info("%s was deleted before it expired", one.path)
            except OpenTinkerError as error:
                _LOG.warning("%s has expired, but its files could not be deleted: %s", one.path, error)
        return len(expired)
