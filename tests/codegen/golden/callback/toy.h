#pragma once
#include <stdbool.h>
#include <stddef.h>

struct toy_pair { int low, high; };
struct toy_machine;

typedef bool            (*toy_visit_t)(int step, const char * label, void * user_data);
typedef struct toy_pair (*toy_bounds_t)(int n, void * data);
typedef void            (*toy_bell_t)(const char * text);
typedef int             (*toy_inner_t)(int x);

int toy_walk(int steps, toy_visit_t visit, void * user_data);
struct toy_machine * toy_machine_new(toy_bounds_t bounds, void * data);
void toy_machine_listen(struct toy_machine * machine, toy_visit_t visit, void * user_data);
void toy_machine_reset(struct toy_machine * machine);
void toy_machine_free(struct toy_machine * machine);
void toy_set_bell(toy_bell_t bell);
toy_inner_t toy_inner(void);
