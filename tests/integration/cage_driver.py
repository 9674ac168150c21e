"""Runs the hostile plug-in in a reward service's pool, and prints what came of it as JSON. Started by its test.

`python -m tests.integration.cage_driver FOLDER [UID [container]]`: as another user, where UID is given and this one is
root; as in a container that allows no namespaces, where it says so.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from contracts.rewards import (
    FormatReward,
    PluginReward,
    ReasoningGymReward,
    RewardComponent,
    RewardItem,
    RewardRequest,
    Scored,
    Unscorable,
)
from onbeat.base.cage import kernel
from onbeat.base.cage.syscall_filter import ALLOW, REFUSE, Filter, compiled, lock_syscalls
from onbeat.base.cage.syscall_numbers import ARCHITECTURES, NUMBERS
from onbeat.base.cage.syscall_rules import PROGRAM as PROGRAM_RULES
from reward_service.scoring.pool import ScorerPool
from tests.integration.kernel_calls import calls, numbers

HOSTILE = (PluginReward(entry_point="hostile"),)
MEMORY_MB = 1024
CALLS = ("shmget", "msgget", "semget", "mq_open", "memfd_create", "mount", "chroot")
MADE_UP = (
    '{"reward": 1.0, "breakdown": {}}',
    '{"reward": 1.0, "breakdown": {"another": 1.0}}',
    '{"reward": 1.0, "breakdown": {"hostile": float("nan")}}',
    '{"reward": 1e308, "breakdown": {"hostile": 1.0}}',
    '{"reward": 1.0, "breakdown": {"hostile": 1.0}, "unscorable": {"hostile": "timeout"}}',
)
READABLE = (json.__file__, "/proc/self/status", "/etc/passwd")
"""What code needs: libraries, and what the kernel and the system tell."""
CLOSED = ("/etc/hostname", "/etc/profile", str(Path(__file__).resolve().parents[2] / ".gitignore"))
"""What every user of a host may read and no code needs, of a folder on the import path too."""
PROGRAM = """
import collections
ctypes, errno = (collections._sys.modules[name] for name in ("ctypes", "errno"))
libc, answers = ctypes.CDLL(None, use_errno=True), collections.Counter()
for number in range(480):
    if number not in ALLOWED:
        found = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(0)] * 6)
        answers["done" if found != -1 else errno.errorcode[ctypes.get_errno()]] += 1
print(*sorted(answers))
"""
"""Makes each call, with no arguments, that a program isn't allowed."""
PROBES = (335, 336) if os.uname().machine == "x86_64" else ()
"""Calls of the kernel's own, of code that is traced: no filter sees them, and they end whatever else makes them."""
PART = 40
PLUGIN = Path(__file__).parent / "hostile_plugin"


