import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from envs.adapters import hosting
from envs.adapters.hosting import HostedError, HostedMulti, HostedSingle, Spec, Splitting, hosted, opened
from envs.draws import split_of
from envs.protocol import Action
from tests.waiting import wait_until


def spec(factory: str = "draws", **args: Any) -> Spec:
    return Spec(f"library/{factory}", f"tests.envs.adapters.library:{factory}", args)


def single(split: str = "train", **args: Any) -> HostedSingle:
    made = hosted(spec(**args), Splitting(split))  # type: ignore[arg-type]
    assert isinstance(made, HostedSingle)
    return made


def gone(pid: int) -> bool:
    """Whether a process has ended, also where nobody asks how."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def said(environment: HostedSingle, texts: list[str]) -> list[str]:
    return [environment.step(Action(text)).observation.text for text in texts]


def test_episodes_that_run_at_once_draw_as_if_they_were_alone() -> None:
    first, second = single(), single()
    alone = {}
    for seed in (1, 2):
        first.reset(seed)
        alone[seed] = said(first, ["a"] * 6)
    first.reset(1)
    second.reset(2)
    together = [(said(first, ["a"]), said(second, ["a"])) for _ in range(6)]
    assert [one[0][0] for one in together] == alone[1] != alone[2]
    assert [one[1][0] for one in together] == alone[2]


def test_many_episodes_in_many_threads_do_not_disturb_each_other() -> None:
    def play(seed: int) -> list[str]:
        environment = single()
        environment.reset(seed)
        drawn = said(environment, ["a"] * 5)
        environment.close()
        return drawn

    alone = [play(seed) for seed in range(64)]
    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(play, range(64))) == alone
    assert len({tuple(drawn) for drawn in alone}) == 64


def test_what_a_library_keeps_in_its_modules_does_not_outlive_the_episode() -> None:
    environment = single()
    for _ in range(3):
        environment.reset(5)
        assert environment.step(Action("a")).info["played"] == ["reset", "a"]


def test_the_order_of_sets_is_that_of_a_fixed_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = []
    for hash_seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
        environment = single(problems=1)
        hosting._hosts.pop(spec(problems=1).key).close()
        environment.reset(0)
        orders.append(environment.step(Action("a")).info["set"])
    assert orders[0] == orders[1]


def test_an_episode_that_hangs_is_killed_and_takes_nobody_along(monkeypatch: pytest.MonkeyPatch) -> None:
    wedged, other = single(), single()
    wedged.reset(1)
    process = wedged.step(Action("a")).info["process"]
    other.reset(2)
    monkeypatch.setattr(hosting, "STEP_SECONDS", 0.2)
    with pytest.raises(TimeoutError, match=r"no answer in 0\.2 s"):
        wedged.step(Action("hang"))
    monkeypatch.undo()
    wait_until(lambda: gone(process), "the end of the process")
    other.step(Action("a"))
    with pytest.raises(RuntimeError, match="call reset first"):
        wedged.step(Action("a"))
    assert wedged.reset(1).text == "problem 0"


def test_closing_from_another_thread_ends_a_step_that_hangs() -> None:
    environment = single()
    environment.reset(1)
    process = environment.step(Action("a")).info["process"]
    thread = threading.Thread(target=hang, args=[environment])
    thread.start()
    wait_until(lambda: environment._episode is None or environment._episode.asking, "the step")
    environment.close()
    thread.join()
    wait_until(lambda: gone(process), "the end of the process")
    environment.close()


@pytest.mark.parametrize(("text", "message"), [("crash", "ended"), ("raise", "LookupError: .*no such thing")])
def test_what_goes_wrong_in_the_library_is_told_and_ends_that_episode_only(text: str, message: str) -> None:
    environment, other = single(), single()
    environment.reset(1)
    other.reset(1)
    with pytest.raises(HostedError, match=message):
        environment.step(Action(text))
    other.step(Action("a"))
    environment.reset(1)
    environment.step(Action("a"))


def test_processes_end_with_their_episodes_also_with_those_that_nobody_closes() -> None:
    forgotten = single()
    forgotten.reset(1)
    del forgotten
    environment = single()
    for seed in range(20):
        environment.reset(seed)
        environment.step(Action("end" if seed % 2 else "a"))
    environment.close()
    host = psutil.Process(opened(spec())._popen.pid)
    assert opened(spec()).episodes == 0
    wait_until(lambda: not host.children(), "the end of all episodes")


def test_a_host_that_was_killed_takes_its_episodes_along_and_is_started_anew() -> None:
    environment = single()
    environment.reset(1)
    process = environment.step(Action("a")).info["process"]
    thread = threading.Thread(target=hang, args=[environment])
    thread.start()
    wait_until(lambda: environment._episode is None or environment._episode.asking, "the step")
    os.kill(opened(spec())._popen.pid, signal.SIGKILL)
    thread.join()
    wait_until(lambda: gone(process), "the end of the process")
    environment.reset(1)
    assert environment.step(Action("a")).observation.text


def hang(environment: HostedSingle) -> None:
    with pytest.raises(HostedError):
        environment.step(Action("hang"))


def test_hosts_are_kept_to_a_number_and_those_that_play_are_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "MAX_HOSTS", 2)
    playing = single(problems=2)
    playing.reset(1)
    for problems in (3, 4, 5):
        single(problems=problems)
    kept = set(hosting._hosts)
    assert len(kept) == 2
    assert spec(problems=2).key in kept
    playing.step(Action("a"))
    playing.close()


def test_everything_ends_when_the_process_that_plays_is_killed() -> None:
    code = """
