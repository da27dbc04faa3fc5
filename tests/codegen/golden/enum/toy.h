#pragma once

enum toy_flag {
    TOY_FLAG_A     = 1 << 3,
    TOY_FLAG_B     = TOY_FLAG_A | 0x1u,
    TOY_FLAG_SAME  = 8,
    TOY_FLAG_BELOW = -1,
    TOY_FLAG_NEXT,
    TOY_FLAG_GAP   = 98,
    TOY_FLAG_COUNT,
};

enum { TOY_LIMIT = 1 << 4, TOY_MORE };

enum toy_flag toy_or(enum toy_flag a, enum toy_flag b);
int toy_flags(enum toy_flag * list);
