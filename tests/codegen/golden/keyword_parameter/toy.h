#pragma once

struct toy_lambda_params { int from; int is; };

int toy_copy(int from, const char * class, int lambda);
int toy_run(struct toy_lambda_params params);
