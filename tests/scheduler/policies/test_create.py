import pytest

from molink.errors import UsageError
from molink.scheduler.policies.create import SCHEDULING_POLICIES, create_scheduling_policy
from molink.scheduler.policies.fcfs import Fcfs


def test_policies_are_created_by_name() -> None:
    assert isinstance(create_scheduling_policy("fcfs"), Fcfs)
    for name in SCHEDULING_POLICIES:
        assert create_scheduling_policy(name) is not create_scheduling_policy(name)


def test_an_unknown_name_lists_the_choices() -> None:
    with pytest.raises(UsageError, match="no scheduling policy 'lottery': choose one of fcfs"):
        create_scheduling_policy("lottery")
