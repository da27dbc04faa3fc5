#pragma once
#include <stddef.h>
#include <stdint.h>

int toy_write(const void * data, size_t offset, size_t size);
int toy_read(uint8_t * data, size_t size);