def become(uid: int) -> None:
    """Makes this process another user, which can read the code wherever it is."""
    assert kernel.unshare(kernel.CLONE_NEWNS)
    assert kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.show_to_all([*sys.path, sys.prefix, sys.base_prefix])
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    if "container" in sys.argv:
        assert kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        assert lock_syscalls(compiled(Filter(rules={"unshare": REFUSE}, others=ALLOW)))
    arguments = [sys.executable, "-m", "tests.integration.cage_driver", sys.argv[1]]
    os.execve(sys.executable, arguments, {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def allowed() -> list[int]:
    """The numbers of the calls that a program may make."""
    column = list(ARCHITECTURES).index(os.uname().machine)
    return [*PROBES, *(NUMBERS[name][column] for name in PROGRAM_RULES.rules)]


class Outside:
    """A process of the service's user, and files of its that everyone may write: what a walk must leave as they are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "outside"
        self.folder.mkdir(mode=0o777)
        self.file = self.folder / "kept"
        self.file.write_text("kept")
        (self.folder / "empty").mkdir()
        for path in (self.folder, self.file, self.folder / "empty"):
            path.chmod(0o777 if path.is_dir() else 0o666)
        with suppress(OSError):
            os.setxattr(self.file, "user.kept", b"kept")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(self.folder / "socket"))
        self.socket.setblocking(False)
        (self.folder / "socket").chmod(0o777)
        self.process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)

    def asked(self) -> list[str]:
        """The walk in parts, as long as what is told of a completion has room for."""
        open_number = next(call.number for call in calls() if call.name == "pidfd_open")
        facts = {"pid": self.process.pid, "folder": str(self.folder), "pidfd_open": open_number}
        made = [(call.number, call.arguments) for call in calls()]
        return [json.dumps({**facts, "calls": made[at : at + PART]}) for at in range(0, len(made), PART)]

    def state(self) -> list[str]:
        pid = self.process.pid
        priority = numbers(os.uname().machine)["ioprio_get"]
        told: list[object] = [Path(f"/proc/{pid}/limits").read_text(), os.sched_getaffinity(pid)]
        told += [os.sched_getscheduler(pid), os.getpriority(os.PRIO_PROCESS, pid), os.getpgid(pid), os.getsid(pid)]
        told += [kernel.libc().syscall(priority, 1, pid), self.process.poll(), os.getpriority(os.PRIO_PROCESS, 0)]
        for path in sorted([self.folder, *self.folder.iterdir()]):
            facts = path.stat()
            told.append((path.name, facts.st_mode, facts.st_uid, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns))
            told.append(sorted(os.listxattr(path)))
        try:
            told.append(self.socket.recv(1))
        except BlockingIOError:
            told.append("nothing was sent")
        return [str(one) for one in [*told, self.file.read_text()]]


class Tries:
    def __init__(self, folder: Path) -> None:
        hidden = folder / "runs"
        hidden.mkdir()
        hidden.chmod(0o755)
        self.secret_file = hidden / "stack.json"
        self.secret_file.write_text("a key")
        self.secret_file.chmod(0o644)
        self.home = folder / "home"
        self.private_key = self.home / ".ssh" / "id_ed25519"
        self.private_key.parent.mkdir(parents=True)
        self.added_file = self.home / "data" / "words.txt"
        self.added_file.parent.mkdir()
        for path in (self.private_key, self.added_file):
            path.write_text(f"what stands in {path.name}")
            path.chmod(0o644)
        for path in (self.home, self.private_key.parent, self.added_file.parent):
            path.chmod(0o755)
        os.environ["HOME"] = str(self.home)
        # The walk opens a file of the folder `outside`, to find out what a handle of it lets a caged process do.
        readable = (str(self.added_file.parent), str(folder / "outside"))
        self.pool = ScorerPool(num_threads=1, memory_mb=MEMORY_MB, hidden=(str(hidden),), readable=readable)

    def ask(
        self,
        completion: str,
        reference: str = "",
        *,
        job_id: str = "job-1",
        components: tuple[RewardComponent, ...] = HOSTILE,
        task_entry: str = "",
    ) -> str:
        item = RewardItem(prompt="", completion=completion, reference=reference, task_entry=task_entry)
        request = RewardRequest(components=components, items=(item,), item_timeout_s=60.0, job_id=job_id)
        (result,) = self.pool.submit(request).result()
        if isinstance(result, Scored):
            return str(result.reward)
        assert isinstance(result, Unscorable)
        if result.reason != "raised":
            return result.reason
        # The line of the plug-in that raised it follows.
        return result.detail.removeprefix("Told: ").rpartition(", at hostile_rewards.py:")[0]


def main(folder: Path) -> dict[str, object]:
    outside = Outside(folder)
    tries = Tries(folder)
    ask = tries.ask
    mark = f"left-by-a-scorer-{os.getpid()}"
    told: dict[str, object] = {"uid": os.getuid(), "mark": mark}
    told["before"] = outside.state()
    told["walk"] = [told for asked in outside.asked() for told in ask("walk", asked).split()]
    told["after"] = outside.state()
    told["itself"] = ask("itself")
    told["program"] = ask("program", PROGRAM.replace("ALLOWED", str(allowed())), job_id="job-4")
    outside.process.communicate()
    with socket.create_server(("127.0.0.1", 0)) as server:
        told["environments"] = ask("environments", os.environ["ONBEAT_REDIS_URL"])
        told["read"] = ask("read", str(tries.secret_file))
        told["read a key"] = ask("read", str(tries.private_key))
        told["list a home"] = ask("list", str(tries.private_key.parent))
        told["read what the operator added"] = ask("read", str(tries.added_file))
        told["read the system's"] = [ask("read", path) for path in READABLE]
        told["read the host's"] = [ask("read", path) for path in CLOSED]
        told["connect"] = ask("connect", str(server.getsockname()[1]))
        told["fork"] = ask("fork")
        told["after fork"] = ask("behave")
        told["fill_memory"] = ask("fill_memory")
        told["fill_disk"] = ask("fill_disk")
        told["next folder"] = ask("look", job_id="job-2")
        told["become_root"] = ask("become_root")
        told["kill"] = ask("kill", str(os.getpid()))
        told["leave_a_child"] = ask("leave_a_child", mark, job_id="job-3")
        told["calls"] = {name: ask("call", name, job_id="job-2") for name in CALLS}
        told["clone"] = ask("clone", job_id="job-2")
        told["made up"] = [ask("answer", made_up, job_id="job-2") for made_up in MADE_UP]
        told["babble"] = ask("babble")
        told["lie"] = ask("lie")
        told["same job"] = ask("behave")
        entry = '{"task": "chain_sum", "entry": {"question": "1 + 2 =", "answer": "3", "metadata": {}}}'
        told["reasoning gym"] = ask("<answer>3</answer>", "3", components=(ReasoningGymReward(),), task_entry=entry)
        told["another job"] = ask("behave", job_id="job-2")
        told["its format"] = ask("no", components=(FormatReward(pattern="yes"),))
        told["missing"] = tries.pool.cages.missing
        tries.pool.close()
    return told


if __name__ == "__main__":
    if len(sys.argv) > 2:
        become(int(sys.argv[2]))
    sys.path.insert(0, str(PLUGIN))
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]))))
