"""Runs that train through a service: what they learn is what a run in the process learns."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tinker

from opentinker_core.config.schema import LoRAConfig, TrainConfig
from opentinker_core.errors import OpenTinkerError, UsageError
from opentinker_core.runtime.held_out import evaluate_version
from opentinker_core.runtime.remote.adapters import tinker_lora
from opentinker_core.runtime.session import open_session
from tests.runtime.runs import CONFIG, run_to_the_end, small_config, train, workspace_at
from tests.servers import free_port
from tests.service.live import Live, serving

LORA = {"rank": 4, "alpha": 32.0, "target_modules": "all-linear"}
POLICY = {**CONFIG["policy"], "lora": LORA}
RL = {**CONFIG["rl"], "groups": 4}
"""Every completion is a request or two."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving(tmp_path_factory.mktemp("served")) as live:
        yield live


@pytest.fixture(autouse=True)
def _key(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", live.key())
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


def config_of(live: Live | None, **changes: object) -> TrainConfig:
    runtime = {"threads": 1} | ({"url": live.url} if live else {})
    return small_config(**{"policy": POLICY, "rl": RL, "runtime": runtime} | changes)


def _saved(live: Live) -> set[str]:
    """The checkpoints that the service keeps."""
    client = tinker.RestClient(base_url=live.url, api_key=live.key())
    kept = client.list_user_checkpoints().result().checkpoints
    return {one.tinker_path for one in kept if one.checkpoint_type == "training"}


@pytest.mark.parametrize("reference", ["base", "start"])
def test_a_remote_run_learns_what_a_local_one_does(live: Live, tmp_path: Path, reference: str) -> None:
    before = _saved(live)
    rl = {**RL, "objective": {"kl_coefficient": 0.01, "kl_reference": reference}}
    remote, local = (
        train(tmp_path / name, config_of(where, rl=rl)) for name, where in (("r", live), ("l", None))
    )
    assert remote.token_ids_digest() == local.token_ids_digest()
    versions = zip(
        *(one.workspace.catalog.run_versions(one.run.run_id) for one in (remote, local)), strict=True
    )
    for ours, theirs in versions:
        assert (ours.ref, ours.step, ours.phase) == (theirs.ref, theirs.step, theirs.phase)
        assert ours.metrics.keys() == theirs.metrics.keys()
        for name in ("loss", "grad_norm", "nll", "reference_kl", "reward_mean"):
            if name in theirs.metrics:
                assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-4, abs=1e-5), name
    ends = [one.workspace.catalog.evaluations(run_id=one.run.run_id)[0].mean for one in (remote, local)]
    assert ends[0] == ends[1]
    needed = 1 if reference == "start" else 0
    assert len(_saved(live) - before) == remote.config.record.keep_checkpoints + needed
    # What was published is here, not only there: a local runtime samples it.
    ref = remote.version.ref
    assert evaluate_version(config_of(None), remote.workspace, ref).mean == pytest.approx(ends[0])


def test_a_killed_run_goes_on_from_what_the_service_saved(live: Live, tmp_path: Path) -> None:
    config = config_of(live, sft=None)
    whole = train(tmp_path / "whole", config)
    workspace = workspace_at(tmp_path / "cut")
    session = open_session(config, workspace)
    session.build_batch(1, session.rollout(1))
    session.refresh(session.publish(1, session.update(1)))
    session.build_batch(2, session.rollout(2))
    session.update(2)  # and is killed: the step at the service is lost with its session
    run_id = session.run.run_id
    del session
    resumed = run_to_the_end(open_session(None, workspace_at(tmp_path / "cut"), run_id=run_id))
    assert resumed.token_ids_digest() == whole.token_ids_digest()
    losses = [
        [version.metrics.get("loss") for version in one.workspace.catalog.run_versions(one.run.run_id)]
        for one in (whole, resumed)
    ]
    assert losses[0] == losses[1]


def test_a_run_goes_on_after_the_service_was_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    with serving(tmp_path / "served", port=port) as first:
        monkeypatch.setenv("TINKER_API_KEY", first.key())
        session = open_session(config_of(first, sft=None), workspace_at(tmp_path))
        session.build_batch(1, session.rollout(1))
        session.refresh(session.publish(1, session.update(1)))
    with serving(tmp_path / "served", port=port):
        session.build_batch(2, session.rollout(2))  # what was saved can be sampled still
        with pytest.raises(OpenTinkerError, match="restarted"):
            session.update(2)
        again = open_session(None, workspace_at(tmp_path), run_id=session.run.run_id)
        assert run_to_the_end(again).version.step == 3


