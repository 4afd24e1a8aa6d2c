/* The loop of a slot: forks and reaps, and never sees a payload or output. Between two calls no Python runs in the slot,
   so almost none of the memory that it shares with its programs is written to and copied.

   Also `pause` and `restore`, which continue a notebook in another slot: see daemon/snapshot.py.

   Not here: walls, and the rest of the program's process. */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifdef __GLIBC__
#include <ucontext.h>
#endif

#if !(defined(__GLIBC__) && __GLIBC_PREREQ(2, 34))
#define _Fork fork
#endif
#ifndef SYS_close_range
#define SYS_close_range 436 /* the same on every architecture */
#endif

#define CONTROL 3           /* descriptor of control in the program's process */
#define OLD_DESCRIPTORS 256 /* more than a slot has; for kernels without close_range */
#define LIST_BYTES (1 << 13) /* of process ids of children; the next read finds the rest */
#define RENEW_MS 1000 /* for a fresh directory: an answer that waited for more might come after its wall limit */

enum { STDOUT, STDERR, REPORTS, DESCRIPTORS }; /* of one call */

struct __attribute__((packed)) ended { /* channel.ENDED */
    int32_t wait_status;
    uint8_t stopped, stale;
    double run_seconds, cpu_seconds, own_cpu_seconds, slot_cpu_seconds;
    uint64_t peak_memory_bytes;
    uint8_t reusable;
};

struct slot { /* descriptors and settings from `walls`, and the slot's state */
    int channel, reset;
    bool private;           /* in a pid namespace of its own, as its first process */
    int children;           /* elsewhere: descriptor of the list of this process's children; -1 without */
    const char *workdir;
    struct stat fresh;      /* the working directory before any program */
    struct timespec opened; /* when the program started in it, by the clock of the file system */
    bool counted;           /* only our own forks have used process ids of the namespace so far */
    pid_t last;             /* process id of the last fork */
    double children_seconds;
};

static int64_t nanoseconds(struct timespec time) { return time.tv_sec * INT64_C(1000000000) + time.tv_nsec; }

static double seconds_of(clockid_t clock)
{
    struct timespec time = {0};
    clock_gettime(clock, &time); /* zero if the process is gone */
    return (double)nanoseconds(time) * 1e-9;
}

