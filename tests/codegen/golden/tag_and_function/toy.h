#pragma once

enum toy_kind { TOY_KIND_PLAIN, TOY_KIND_FANCY };
struct toy_thing;

enum toy_kind toy_kind(const struct toy_thing * thing);
struct toy_thing * toy_thing(enum toy_kind kind);
