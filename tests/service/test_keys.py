"""API keys: shown once, kept as hashes, refused when wrong, expired or revoked."""

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from opentinker_core.errors import NotFoundError, UsageError
from opentinker_core.policies.tables import utc_now
from opentinker_core.service.key_tables import KeyRow
from opentinker_core.service.keys import REVOKED_AFTER_S, KeyRing, Keys
from opentinker_core.service.principal import Principal, Role


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[Keys]:
    keys = Keys(f"sqlite:///{tmp_path / 'catalog.db'}")
    yield keys
    keys.close()


def test_a_key_stands_for_its_tenant_and_role(keys: Keys) -> None:
    key, made = keys.create("acme", "laptop", Role.READER)
    assert key.startswith("tml-")
    assert keys.authenticate(key) == Principal("acme", "reader", made.key_id)


def test_the_secret_is_nowhere_in_the_database(keys: Keys, tmp_path: Path) -> None:
    key, _ = keys.create("acme", "laptop")
    keys.close()
    secret = key.split("-", 2)[2].encode()
    files = list(tmp_path.iterdir())
    assert any(path.name == "catalog.db" for path in files)
    assert not any(secret in path.read_bytes() for path in files)


@pytest.mark.parametrize("spoil", [lambda key: key[:-1] + ("A" if key[-1] != "A" else "B"), str.upper])
def test_a_key_that_differs_in_one_place_is_refused(keys: Keys, spoil: Callable[[str], str]) -> None:
    key, _ = keys.create("acme", "laptop")
    assert keys.authenticate(spoil(key)) is None


@pytest.mark.parametrize(
    "key",
    ["", "tml-", "tml-000000000000-" + "a" * 43, "tml-' OR 1=1 --", "x" * 100_000, "tml-\x00", "\udcff"],
)
def test_what_is_no_key_is_refused(keys: Keys, key: str) -> None:
    keys.create("acme", "laptop")
    assert keys.authenticate(key) is None


def test_the_secret_of_one_key_does_not_fit_the_id_of_another(keys: Keys) -> None:
    first, _ = keys.create("acme", "a")
    second, _ = keys.create("other", "b")
    mixed = "-".join([*first.split("-", 2)[:2], second.split("-", 2)[2]])
    assert keys.authenticate(mixed) is None


def test_a_revoked_key_is_refused_and_stays_listed(keys: Keys) -> None:
    key, made = keys.create("acme", "laptop")
    keys.revoke(made.key_id)
    keys.revoke(made.key_id)
    assert keys.authenticate(key) is None
    assert [(one.key_id, one.active) for one in keys.listed()] == [(made.key_id, False)]


def test_an_expired_key_is_refused(keys: Keys) -> None:
    key, made = keys.create("acme", "laptop", expires_in_days=1)
    assert keys.authenticate(key) is not None
    with keys._database.write("acme") as session:
        row = session.get(KeyRow, made.key_id)
        assert row is not None
        row.expires_at = utc_now() - timedelta(seconds=1)
    assert keys.authenticate(key) is None


def test_a_tenant_sees_and_revokes_only_its_own_keys(keys: Keys) -> None:
    key, made = keys.create("acme", "laptop")
    keys.create("other", "laptop")
    assert [one.key_id for one in keys.listed("acme")] == [made.key_id]
    with pytest.raises(NotFoundError) as other:
        keys.revoke(made.key_id, "other")
    with pytest.raises(NotFoundError) as unknown:
        keys.revoke("0" * 12, "other")
    assert str(other.value).replace(made.key_id, "") == str(unknown.value).replace("0" * 12, "")
    assert keys.authenticate(key) is not None


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("a/b", "x"), "tenant"),
        (("acme", ""), "name"),
        (("acme", "x", Role.MEMBER, 0.0), "expires_in_days"),
        (("acme", "x", Role.MEMBER, float("nan")), "expires_in_days"),
    ],
)
def test_a_wrong_request_names_the_field(keys: Keys, arguments: tuple[object, ...], field: str) -> None:
    with pytest.raises(UsageError, match=f"^{field}: "):
        keys.create(*arguments)  # type: ignore[arg-type]


def test_a_key_ring_asks_again_before_a_revoked_key_is_taken_for_long(keys: Keys) -> None:
    now = 0.0
    ring = KeyRing(keys, lambda: now)
    key, made = keys.create("acme", "laptop")
    assert asyncio.run(ring.principal(key)) is not None
    keys.revoke(made.key_id)
    assert asyncio.run(ring.principal(key)) is not None, "it does not ask at every request"
    now = REVOKED_AFTER_S
    assert asyncio.run(ring.principal(key)) is None
    assert REVOKED_AFTER_S <= 5


def test_a_new_key_works_although_it_was_refused_before(keys: Keys) -> None:
    ring = KeyRing(keys)
    key, _ = keys.create("acme", "laptop")
    assert asyncio.run(ring.principal(key[:-1])) is None
    assert asyncio.run(ring.principal(key)) is not None