/* Receive the descriptors of a call; ends the process if the daemon has closed the channel. */
static void receive(const struct slot *slot, int fds[DESCRIPTORS])
{
    char kind, room[CMSG_SPACE(DESCRIPTORS * sizeof(int))];
    struct iovec part = {&kind, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    ssize_t got = recvmsg(slot->channel, &message, MSG_CMSG_CLOEXEC);
    struct cmsghdr *extra = got == 1 ? CMSG_FIRSTHDR(&message) : NULL;
    if (!extra || extra->cmsg_type != SCM_RIGHTS || extra->cmsg_len != CMSG_LEN(DESCRIPTORS * sizeof(int)))
        _exit(0);
    memcpy(fds, CMSG_DATA(extra), DESCRIPTORS * sizeof(int));
}

/* In a fresh fork: close the slot's descriptors and prepare Python; returns control's descriptor. */
static PyObject *become_child(const struct slot *slot, const int fds[DESCRIPTORS])
{
    sigset_t none;
    sigemptyset(&none);
    close(0);
    if (open("/dev/null", O_RDONLY) != 0 || dup2(fds[STDOUT], 1) < 0 || dup2(fds[STDERR], 2) < 0 ||
        dup3(fds[REPORTS], CONTROL, O_CLOEXEC) < 0 || chdir(slot->workdir) < 0 || setpgid(0, 0) < 0)
        _exit(1);
    if (syscall(SYS_close_range, CONTROL + 1, ~0U, 0) < 0)
        for (int fd = CONTROL + 1; fd < OLD_DESCRIPTORS; fd++)
            close(fd);
    sigprocmask(SIG_SETMASK, &none, NULL);
    PyOS_AfterFork_Child();
    return PyLong_FromLong(CONTROL);
}

static double seconds(struct timeval time) { return (double)time.tv_sec + (double)time.tv_usec * 1e-6; }

/* Reap an ended process and add its use of CPU and memory; returns its wait status. */
static int reap(struct ended *ended, pid_t pid)
{
    int status = 0;
    struct rusage usage = {0};
    wait4(pid, &status, 0, &usage);
    uint64_t peak = (uint64_t)usage.ru_maxrss * 1024;
    ended->cpu_seconds += seconds(usage.ru_utime) + seconds(usage.ru_stime);
    ended->peak_memory_bytes = peak > ended->peak_memory_bytes ? peak : ended->peak_memory_bytes;
    return status;
}

/* Send a signal to each child in this list, which ends with a zero. */
static void signal_all(char *list, int number)
{
    long pid;
    for (char *next = list; (pid = strtol(next, &next, 10)) > 0;)
        kill((pid_t)pid, number);
}

/* Kill the program whose first process this is, and everything it started. A stopped process cannot fork. */
static void kill_all(const struct slot *slot, pid_t pid)
{
    char list[LIST_BYTES]; /* not static: `restore` reads this module's data while it replaces anonymous memory */
    if (slot->private) {
        kill(-1, SIGKILL);
        return;
    }
    kill(-pid, SIGKILL); /* its process group, if it has made one yet */
    ssize_t size = slot->children < 0 ? 0 : pread(slot->children, list, sizeof list - 1, 0);
    while (size > 0 && list[size - 1] != ' ') /* a process id that is cut off would be another one */
        size--;
    list[size < 0 ? 0 : size] = 0;
    signal_all(list, SIGSTOP);
    signal_all(list, SIGKILL);
}

/* Wait until the first process has ended; then kill and reap the rest. Orphans become our children when their parents
   end: no child means that no process of the call is left. */
static void await_end(const struct slot *slot, struct ended *ended, pid_t pid, double started)
{
    sigset_t expected;
    sigemptyset(&expected);
    sigaddset(&expected, SIGCHLD);
    sigaddset(&expected, SIGUSR1);
    bool over = false;
    siginfo_t dead = {0};
    while (waitid(P_ALL, 0, &dead, WEXITED | WNOHANG | WNOWAIT) == 0) {
        if (dead.si_pid == pid) {
            over = true;
            ended->run_seconds = seconds_of(CLOCK_MONOTONIC) - started;
            ended->own_cpu_seconds = seconds_of((clockid_t)((~(unsigned)pid << 3) | 2)); /* clock of that process */
            ended->wait_status = reap(ended, pid);
        } else if (dead.si_pid) {
            reap(ended, dead.si_pid);
        } else if (over) {
            kill_all(slot, pid);
            waitid(P_ALL, 0, &dead, WEXITED | WNOWAIT);
        } else if (sigwaitinfo(&expected, NULL) == SIGUSR1) {
            ended->stopped = true;
            kill_all(slot, pid);
        }
        dead.si_pid = 0;
    }
}

/* Whether a program may have left a trace in the working directory. Every change of a folder sets its ctime, which no
   program can forge, but only to the resolution of the file system's clock; reading it sets its atime. */
static bool is_touched(const struct slot *slot)
{
    struct stat now;
    int64_t changed = nanoseconds(slot->fresh.st_ctim), read = nanoseconds(slot->fresh.st_atim);
    return stat(slot->workdir, &now) < 0 || nanoseconds(now.st_ctim) != changed || nanoseconds(now.st_atim) != read ||
           changed >= nanoseconds(slot->opened);
}

/* Have the keeper give us a fresh working directory; false if that fails, or takes long because of many files. */
static bool renew(struct slot *slot)
{
    char answer = 0;
    struct pollfd keeper = {slot->reset, POLLIN, 0};
    bool asked = write(slot->reset, "r", 1) == 1 && poll(&keeper, 1, RENEW_MS) == 1;
    bool heard = asked && read(slot->reset, &answer, 1) == 1;
    return heard && answer == 1 && stat(slot->workdir, &slot->fresh) == 0;
}

/* Answer the call whose first process has just been forked; false: the slot can serve no other call. */
static bool end_call(struct slot *slot, pid_t pid, double started)
{
    struct ended ended = {.stale = !slot->counted};
    const struct timespec now = {0};
    sigset_t stop;
    sigemptyset(&stop);
    sigaddset(&stop, SIGUSR1);
    await_end(slot, &ended, pid, started);
    if (sigtimedwait(&stop, NULL, &now) == SIGUSR1) /* arrived after the end: it must not end the next call */
        ended.stopped = true;
    slot->children_seconds += ended.cpu_seconds;
    ended.slot_cpu_seconds = slot->children_seconds + seconds_of(CLOCK_PROCESS_CPUTIME_ID);
    ended.reusable = slot->counted && (!is_touched(slot) || renew(slot));
    return send(slot->channel, &ended, sizeof ended, MSG_NOSIGNAL) == sizeof ended && ended.reusable;
}

static PyObject *answer_calls(struct slot *slot)
{
    for (;;) {
        int fds[DESCRIPTORS];
        receive(slot, fds);
        double started = seconds_of(CLOCK_MONOTONIC);
        clock_gettime(CLOCK_REALTIME_COARSE, &slot->opened);
        pid_t pid = _Fork(), number = pid ? pid : getpid();
        slot->counted = slot->counted && (!slot->private || slot->last == 0 || slot->last + 1 == number);
        slot->last = number;
        if (pid < 0 || (pid == 0 && !slot->counted))
            _exit(1);
        if (pid == 0)
            return become_child(slot, fds);
        for (int n = 0; n < DESCRIPTORS; n++)
            close(fds[n]);
        if (!end_call(slot, pid, started))
            _exit(0);
    }
}

PyDoc_STRVAR(serve_doc, "serve(channel, walls) -> int\n\n"
"Answer requests until the channel closes, then end the process. Returns in forked processes only: the descriptor of\n"
"control, with standard streams in place, all others closed, in the working directory.\n\n"
"Raises OSError if that is gone, ValueError where it should be the first process of a pid namespace and is not.");

static PyObject *serve(PyObject *module, PyObject *args)
{
    (void)module;
    struct slot slot = {.counted = true};
    PyObject *channel, *walls, *inside;
    int private;
    if (!PyArg_ParseTuple(args, "OO", &channel, &walls) || (slot.channel = PyObject_AsFileDescriptor(channel)) < 0)
        return NULL;
    if (!(inside = PyObject_GetAttrString(walls, "inside")))
        return NULL;
    args = Py_BuildValue("(NNNN)", PyObject_GetAttrString(walls, "reset"), PyObject_GetAttrString(walls, "workdir"),
                         PyObject_GetAttrString(walls, "children"),
                         PyObject_GetAttrString(inside, "private_processes"));
    if (!args || !PyArg_ParseTuple(args, "isip", &slot.reset, &slot.workdir, &slot.children, &private))
        return NULL;
    slot.private = private;
    if (private && getpid() != 1) {
        PyErr_SetString(PyExc_ValueError, "only the first process of a pid namespace may serve: it kills all others");
        return NULL;
    }
    if (stat(slot.workdir, &slot.fresh) < 0)
        return PyErr_SetFromErrnoWithFilename(PyExc_OSError, slot.workdir);
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    PyOS_BeforeFork(); /* its counterpart runs in every child */
    return answer_calls(&slot);
}

#ifdef __GLIBC__
/* One mapping of a notebook, `snapshot.STEP`. */
struct step {
    uint64_t kind, start, size, protection, offset, path;
};

enum { UNMAP, ZERO, DATA, COPY, HEAP, FILED };

#define STEPS_BYTES (1 << 20)
#define STACK_BYTES (1 << 17)

/* Memory of `restore` itself: at the same address in all forks of a zygote, and not replaced. */
static struct arena {
    uint64_t heap; /* end of the heap of a waiting notebook */
    char stack[STACK_BYTES];
    char steps[STEPS_BYTES];
    size_t count;
    int memory;
    bool restored;
} *arena;

static ucontext_t paused; /* where a copied notebook continues */

static size_t arena_bytes;

static bool make_arena(void)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    arena_bytes = (sizeof *arena + page - 1) / page * page;
    char *start = mmap(NULL, arena_bytes + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    arena = (struct arena *)(start + page); /* one page on each side keeps it a mapping of its own */
    return start != MAP_FAILED && mprotect(arena, arena_bytes, PROT_READ | PROT_WRITE) == 0;
}

PyDoc_STRVAR(pause_doc, "pause(control, message) -> bool\n\n"
"Send the message and wait for a byte, while the daemon copies this process: False. In the copy: True.");

static PyObject *pause_notebook(PyObject *module, PyObject *args)
{
    (void)module;
    int control;
    const char *message;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "iy#", &control, &message, &size))
        return NULL;
    PyOS_BeforeFork();
    arena->restored = false;
    arena->heap = (uint64_t)(uintptr_t)sbrk(0);
    getcontext(&paused);
    if (arena->restored) {
        PyOS_AfterFork_Child();
        Py_RETURN_TRUE;
    }
    char go;
    if (write(control, message, (size_t)size) == size)
        while (read(control, &go, 1) < 0 && errno == EINTR)
            continue;
    PyOS_AfterFork_Parent();
    Py_RETURN_FALSE;
}

