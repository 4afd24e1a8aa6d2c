/* The part of a slot that must not be Python: between two calls nothing may write to memory.

   A fork copies the page tables of every mapping that holds private pages, and a Python that runs makes all of its
   memory private within milliseconds. So `serve` first moves all private memory of this process into a memory file and
   maps it back, privately, at the same addresses: such a mapping is skipped by fork until somebody writes to it. Then it
   lets Python build a slot (`raise_slot`, which forks) and, in the slot, maps the file once more over everything. That
   turns memory back to the moment of the snapshot while the C stack, descriptors and walls stay. From there on only this
   file runs in the slot: it reads a request, forks, and `serve` returns to Python in the child.

   Covered: what docs/sandbox.md promises of a slot; `slot.py` is the same loop in Python, where this cannot be built.
   Not covered: walls, wiping a folder, everything about the program itself. Those are Python, in a fork.

   The process must have one thread. No secrets: requests and output are forgotten as soon as they are passed on. */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if !(defined(__GLIBC__) && __GLIBC_PREREQ(2, 34))
#define _Fork fork
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434 /* the same on every architecture */
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif

#define MAX_REGIONS 16384       /* numpy, sympy and scipy together make about 800 */
#define TEXT_BYTES 65536        /* of a list of mappings, read at a time */
#define PAGES_AT_ONCE 512
#define SNAPSHOT_FD 100
#define MAX_SETTINGS 4096       /* what the slot tells each of its programs' processes */
#define REPORT_BYTES (256 * 1024)
#define SCRATCH_BYTES 65536
#define MAX_FILES_BYTES (24u << 20) /* of files read back, as JSON: 16 MiB of content and their names */
#define QUIET_SECONDS 0.01      /* short programs end within it: one wake-up instead of many */
#define UNWATCHED_SECONDS 0.005 /* between looks at a child where there is no pidfd (before Linux 5.3) */
#define AGE_SECONDS 0.1         /* a program that runs longer makes way for those that may be short */
#define FIRST_TO_KILL 1000      /* oom_score_adj of programs: the highest there is */
#define AGED_NICE 10            /* a tenth of a young one's share; 19 would be a seventieth, and starve honest work */

enum ended { ITSELF, WALL, OUTPUT, CANCELLED };

/* ---- the bytes of slotwire.py: native order, no padding ---- */

struct __attribute__((packed)) request {
    uint32_t size;
    double wall_seconds;
    uint32_t output_bytes, fetch_size;
};

struct __attribute__((packed)) answer {
    int32_t wait_status;
    uint8_t ended;
    uint8_t reusable;
    double run_seconds, cpu_seconds;
    uint64_t peak_memory, dropped_out, dropped_err;
    double slot_cpu_seconds;
    uint8_t committed;
    uint32_t out_bytes, err_bytes, report_bytes, files_bytes;
};

/* ---- memory: snapshot and return to it ---- */

struct region {
    unsigned long start, end;
    off_t offset;
    int protection;
    bool anonymous;
};

struct snapshot {
    int fd, pagemap;
    unsigned long brk;
    size_t count;
    off_t size;
    struct region regions[MAX_REGIONS];
    char text[TEXT_BYTES];
    uint64_t pages[PAGES_AT_ONCE];
};

struct mapping {
    unsigned long start, end;
    const char *rights; /* "rw-p" */
    bool anonymous, special;
};

static long page_size;

/* One line of /proc/self/maps. */
static struct mapping parse_mapping(char *line)
{
    struct mapping found;
    char *at = line;
    found.start = strtoul(at, &at, 16);
    found.end = strtoul(at + 1, &at, 16);
    found.rights = at + 1;
    at += 6;
    strtoul(at, &at, 16); /* offset */
    while (*at == ' ')
        at++;
    while (*at && *at != ' ') /* device */
        at++;
    found.anonymous = strtoul(at, &at, 10) == 0;
    while (*at == ' ')
        at++;
    found.special = strncmp(at, "[v", 2) == 0; /* vdso, vvar, vsyscall: the kernel's own */
    return found;
}

/* Call `visit` for each line of the list; -1 with errno when reading or a visit fails. */
static int each_mapping(struct snapshot *book, int maps, int (*visit)(struct snapshot *, struct mapping *))
{
    size_t held = 0;
    if (lseek(maps, 0, SEEK_SET) < 0)
        return -1;
    for (;;) {
        ssize_t got = read(maps, book->text + held, TEXT_BYTES - 1 - held);
        if (got < 0)
            return -1;
        if (got == 0)
            return 0;
        held += (size_t)got;
        char *line = book->text, *end;
        while ((end = memchr(line, '\n', held - (size_t)(line - book->text)))) {
            *end = 0;
            struct mapping found = parse_mapping(line);
            if (visit(book, &found) < 0)
                return -1;
            line = end + 1;
        }
        held -= (size_t)(line - book->text);
        memmove(book->text, line, held);
    }
}

