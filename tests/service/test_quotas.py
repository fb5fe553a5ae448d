"""Quotas: what a tenant may run at once and by the minute, and what it may keep."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker_core.config.serving import QuotaConfig, QuotasConfig
from opentinker_core.service.errors import Forbidden, QuotaError, Unavailable
from opentinker_core.service.quotas import Quotas


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def quotas(clock: Clock | None = None, **default: float) -> Quotas:
    config = QuotasConfig.model_validate(
        {"default": default, "tenants": {"big": {"concurrent_requests": 100}}}
    )
    return Quotas(config, clock or Clock())


def test_no_more_than_so_many_requests_of_a_tenant_run_at_once() -> None:
    book = quotas(concurrent_requests=2)
    first, _ = book.admit("acme"), book.admit("acme")
    with pytest.raises(QuotaError, match=r"concurrent_requests: 2 .*; accepted: up to 2") as error:
        book.admit("acme")
    assert error.value.status == 429
    assert error.value.retry_after
    book.admit("other")
    first.end()
    first.end()
    book.admit("acme")
    with pytest.raises(QuotaError):
        book.admit("acme")
    assert book.running == 3


def test_a_tenant_may_have_quotas_of_its_own() -> None:
    book = quotas(concurrent_requests=1)
    for _ in range(100):
        book.admit("big")
    with pytest.raises(QuotaError):
        book.admit("big")


def test_tokens_come_back_by_the_minute_and_the_error_says_when() -> None:
    clock = Clock()
    book = quotas(clock, tokens_per_minute=600)
    book.admit("acme", tokens=600).end()
    with pytest.raises(QuotaError) as error:
        book.admit("acme", tokens=1)
    assert error.value.retry_after is not None
    clock.now += error.value.retry_after
    book.admit("acme", tokens=1)


def test_work_larger_than_the_quota_is_done_and_then_paid_for() -> None:
    clock = Clock()
    book = quotas(clock, tokens_per_minute=600)
    book.admit("acme", tokens=6000).end()
    clock.now += 9 * 60 - 1
    with pytest.raises(QuotaError):
        book.admit("acme")
    clock.now += 2
    book.admit("acme")


def test_tokens_that_show_only_at_the_end_count() -> None:
    book = quotas(tokens_per_minute=600)
    book.admit("acme", tokens=10).end(tokens=590)
    with pytest.raises(QuotaError):
        book.admit("acme")


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 500)), max_size=40))
def test_over_any_time_no_more_is_begun_than_the_quota_and_one_piece(work: list[tuple[float, int]]) -> None:
    clock, limit, largest = Clock(), 600, 500
    book, used, began = quotas(clock, tokens_per_minute=limit), 0, clock.now
    for pause, tokens in work:
        clock.now += pause
        with suppress(QuotaError):
            book.admit("acme", tokens=tokens).end()
            used += tokens
        assert used <= limit + (clock.now - began) * limit / 60 + largest + 1e-6


def test_what_does_not_come_back_by_waiting_is_no_429() -> None:
    book = quotas(policies=2, storage_gb=0.001)
    book.check_policies("acme", 1)
    book.check_storage("acme", 999_999)
    with pytest.raises(Forbidden, match="quota policies: this tenant trains 2 policies; accepted: up to 2"):
        book.check_policies("acme", 2)
    with pytest.raises(Forbidden, match=r"quota storage_gb: .* 0\.001 GB; accepted: up to 0\.001 GB"):
        book.check_storage("acme", 1_000_000)


def test_zero_is_no_limit() -> None:
    book = Quotas(QuotasConfig(default=QuotaConfig(concurrent_requests=0)))
    for _ in range(10_000):
        book.admit("acme", tokens=1 << 40)
    book.check_policies("acme", 1 << 40)
    book.check_storage("acme", 1 << 60)


def test_a_stopping_server_admits_nothing() -> None:
    book = quotas()
    hold = book.admit("acme")
    book.close()
    with pytest.raises(Unavailable):
        book.admit("acme")
    with hold:
        assert book.running == 1
    assert book.running == 0
