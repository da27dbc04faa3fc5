"""Building graphs and views."""

from __future__ import annotations

from ggml_cffi import capi

from ._site import GRAPH, VIEW, site

I32 = capi.GGML_TYPE_I32

# ---- graph building


@site(GRAPH, "ggml_mul_mat", "ggml_can_mul_mat(a, b)")
def product_of_matrices_that_do_not_fit(arena):
    ctx = arena.context()
    capi.ggml_mul_mat(ctx, arena.tensor(4, 3), arena.tensor(5, 3))


@site(GRAPH, "ggml_mul_mat", "!ggml_is_transposed(a)")
def product_with_a_transposed_matrix(arena):
    ctx = arena.context()
    turned = capi.ggml_transpose(ctx, arena.tensor(3, 4))
    capi.ggml_mul_mat(ctx, turned, arena.tensor(4, 3))


@site(GRAPH, "ggml_add", "ggml_can_repeat(b, a)")
def sum_of_other_shapes(arena):
    capi.ggml_add(arena.context(), arena.tensor(4, 3), arena.tensor(3, 3))


@site(GRAPH, "ggml_concat", "dim >= 0 && dim < GGML_MAX_DIMS")
def concatenation_along_a_fifth_axis(arena):
    capi.ggml_concat(arena.context(), arena.tensor(4), arena.tensor(4), 4)


@site(GRAPH, "ggml_concat", "a->type == b->type")
def concatenation_of_two_types(arena):
    capi.ggml_concat(arena.context(), arena.tensor(4), arena.tensor(4, type=I32), 0)


@site(GRAPH, "ggml_get_rows", "b->type == GGML_TYPE_I32")
def rows_by_floats(arena):
    capi.ggml_get_rows(arena.context(), arena.tensor(4, 3), arena.tensor(2))


@site(GRAPH, "ggml_soft_max_ext", "mask->ne[0] == a->ne[0]")
def soft_max_with_a_narrow_mask(arena):
    capi.ggml_soft_max_ext(arena.context(), arena.tensor(8, 2), arena.tensor(4, 2), 1.0, 0.0)


@site(GRAPH, "ggml_rope", "a->ne[2] == b->ne[0]")
def rope_with_too_few_positions(arena):
    positions = arena.tensor(2, type=I32)
    capi.ggml_rope(arena.context(), arena.tensor(8, 2, 3), positions, 8, 0)


@site(GRAPH, "ggml_mul_mat_set_prec", "a->op == GGML_OP_MUL_MAT")
def precision_of_no_product(arena):
    capi.ggml_mul_mat_set_prec(arena.tensor(4), capi.GGML_PREC_F32)


@site(GRAPH, "ggml_upscale", "scale_factor > 1")
def upscale_by_one(arena):
    capi.ggml_upscale(arena.context(), arena.tensor(4, 4), 1, capi.GGML_SCALE_MODE_NEAREST)


@site(GRAPH, "ggml_build_forward_expand", "cgraph->n_nodes < cgraph->size")
def more_nodes_than_a_graph_holds(arena):
    ctx = arena.context()
    graph = capi.ggml_new_graph_custom(ctx, 4, False)
    node = arena.tensor(4)
    for _ in range(6):
        node = capi.ggml_sqr(ctx, node)
    capi.ggml_build_forward_expand(graph, node)


@site(GRAPH, "ggml_graph_node", "i < cgraph->n_nodes")
def node_that_is_not_there(arena):
    capi.ggml_graph_node(capi.ggml_new_graph(arena.context()), 3)


# ---- views


@site(VIEW, "ggml_reshape_2d", "ggml_nelements(a) == ne0*ne1")
def reshape_to_another_number(arena):
    capi.ggml_reshape_2d(arena.context(), arena.tensor(12), 5, 3)


@site(VIEW, "ggml_reshape_1d", "ggml_is_contiguous(a)")
def reshape_of_a_transposed_matrix(arena):
    ctx = arena.context()
    capi.ggml_reshape_1d(ctx, capi.ggml_transpose(ctx, arena.tensor(4, 3)), 12)


@site(VIEW, "ggml_permute", "axis3 >= 0 && axis3 < GGML_MAX_DIMS")
def permutation_with_a_fifth_axis(arena):
    capi.ggml_permute(arena.context(), arena.tensor(4, 3), 0, 1, 2, 4)


@site(VIEW, "ggml_permute", "axis0 != axis1")
def permutation_with_an_axis_twice(arena):
    capi.ggml_permute(arena.context(), arena.tensor(4, 3), 1, 1, 2, 3)


@site(VIEW, "ggml_cpy", "ggml_nelements(a) == ggml_nelements(b)")
def copy_of_another_number(arena):
    capi.ggml_cpy(arena.context(), arena.tensor(4), arena.tensor(5))


@site(VIEW, "ggml_cont_2d", "ggml_nelements(a) == (ne0*ne1*ne2*ne3)")
def contiguous_copy_of_another_number(arena):
    capi.ggml_cont_2d(arena.context(), arena.tensor(12), 5, 3)


@site(VIEW, "ggml_backend_view_init", "tensor->view_src != NULL")
def view_init_of_no_view(arena):
    capi.ggml_backend_view_init(arena.tensor(4))


@site(VIEW, "ggml_backend_view_init", "tensor->view_src->buffer != NULL")
def view_init_before_its_source(arena):
    capi.ggml_backend_view_init(capi.ggml_view_tensor(arena.context(), arena.tensor(4)))