/* The stack that runs us and the book itself are in use while memory is exchanged. */
static bool in_use(struct snapshot *book, struct mapping *found)
{
    unsigned long stack = (unsigned long)__builtin_frame_address(0), self = (unsigned long)book;
    return (found->start <= stack && stack < found->end) || (found->start <= self && self < found->end);
}

/* What the kernel knows of the next pages, into book->pages; how many, or -1. */
static ssize_t read_pages(struct snapshot *book, unsigned long start, unsigned long end)
{
    size_t count = (end - start) / (unsigned long)page_size;
    count = count < PAGES_AT_ONCE ? count : PAGES_AT_ONCE;
    ssize_t wanted = (ssize_t)(count * sizeof(uint64_t));
    off_t at = (off_t)(start / (unsigned long)page_size * sizeof(uint64_t));
    return pread(book->pagemap, book->pages, (size_t)wanted, at) == wanted ? (ssize_t)count : -1;
}

static bool is_there(uint64_t page) { return page >> 62; } /* present or swapped */

static bool is_private(uint64_t page) { return is_there(page) && !(page >> 61 & 1); }

/* Whether a read-only mapping holds private pages: relocated tables do. */
static int has_private_pages(struct snapshot *book, struct mapping *found)
{
    for (unsigned long at = found->start; at < found->end;) {
        ssize_t count = read_pages(book, at, found->end);
        if (count < 0)
            return -1;
        for (ssize_t n = 0; n < count; n++)
            if (is_private(book->pages[n]))
                return 1;
        at += (unsigned long)(count * page_size);
    }
    return 0;
}

/* Note a mapping that has to be saved: private, and writable or written to before it was made read-only. */
static int note_region(struct snapshot *book, struct mapping *found)
{
    const char *rights = found->rights;
    if (rights[3] != 'p' || rights[0] != 'r' || found->special || in_use(book, found))
        return 0;
    if (rights[1] != 'w') {
        int written = has_private_pages(book, found);
        if (written <= 0)
            return written;
    }
    if (book->count == MAX_REGIONS) {
        errno = ENOSPC;
        return -1;
    }
    int protection = PROT_READ | (rights[1] == 'w' ? PROT_WRITE : 0) | (rights[2] == 'x' ? PROT_EXEC : 0);
    book->regions[book->count++] =
        (struct region){found->start, found->end, book->size, protection, found->anonymous};
    /* A gap in the file keeps neighbours from being merged: one page written would then cost the tables of both. */
    book->size += (off_t)(found->end - found->start) + page_size;
    return 0;
}

static int write_all(int fd, const void *data, size_t size, off_t offset)
{
    const char *at = data;
    while (size) {
        ssize_t wrote = pwrite(fd, at, size, offset);
        if (wrote <= 0)
            return -1;
        at += wrote;
        offset += wrote;
        size -= (size_t)wrote;
    }
    return 0;
}

/* Copy one region into the file; pages that were never touched stay holes. */
static int save_region(struct snapshot *book, const struct region *region)
{
    for (unsigned long at = region->start; at < region->end;) {
        ssize_t count = read_pages(book, at, region->end);
        if (count < 0)
            return -1;
        for (ssize_t n = 0; n < count; n++) {
            unsigned long page = at + (unsigned long)(n * page_size);
            off_t offset = region->offset + (off_t)(page - region->start);
            bool needed = !region->anonymous || is_there(book->pages[n]);
            if (needed && write_all(book->fd, (void *)page, (size_t)page_size, offset) < 0)
                return -1;
        }
        at += (unsigned long)(count * page_size);
    }
    return 0;
}

static int map_region(const struct snapshot *book, const struct region *region)
{
    size_t size = region->end - region->start;
    int flags = MAP_PRIVATE | MAP_FIXED;
    void *at = mmap((void *)region->start, size, region->protection, flags, book->fd, region->offset);
    return at == MAP_FAILED ? -1 : 0;
}

