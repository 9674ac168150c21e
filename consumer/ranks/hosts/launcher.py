"""The ranks of this host, of a trainer that several hosts make up: `python -m consumer JOB_ID` of such a job.

    consumers ─ offer ─▶ form, join (broker/scripts/hosts.lua) ─▶ seal ─▶ ranks start on each ─▶ as ranks of one host
                              ▲                                              │
                              └── a rank, a host or a lease has ended: all ranks are killed, and the rest begin again

The leader has bound its socket before its address is told; rank 0 is on its host. Two threads: one keeps the host's
lease and asks whether the leader still answers, the other starts ranks and kills them, also where the first one hears
nothing for a lease: a rank that waits for another host may wait for ever.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import threading
import time
from functools import partial

import psutil
import torch
from blake3 import blake3
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from broker.connection.client import Broker
from broker.connection.deadlines import within
from broker.hosts_side import REFUSALS, HostGroup, HostKind, HostsSide
from broker.job_store import JobStore
from consumer.ranks.hosts.local_ranks import LocalRanks, WaitingRanks
from consumer.ranks.hosts.network import answers, listening_on, own_address
from contracts.errors import Fault, NotFound, Unavailable, kind_and_text
from contracts.jobs import JobState, TrainerExit
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.base.kernels import cpu_kind, gpu_kind
from onbeat.base.process.crash_points import reach
from onbeat.base.process.ending import CALL_S, LAUNCHER_END_S, Ending
from onbeat.base.process.launcher import HOME
from onbeat.base.process.own_packages import PACKAGES

LOOK_S = 0.05
ASK_S = 0.25
"""Between two looks of a host that waits for others."""
SETTLE_S = 3.0
"""A leader with hosts enough waits so long for a further one: an idle consumer looks for jobs every two seconds."""
EXPECTED_S = 20.0
"""The same for one that is known: it was of the last generation, or waited for this one, and starts a launcher now.
Longer where that took long here (`expected_s`): one that came late each time would interrupt the others for nothing."""
WAITS_S = 10.0
"""A host that was too late is taken to wait still for so long."""
WAITING_AFTER_S = 10.0
"""Ranks of the next generation are started once those of this one have had the processor for so long."""

CLOCKS_APART_S = 1.0

log = logging.getLogger(__name__)


def kind_of_host(settings: StackSettings) -> HostKind:
    """Returns the properties of this host that must be alike on all hosts of a trainer."""
    sources = blake3()
    for path in sorted(path for package in PACKAGES for path in (HOME / package).rglob("*.py")):
        sources.update(str(path.relative_to(HOME)).encode() + path.read_bytes())
    is_gpu = settings.device == "cuda"
    return HostKind(
        code=sources.hexdigest(),
        torch=str(torch.__version__),
        device=gpu_kind() if is_gpu else f"cpu, {settings.threads} threads",
        cpu=cpu_kind(),
    )


def clocks_apart(ahead_s: float) -> str:
    """Says that this host's clock is off, by seconds before the server's; "" where it isn't."""
    if abs(ahead_s) < CLOCKS_APART_S:
        return ""
    way = "ahead of" if ahead_s > 0 else "behind"
    off = f"this host's clock is {abs(ahead_s):.1f} s {way} Redis'"
    return f"{off}: leases go by Redis', but timelines and logs are off by as much; set it"


def expected_s(start_s: float, wait_s: float) -> float:
    """How long a leader whose own launcher took start_s waits for a host that it knows of."""
    return max(EXPECTED_S, min(3 * start_s, wait_s))


def address_of(group: HostGroup) -> str:
    """Where its leader listens, for people."""
    return group.address.replace(" ", " port ")


class Gone(Exception):
    """This host's generation has ended, or it can't be a member of one now; the text says why."""


