"""Which endpoint gets a request."""

from opentinker_core.sampling.vllm.balance import Balancer


def prompt(start: int, length: int = 64) -> tuple[int, ...]:
    return tuple(range(start, start + length))


def test_turns_of_an_episode_stay_where_their_cache_is() -> None:
    balancer = Balancer(3)
    first = [balancer.begin("p@1", prompt(1000 * episode), [0, 1, 2]) for episode in range(6)]
    assert sorted(first) == [0, 0, 1, 1, 2, 2]
    for endpoint in first:
        balancer.end(endpoint)
    longer = [balancer.begin("p@1", (*prompt(1000 * episode), 7, 7, 7), [0, 1, 2]) for episode in range(6)]
    assert longer == first


def test_another_version_has_no_cache_to_stay_with() -> None:
    balancer = Balancer(2)
    assert balancer.begin("p@1", prompt(0), [0, 1]) == 0
    assert balancer.begin("p@2", prompt(0), [0, 1]) == 1


def test_a_common_beginning_of_less_than_half_a_prompt_does_not_bind() -> None:
    balancer = Balancer(2)
    common = prompt(0, 32)
    placed = [balancer.begin("p@1", common + prompt(1000 * n, 64), [0, 1]) for n in range(1, 5)]
    assert placed == [0, 1, 0, 1]


def test_an_overloaded_endpoint_shares_even_its_own_prompts() -> None:
    balancer = Balancer(2)
    placed = [balancer.begin("p@1", prompt(0), [0, 1]) for _ in range(64)]
    assert min(placed.count(0), placed.count(1)) >= 24


def test_endpoints_that_do_not_work_get_nothing() -> None:
    balancer = Balancer(2)
    assert balancer.begin("p@1", prompt(0), [0, 1]) == 0
    assert balancer.begin("p@1", prompt(0), [1]) == 1
    assert balancer.running() == [1, 1]