/* Move all private memory into the file. Whatever fails, memory keeps its content. */
static int fill_snapshot(struct snapshot *book, int maps)
{
    if (each_mapping(book, maps, note_region) < 0 || ftruncate(book->fd, book->size) < 0)
        return -1;
    book->brk = (unsigned long)syscall(SYS_brk, 0);
    for (size_t n = 0; n < book->count; n++)
        if (save_region(book, &book->regions[n]) < 0 || map_region(book, &book->regions[n]) < 0)
            return -1;
    return fcntl(book->fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
}

static void close_if_open(int fd)
{
    if (fd >= 0)
        close(fd);
}

static size_t book_size(void)
{
    return (sizeof(struct snapshot) + (size_t)page_size - 1) & ~((size_t)page_size - 1);
}

/* Between two pages that nobody may touch: else the kernel might make one mapping of the book and Python's memory, and
   that would be left out of the snapshot with it. */
static struct snapshot *open_book(void)
{
    size_t size = book_size();
    char *space = mmap(NULL, size + 2 * (size_t)page_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (space == MAP_FAILED || mprotect(space + page_size, size, PROT_READ | PROT_WRITE) < 0)
        return NULL;
    return (struct snapshot *)(space + page_size);
}

static int close_book(struct snapshot *book)
{
    return munmap((char *)book - page_size, book_size() + 2 * (size_t)page_size);
}

static struct snapshot *take_snapshot(void)
{
    struct snapshot *book = open_book();
    if (!book)
        return NULL;
    int maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    int fd = memfd_create("rocstar-snapshot", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    book->pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    book->fd = fcntl(fd, F_DUPFD_CLOEXEC, SNAPSHOT_FD); /* out of the way of all that a slot opens */
    int failed = maps < 0 || book->pagemap < 0 || book->fd < 0 || fill_snapshot(book, maps) < 0, error = errno;
    close_if_open(maps);
    close_if_open(fd);
    close_if_open(book->pagemap);
    if (!failed)
        return book;
    close_if_open(book->fd);
    close_book(book);
    errno = error;
    return NULL;
}

/* Drop what was mapped after the snapshot. */
static int drop_newcomer(struct snapshot *book, struct mapping *found)
{
    if (found->rights[3] != 'p' || found->rights[1] != 'w' || found->special || in_use(book, found))
        return 0;
    for (size_t n = 0; n < book->count; n++)
        if (book->regions[n].start < found->end && found->start < book->regions[n].end)
            return 0;
    return munmap((void *)found->start, found->end - found->start);
}

/* Memory as it was when the snapshot was taken, but for the stack. `maps`: this process's list of mappings, or -1. */
static int return_to_snapshot(struct snapshot *book, int maps)
{
    syscall(SYS_brk, book->brk);
    for (size_t n = 0; n < book->count; n++)
        if (map_region(book, &book->regions[n]) < 0)
            return -1;
    return maps < 0 ? 0 : each_mapping(book, maps, drop_newcomer);
}

/* ---- buffers that forget ---- */

struct buffer {
    char *data;
    size_t size, used;
};

static int reserve(struct buffer *buffer, size_t size)
{
    if (size <= buffer->size)
        return 0;
    if (buffer->data)
        munmap(buffer->data, buffer->size);
    size = (size + (size_t)page_size - 1) & ~((size_t)page_size - 1);
    void *space = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *buffer = (struct buffer){space == MAP_FAILED ? NULL : space, space == MAP_FAILED ? 0 : size, 0};
    return space == MAP_FAILED ? -1 : 0;
}

/* The next program is a fork of this process and must find nothing of the last one. */
static int forget(struct buffer *buffer)
{
    if (buffer->used && madvise(buffer->data, buffer->size, MADV_DONTNEED) < 0)
        return -1;
    buffer->used = 0;
    return 0;
}

/* ---- the slot ---- */

struct stream {
    int read_end, write_end;
    uint64_t dropped;
    bool closed; /* by the program, which may well run on */
    struct buffer kept;
};

struct slot {
    int channel, report_fd, children;
    int private_processes; /* in a pid namespace of its own, of which this is the first process */
    int may_age;
    int oom, ordinary_oom;  /* descriptor of our own oom_score_adj, or -1; what stands there */
    long long clean_inodes; /* in use on the empty working directory's own file system; -1 where it has none */
    unsigned int mode;      /* of the working directory */
    char *report;
    size_t settings_size;
    struct stream out, err, files;
    struct buffer payload, scratch;
    char settings[MAX_SETTINGS];
};

struct call {
    pid_t pid;
    double started, deadline;
    size_t output_left;
    enum ended ended;
    int status;
    double run_seconds, cpu_seconds;
    uint64_t peak_memory;
};

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static double seconds(struct timeval time) { return (double)time.tv_sec + (double)time.tv_usec * 1e-6; }

/* All of `size`; -1 when the host has gone. */
static int receive(int channel, void *data, size_t size)
{
    char *at = data;
    while (size) {
        ssize_t got = recv(channel, at, size, MSG_WAITALL);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return -1;
        at += got;
        size -= (size_t)got;
    }
    return 0;
}

static int send_all(int channel, struct iovec *parts, size_t count)
{
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
    while (message.msg_iovlen) {
        ssize_t sent = sendmsg(channel, &message, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0)
            return -1;
        while (message.msg_iovlen && (size_t)sent >= message.msg_iov->iov_len) {
            sent -= (ssize_t)message.msg_iov->iov_len;
            message.msg_iov++;
            message.msg_iovlen--;
        }
        if (message.msg_iovlen) {
            message.msg_iov->iov_base = (char *)message.msg_iov->iov_base + sent;
            message.msg_iov->iov_len -= (size_t)sent;
        }
    }
    return 0;
}

static int open_stream(struct stream *stream, size_t room)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) < 0)
        return -1;
    stream->read_end = ends[0];
    stream->write_end = ends[1];
    stream->dropped = 0;
    stream->closed = false;
    if (fcntl(stream->read_end, F_SETFL, O_NONBLOCK) < 0)
        return -1;
    return reserve(&stream->kept, room);
}

