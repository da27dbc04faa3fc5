// ggml's RPC client waits for ever, for whoever it connects to and for each answer, takes every signal for
// the end of a connection, and lets two threads write into each other's messages. Its calls of the socket
// functions are replaced by these, in its library alone: they have time limits, know which worker they speak
// to and why it was lost, and let what a lost worker had be freed. ggml's RPC server can be stopped by them.

#include <arpa/inet.h>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <map>
#include <memory>
#include <mutex>
#include <netinet/in.h>
#include <poll.h>
#include <stdexcept>
#include <string>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

static void ggml_cffi_py_signals(void);

namespace ggml_cffi::net {

// ---- who is spoken to

using clock = std::chrono::steady_clock;

struct limits {
    int               connect_ms = 10'000;
    int               answer_ms = 300'000;
    bool              opening = false; // all that is done until the limits are set takes connect_ms together
    clock::time_point end{};
};

// The command by this name, RPC_CMD_FREE_BUFFER, in all releases so far.
constexpr uint8_t free_buffer = 4;
constexpr uint8_t device_count = 15; // RPC_CMD_DEVICE_COUNT, whose answer is believed
constexpr uint32_t most_devices = 1024;

// A connection of the client's. Its messages: a command of 1 byte, the size of what follows in 8, and that.
struct connection {
    const std::string name; // host:port
    limits            allowed;
    std::string       lost; // why, once it is
    std::timed_mutex  talking; // held by the thread whose message, or answer, is under way

    enum class part { command, size, content } next = part::command;
    uint64_t left = 0;         // bytes of the present part
    uint64_t size = 0;         // as far as it is sent
    bool     freeing = false;  // the message frees a buffer
    bool     counting = false; // or asks how many devices there are

