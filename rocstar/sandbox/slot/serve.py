"""The loop of a slot: forks and reaps, and never sees a payload or output. `_fork.c` is the same loop, compiled."""

import os
import signal
import socket
import time
from contextlib import suppress

from rocstar.sandbox.slot.channel import CONTROL, ENDED
from rocstar.sandbox.walls.plans import Walls

COARSE = 5  # CLOCK_REALTIME_COARSE: what files are dated by


def serve(channel: socket.socket, walls: Walls) -> int:
    """Answer requests until the channel closes, then end the process. Returns in forked processes only: the descriptor
    of control, with standard streams in place, all others closed, in the working directory; OSError if that is gone."""
    private, number, total = os.getpid() == 1, 0, 0.0
    fresh, counted, reusable = times(walls.workdir), True, True
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    while reusable and len(fds := socket.recv_fds(channel, 1, 3)[1]) == 3:
        started, opened, last = time.monotonic(), time.clock_gettime_ns(COARSE), number
        pid = os.fork()
        number = pid or os.getpid()
        counted = counted and (not private or last in (0, number - 1))  # else an earlier call has started processes
        if not pid:
            return become_child(fds, walls.workdir) if counted else os._exit(0)
        for fd in fds:
            os.close(fd)
        status, stopped, ended, own, spent, peak = await_end(pid, walls)
        stopped |= signal.sigtimedwait({signal.SIGUSR1}, 0) is not None  # too late: it must not end the next call
        total, reusable = total + spent, counted
        if reusable and (times(walls.workdir) != fresh or opened <= fresh[0]):  # that clock ticks coarsely
            reusable, fresh = walls.renew(), times(walls.workdir)
        seconds = ended - started, spent, own, total + time.process_time()
        channel.send(ENDED.pack(status, stopped, not counted, *seconds, peak, reusable))
    os._exit(0)


def times(workdir: str) -> tuple[int, int]:
    return (state := os.stat(workdir)).st_ctime_ns, state.st_atime_ns  # they change with the folder, or when it is read


def become_child(fds: list[int], workdir: str) -> int:
    for target, fd in enumerate((os.open("/dev/null", os.O_RDONLY), *fds)):
        os.dup2(fd, target, inheritable=target != CONTROL)
    os.closerange(CONTROL + 1, os.sysconf("SC_OPEN_MAX"))
    os.chdir(workdir)
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return CONTROL


def await_end(pid: int, walls: Walls) -> tuple[int, bool, float, float, float, int]:
    """Until the first process is dead; then kill and reap the rest."""
    status, stopped, ended, own, spent, peak = -1, False, 0.0, 0.0, 0.0, 0
    with suppress(ChildProcessError):  # orphans come to us: none means that nothing of the call is left
        while True:
            if dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if dead.si_pid == pid:
                    ended, own = time.monotonic(), time.clock_gettime(~pid << 3 | 2)
                _, result, usage = os.wait4(dead.si_pid, 0)
                status = result if dead.si_pid == pid else status
                spent, peak = spent + usage.ru_utime + usage.ru_stime, max(peak, usage.ru_maxrss * 1024)
            elif ended:
                walls.kill_all(pid)
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            elif signal.sigwaitinfo({signal.SIGCHLD, signal.SIGUSR1}).si_signo == signal.SIGUSR1:
                stopped = True
                walls.kill_all(pid)
    return status, stopped, ended, own, spent, peak
