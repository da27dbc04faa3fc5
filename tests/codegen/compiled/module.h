#pragma once

#ifdef __cplusplus
extern "C" {
#endif

int toy_of_a_module(int a);

#ifdef __cplusplus
}
#endif