    connection(std::string to, limits within) : name(std::move(to)), allowed(within) {}
};
using shared = std::shared_ptr<connection>;

inline fork_safe_mutex                    lock;
inline std::unordered_map<int, shared>    connections;  // by descriptor
inline std::map<std::string, limits>      limits_of;    // by host:port
inline std::unordered_set<int>            served;       // the server's: those that listen, and the clients'

// Connected to nobody: a forked child may have no descriptor free for another one.
inline int spare = -1;

// With the lock.
inline void keep_spare() {
    if (spare < 0) {
        spare = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    }
}

// What this thread speaks to, from a message's first byte to the next message or the end of its call.
static thread_local shared spoken_to;

// What ggml got no connection by: it closes it itself, or does not.
static thread_local int left_open = -1;

inline void end_exchange() {
    state.speaks = false;
    if (left_open >= 0) {
        ::close(std::exchange(left_open, -1));
    }
    if (spoken_to) {
        spoken_to->talking.unlock();
        spoken_to.reset();
    }
}

inline shared connection_of(int fd) {
    std::lock_guard<fork_safe_mutex> hold(lock);
    const auto found = connections.find(fd);
    return found == connections.end() ? nullptr : found->second;
}

// The call that goes on has failed over this worker.
inline void blame(const std::string & name, const std::string & why) {
    thread_details & d = details();
    d.worker = name + "\n" + why;
    d.worker_serial = state.serial;
}

// Nothing more goes through the connection: where a message broke off, nobody knows what the next byte is.
inline int lose(connection & c, int fd, const std::string & why) {
    if (c.lost.empty()) {
        c.lost = why;
        ::shutdown(fd, SHUT_RDWR);
    }
    blame(c.name, c.lost);
    errno = EPIPE;
    return -1;
}

// What came was no answer.
inline void on_abort(const char * message) {
    if (spoken_to && spoken_to->lost.empty() && std::strstr(message, "RPC server")) {
        spoken_to->lost = "its answer was malformed";
        std::lock_guard<fork_safe_mutex> hold(lock);
        for (const auto & [fd, c] : connections) {
            if (c == spoken_to) {
                ::shutdown(fd, SHUT_RDWR);
            }
        }
        blame(spoken_to->name, spoken_to->lost);
    }
}

// ---- waiting

struct deadline {
    const bool              none;
    const clock::time_point end;
    explicit deadline(int ms) : none(ms < 0), end(clock::now() + std::chrono::milliseconds(ms < 0 ? 0 : ms)) {}
    explicit deadline(clock::time_point at) : none(false), end(at) {}
    int left() const {
        if (none) {
            return -1;
        }
        const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(end - clock::now()).count();
        return ms < 0 ? 0 : (int) ms + 1;
    }
};

// Whom this thread waits for while a signal's Python function runs, which must not speak to it; one
// function may be interrupted by another one.
struct waiting {
    const connection *    with;
    const waiting * const before;
};
static thread_local const waiting * waits = nullptr;

inline bool waited_for(const connection * c) {
    for (const waiting * each = waits; each; each = each->before) {
        if (each->with == c) {
            return true;
        }
    }
    return false;
}

// A signal has come: its Python function may raise, which ends the waiting.
inline bool interrupted() {
    if (!has_python()) {
        return false;
    }
    const waiting now{ spoken_to.get(), waits };
    shared        mine = std::move(spoken_to);
    bool          raised;
    waits = &now;
    {
        state.speaks = false;
        python_entry entry;
        ggml_cffi_py_signals();
        raised = entry.failed();
    }
    spoken_to = std::move(mine);
    state.speaks = spoken_to != nullptr;
    waits = now.before;
    return raised;
}

// Wait until no other thread speaks to it; false where a signal has ended that. What frees a buffer waits
// all the same: nobody would free it later.
inline bool begin_exchange(const shared & with, bool freeing) {
    end_exchange();
    while (!with->talking.try_lock_for(std::chrono::milliseconds(50))) {
        if (!freeing && interrupted()) {
            return false;
        }
    }
    spoken_to = with;
    state.speaks = true;
    return true;
}

enum class event { ready, too_late, interrupt, stop };

// Until something can be done with `fd`, or can be read from `stop` (-1: nothing).
inline event wait_for(int fd, short what, const deadline & until, int stop = -1) {
    for (;;) {
        pollfd    both[2] = { { fd, what, 0 }, { stop, POLLIN, 0 } };
        const int n = ::poll(both, stop < 0 ? 1 : 2, until.left());
        if (n < 0 && errno == EINTR) {
            if (stop < 0 && interrupted()) {
                return event::interrupt;
            }
        } else if (n > 0 && stop >= 0 && both[1].revents) {
            return event::stop;
        } else if (n) {
            return event::ready; // errors are found by what is done then
        } else {
            return event::too_late;
        }
    }
}

inline std::string within(int ms) {
    std::string text = std::to_string(ms / 1000.0);
    text.erase(text.find_last_not_of('0') + 1);
    return " within " + (text.back() == '.' ? text.substr(0, text.size() - 1) : text) + " s";
}

// How long to go on for: to be connected, or for an answer.
inline deadline until(const limits & allowed, int ms) { return allowed.opening ? deadline(allowed.end) : deadline(ms); }

// As they are now: another thread may set them.
inline limits allowed_of(const connection & c) {
    std::lock_guard<fork_safe_mutex> hold(lock);
    return c.allowed;
}

inline deadline until(const connection & c) {
    const limits allowed = allowed_of(c);
    return until(allowed, allowed.answer_ms);
}

inline std::string in_time(const connection & c) {
    const limits allowed = allowed_of(c);
    return within(allowed.opening ? allowed.connect_ms : allowed.answer_ms);
}

// ---- the server's side: a thread that serves, until `stop` can be read

struct serving {
    int stop = -1;
    int ready = -1;    // is written the port to, once it listens
    int listener = -1; // ggml forgets it where the port cannot be had
};
static thread_local serving here;

// ---- what ggml calls

// Leave the guarded call, where it can be left: ggml looks at few places whether it has got a connection,
// and goes on without one.
inline void give_up(const std::string & message) {
    const region * inside = state.inside;
    if (inside && inside->how != leave::by_jump && !is_freeing(inside)) {
        throw abort_error{ message };
    }
}

inline std::string address_of(const sockaddr * address) {
    const auto * in = (const sockaddr_in *) address;
    char         text[INET_ADDRSTRLEN] = "?";
    ::inet_ntop(AF_INET, &in->sin_addr, text, sizeof text);
    return std::string(text) + ":" + std::to_string(ntohs(in->sin_port));
}

// Its descriptor is of this program alone, not of those that another thread starts at this moment.
inline int socket(int domain, int type, int protocol) {
    const int fd = ::socket(domain, type | SOCK_CLOEXEC, protocol);
    if (fd >= 0 && here.ready >= 0) {
        here.listener = fd;
    }
    return fd;
}

inline int connect(int fd, const sockaddr * address, socklen_t size) {
    if (!address || address->sa_family != AF_INET) {
        return ::connect(fd, address, size);
    }
    const std::string name = address_of(address);
    limits            allowed;
    {
        std::lock_guard<fork_safe_mutex> hold(lock);
        const auto found = limits_of.find(name);
        if (found != limits_of.end()) {
            allowed = found->second;
        }
    }
    const int flags = ::fcntl(fd, F_GETFL);
    ::fcntl(fd, F_SETFL, flags | O_NONBLOCK);
    int error = ::connect(fd, address, size) ? errno : 0;
    if (error == EINPROGRESS || error == EINTR) {
        switch (wait_for(fd, POLLOUT, until(allowed, allowed.connect_ms))) {
            case event::ready: {
                socklen_t length = sizeof error;
                ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
                break;
            }
            case event::too_late: error = ETIMEDOUT; break;
            default: error = EINTR;
        }
    }
    if (error) {
        blame(name, error == ETIMEDOUT ? "no connection" + within(allowed.connect_ms) : std::strerror(error));
        left_open = fd;
        state.speaks = true;
        give_up("no connection to " + name);
        errno = error;
        return -1;
    }
    ::fcntl(fd, F_SETFL, flags);
    std::lock_guard<fork_safe_mutex> hold(lock);
    keep_spare();
    connections[fd] = std::make_shared<connection>(name, allowed);
    return 0;
}

// Follows the message that `size` bytes of are on their way.
inline void follow(connection & c, const void * data, size_t size) {
    const auto * bytes = (const uint8_t *) data;
    while (size) {
        if (c.next == connection::part::command) {
            c.freeing = *bytes == free_buffer;
            c.counting = *bytes == device_count;
            c.next = connection::part::size;
            c.left = 8;
            c.size = 0;
            ++bytes;
            --size;
            continue;
        }
        const size_t n = std::min<uint64_t>(size, c.left);
        if (c.next == connection::part::size) {
            std::memcpy((uint8_t *) &c.size + (8 - c.left), bytes, n);
        }
        bytes += n;
        size -= n;
        c.left -= n;
        if (!c.left && c.next == connection::part::size && c.size) {
            c.next = connection::part::content;
            c.left = c.size;
        } else if (!c.left) {
            c.next = connection::part::command;
        }
    }
}

inline ssize_t send(int fd, const void * data, size_t size, int flags) {
    flags |= MSG_NOSIGNAL;
    const shared c = connection_of(fd);
    if (!c) { // the server's
        for (;;) {
            const ssize_t n = ::send(fd, data, size, flags | MSG_DONTWAIT);
            if (n >= 0 || (errno != EINTR && errno != EAGAIN && errno != EWOULDBLOCK)) {
                return n;
            }
            if (wait_for(fd, POLLOUT, deadline(-1), here.stop) == event::stop) {
                errno = ECANCELED;
                return -1;
            }
        }
    }
    if (waited_for(c.get())) {
        blame(c->name, "its answer to another call is waited for on this thread");
        errno = EBUSY;
        return -1;
    }
    const bool mine = c == spoken_to;
    if (!mine || c->next == connection::part::command) {
        if (!begin_exchange(c, *(const uint8_t *) data == free_buffer)) {
            errno = EINTR; // nothing is sent: it is not lost
            return -1;
        }
    }
    if (!c->lost.empty() && !mine) {
        c->next = connection::part::command; // where another message broke off
    }
    if (!c->lost.empty() && c->next == connection::part::command && *(const uint8_t *) data != free_buffer) {
        return lose(*c, fd, c->lost);
    }
    size_t sent = 0;
    while (c->lost.empty() && sent < size) {
        const ssize_t n = ::send(fd, (const char *) data + sent, size - sent, flags | MSG_DONTWAIT);
        if (n >= 0) {
            sent += (size_t) n;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            const event happened = wait_for(fd, POLLOUT, until(*c));
            if (happened == event::interrupt) {
                lose(*c, fd, "the wait for it was interrupted");
            } else if (happened == event::too_late) {
                lose(*c, fd, "it took nothing" + in_time(*c));
            }
        } else if (errno != EINTR) {
            lose(*c, fd, std::strerror(errno));
        }
    }
    if (sent < size && c->next == connection::part::command) {
        c->freeing = *(const uint8_t *) data == free_buffer;
    }
    if (sent < size && !c->freeing) {
        c->next = connection::part::command;
        return lose(*c, fd, c->lost);
    }
    follow(*c, data, size);
    return (ssize_t) size; // or to a worker that is lost, and has freed it with all that it had
}

inline ssize_t recv(int fd, void * data, size_t size, int flags) {
    const shared c = connection_of(fd);
    if (!c) { // the server's
        for (;;) {
            if (here.stop >= 0 && wait_for(fd, POLLIN, deadline(-1), here.stop) == event::stop) {
                errno = ECANCELED;
                return -1;
            }
            const ssize_t n = ::recv(fd, data, size, flags);
            if (n >= 0 || errno != EINTR) {
                return n;
            }
        }
    }
    if (c->lost.empty()) {
        uint32_t   count = 0; // of devices: ggml makes as many, whatever that takes, so it is looked at as a whole
        size_t     have = 0;
        const bool counts = c->counting && size == sizeof count;
        for (;;) {
            const ssize_t n = ::recv(fd, (char *) data + have, size - have, flags | MSG_DONTWAIT);
            if (n > 0 && counts) {
                have += (size_t) n;
                if (have < size) {
                    continue;
                }
                std::memcpy(&count, data, sizeof count);
                if (count > most_devices) {
                    return lose(*c, fd, "it claims to have more than " + std::to_string(most_devices) + " devices");
                }
                return (ssize_t) size;
            }
            if (n > 0) {
                return n;
            }
            if (!n) {
                lose(*c, fd, "it has closed the connection");
                break;
            }
            if (errno == EAGAIN || errno == EWOULDBLOCK) {
                const event happened = wait_for(fd, POLLIN, until(*c));
                if (happened == event::ready) {
                    continue;
                }
                lose(*c, fd, happened == event::interrupt ? "the wait for it was interrupted"
                                                          : "no answer" + in_time(*c));
                break;
            }
            if (errno != EINTR) {
                lose(*c, fd, std::strerror(errno));
                break;
            }
        }
    }
    if (c->freeing && size <= 8) { // an empty answer
        std::memset(data, 0, size);
        return (ssize_t) size;
    }
    return lose(*c, fd, c->lost);
}

// What a compiler makes of recv() where it knows how large `data` is.
inline ssize_t checked_recv(int fd, void * data, size_t size, size_t, int flags) { return recv(fd, data, size, flags); }

inline int close(int fd) {
    if (fd == left_open) {
        left_open = -1;
    }
    if (fd == here.listener) {
        here.listener = -1;
    }
    {
        std::lock_guard<fork_safe_mutex> hold(lock);
        connections.erase(fd);
        served.erase(fd);
    }
    return ::close(fd);
}

inline int listen(int fd, int) {
    const int status = ::listen(fd, 16); // one is served at a time: others wait
    sockaddr_in address{};
    socklen_t   size = sizeof address;
    if (!status && here.ready >= 0 && !::getsockname(fd, (sockaddr *) &address, &size)) {
        const uint64_t port = ntohs(address.sin_port);
        {
            std::lock_guard<fork_safe_mutex> hold(lock);
            keep_spare();
            served.insert(fd);
        }
        (void) !::write(here.ready, &port, sizeof port);
    }
    return status;
}

inline int accept(int fd, sockaddr * address, socklen_t * size) {
    for (;;) {
        if (here.stop >= 0 && wait_for(fd, POLLIN, deadline(-1), here.stop) == event::stop) {
            errno = ECANCELED;
            return -1;
        }
        const int client = ::accept4(fd, address, size, SOCK_CLOEXEC);
        // who has gone again meanwhile is no reason to stop serving
        if (client >= 0) {
            std::lock_guard<fork_safe_mutex> hold(lock);
            served.insert(client);
            return client;
        }
        if (errno != EINTR && errno != ECONNABORTED) {
            return client;
        }
    }
}

// ---- forks

// The child has copies of all sockets. They are none of its own: what it says would run into the parent's
// messages, and a connection does not end before all copies are closed. So each becomes a socket that is
// connected to nobody; what closes it later closes that.
inline void let_go_in_child() {
    if (connections.empty() && served.empty()) {
        return;
    }
    keep_spare();
    for (auto & [fd, c] : connections) {
        const shared anew = std::make_shared<connection>(c->name, c->allowed);
        anew->lost = "it is connected to the process that was forked";
        c = anew; // a thread of the parent's may have held the other one's mutex
        ::dup3(spare, fd, O_CLOEXEC);
    }
    for (const int fd : served) {
        ::dup3(spare, fd, O_CLOEXEC);
    }
    served.clear();
}

// ---- in the place of libc's

struct replacement {
    const char * name;
    void *       with;
};
inline const replacement replacements[] = {
    { "connect", (void *) connect }, { "send", (void *) send },     { "recv", (void *) recv },
    { "close", (void *) close },     { "listen", (void *) listen }, { "accept", (void *) accept },
    { "__recv_chk", (void *) checked_recv }, { "socket", (void *) socket },
};

inline bool names_function(uint64_t relocation) {
#if defined(__x86_64__)
    return relocation == R_X86_64_JUMP_SLOT || relocation == R_X86_64_GLOB_DAT;
#else
    return relocation == R_AARCH64_JUMP_SLOT || relocation == R_AARCH64_GLOB_DAT;
#endif
}

struct read_only {
    uintptr_t base;
    uintptr_t begin, end;
};

// The loader has made the table of functions of a library read-only, or not.
inline int find_read_only(dl_phdr_info * info, size_t, void * data) {
    auto & found = *(read_only *) data;
    if (info->dlpi_addr != found.base) {
        return 0;
    }
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        if (info->dlpi_phdr[i].p_type == PT_GNU_RELRO) {
            found.begin = found.base + info->dlpi_phdr[i].p_vaddr;
            found.end = found.begin + info->dlpi_phdr[i].p_memsz;
        }
    }
    return 1;
}