/* Bytes read: kept while the cap allows, else counted and forgotten. 0 when there are none now, or no more. */
static ssize_t read_some(struct slot *slot, struct call *call, struct stream *stream)
{
    if (!call->output_left) {
        ssize_t got = read(stream->read_end, slot->scratch.data, SCRATCH_BYTES);
        if (got <= 0)
            return 0;
        slot->scratch.used = SCRATCH_BYTES;
        stream->dropped += (uint64_t)got;
        return got;
    }
    ssize_t got = read(stream->read_end, stream->kept.data + stream->kept.used, call->output_left);
    if (got <= 0)
        return 0;
    stream->kept.used += (size_t)got;
    call->output_left -= (size_t)got;
    return got;
}

static bool dropped_any(const struct slot *slot) { return slot->out.dropped || slot->err.dropped; }

/* Without a pid namespace: stop all of our children, then kill them. A stopped process cannot fork on. */
static void kill_children(int children)
{
    char text[16384];
    ssize_t size = children < 0 ? 0 : pread(children, text, sizeof text, 0);
    const int signals[] = {SIGSTOP, SIGKILL};
    for (int round = 0; round < 2; round++) {
        pid_t pid = 0;
        for (ssize_t n = 0; n < size; n++) {
            if (text[n] >= '0' && text[n] <= '9') {
                pid = pid * 10 + (text[n] - '0');
                continue;
            }
            if (pid > 1)
                kill(pid, signals[round]);
            pid = 0;
        }
    }
}

static void kill_all(const struct slot *slot, pid_t pid)
{
    if (slot->private_processes) {
        kill(-1, SIGKILL); /* everything in the namespace but its first process, which we are */
        return;
    }
    kill(-pid, SIGKILL);
    kill(pid, SIGKILL); /* it may not have made its group yet */
    kill_children(slot->children);
}

static void add_usage(struct call *call, const struct rusage *usage)
{
    call->cpu_seconds += seconds(usage->ru_utime) + seconds(usage->ru_stime);
    uint64_t peak = (uint64_t)usage->ru_maxrss * 1024;
    if (peak > call->peak_memory)
        call->peak_memory = peak;
}

static bool has_died(pid_t pid)
{
    siginfo_t seen = {0};
    return waitid(P_PID, (id_t)pid, &seen, WEXITED | WNOHANG | WNOWAIT) < 0 || seen.si_pid == pid;
}

static void leave(const struct slot *slot, pid_t pid)
{
    kill_all(slot, pid);
    _exit(0);
}

/* What one wake-up brought; true when the call is over. */
static bool take_events(struct slot *slot, struct call *call, const struct pollfd *seen)
{
    if (seen[0].revents) {
        char word;
        if (receive(slot->channel, &word, 1) < 0)
            leave(slot, call->pid);
        call->ended = CANCELLED;
        return true;
    }
    struct stream *streams[] = {&slot->out, &slot->err};
    for (int n = 0; n < 2; n++) {
        if (seen[2 + n].revents & POLLIN)
            read_some(slot, call, streams[n]);
        else if (seen[2 + n].revents)
            streams[n]->closed = true;
    }
    if (dropped_any(slot))
        call->ended = OUTPUT;
    return dropped_any(slot);
}

static void make_way(const struct slot *slot, pid_t pid)
{
    if (!slot->may_age)
        return;
    setpriority(PRIO_PGRP, (id_t)pid, AGED_NICE);
    setpriority(PRIO_PROCESS, (id_t)pid, AGED_NICE);
}

