struct ggml_context;
struct ggml_tensor;

enum toy_order {
    TOY_ORDER_UP,
    TOY_ORDER_DOWN,
};

// twice a
struct ggml_tensor * toy_twice(struct ggml_context * ctx, struct ggml_tensor * a);

// all have defaults
struct ggml_tensor * toy_sort(struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * mask, enum toy_order order, float scale);

// n has none, behind one that has
struct ggml_tensor * toy_turn(struct ggml_context * ctx, struct ggml_tensor * a, struct ggml_tensor * c, int n, float base);

// the result has two axes
struct ggml_tensor * toy_shape_2d(struct ggml_context * ctx, struct ggml_tensor * a, long long ne0, long long ne1);

// no operand: the context has to be named
struct ggml_tensor * toy_range(struct ggml_context * ctx, float stop, float step);

// several operands
struct ggml_tensor * toy_join(struct ggml_context * ctx, struct ggml_tensor ** parts, int n_parts);

// makes a tensor, but is no operation
struct ggml_tensor * toy_new(struct ggml_context * ctx, int n);

// no context: none either
struct ggml_tensor * toy_view(struct ggml_tensor * a);

// writes in a
struct ggml_tensor * toy_limit(struct ggml_context * ctx, struct ggml_tensor * a, float most);