// Let the library that has `address` call the functions above. Throws where that cannot be: half of them
// would be worse than none.
inline void replace_in(const void * address) {
    Dl_info    info;
    link_map * map = nullptr;
    if (!dladdr1(address, &info, (void **) &map, RTLD_DL_LINKMAP) || !map) {
        throw std::runtime_error("the library of ggml's RPC is not found");
    }
    uintptr_t symbols = 0, strings = 0, tables[2] = {}, sizes[2] = {};
    for (const ElfW(Dyn) * d = map->l_ld; d->d_tag != DT_NULL; ++d) {
        switch (d->d_tag) {
            case DT_SYMTAB: symbols = d->d_un.d_ptr; break;
            case DT_STRTAB: strings = d->d_un.d_ptr; break;
            case DT_JMPREL: tables[0] = d->d_un.d_ptr; break;
            case DT_PLTRELSZ: sizes[0] = d->d_un.d_val; break;
            case DT_RELA: tables[1] = d->d_un.d_ptr; break;
            case DT_RELASZ: sizes[1] = d->d_un.d_val; break;
        }
    }
    read_only fixed{ map->l_addr, 0, 0 };
    dl_iterate_phdr(find_read_only, &fixed);
    const uintptr_t page = (uintptr_t) sysconf(_SC_PAGESIZE);
    fixed.begin &= ~(page - 1); // as the loader does it
    fixed.end &= ~(page - 1);
    std::vector<std::pair<void **, void *>> slots;
    for (int t = 0; t < 2 && symbols && strings; ++t) {
        const auto * entries = (const ElfW(Rela) *) tables[t];
        for (size_t i = 0; tables[t] && i < sizes[t] / sizeof(ElfW(Rela)); ++i) {
            if (!names_function(ELF64_R_TYPE(entries[i].r_info))) {
                continue;
            }
            const auto & symbol = ((const ElfW(Sym) *) symbols)[ELF64_R_SYM(entries[i].r_info)];
            for (const replacement & r : replacements) {
                if (std::strcmp((const char *) strings + symbol.st_name, r.name)) {
                    continue;
                }
                slots.push_back({ (void **) (map->l_addr + entries[i].r_offset), r.with });
            }
        }
    }
    const auto protect = [&](int how) {
        return fixed.begin >= fixed.end || !mprotect((void *) fixed.begin, fixed.end - fixed.begin, how);
    };
    if (slots.empty() || !protect(PROT_READ | PROT_WRITE)) {
        throw std::runtime_error("the socket functions of ggml's RPC cannot be replaced");
    }
    for (const auto & [slot, with] : slots) {
        __atomic_store_n(slot, with, __ATOMIC_RELEASE);
    }
    protect(PROT_READ);
}