/* Until the program ends or has to be ended. Wakes on its death, its output, the host, the clock. */
static void watch(struct slot *slot, struct call *call)
{
    int pidfd = (int)syscall(SYS_pidfd_open, call->pid, 0);
    double quiet_until = call->started + QUIET_SECONDS, age_at = call->started + AGE_SECONDS;
    bool listening = false, aged = false;
    for (;;) {
        double wake = call->deadline;
        if (!listening && quiet_until < wake)
            wake = quiet_until;
        if (!aged && age_at < wake)
            wake = age_at;
        double wait = wake - now();
        if (pidfd < 0 && wait > UNWATCHED_SECONDS)
            wait = UNWATCHED_SECONDS;
        if (wait < 0)
            wait = 0;
        struct timespec time = {(time_t)wait, (long)((wait - (double)(time_t)wait) * 1e9)};
        struct pollfd seen[4] = {
            {slot->channel, POLLIN, 0},
            {pidfd, POLLIN, 0},
            {listening && !slot->out.closed ? slot->out.read_end : -1, POLLIN, 0},
            {listening && !slot->err.closed ? slot->err.read_end : -1, POLLIN, 0},
        };
        if (ppoll(seen, 4, &time, NULL) < 0 && errno != EINTR)
            _exit(1);
        if (seen[1].revents || (pidfd < 0 && has_died(call->pid)))
            break;
        if (take_events(slot, call, seen))
            break;
        double time_now = now();
        if (time_now >= call->deadline) {
            call->ended = WALL;
            break;
        }
        listening = listening || time_now >= quiet_until;
        if (!aged && time_now >= age_at) {
            make_way(slot, call->pid);
            aged = true;
        }
    }
    close_if_open(pidfd);
}

/* Orphans come to the slot when their parents die, so "no child" means nothing of the call is left. */
static void reap_rest(const struct slot *slot, struct call *call)
{
    int waiting = WNOHANG;
    for (;;) {
        struct rusage usage;
        pid_t pid = wait4(-1, NULL, waiting, &usage);
        if (pid < 0 && errno == EINTR)
            continue;
        if (pid < 0)
            return;
        if (pid) {
            add_usage(call, &usage);
            waiting = WNOHANG;
        } else {
            kill_all(slot, call->pid);
            waiting = 0;
        }
    }
}

/* Kill what is left, collect every process and the last output. */
static void end_call(struct slot *slot, struct call *call)
{
    struct rusage usage = {0};
    if (call->ended != ITSELF)
        kill_all(slot, call->pid);
    while (wait4(call->pid, &call->status, 0, &usage) < 0)
        if (errno != EINTR)
            _exit(1);
    call->run_seconds = now() - call->started;
    add_usage(call, &usage);
    reap_rest(slot, call);
    while (read_some(slot, call, &slot->out) > 0 || read_some(slot, call, &slot->err) > 0)
        ;
    if (dropped_any(slot) && call->ended == ITSELF)
        call->ended = OUTPUT;
}

/* Whether the folder we stand in has no entries; -1 on failure. */
static int folder_is_empty(void)
{
    char entries[1024];
    int folder = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), result = 1;
    if (folder < 0)
        return -1;
    long size = syscall(SYS_getdents64, folder, entries, sizeof entries);
    if (size < 0)
        result = -1;
    for (long at = 0; at < size && result == 1;) {
        /* struct linux_dirent64: u64 inode, s64 offset, u16 length, u8 type, name */
        uint16_t length;
        memcpy(&length, entries + at + 16, sizeof length);
        const char *name = entries + at + 19;
        if (strcmp(name, ".") != 0 && strcmp(name, "..") != 0)
            result = 0;
        at += length;
    }
    close(folder);
    return result;
}

/* Whether the working directory is as the next program must find it; -1 on failure. */
static int is_clean(const struct slot *slot)
{
    struct stat state;
    if (stat(".", &state) < 0 || state.st_nlink == 0)
        return -1;
    if (state.st_mode != slot->mode && chmod(".", slot->mode & 07777) < 0)
        return -1;
    if (slot->clean_inodes < 0)
        return folder_is_empty();
    struct statfs usage;
    if (statfs(".", &usage) < 0)
        return -1;
    return (long long)(usage.f_files - usage.f_ffree) == slot->clean_inodes;
}

static void close_from(int first)
{
    if (syscall(SYS_close_range, first, ~0U, 0) == 0)
        return;
    for (int fd = first; fd < 256; fd++) /* a slot holds far fewer */
        close(fd);
}

/* What a fork of the slot is for: to run a program, or to read files back and wipe the working directory. */
struct job {
    bool program;
    const char *payload;
    size_t size;
    int out, err; /* its stdout and stderr; -1 for where the slot's lead, to nowhere */
};

