#pragma once

struct toy_node { const char * name; const int * const sizes; };

#define TOY_ANSWER  (6 * 7)
#define TOY_ALIAS   TOY_ANSWER
#define TOY_NAME    "toy"
#define TOY_MAX(a, b) ((a) > (b) ? (a) : (b))
#define TOY_NOTHING
static const int TOY_LENGTH = 12;

const struct toy_node * toy_next(const struct toy_node * const node);
void toy_fill(int * target, const int * source, const void * tag);
