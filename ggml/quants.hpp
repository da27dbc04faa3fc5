// Quantisation to Q8_0, with the bits of ggml's own, which rounds number by number in a function of the C library.

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace ggml_cffi {

// What roundf gives (half away from zero) of what fits into 32 bits. Added is the largest float below a half, and
// truncation follows: a half itself comes to 1, for the sum is rounded up, and the float below a half stays below.
inline int rounded(float x) {
    return (int) (x + std::copysign(0x1.fffffep-2f, x));
}

} // namespace ggml_cffi

// Whole blocks (block_q8_0 of ggml-common.h): a scale in half precision, and 32 integers, the largest 127.
static void ggml_cffi_quantize_q8_0(const float * numbers, void * blocks, int64_t n) {
    constexpr int   block = 32;
    constexpr float most = 127;
    auto *          to = (unsigned char *) blocks;
    for (; n >= block; n -= block, numbers += block) {
        float largest = 0;
        bool  finite = true;
        for (int i = 0; i < block; ++i) {
            const float size = std::fabs(numbers[i]);
            largest = largest > size ? largest : size;
            finite &= size <= FLT_MAX;
        }
        const float scale = largest / most;
        const float by = scale != 0 ? 1 / scale : 0;
        if (!finite || by > FLT_MAX) { // what an integer is then, C leaves to whoever has compiled ggml
            ggml_quantize_chunk(GGML_TYPE_Q8_0, numbers, to, 0, 1, block, nullptr);
            to += sizeof(ggml_fp16_t) + block;
            continue;
        }
        const ggml_fp16_t half = ggml_fp32_to_fp16(scale);
        int8_t            integers[block];
        for (int i = 0; i < block; ++i) {
            integers[i] = (int8_t) ggml_cffi::rounded(numbers[i] * by);
        }
        std::memcpy(to, &half, sizeof(half));
        std::memcpy(to + sizeof(half), integers, sizeof(integers));
        to += sizeof(half) + sizeof(integers);
    }
}
