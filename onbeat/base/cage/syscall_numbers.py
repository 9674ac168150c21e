"""The numbers of Linux's system calls on each machine, as far as a filter of ours names them, by what they lead to."""

from __future__ import annotations

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machine → the kernel's name for it."""
ABSENT = 0xFFFFFFFF
"""The number of no call: where a machine doesn't have one."""
FIRST_UNREAD = 470
"""Calls from here on are newer than this table (Linux 6.18): what they may be asked to do is not known here."""
X32_NUMBERS = 0x40000000
"""x86_64 kernels may take every call by a second number, from here on."""

Calls = dict[str, tuple[int, ...]]
"""Call → its number on each machine, in the order of ARCHITECTURES."""


def _calls(table: str) -> Calls:
    """Parses a table of system calls.

    Args:
        table: Calls with commas between them, each with its number on each machine; "-" where a machine lacks it.
    """
    rows = [row.split() for row in table.split(",")]
    return {name: tuple(ABSENT if number == "-" else int(number) for number in numbers) for name, *numbers in rows}


OTHER_PROCESSES = _calls(
    """
    ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440,
    process_mrelease 448 448, pidfd_getfd 438 438, kcmp 312 272, move_pages 279 239, migrate_pages 256 238,
    get_robust_list 274 100, perf_event_open 298 241
    """
)
KERNEL = _calls(
    """
    add_key 248 217, request_key 249 218, keyctl 250 219, unshare 272 97, setns 308 268, bpf 321 280,
    userfaultfd 323 282, io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427
    """
)
"""Keys, namespaces, and ways around a filter."""
SHARED_MEMORY = _calls(
    """
    shmget 29 194, shmat 30 196, shmctl 31 195, semget 64 190, semop 65 193, semctl 66 191, semtimedop 220 192,
    msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187, mq_open 240 180, mq_unlink 241 181,
    memfd_create 319 279, memfd_secret 447 447
    """
)
"""Memory that counts for no process, and that of others: a System V segment is found by its number."""
MOUNTS = _calls(
    """
    mount 165 40, umount2 166 39, move_mount 429 429, open_tree 428 428, open_tree_attr 467 467, fsopen 430 430,
    fsconfig 431 431, fsmount 432 432, fspick 433 433, mount_setattr 442 442, pivot_root 155 41, chroot 161 51,
    swapon 167 224, swapoff 168 225, acct 163 89, quotactl 179 60, quotactl_fd 443 443, uselib 134 -,
    open_by_handle_at 304 265
    """
)
ATTRIBUTES = _calls(
    """
    chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -,
    fchownat 260 54, utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88, setxattr 188 5, lsetxattr 189 6,
    fsetxattr 190 7, setxattrat 463 463, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16,
    removexattrat 466 466, file_setattr 469 469, truncate 76 45
    """
)
"""Modes, owners, times and extended attributes of a file, which Landlock leaves to its owner, and its length, which
older kernels' Landlock does."""
COMPUTES = _calls(
    """
    brk 12 214, mmap 9 222, munmap 11 215, mremap 25 216, mprotect 10 226, madvise 28 233, read 0 63, write 1 64,
    readv 19 65, writev 20 66, lseek 8 62, fstat 5 80, sched_yield 24 124, exit 60 93, exit_group 231 94
    """
)
"""Memory, the three open files that a program has, and its end. It handles no signal: what it would say when its time
is over would depend on the machine's speed."""
SINGLE = _calls(
    """
    seccomp 317 277, clone 56 220, clone3 435 435, socket 41 198, socketpair 53 199, prctl 157 167, fcntl 72 25,
    ioctl 16 29, prlimit64 302 261, sched_setaffinity 203 122, sched_setparam 142 118, sched_setscheduler 144 119,
    sched_setattr 314 274, setpriority 141 140, ioprio_set 251 30, open 2 -, openat 257 56, openat2 437 437,
    futex 202 98
    """
)
"""System calls that rules name by themselves, and the call by which a filter is set."""
NUMBERS = SINGLE | OTHER_PROCESSES | KERNEL | SHARED_MEMORY | MOUNTS | ATTRIBUTES | COMPUTES