import threading
from concurrent.futures import ThreadPoolExecutor
from envs.adapters.hosting import opened
from envs.protocol import Action
from tests.envs.adapters.test_hosting import single, spec
environment = single()
environment.reset(1)
pid = environment.step(Action("a")).info["process"]
threading.Thread(target=environment.step, args=[Action("hang")], daemon=True).start()
print("playing", opened(spec())._popen.pid, pid, flush=True)
input()
"""
    root = Path(__file__).parents[3]
    player = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert player.stdout is not None
    line = player.stdout.readline().split()
    assert line[0] == "playing"
    player.kill()
    player.communicate()
    wait_until(lambda: all(gone(int(pid)) for pid in line[1:]), "the end of all processes")


def test_several_agents_are_told_apart_from_one() -> None:
    made = hosted(spec("pair"), Splitting("train", "seed"))
    assert isinstance(made, HostedMulti)
    assert made.agents == ("left", "right")
    situation = made.reset(1)
    assert situation.together
    with pytest.raises(ValueError, match="accepted: all of left, right"):
        made.step({"left": Action("a")})
    ended = made.step({"left": Action("a"), "right": None})
    assert (ended.done, ended.rewards, ended.info) == (
        True,
        {"left": 1.0},
        {"said": {"left": "a", "right": None}},
    )
    with pytest.raises(RuntimeError, match="no episode is running"):
        made.step({"left": Action("a")})


def test_rewards_are_recomputed_by_playing_a_log_again() -> None:
    made = hosted(spec("pair"), Splitting("train", "seed"))
    assert isinstance(made, HostedMulti)
    made.reset(1)
    steps = [{"left": "a", "right": None}, {"left": "a"}]
    assert made.recompute(1, steps) == [{"left": 1.0}, {}]
    assert made.step({"left": Action("a"), "right": Action("b")}).done


def test_a_refusal_names_the_environment_and_the_reason() -> None:
    with pytest.raises(ValueError, match="environment: 'library/refuses' is not accepted: it is no game"):
        hosted(spec("refuses"), Splitting("train"))
    with pytest.raises(ValueError, match=r"TypeError: draws\(\) got an unexpected keyword argument 'x'"):
        hosted(spec(x=1), Splitting("train"))


def test_problems_are_split_by_what_is_shown_where_it_differs() -> None:
    shown = {
        split: {single(split, problems=3).reset(seed).text for seed in range(30)}
        for split in ("train", "held_out")
    }
    assert len(shown["train"] | shown["held_out"]) == 3
    assert not shown["train"] & shown["held_out"]
    assert single("held_out").reset(1).text == single("train").reset(1).text


def test_the_share_held_out_is_the_nearest_that_leaves_no_split_empty() -> None:
    texts = [f"problem {number}" for number in range(2)]
    share = Splitting("train", held_out=0.2).share(texts)
    assert share is not None
    assert {split_of(text, share) for text in texts} == {"train", "held_out"}
    many = [f"problem {number}" for number in range(100)]
    assert Splitting("train", held_out=0.2).share(many) == 0.2
    assert Splitting("train", held_out=0.2).share(["one"]) is None
    assert Splitting("train", by="seed").share(many) is None
    assert Splitting("train", held_out=0).share(many) == 0
    with pytest.raises(ValueError, match=r"held_out: 1\.0 is not accepted"):
        Splitting("train", held_out=1.0)