class Membership:
    """This host in one generation: a thread that renews its lease, and asks for the leader."""

    def __init__(self, side: HostsSide, group: HostGroup, *, host: str) -> None:
        self._side = side
        self._lease_s = group.lease_ms / 1000
        self.host = host
        self.group = group
        self._sealed = 0
        self._heard_s = time.monotonic()
        self._why = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host lease", daemon=True)
        self._thread.start()

    @property
    def is_leader(self) -> bool:
        return self.group.members[0].host == self.host

    @property
    def place(self) -> int:
        """Among the hosts that were sealed; 0 leads."""
        return [member.host for member in self.group.members].index(self.host)

    @property
    def num_waiting(self) -> int:
        """Hosts that were too late, and would come still."""
        since_ms = self.group.members[self.place].until_ms - self.group.lease_ms - 1000 * WAITS_S
        return sum(refusal.why == "late" and refusal.at_ms >= since_ms for refusal in self.group.refused)

    def check(self) -> None:
        """Raises Gone where the generation has ended, or nothing was heard of it for a lease."""
        if self._why:
            raise Gone(self._why)
        if (silent_s := time.monotonic() - self._heard_s) > self._lease_s:
            raise Gone(f"this host could not renew its lease for {silent_s:.1f} s")

    def close(self, reason: str) -> None:
        """Leaves, unless the generation has ended; Redis may be away, then the lease runs out."""
        self._over.set()
        self._thread.join(self._lease_s)
        if not self._why:
            with contextlib.suppress(Unavailable, NotFound), within(self._lease_s):
                self._side.leave(self.group.formed, reason)

    def seal(self) -> None:
        """Lets no other host come; the next renewal says what was sealed. Raises Unavailable."""
        self._side.seal(self.group.formed)

    def _run(self) -> None:
        try:
            self._renew()
        except BaseException as error:
            # Without renewals the other hosts take this one for lost: the launcher reads the reason and ends its ranks.
            log.exception("the lease of this host is not renewed any more")
            self._why = f"what renews its lease died: {kind_and_text(error)}"

    def _renew(self) -> None:
        num_missed = 0
        while not self._over.wait(self._lease_s / 3 if self._sealed else min(ASK_S, self._lease_s / 3)):
            try:
                asked_s = time.monotonic()
                with within(self._lease_s):
                    outcome, group = self._side.renew(self.group.formed, self._sealed)
            except Unavailable as error:
                log.warning("the lease of this host: %s", error)
                continue
            except NotFound as error:
                self._why = str(error)
                return
            if outcome == "gone":
                self._why = f"the generation has ended: {group.reason or 'another one stands'}"
                return
            # Since it was asked: the lease runs from some time after that.
            self._heard_s, self.group, self._sealed = asked_s, group, group.sealed
            if self._sealed and not self.is_leader:
                num_missed = 0 if answers(group.address, self._lease_s / 3) else num_missed + 1
                if num_missed == 2:
                    self._why = f"cannot reach {address_of(group)}"
                    with contextlib.suppress(Unavailable):
                        self._side.leave(group.formed, f"{self.host} {self._why}")
                    return