static bool take(const struct step *step)
{
    void *start = (void *)(uintptr_t)step->start;
    int protection = (int)step->protection, fixed = MAP_PRIVATE | MAP_FIXED, fd;
    off_t offset = (off_t)step->offset;
    switch (step->kind) {
    case UNMAP:
        return munmap(start, step->size) == 0;
    case ZERO:
        return mmap(start, step->size, protection, fixed | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) == start;
    case DATA:
        return mmap(start, step->size, protection, fixed, arena->memory, offset) == start;
    case COPY: /* into the stack, which would not grow as a mapping of a file */
        return pread(arena->memory, start, step->size, offset) == (ssize_t)step->size;
    case HEAP:
        return brk(start) == 0;
    default:
        return (fd = open(arena->steps + step->path, O_RDONLY | O_CLOEXEC)) >= 0 &&
               mmap(start, step->size, protection, fixed, fd, offset) == start && close(fd) == 0;
    }
}

/* Runs on the arena's stack: all other memory of the process is replaced. */
static void take_all(void)
{
    for (size_t n = 0; n < arena->count; n++)
        if (!take((struct step *)arena->steps + n))
            _exit(1);
    close(arena->memory);
    arena->restored = true;
    setcontext(&paused);
}

PyDoc_STRVAR(restore_doc, "restore(memory, offset, count)\n\n"
"Become the copy of a notebook: `count` steps stand in this file from `offset` on. Never returns.");

