"""Measures how long a run stands still after a death: of a process of its stack, or of Redis' primary under Sentinel.

    python -m benchmarks healing processes [--repeats 3] [--leases 10 2]
    python -m benchmarks healing failover [--repeats 3] [--faults killed,hung]

`processes` kills by SIGKILL what a stack of the demo consists of:

generator   killed while it holds a batch, next to an idle one, until that batch is published: the rest of its lease and
            one generation; with hedging, the idle one may have taken a copy before that
trainer     killed inside a job, until its successor commits: the rest of its lease, a look of the consumer, the start
            of a process that loads the model, and one iteration
worker      the consumer that started the trainer, which ends with it: until the successor's commit
redis, reward service
            killed inside a job, until the second commit after it (what is scored already may make the first): the stack
            starts it again, its clients ask again; one iteration
gateway     killed, until it answers again; the run doesn't notice

`failover` has a primary, two replicas and three sentinels as `deploy/sentinel/` has them, `ONBEAT_REDIS_REPLICAS=1`,
and two generators of a lagging job. The primary is killed, hangs or is cut off. Seconds are from the fault to the next
commit, less the median time between commits before it. Where the trainer is cut off, too, another takes the job: its
lease (2 s) and its start count. Cutting off needs root and `ip netns`.
"""

from __future__ import annotations

import argparse

from benchmarks import _process_healing, _redis_failover
from benchmarks._results import shown_path, write_result


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks healing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="what", required=True)
    processes = commands.add_parser("processes")
    processes.add_argument("--leases", type=float, nargs="+", default=[10.0, 2.0], help="seconds; the default is 10")
    failover = commands.add_parser("failover")
    faults = _redis_failover.FAULTS
    failover.add_argument("--faults", default=",".join(faults), help="some of: " + ", ".join(faults))
    for command in (processes, failover):
        command.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.what == "processes":
        path = write_result("healing", _process_healing.run(arguments.leases, repeats=arguments.repeats))
    else:
        path = write_result("failover", _redis_failover.run(arguments.faults.split(","), repeats=arguments.repeats))
    print(f"written to {shown_path(path)}")


if __name__ == "__main__":
    main()