class HostLauncher:
    """Offers this host to one job, generation after generation, until the job is over or other hosts have it."""

    def __init__(self, settings: StackSettings, broker: Broker, spec: JobSpec, job_id: str) -> None:
        """Raises InvalidInput for a network that isn't here."""
        hosts = spec.trainer.over_hosts
        assert hosts is not None
        self._hosts = hosts
        self._own = own_address(settings.network, by_interface=settings.device == "cuda")
        self._spec, self._job_id = spec, job_id
        self._jobs = JobStore(broker)
        self._host = settings.process_id()
        self._side = HostsSide(broker, job_id, host=self._host, ranks=hosts.ranks)
        self._kind = kind_of_host(settings)
        self._broker = broker
        self._waiting = WaitingRanks(job_id, hosts.ranks)
        self._expected_s = expected_s(time.time() - psutil.Process().create_time(), hosts.wait_s)
        self._is_asked_to_end = False
        self._out_of_reach = 0
        """The newest generation whose leader this host could not reach, which is said once."""
        self._num_expected = 0
        """Hosts that are likely to come, by what this one knows of the last generation; 0: it knows nothing."""

    def run(self) -> int:
        """Returns the exit code, of rank 0 where that was here. Raises Unavailable where Redis stays away."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        hurry = partial(self._broker.hurry, CALL_S)
        ending = Ending(LAUNCHER_END_S, exit_code=TrainerExit.STOPPED, on_request=hurry)
        if warning := clocks_apart(time.time() - self._broker.now_s()):
            log.warning("%s", warning)
        with ending.listening(), contextlib.closing(self._waiting):
            # They import while hosts come together.
            self._waiting.fill()
            while (code := self._generation()) is None:
                pass
            return code

    def _on_signal(self, *_: object) -> None:
        self._is_asked_to_end = True

    def _generation(self) -> int | None:
        """Forms a generation and runs it to its end. Returns the exit code; None where another one may follow."""
        with contextlib.ExitStack() as open_sockets:
            membership = self._entered(open_sockets)
            if isinstance(membership, int):
                return membership
            code, reason = TrainerExit.DIED, "its ranks have ended"
            try:
                self._wait_for_seal(membership)
                self._num_expected = len(membership.group.members) - 1
                code, reason = self._run_ranks(membership)
            except Gone as error:
                reason = str(error)
            finally:
                self._num_expected += membership.num_waiting
                membership.close(f"{self._host}: {reason}")
            log.info("the ranks here have ended: %s", reason)
            if self._is_asked_to_end or code == TrainerExit.FAILED:
                return code
            return TrainerExit.DONE if self._is_over() else None

    def _entered(self, open_sockets: contextlib.ExitStack) -> Membership | int:
        """Joins the generation that forms, or begins one; or an exit code. Raises Unavailable."""
        while not self._is_asked_to_end:
            outcome, group = self._side.look()
            if outcome == "forming":
                reaches = answers(group.address, self._spec.timeouts.trainer_lease_s)
                joined, group = self._side.join(self._kind, reaches=reaches)
                if joined == "joined":
                    log.info("this host, %s, offers its ranks to %s", self._host, group.members[0].host)
                    return Membership(self._side, group, host=self._host)
                if joined not in ("unreachable", "none"):
                    log.warning("the leading host refuses the ranks of this host: %s", REFUSALS.get(joined, joined))
                    return TrainerExit.HELD
                if not reaches and group.formed not in (0, self._out_of_reach):
                    self._out_of_reach = group.formed
                    log.warning("this host can't reach the leading host, %s, and waits until it can", address_of(group))
            elif outcome == "late":
                log.info("other hosts have all ranks of this job already; this host waits")
                return TrainerExit.HELD
            elif outcome == "none":
                if self._is_over():
                    return TrainerExit.DONE
                if (formed := self._formed(open_sockets)) is not None:
                    return formed
            time.sleep(ASK_S)
        return TrainerExit.STOPPED

    def _formed(self, open_sockets: contextlib.ExitStack) -> Membership | int | None:
        """Begins a generation, and leads it; None where another host was first."""
        listening = open_sockets.enter_context(listening_on(self._own))
        port = listening.getsockname()[1]
        about = HostGroup(
            **{"number": 0, "formed": 0, "sealed": 0, "members": (), "refused": (), "reason": ""},
            least=self._hosts.least,
            most=self._hosts.most,
            lease_ms=int(self._spec.timeouts.trainer_lease_s * 1000),
            kind=self._kind,
            address=f"{self._own.address} {port}",
            key=secrets.token_hex(32),
        )
        is_formed, group = self._side.form(about)
        if not is_formed:
            return None
        limit = self._spec.timeouts.max_trainer_starts
        if self._jobs.count_trainer_start(self._job_id) > limit:
            self._side.leave(group.formed, "too many starts")
            reason = f"{limit} groups of hosts ended without committing a new iteration (timeouts.max_trainer_starts)"
            self._jobs.fail(self._job_id, f"{group.reason}; so {reason}", fault=Fault.STACK)
            return TrainerExit.FAILED
        store = TCPStore(
            *(self._own.address, port),
            is_master=True,
            multi_tenant=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(listening.fileno()),
        )
        open_sockets.callback(lambda: store)  # it serves until then
        log.info("this host, %s, leads the ranks of %s at %s", self._host, self._job_id, about.address)
        reach("hosts.forming")
        return Membership(self._side, group, host=self._host)

    def _wait_for_seal(self, membership: Membership) -> None:
        """Returns once the hosts are known; the leader seals them. Raises Gone, Unavailable."""
        began_s = changed_s = time.monotonic()
        num_there = 0
        while not membership.group.sealed:
            membership.check()
            if self._is_asked_to_end:
                raise Gone("it was asked to end")
            if membership.is_leader:
                now_s, group = time.monotonic(), membership.group
                if len(group.members) != num_there:
                    num_there, changed_s = len(group.members), now_s
                settle_s = SETTLE_S if not self._num_expected else self._expected_s * (num_there < self._num_expected)
                is_settled = num_there >= self._hosts.least and now_s - changed_s >= settle_s
                if num_there == self._hosts.most or is_settled:
                    membership.seal()
                    time.sleep(ASK_S)
                elif now_s - began_s > self._hosts.wait_s:
                    raise Gone(self._too_few(group))
            time.sleep(LOOK_S)

    def _too_few(self, group: HostGroup) -> str:
        present = f"{len(group.members)} of {self._hosts.least} hosts within {self._hosts.wait_s:g} s"
        return f"{present} (trainer.hosts.wait_s); {group.in_words}"

    def _run_ranks(self, membership: Membership) -> tuple[int, str]:
        """Runs this host's ranks to their end. Returns (exit code, why they ended). Raises Gone."""
        log.info("hosts of the ranks: %d, ranks here: %d", len(membership.group.members), self._hosts.ranks)
        reach("hosts.sealed")
        ranks = LocalRanks(self._waiting, membership.group, membership.place, self._own)
        began_s = time.monotonic()
        try:
            while (code := ranks.ended()) is None:
                membership.check()
                if self._is_asked_to_end:
                    return ranks.stop(), "it was asked to end"
                if time.monotonic() - began_s > WAITING_AFTER_S:
                    self._waiting.fill()
                if membership.is_leader and self._may_grow(membership, began_s):
                    self._num_expected += 1
                    ranks.stop()
                    return TrainerExit.DIED, "a host waits: the ranks begin again with it"
                time.sleep(LOOK_S)
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            return (code if code >= 0 else TrainerExit.DIED), f"a rank here {how}"
        finally:
            ranks.kill()

    def _may_grow(self, membership: Membership, began_s: float) -> bool:
        """Returns True where this generation has run long enough, may have more hosts, and a host waits."""
        regroup_s = self._hosts.regroup_s
        if not regroup_s or time.monotonic() - began_s < regroup_s:
            return False
        if len(membership.group.members) == self._hosts.most:
            return False
        return membership.num_waiting > 0

    def _is_over(self) -> bool:
        """Returns True where the job needs no ranks any more."""
        try:
            state = self._jobs.state(self._job_id)
        except NotFound:
            return True
        return state.is_final or state is JobState.CANCELLING
