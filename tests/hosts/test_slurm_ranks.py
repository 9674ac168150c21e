"""deploy/slurm/onbeat.sbatch on a Slurm of two nodes whose consumers have the ranks of one trainer."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.short_job import long_variant
from tests.e2e.test_slurm import SPEC, goes_on

OVER_HOSTS = """\
weights = { transport = "redis" }
[trainer]
checkpoint_every_iterations = 2
hosts = { least = 2, most = 2 }
"""


@long_variant
def test_a_trainer_of_two_nodes_that_is_requeued_goes_on_to_its_end(tmp_path: Path) -> None:
    head, trainer, _ = SPEC.partition("trainer = ")
    assert trainer
    nodes = ("127.0.0.1", "127.0.0.2")
    goes_on(tmp_path, head + OVER_HOSTS, *nodes, CONSUMERS="2", ONBEAT_NETWORK="127.0.0.0/8")
    assert "hosts of the ranks: 2" in (tmp_path / "shared" / "logs" / "consumers.log").read_text()