// The same once for each library; modules may be loaded anew.
inline fork_safe_mutex           once;
inline std::atomic<const void *> done{ nullptr };

inline void replace_once(const void * address) {
    if (done.load(std::memory_order_acquire) == address) {
        return;
    }
    std::lock_guard<fork_safe_mutex> hold(once);
    if (done.load(std::memory_order_relaxed) != address) {
        replace_in(address);
        done.store(address, std::memory_order_release);
    }
}

} // namespace ggml_cffi::net

// How long a worker at host:port may take from now on, for being connected to and for each answer; in seconds.
// Where it is opened, both together, from now until they are set anew.
static bool ggml_cffi_net_limits(const char * name, double connect, double answer, bool opening) try {
    using namespace ggml_cffi::net;
    limits given{ (int) (connect * 1000), (int) (answer * 1000) };
    given.opening = opening;
    given.end = clock::now() + std::chrono::milliseconds(given.connect_ms);
    std::lock_guard<ggml_cffi::fork_safe_mutex> hold(ggml_cffi::net::lock);
    limits_of[name] = given;
    for (auto & [fd, c] : connections) {
        if (c->allowed.opening && c->name == name) {
            c->allowed = given;
        }
    }
    return true;
} catch (const std::bad_alloc &) {
    return false;
}

// This thread is going to serve until `stop` can be read from; the port is written to `ready`. -1: it has.
static void ggml_cffi_net_serve(int stop, int ready) {
    using namespace ggml_cffi::net;
    if (here.listener >= 0) {
        ggml_cffi::net::close(here.listener);
    }
    here = { stop, ready, -1 };
}