static PyObject *restore(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long offset, count;
    if (!PyArg_ParseTuple(args, "iKK", &arena->memory, &offset, &count))
        return NULL;
    arena->count = count;
    ucontext_t there;
    getcontext(&there);
    there.uc_stack.ss_sp = arena->stack;
    there.uc_stack.ss_size = sizeof arena->stack;
    there.uc_link = NULL;
    makecontext(&there, take_all, 0);
    if (pread(arena->memory, arena->steps, sizeof arena->steps, (off_t)offset) > 0)
        setcontext(&there);
    return PyErr_SetFromErrno(PyExc_OSError);
}
#endif

static PyMethodDef methods[] = {
    {"serve", serve, METH_VARARGS, serve_doc},
#ifdef __GLIBC__
    {"pause", pause_notebook, METH_VARARGS, pause_doc},
    {"restore", restore, METH_VARARGS, restore_doc},
#endif
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_fork", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit__fork(void)
{
    PyObject *module = PyModule_Create(&definition), *place = Py_NewRef(Py_None);
#ifdef __GLIBC__
    if (make_arena())
        Py_SETREF(place, Py_BuildValue("(KK)", (unsigned long long)(uintptr_t)arena, (unsigned long long)arena_bytes));
#endif
    if (module && (PyModule_AddObject(module, "arena", place) < 0 || PyModule_AddIntConstant(module, "source", SOURCE)))
        Py_CLEAR(module);
    return module;
}