/* In a fresh fork: nothing of the slot but its report, and Python as it was. None on failure, with an exception. */
static PyObject *become_child(struct slot *slot, const struct job *job)
{
    setpgid(0, 0);
    if (!slot->private_processes && prctl(PR_SET_PDEATHSIG, SIGKILL) < 0)
        _exit(1);
    if ((job->out >= 0 && dup2(job->out, 1) < 0) || (job->err >= 0 && dup2(job->err, 2) < 0))
        _exit(1);
    close_from(3);
    PyOS_AfterFork_Child();
    PyObject *result = Py_BuildValue("(Oy#y#N)", job->program ? Py_True : Py_False, job->payload,
                                     (Py_ssize_t)job->size, slot->settings, (Py_ssize_t)slot->settings_size,
                                     PyMemoryView_FromMemory(slot->report, REPORT_BYTES, PyBUF_WRITE));
    struct buffer *own[] = {&slot->payload, &slot->scratch, &slot->out.kept, &slot->err.kept, &slot->files.kept};
    for (size_t n = 0; n < sizeof own / sizeof *own; n++)
        if (own[n]->data)
            munmap(own[n]->data, own[n]->size);
    return result;
}

/* All that comes through the pipe, as far as there is room for it. */
static void read_to_end(struct stream *stream)
{
    struct buffer *kept = &stream->kept;
    while (kept->used < kept->size) {
        ssize_t got = read(stream->read_end, kept->data + kept->used, kept->size - kept->used);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        kept->used += (size_t)got;
    }
}

/* Read files back where the job's payload names some, then wipe the working directory: by Python, in a fork. True in
   that fork; *clean: whether the folder may be used again. */
static bool tidy(struct slot *slot, struct job *job, int *clean)
{
    int status = 0, ends[2];
    struct stream *files = &slot->files;
    *clean = 0;
    job->out = job->err = -1;
    if (job->size) {
        if (pipe2(ends, O_CLOEXEC) < 0 || reserve(&files->kept, MAX_FILES_BYTES) < 0)
            return false;
        files->read_end = ends[0];
        job->out = ends[1];
    }
    pid_t pid = _Fork();
    if (pid == 0)
        return true;
    close_if_open(job->out);
    if (pid > 0 && job->size)
        read_to_end(files);
    if (job->size)
        close(files->read_end);
    if (pid < 0)
        return false;
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR)
            return false;
    *clean = status == 0 && is_clean(slot) == 1;
    return false;
}

static uint32_t report_size(const struct slot *slot)
{
    struct stat state;
    if (fstat(slot->report_fd, &state) < 0)
        _exit(1);
    if (state.st_blocks == 0)
        return 0; /* never written to */
    uint32_t claimed;
    memcpy(&claimed, slot->report, sizeof claimed);
    const uint32_t room = REPORT_BYTES - sizeof claimed;
    return claimed < room ? claimed : room;
}

static double own_cpu_seconds(void)
{
    struct rusage self, children;
    getrusage(RUSAGE_SELF, &self);
    getrusage(RUSAGE_CHILDREN, &children);
    return seconds(self.ru_utime) + seconds(self.ru_stime) + seconds(children.ru_utime) + seconds(children.ru_stime);
}

static int send_answer(struct slot *slot, const struct call *call, bool reusable)
{
    struct answer answer = {
        .wait_status = call->status,
        .ended = (uint8_t)call->ended,
        .reusable = reusable,
        .run_seconds = call->run_seconds,
        .cpu_seconds = call->cpu_seconds,
        .peak_memory = call->peak_memory,
        .dropped_out = slot->out.dropped,
        .dropped_err = slot->err.dropped,
        .slot_cpu_seconds = own_cpu_seconds(),
        .out_bytes = (uint32_t)slot->out.kept.used,
        .err_bytes = (uint32_t)slot->err.kept.used,
        .report_bytes = report_size(slot),
        .files_bytes = (uint32_t)slot->files.kept.used,
    };
    struct iovec parts[] = {
        {&answer, sizeof answer},
        {slot->out.kept.data, slot->out.kept.used},
        {slot->err.kept.data, slot->err.kept.used},
        {slot->report + sizeof(uint32_t), answer.report_bytes},
        {slot->files.kept.data, slot->files.kept.used},
    };
    if (send_all(slot->channel, parts, 5) < 0)
        return -1;
    if (answer.report_bytes && madvise(slot->report, REPORT_BYTES, MADV_REMOVE) < 0)
        return -1;
    if (forget(&slot->out.kept) < 0 || forget(&slot->err.kept) < 0 || forget(&slot->files.kept) < 0)
        return -1;
    return forget(&slot->scratch);
}

