#pragma once

/* The name of a colour.
 * Never NULL. */
const char * toy_name(int colour);
const char * toy_hint(const char * topic, const char * language); // NULL: none
char * toy_buffer(char * buffer);
