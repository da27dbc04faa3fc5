// A table by tensor, for what is asked of every tensor of a graph.

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace ggml_cffi {

// One number after another goes into a hash.
inline uint64_t mixed(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
    return hash ^ (hash >> 29);
}

// Values by tensor. Open addressing: the nodes of a standard map would take longer than the rest of what
// is done with a graph.
template <class Value> class by_tensor {
    struct slot {
        const ggml_tensor * tensor = nullptr;
        Value               value{};
    };
    std::vector<slot> slots; // a power of two
    size_t            used = 0;

    static slot & place(std::vector<slot> & slots, const ggml_tensor * tensor) {
        const size_t mask = slots.size() - 1;
        size_t       i = mixed(0, (uintptr_t) tensor) & mask;
        while (slots[i].tensor && slots[i].tensor != tensor) {
            i = (i + 1) & mask;
        }
        return slots[i];
    }

    void grow() {
        std::vector<slot> larger(2 * slots.size());
        for (const slot & one : slots) {
            if (one.tensor) {
                place(larger, one.tensor) = one;
            }
        }
        slots.swap(larger);
    }

  public:
    explicit by_tensor(size_t expected) {
        size_t size = 64;
        while (size < 2 * expected) {
            size *= 2;
        }
        slots.resize(size);
    }

    bool has(const ggml_tensor * tensor) { return place(slots, tensor).tensor; }

    // The value of `tensor`, good until the next call, and whether there was none before.
    std::pair<Value &, bool> of(const ggml_tensor * tensor) {
        if (2 * (used + 1) > slots.size()) {
            grow();
        }
        slot &     found = place(slots, tensor);
        const bool fresh = !found.tensor;
        if (fresh) {
            found.tensor = tensor;
            ++used;
        }
        return { found.value, fresh };
    }
};

} // namespace ggml_cffi
