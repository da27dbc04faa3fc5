// How many there are.
int toy_count(void);
const char * toy_name(struct toy_state * state, int index);
