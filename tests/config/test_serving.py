"""The service's config: files, overrides, short forms, mistakes."""

from datetime import timedelta
from pathlib import Path

import pytest

from opentinker_core.config.loading import load
from opentinker_core.config.serving import ServeConfig
from opentinker_core.errors import UsageError
from opentinker_core.policies.tables import utc_now
from opentinker_core.service.server import listen
from tests.servers import free_port

EXAMPLE = Path(__file__).parent.parent.parent / "deployments" / "configs" / "serve.yaml"


def test_without_a_file_there_are_defaults() -> None:
    config = load(None, [], ServeConfig)
    assert (config.host, config.port) == ("127.0.0.1", 8000)
    assert [model.served_name for model in config.models] == ["smollm2-135m"]


def test_the_example_can_be_read() -> None:
    config = load(EXAMPLE, ["port=9000"], ServeConfig)
    assert config.port == 9000


@pytest.mark.parametrize("text", ["tiny", "[tiny]", "[{model: tiny}]"])
def test_a_model_alone_is_short_for_a_mapping(text: str) -> None:
    assert [model.model for model in load(None, [f"models={text}"], ServeConfig).models] == ["tiny"]


def test_a_tenant_has_its_own_quotas_or_the_default_ones() -> None:
    config = load(None, ["quotas.default.policies=3", "quotas.tenants.acme.policies=9"], ServeConfig)
    assert (config.quotas.of("acme").policies, config.quotas.of("other").policies) == (9, 3)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("prot=1", "prot: 1: is not a known key; did you mean 'port'"),
        ("port=0", "port: 0: accepted is greater than or equal to 1"),
        ("models=[]", "models: "),
        ("models=[{modle: x}]", "models.0.modle: 'x': is not a known key; did you mean 'model'"),
        ("models=[tiny, tiny]", "tiny, tiny; accepted: each name once"),
        ("quotas.tenants.acme.polices=3", "quotas.tenants.acme.polices: 3: is not a known key; did you mean"),
        ("quotas.tenants={'a/b': {}}", "quotas.tenants"),
        ("tls.certificate=a.pem", "tls.key: is missing"),
        ("runtime.url=http://x", "runtime.url: http://x; accepted by a server: none"),
        ("metrics=some", "metrics: 'some': accepted is 'open', 'keyed' or 'off'"),
        ("limits.request_mb=0", "limits.request_mb: 0: accepted is greater than 0"),
        ("limits.request_mb=1e300", "limits.request_mb: 1e+300: accepted is less than or equal to 1000000"),
        ("limits.answer_timeout_s=1e7", "limits.answer_timeout_s: 10000000.0: accepted is less than"),
        ("session_timeout_s=1e11", "session_timeout_s: 100000000000.0: accepted is less than or equal to"),
        ("drain_timeout_s=1e11", "drain_timeout_s: 100000000000.0: accepted is less than or equal to 86400"),
        ("audit_days=740000", "audit_days: 740000: accepted is less than or equal to 36500"),
        (f"quotas.default.policies={10**16}", "accepted is less than or equal to 1000000000000000"),
    ],
)
def test_a_mistake_names_field_value_and_what_is_accepted(override: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        load(None, [override], ServeConfig)
    assert message in str(error.value)
    assert f"config with {override}" in str(error.value)


def test_the_largest_numbers_are_ones_that_a_server_can_count_with() -> None:
    largest = ["limits.answer_timeout_s=86400", f"port={free_port()}"]
    config = load(None, [*largest, f"session_timeout_s={30 * 86400}", "audit_days=36500"], ServeConfig)
    with listen(config):
        assert utc_now() - timedelta(days=config.audit_days) < utc_now()
        assert utc_now() - timedelta(seconds=config.session_timeout_s) < utc_now()