def test_a_step_can_be_published_again_after_a_crash_before_its_record(live: Live, tmp_path: Path) -> None:
    session = open_session(config_of(live, sft=None), workspace_at(tmp_path))
    session.build_batch(1, session.rollout(1))
    metrics = session.update(1)
    publish = session.workspace.catalog.publish_version

    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    session.workspace.catalog.publish_version = crash  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        session.publish(1, metrics)
    session.workspace.catalog.publish_version = publish  # type: ignore[method-assign]
    again = open_session(None, workspace_at(tmp_path), run_id=session.run.run_id)
    again.build_batch(1, again.rollout(1))
    assert again.publish(1, again.update(1)).metrics["loss"] == metrics["loss"]


def test_runs_go_on_from_versions_of_the_same_service_alone(live: Live, tmp_path: Path) -> None:
    first = train(tmp_path, config_of(live, rl=None))
    forked = train(tmp_path, _forking(config_of(live, sft=None), first.version.ref))
    assert forked.version.policy_name == "fork"
    local = train(tmp_path, small_config(policy={**POLICY, "name": "local"}, rl=None))
    with pytest.raises(
        UsageError, match=r"fork@\d+: from a local runtime, not at .*, and weights cannot be sent"
    ):
        open_session(_forking(config_of(live, sft=None), local.version.ref), workspace_at(tmp_path))


def _forking(config: TrainConfig, ref: str) -> TrainConfig:
    policy = config.policy.model_copy(update={"start": ref, "name": "fork"})
    return config.model_copy(update={"policy": policy})


def test_flows_of_several_tenants_share_the_base_model(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = train(tmp_path / "alone", config_of(live, sft=None))
    sessions = []
    for tenant in ("one", "two", "three"):
        monkeypatch.setenv("TINKER_API_KEY", live.key(tenant))
        sessions.append(open_session(config_of(live, sft=None), workspace_at(tmp_path / tenant)))
    with ThreadPoolExecutor(3) as threads:
        ended = list(threads.map(run_to_the_end, sessions))
    for session in ended:
        assert session.token_ids_digest() == alone.token_ids_digest()
        assert session.version.metrics["loss"] == alone.version.metrics["loss"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"policy": CONFIG["policy"]}, "policy.lora.alpha: 16.0.*32.0"),
        ({"policy": {**POLICY, "lora": {**LORA, "target_modules": ["q_proj"]}}}, "whole groups"),
        (
            {"policy": {**POLICY, "base_model": "smollm2-135m"}},
            "'smollm2-135m' is not served.*: tiny",
        ),
        ({"runtime": {"url": "http://127.0.0.1:9"}}, "runtime.url: .* does not answer"),
    ],
)
def test_what_a_service_cannot_do_is_said_before_anything_runs(
    live: Live, tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    config = small_config(**{"policy": POLICY, "runtime": {"url": live.url}, **changes})
    with pytest.raises(UsageError, match=says):
        open_session(config, workspace_at(tmp_path))


def test_a_key_is_asked_for(live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
    with pytest.raises(UsageError, match="TINKER_API_KEY: not accepted"):
        open_session(config_of(live), workspace_at(tmp_path))
    monkeypatch.delenv("TINKER_API_KEY")
    with pytest.raises(UsageError, match="TINKER_API_KEY: not set"):
        open_session(config_of(live), workspace_at(tmp_path))


def test_configs_say_what_the_api_has_no_field_for() -> None:
    for sampling, says in (({"temperature": 0.7}, "temperature: 0.7"), ({"top_k": 5}, "top_k: 5")):
        with pytest.raises(ValueError, match=rf"rl.sampling.{says}; accepted with runtime.url"):
            small_config(rl={"steps": 1, "sampling": sampling}, runtime={"url": "http://x"})
    with pytest.raises(ValueError, match=r"evaluation.sampling.min_p"):
        small_config(evaluation={"sampling": {"min_p": 0.1}}, runtime={"url": "http://x"})
    with pytest.raises(ValueError, match="url"):
        small_config(runtime={"url": "file:///etc/passwd"})


def test_adapters_of_the_api() -> None:
    heads = LoRAConfig(rank=3, alpha=32, target_modules=("lm_head", "q_proj", "k_proj", "v_proj", "o_proj"))
    wanted = tinker_lora(heads)
    assert (wanted.rank, wanted.train_attn, wanted.train_mlp, wanted.train_unembed) == (3, True, False, True)
    with pytest.raises(UsageError, match="use_rslora: True"):
        tinker_lora(LoRAConfig(alpha=32, use_rslora=True))