/* For forks of ours to be killed first where memory runs out: they inherit what stands there. */
static void expose(const struct slot *slot, int score)
{
    char text[16];
    int size = snprintf(text, sizeof text, "%d", score);
    if (slot->oom >= 0 && pwrite(slot->oom, text, (size_t)size, 0) < 0)
        return; /* nothing is lost but the order */
}

/* Answer calls for ever. Returns in a fork only: what that is to do. */
static struct job answer_calls(struct slot *slot)
{
    for (;;) {
        char word;
        struct request request;
        if (receive(slot->channel, &word, 1) < 0)
            _exit(0);
        if (word != 'R')
            continue; /* a cancellation that came too late */
        if (receive(slot->channel, &request, sizeof request) < 0 || request.fetch_size > request.size ||
            reserve(&slot->payload, request.size) < 0 ||
            receive(slot->channel, slot->payload.data, request.size) < 0)
            _exit(0);
        slot->payload.used = request.size;
        if (open_stream(&slot->out, request.output_bytes) < 0 || open_stream(&slot->err, request.output_bytes) < 0)
            _exit(1);
        size_t task = request.size - request.fetch_size;
        struct job program = {true, slot->payload.data, task, slot->out.write_end, slot->err.write_end};
        struct job tidying = {false, slot->payload.data + task, request.fetch_size, -1, -1};
        struct call call = {.started = now(), .output_left = request.output_bytes};
        call.deadline = call.started + request.wall_seconds;
        expose(slot, FIRST_TO_KILL);
        call.pid = _Fork();
        if (call.pid == 0)
            return program;
        expose(slot, slot->ordinary_oom);
        if (call.pid < 0)
            _exit(1);
        close(slot->out.write_end);
        close(slot->err.write_end);
        watch(slot, &call);
        end_call(slot, &call);
        close(slot->out.read_end);
        close(slot->err.read_end);
        int clean = is_clean(slot);
        if (clean == 0 && tidy(slot, &tidying, &clean))
            return tidying;
        if (forget(&slot->payload) < 0 || send_answer(slot, &call, clean == 1) < 0 || clean != 1)
            _exit(1);
    }
}

/* From what raise_slot returned; -1 with an exception. */
static int parse_slot(PyObject *raised, struct slot *slot, int *maps)
{
    const char *settings;
    Py_ssize_t size;
    memset(slot, 0, sizeof *slot);
    if (!PyArg_ParseTuple(raised, "iiiippLIiiy#", &slot->channel, maps, &slot->report_fd, &slot->children,
                          &slot->private_processes, &slot->may_age, &slot->clean_inodes, &slot->mode,
                          &slot->oom, &slot->ordinary_oom, &settings, &size))
        return -1;
    if (size > MAX_SETTINGS) {
        PyErr_SetString(PyExc_ValueError, "the settings of a slot are too long");
        return -1;
    }
    memcpy(slot->settings, settings, (size_t)size);
    slot->settings_size = (size_t)size;
    return 0;
}

static int open_slot(struct slot *slot)
{
    if (reserve(&slot->scratch, SCRATCH_BYTES) < 0)
        return -1;
    void *report = mmap(NULL, REPORT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, slot->report_fd, 0);
    slot->report = report;
    return report == MAP_FAILED ? -1 : 0;
}

/* Sort the heap's free pieces now: a child would do so at its first large request, touching a page for each. */
static void settle_heap(void)
{
    malloc_trim(0);
    free(malloc(SCRATCH_BYTES));
}

PyDoc_STRVAR(serve_doc,
"serve(raise_slot) -> (is_program, payload, settings, report) or None\n\n"
"Snapshot memory, then call raise_slot(snapshot_fd). It forks slots; in a slot it returns\n"
"(channel, maps, report_fd, children, private_processes, may_age, clean_inodes, mode, oom, ordinary_oom, settings),\n"
"elsewhere None.\n"
"Returns in a process forked by a slot: `payload` is the program to run, or names the files to be read back before\n"
"the working directory is wiped.\n"
"Raises OSError, before raise_slot is called, where memory cannot be exchanged.");

static PyObject *serve(PyObject *module, PyObject *raise_slot)
{
    (void)module;
    struct slot slot;
    int maps = -1;
    settle_heap();
    PyOS_BeforeFork(); /* its counterpart runs in every child, on memory as it is now */
    struct snapshot *book = take_snapshot();
    int error = errno;
    PyOS_AfterFork_Parent();
    if (!book) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    PyObject *raised = PyObject_CallFunction(raise_slot, "i", book->fd);
    if (!raised || raised == Py_None)
        return raised;
    if (parse_slot(raised, &slot, &maps) < 0)
        return NULL;
    /* No reference is dropped: the objects end with the memory they lie in. */
    if (return_to_snapshot(book, maps) < 0)
        _exit(1);
    close(book->fd);
    close_if_open(maps);
    if (close_book(book) < 0 || open_slot(&slot) < 0)
        _exit(1);
    struct job job = answer_calls(&slot);
    return become_child(&slot, &job);
}

