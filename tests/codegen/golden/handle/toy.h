#pragma once
#include <stddef.h>

struct toy_thing;
struct toy_part;
struct toy_copy { struct toy_thing * thing; int n; };

struct toy_thing * toy_thing_new(void);
void toy_thing_free(struct toy_thing * thing);

// a part is freed with the thing that it is of
struct toy_part * toy_part_new(const char * name, struct toy_thing * thing);
void toy_part_free(struct toy_thing * thing, struct toy_part * part);

struct toy_copy toy_copy_new(struct toy_thing * thing);
void toy_copy_free(struct toy_copy copy);
