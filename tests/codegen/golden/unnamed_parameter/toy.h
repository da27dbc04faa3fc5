#pragma once

int toy_sum(int, int b, const float *);
int toy_nothing(void);
