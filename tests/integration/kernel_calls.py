"""The kernel's table of system calls, up to Linux 6.18: which of them take a process, a path or a file, and with what.

A walk makes each of those calls in a cage, with a process and files outside of it that its user might change.
"""

from __future__ import annotations

import platform
from typing import NamedTuple

MACHINES = ("x86_64", "aarch64")
TABLE = """
ptrace                101     117 pid        refused    16 PID
process_vm_readv      310     270 pid        refused    PID BUF 1 BUF 1
process_vm_writev     311     271 pid        refused    PID BUF 1 BUF 1
process_madvise       440     440 pid        refused    PIDFD BUF 1 20
process_mrelease      448     448 pid        refused    PIDFD
pidfd_getfd           438     438 pid        refused    PIDFD 0
kcmp                  312     272 pid        refused    PID PID 2
move_pages            279     239 pid        refused    PID 0 BUF 0 BUF
migrate_pages         256     238 pid        refused    PID 8 BUF BUF
get_robust_list       274     100 pid        refused    PID BUF BUF
perf_event_open       298     241 pid        refused    BUF PID -1 -1
setns                 308     268 pid        refused    PIDFD 0x20000000
prlimit64             302     261 pid        refused    PID 7 LIMIT 0
sched_setaffinity     203     122 pid        refused    PID 8 ONE
sched_setparam        142     118 pid        refused    PID BUF
sched_setscheduler    144     119 pid        refused    PID 5 BUF
sched_setattr         314     274 pid        refused    PID SCHED 0
setpriority           141     140 pid        refused    0 PID 19
setpriority           141     140 pid        refused    2 0 19
ioprio_set            251      30 pid        refused    1 PID 0x6000
ioprio_set            251      30 pid        refused    3 0 0x6000
fcntl                  72      25 pid        refused    SOCKET 8 PID
fcntl                  72      25 pid        refused    SOCKET 15 OWNER
fcntl                  72      25 pid        refused    SOCKET 10 9
ioctl                  16      29 pid        refused    SOCKET 0x8901 PIDBUF
ioctl                  16      29 pid        refused    SOCKET 0x8902 PIDBUF
prctl                 157     167 pid        refused    62 1 PID 0 0
kill                   62     129 pid        kept       PID 9
tkill                 200     130 pid        kept       PID 9
tgkill                234     131 pid        kept       PID PID 9
rt_sigqueueinfo       129     138 pid        kept       PID 9 SIGNAL
rt_tgsigqueueinfo     297     240 pid        kept       PID PID 9 SIGNAL
pidfd_open            434     434 pid        kept       PID
pidfd_send_signal     424     424 pid        kept       PIDFD 9
setpgid               109     154 pid        kept       PID 0
getpgid               121     155 pid        kept       PID
getsid                124     156 pid        kept       PID
sched_getaffinity     204     123 pid        kept       PID 8 BUF
sched_getparam        143     121 pid        kept       PID BUF
sched_getscheduler    145     120 pid        kept       PID
sched_getattr         315     275 pid        kept       PID BUF 48 0
sched_rr_get_interval    148     127 pid        kept       PID BUF
getpriority           140     141 pid        kept       0 PID
ioprio_get            252      31 pid        kept       1 PID
capget                125      90 pid        kept       CAPS BUF
capset                126      91 pid        kept       CAPS BUF
wait4                  61     260 pid        kept       PID 0 1 0
waitid                247      95 pid        kept       1 PID BUF 5 0
clock_settime         227     112 pid        kept       CLOCK BUF
clock_gettime         228     113 pid        kept       CLOCK BUF
clock_getres          229     114 pid        kept       CLOCK BUF
clock_nanosleep       230     115 pid        kept       CLOCK 0 ZERO 0
clock_adjtime         305     266 pid        kept       CLOCK BUF
timer_create          222     107 pid        kept       CLOCK 0 BUF
mount                 165      40 path       refused    FILE DIR 0 0x1000 0
umount2               166      39 path       refused    DIR 2
move_mount            429     429 path       refused    AT DIR AT DIR 0
open_tree             428     428 path       refused    AT DIR 1
open_tree_attr        467     467 path       refused    AT DIR 1 BUF 32
fsopen                430     430 path       refused    TMPFS 0
fsconfig              431     431 path       refused    FD 0 NAME NAME 0
fspick                433     433 path       refused    AT DIR 0
mount_setattr         442     442 path       refused    AT DIR 0 BUF 32
pivot_root            155      41 path       refused    DIR DIR
chroot                161      51 path       refused    DIR
swapon                167     224 path       refused    FILE 0
swapoff               168     225 path       refused    FILE
acct                  163      89 path       refused    FILE
quotactl              179      60 path       refused    0x800001 FILE 0 BUF
uselib                134       - path       refused    FILE
open_by_handle_at     304     265 path       refused    AT BUF 0
mq_open               240     180 path       refused    NAME 0x42 0600 0
mq_unlink             241     181 path       refused    NAME
memfd_create          319     279 path       refused    NAME 0
chmod                  90       - path       attributes FILE 0777
fchmodat              268      53 path       attributes AT FILE 0777
fchmodat2             452     452 path       attributes AT FILE 0777 0
chown                  92       - path       attributes FILE OWN OWN
lchown                 94       - path       attributes FILE OWN OWN
fchownat              260      54 path       attributes AT FILE OWN OWN 0
utime                 132       - path       attributes FILE ZERO
utimes                235       - path       attributes FILE ZERO
futimesat             261       - path       attributes AT FILE ZERO
utimensat             280      88 path       attributes AT FILE ZERO 0
setxattr              188       5 path       attributes FILE NAME BUF 1 0
lsetxattr             189       6 path       attributes FILE NAME BUF 1 0
setxattrat            463     463 path       attributes AT FILE 0 NAME XATTR 16
removexattr           197      14 path       attributes FILE KEPT
lremovexattr          198      15 path       attributes FILE KEPT
removexattrat         466     466 path       attributes AT FILE 0 KEPT
file_setattr          469     469 path       attributes AT FILE FLAGS 24 0
truncate               76      45 path       attributes FILE 0
fchmod                 91      52 handle     attributes FD 0777
fchown                 93      55 handle     attributes FD OWN OWN
fsetxattr             190       7 handle     attributes FD NAME BUF 1 0
fremovexattr          199      16 handle     attributes FD KEPT
ioctl                  16      29 handle     refused    FD 0x40086602 ONE
ioctl                  16      29 handle     refused    FD 0x401c5820 FLAGS
ioctl                  16      29 handle     refused    FD 0x40087602 ONE
fcntl                  72      25 handle     refused    FD 1024 0
fcntl                  72      25 handle     refused    FD 1026 ONE
fcntl                  72      25 handle     refused    FD 1036 ONE
open                    2       - path       kept       FILE 0x201
open                    2       - path       kept       NEW 0x42 0666
creat                  85       - path       kept       FILE 0666
openat                257      56 path       kept       AT FILE 0x201
openat                257      56 path       kept       AT NEW 0x42 0666
openat2               437     437 path       kept       AT FILE HOW 24
rename                 82       - path       kept       FILE NEW
renameat              264      38 path       kept       AT FILE AT NEW
renameat2             316     276 path       kept       AT FILE AT NEW 0
mkdir                  83       - path       kept       NEW 0777
mkdirat               258      34 path       kept       AT NEW 0777
rmdir                  84       - path       kept       DIR
unlink                 87       - path       kept       FILE
unlinkat              263      35 path       kept       AT FILE 0
link                   86       - path       kept       FILE NEW
linkat                265      37 path       kept       AT FILE AT NEW 0
symlink                88       - path       kept       FILE NEW
symlinkat             266      36 path       kept       FILE AT NEW
mknod                 133       - path       kept       NEW 0100666 0
mknodat               259      33 path       kept       AT NEW 0010666 0
bind                   49     200 path       kept       SOCKET UNBOUND 110
sendto                 44     206 path       kept       SOCKET BUF 1 0 ADDRESS 110
sendmsg                46     211 path       kept       SOCKET MESSAGE 0
sendmmsg              307     269 path       kept       SOCKET MESSAGE 1 0
connect                42     203 path       kept       SOCKET ADDRESS 110
execve                 59     221 path       kept       FILE 0 0
execveat              322     281 path       kept       AT FILE 0 0 0
stat                    4       - path       kept       FILE BUF
lstat                   6       - path       kept       FILE BUF
newfstatat            262      79 path       kept       AT FILE BUF 0
statx                 332     291 path       kept       AT FILE 0 0x7ff BUF
statfs                137      43 path       kept       FILE BUF
access                 21       - path       kept       FILE 2
faccessat             269      48 path       kept       AT FILE 2
faccessat2            439     439 path       kept       AT FILE 2 0
readlink               89       - path       kept       FILE BUF 64
readlinkat            267      78 path       kept       AT FILE BUF 64
getxattr              191       8 path       kept       FILE KEPT BUF 64
lgetxattr             192       9 path       kept       FILE KEPT BUF 64
listxattr             194      11 path       kept       FILE BUF 64
llistxattr            195      12 path       kept       FILE BUF 64
getxattrat            464     464 path       kept       AT FILE 0 KEPT XATTR 16
listxattrat           465     465 path       kept       AT FILE 0 BUF 64
file_getattr          468     468 path       kept       AT FILE BUF 24 0
chdir                  80      49 path       kept       DIR
inotify_add_watch     254      27 path       kept       FD FILE 2
fanotify_mark         301     263 path       kept       FD 1 2 AT FILE
name_to_handle_at     303     264 path       kept       AT FILE BUF BUF 0
"""
"""Name, number on each machine, what it takes, how it ends in a cage, arguments for a call that would do harm.

refused: by the filter, always. attributes: by the filter where the cage has no mounts of its own, and by those where it
has. kept: by the kernel, or it only reads. Words are what hostile_plugin's `walk` puts in their places."""
NEITHER = """
_sysctl accept accept4 add_key adjtimex afs_syscall alarm arch_prctl bpf brk cachestat clone clone3 close
close_range copy_file_range create_module delete_module dup dup2 dup3 epoll_create epoll_create1 epoll_ctl
epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2 exit exit_group fadvise64
fallocate fanotify_init fchdir fdatasync fgetxattr finit_module flistxattr flock fork fsmount fstat fstatfs fsync
ftruncate futex futex_requeue futex_wait futex_waitv futex_wake get_kernel_syms get_mempolicy get_thread_area getcpu
getcwd getdents getdents64 getegid geteuid getgid getgroups getitimer getpeername getpgrp getpid getpmsg getppid
getrandom getresgid getresuid getrlimit getrusage getsockname getsockopt gettid gettimeofday getuid init_module
inotify_init inotify_init1 inotify_rm_watch io_cancel io_destroy io_getevents io_pgetevents io_setup io_submit
io_uring_enter io_uring_register io_uring_setup ioperm iopl kexec_file_load kexec_load keyctl landlock_add_rule
landlock_create_ruleset landlock_restrict_self listen listmount lookup_dcookie lseek lsm_get_self_attr
lsm_list_modules lsm_set_self_attr madvise map_shadow_stack mbind membarrier memfd_secret mincore mlock mlock2
mlockall mmap modify_ldt mprotect mq_getsetattr mq_notify mq_timedreceive mq_timedsend mremap mseal msgctl msgget
msgrcv msgsnd msync munlock munlockall munmap nanosleep nfsservctl pause personality pipe pipe2 pkey_alloc pkey_free
pkey_mprotect poll ppoll pread64 preadv preadv2 pselect6 putpmsg pwrite64 pwritev pwritev2 query_module quotactl_fd
read readahead readv reboot recvfrom recvmmsg recvmsg remap_file_pages request_key restart_syscall rseq rt_sigaction
rt_sigpending rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigtimedwait sched_get_priority_max
sched_get_priority_min sched_yield seccomp security select semctl semget semop semtimedop sendfile set_mempolicy
set_mempolicy_home_node set_robust_list set_thread_area set_tid_address setdomainname setfsgid setfsuid setgid
setgroups sethostname setitimer setregid setresgid setresuid setreuid setrlimit setsid setsockopt settimeofday
setuid shmat shmctl shmdt shmget shutdown sigaltstack signalfd signalfd4 socket socketpair splice statmount sync
sync_file_range sync_file_range2 syncfs sysfs sysinfo syslog tee time timer_delete timer_getoverrun timer_gettime
timer_settime timerfd_create timerfd_gettime timerfd_settime times tuxcall umask uname unshare uprobe uretprobe
userfaultfd ustat vfork vhangup vmsplice vserver write writev
"""
"""Calls that take neither, and those that a handle from a refused one would be needed for."""


class Call(NamedTuple):
    name: str
    number: int
    takes: str
    ends: str
    arguments: tuple[str, ...]


def numbers(machine: str) -> dict[str, int]:
    """Name → number, of the calls in the table that a machine has."""
    column = 1 + MACHINES.index(machine)
    rows = [row.split() for row in TABLE.strip().splitlines()]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def calls() -> list[Call]:
    """Those of this machine, a line of the table each."""
    known = numbers(platform.machine())
    rows = [row.split() for row in TABLE.strip().splitlines()]
    return [
        Call(name, known[name], takes, ends, tuple(arguments))
        for name, _, _, takes, ends, *arguments in rows
        if name in known
    ]