/* ---- a state of a session (session_state.py) ---- */

#define STATE_FDS 3 /* a new state's channel, its stdout and stderr */

/* What the slot says: a length, with descriptors, and so many bytes. Ends the process when the slot has gone. */
static void receive_cell(int control, int fds[STATE_FDS], struct buffer *payload)
{
    uint32_t size;
    char room[CMSG_SPACE(STATE_FDS * sizeof(int))];
    struct iovec part = {&size, sizeof size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    ssize_t got;
    do
        got = recvmsg(control, &message, MSG_CMSG_CLOEXEC | MSG_WAITALL);
    while (got < 0 && errno == EINTR);
    struct cmsghdr *extra = got == sizeof size ? CMSG_FIRSTHDR(&message) : NULL;
    if (!extra || extra->cmsg_type != SCM_RIGHTS || extra->cmsg_len != CMSG_LEN(STATE_FDS * sizeof(int)))
        _exit(0);
    memcpy(fds, CMSG_DATA(extra), STATE_FDS * sizeof(int));
    if (reserve(payload, size) < 0 || receive(control, payload->data, size) < 0)
        _exit(0);
    payload->used = size;
}

/* A fork whose parent is our parent (or who adopts in its stead), for one copy of our memory: what vfork makes shares
   it, forks, and ends. 0 in the new process. Not clone with CLONE_PARENT: what the C library does in a fork would have
   to be done here again. */
static __attribute__((noinline)) pid_t fork_apart(void)
{
    pid_t middle = vfork();
    if (middle == 0) {
        pid_t pid = fork();
        if (pid == 0)
            return 0; /* on its own copy of this stack, which nobody has returned from */
        _exit(pid < 0);
    }
    int status = 0;
    while (middle > 0 && waitpid(middle, &status, 0) < 0 && errno == EINTR)
        ;
    return middle < 0 || status ? -1 : middle;
}

PyDoc_STRVAR(next_state_doc,
"next_state(control) -> (payload, channel, stdout, stderr)\n\n"
"Wait on the socket `control` for cells, and fork for each. Returns in the forks, which are children of this process's\n"
"parent; ends the process when the socket closes.");

/* In the state that stays nothing runs but this, so that it writes to next to none of the memory it shares. */
static PyObject *next_state(PyObject *module, PyObject *number)
{
    (void)module;
    int control = (int)PyLong_AsLong(number), fds[STATE_FDS];
    struct buffer payload = {0};
    if (PyErr_Occurred())
        return NULL;
    sigset_t all, before;
    sigfillset(&all); /* a hostile cell may send some; they would wait here for the cells of another session */
    sigprocmask(SIG_SETMASK, &all, &before);
    PyOS_BeforeFork(); /* its counterpart runs in every fork */
    for (;;) {
        receive_cell(control, fds, &payload);
        while (waitpid(-1, NULL, WNOHANG) > 0)
            ; /* what the cell left was killed, and counts as a process until it is collected */
        if (fork_apart() == 0)
            break;
        for (int n = 0; n < STATE_FDS; n++)
            close(fds[n]);
        if (forget(&payload) < 0)
            _exit(1);
    }
    PyOS_AfterFork_Child();
    sigprocmask(SIG_SETMASK, &before, NULL);
    PyObject *result = Py_BuildValue("(y#iii)", payload.data, (Py_ssize_t)payload.used, fds[0], fds[1], fds[2]);
    munmap(payload.data, payload.size);
    return result;
}

PyDoc_STRVAR(newest_pid_doc, "newest_pid() -> int\n\nStart a process that ends at once; its number. Raises OSError.");

static PyObject *newest_pid(PyObject *module, PyObject *nothing)
{
    (void)module;
    (void)nothing;
    pid_t pid = vfork();
    if (pid == 0)
        _exit(0);
    if (pid < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
        ;
    return PyLong_FromLong(pid);
}

static PyMethodDef methods[] = {
    {"serve", serve, METH_O, serve_doc},
    {"next_state", next_state, METH_O, next_state_doc},
    {"newest_pid", newest_pid, METH_NOARGS, newest_pid_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_fork", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit__fork(void)
{
    page_size = sysconf(_SC_PAGESIZE);
    return PyModule_Create(&definition);
}
