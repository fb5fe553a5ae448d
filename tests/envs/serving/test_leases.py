from envs.serving.leases import Leases


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_lease_runs_out_once_and_renewal_puts_it_off() -> None:
    clock = Clock()
    leases: Leases[str] = Leases(10, clock)
    leases.renew("a")
    clock.now += 6
    leases.renew("b")
    leases.renew("c")
    assert leases.until_next() == 4
    clock.now += 3
    leases.renew("b")
    clock.now += 7
    assert leases.expired() == ["a", "c"]
    assert leases.expired() == []
    assert leases.has("b")
    assert leases.until_next() == 3
    clock.now += 3
    assert leases.expired() == ["b"]
    assert len(leases) == 0


def test_a_suspended_lease_does_not_run_out() -> None:
    clock = Clock()
    leases: Leases[str] = Leases(10, clock)
    leases.renew("a")
    leases.suspend("a")
    leases.suspend("never there")
    clock.now += 100
    assert leases.expired() == []
    leases.renew("a")
    assert leases.until_next() == 10
