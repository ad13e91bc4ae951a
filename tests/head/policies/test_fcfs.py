from molink.head.job import Job
from molink.head.policies.base import SchedulingPolicy
from molink.head.policies.fcfs import Fcfs
from molink.head.request import HeadRequest
from molink.wire.messages.data import Sampling


def test_order() -> None:
    policy: SchedulingPolicy = Fcfs()
    jobs = [Job.of(HeadRequest("d", str(i), (1,), 1, 1, Sampling())) for i in range(4)]
    for job in jobs[:3]:
        policy.push(job, 0.0)
    policy.push_back(jobs[3], 0.0)
    policy.discard(jobs[1])
    policy.discard(jobs[1])
    assert list(policy.waiting()) == [jobs[3], jobs[0], jobs[2]]
    assert len(policy) == 3
    assert policy.rank(jobs, 0.0) == jobs
