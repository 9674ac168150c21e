"""The processes of one host's ranks: started before there is a group, told which ranks they are, killed with it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

from broker.hosts_side import HostGroup
from consumer.ranks.hosts.network import ADDRESS, OwnAddress
from consumer.ranks.processes.orders import SEAT_FD, Seat
from contracts.encoding.wire import encode
from onbeat.base.process.ending import RANKS_END_S
from onbeat.base.process.launcher import LAUNCHER_PID, end_with_launcher


class WaitingRanks:
    """Processes that have imported torch and the model's library, which takes seconds, and wait for a seat.

    The main thread starts them: they end with it.
    """

    def __init__(self, job_id: str, count: int) -> None:
        self._job_id = job_id
        self._count = count
        self._waiting: list[tuple[subprocess.Popen[bytes], int]] = []
        """Each with the descriptor by which it is told its seat."""

    def fill(self) -> None:
        """Starts as many as are missing."""
        while len(self._waiting) < self._count:
            self._waiting.append(self._started())

    def seated(self, seat: Seat) -> subprocess.Popen[bytes]:
        """Gives a seat to a waiting process, or to a new one, and returns the process.

        A process that was killed meanwhile ends its group, as any rank does.
        """
        process, writer = self._waiting.pop(0) if self._waiting else self._started()
        with open(writer, "wb") as pipe, contextlib.suppress(BrokenPipeError):
            pipe.write(encode(seat))
        return process

    def close(self) -> None:
        for process, writer in self._waiting:
            process.kill()
            process.wait()
            os.close(writer)
        self._waiting.clear()

    def _started(self) -> tuple[subprocess.Popen[bytes], int]:
        reader, writer = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "consumer.host_rank", self._job_id],
            env=os.environ | {SEAT_FD: str(reader), LAUNCHER_PID: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            pass_fds=(reader,),
            preexec_fn=end_with_launcher(),
        )
        os.close(reader)
        return process, writer


class LocalRanks:
    """The processes of this host's ranks."""

    def __init__(self, waiting: WaitingRanks, group: HostGroup, place: int, own: OwnAddress) -> None:
        """place: of this host among those of the group; 0 leads."""
        # Ranks are numbered host by host, in the order in which the hosts joined: the leader has rank 0.
        first = sum(member.ranks for member in group.members[:place])
        host, _, port = group.address.rpartition(" ")
        environment = {
            "WORLD_SIZE": str(sum(member.ranks for member in group.members)),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            # As torch's own launcher says it: the store is there, and no rank serves it.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            ADDRESS: own.address,
            # NCCL takes a name as the beginning of others', but for this sign.
            "NCCL_SOCKET_IFNAME": f"={own.interface}",
            "NCCL_SOCKET_FAMILY": "AF_INET6" if own.is_v6 else "AF_INET",
        }
        self.is_first = place == 0
        self._processes: list[subprocess.Popen[bytes]] = []
        for local_rank in range(group.members[place].ranks):
            own_rank = {"RANK": str(first + local_rank), "LOCAL_RANK": str(local_rank)}
            seat = Seat(sealed=group.sealed, key=group.key, environment=environment | own_rank)
            self._processes.append(waiting.seated(seat))

    def ended(self) -> int | None:
        """Returns the exit code of a rank that has ended, the first rank's before the others'; None while all run."""
        codes = [process.poll() for process in self._processes]
        return next((code for code in codes if code is not None), None)

    def stop(self) -> int:
        """Has rank 0 save and end, where it is here, and kills the others; returns rank 0's code, or that of a kill."""
        if self.is_first:
            self._processes[0].terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._processes[0].wait(RANKS_END_S)
        self.kill()
        return self._processes[0].returncode

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
