"""The usage meter: nothing that was counted is lost while the database does not answer, and old hours go."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from opentinker_core.errors import OpenTinkerError
from opentinker_core.policies.tables import utc_now
from opentinker_core.service.records import Records
from opentinker_core.service.types import Usage, UsageKind
from opentinker_core.service.usage import UsageMeter


def test_what_cannot_be_written_is_written_later() -> None:
    written: list[dict[Usage, int]] = []
    answers = [False, True, True]

    def keep(amounts: Mapping[Usage, int]) -> None:
        if not answers.pop(0):
            raise OpenTinkerError("the database does not answer")
        written.append(dict(amounts))

    meter = UsageMeter(keep)
    meter.keep()
    assert len(answers) == 3, "there was nothing to write"
    meter.add("ada", UsageKind.TRAINING, 5, base_model="tiny", session_id="s")
    meter.keep()
    meter.add("ada", UsageKind.TRAINING, 7, base_model="tiny", session_id="s")
    meter.add("ada", UsageKind.SAMPLED, 0, base_model="tiny")
    meter.keep()
    ((usage, amount),) = [one for amounts in written for one in amounts.items()]
    assert (usage.tenant, usage.kind, usage.session_id, amount) == ("ada", UsageKind.TRAINING, "s", 12)
    assert timedelta(0) <= utc_now() - usage.hour < timedelta(hours=2)
    assert (usage.hour.minute, usage.hour.second, usage.hour.microsecond) == (0, 0, 0)


def test_amounts_add_up_by_tenant_and_old_hours_are_forgotten(tmp_path: Path) -> None:
    records = Records(f"sqlite:///{tmp_path}/catalog.db")
    now = utc_now().replace(minute=0, second=0, microsecond=0)
    old = now - timedelta(days=2)
    mine = Usage("ada", now, UsageKind.PREFILL, "tiny", "")
    more = Usage("ada", now, UsageKind.SAMPLED, "tiny", "s")
    before = Usage("ada", old, UsageKind.SAMPLED, "tiny", "s")
    records.add_usage({mine: 1, before: 100, Usage("bob", now, UsageKind.PREFILL, "tiny", ""): 1000})
    records.add_usage({mine: 2, more: 9})
    end = now + timedelta(hours=1)
    assert records.usage("ada", old, end) == [(before, 100), (more, 9), (mine, 3)]
    assert records.usage("ada", old, now) == [(before, 100)]
    records.forget_usage(now)
    assert records.usage("ada", old, end) == [(more, 9), (mine, 3)]
    records.close()
