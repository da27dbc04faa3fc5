// Large pages for large memory, as NumPy asks for them: less to do for the kernel when the memory is
// first written, and for the processor at every copy.

#include <cerrno>
#include <cstdint>
#include <sys/mman.h>
#include <unistd.h>

// Of memory that nobody has written yet. It is an advice: nothing is lost where it is not taken.
static void ggml_cffi_use_large_pages(void * memory, size_t size) {
#ifdef MADV_HUGEPAGE
    const auto   page = (uintptr_t) sysconf(_SC_PAGESIZE);
    const auto   start = ((uintptr_t) memory + page - 1) / page * page;
    const auto   end = ((uintptr_t) memory + size) / page * page;
    const size_t least = 4 << 20;
    if (memory && size >= least && start < end) {
        const int before = errno;
        madvise((void *) start, end - start, MADV_HUGEPAGE);
        errno = before;
    }
#else
    (void) memory, (void) size;
#endif
}
