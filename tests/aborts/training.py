"""Data sets and optimisation contexts."""

from __future__ import annotations

from _compute import F32, Arena

from ggml_cffi import capi, ffi

from ._site import TRAINING, site
from .scheduling import scheduler

F16 = capi.GGML_TYPE_F16
MSE = capi.GGML_OPT_LOSS_TYPE_MEAN_SQUARED_ERROR


class Model:
    """y = w * x for data of one number each, two in a batch."""

    def __init__(self, arena: Arena, static: bool = True, **parameters):
        self.arena = arena
        self.ctx, weights = arena.context(1 << 24), arena.context()
        self.weight = capi.ggml_new_tensor_2d(weights, F32, 1, 1)
        self.inputs = capi.ggml_new_tensor_2d(weights, F32, 1, 2)
        capi.ggml_set_param(self.weight)
        arena.allocate(weights)
        self.outputs = capi.ggml_mul_mat(self.ctx, self.weight, self.inputs)
        graphs = {"ctx_compute": self.ctx, "inputs": self.inputs, "outputs": self.outputs}
        self.context = capi.ggml_opt_init(
            backend_sched=scheduler(arena, size=256),
            loss_type=MSE,
            **{**(graphs if static else {}), **parameters},
        )
        arena.callback(capi.ggml_opt_free, self.context)

    def alloc(self, backward=False):
        capi.ggml_opt_alloc(self.context, backward)

    def graph(self):
        graph = capi.ggml_new_graph_custom(self.ctx, 256, True)
        capi.ggml_build_forward_expand(graph, self.outputs)
        return graph


def dataset(arena, ne=1, ne_label=1, ndata=8, ndata_shard=1, type=F32):
    made = capi.ggml_opt_dataset_init(type, F32, ne, ne_label, ndata, ndata_shard)
    arena.callback(capi.ggml_opt_dataset_free, made)
    for tensor in (capi.ggml_opt_dataset_data(made), capi.ggml_opt_dataset_labels(made)):
        if tensor is not None:
            capi.ggml_set_zero(tensor)
    return made


@site(TRAINING, "ggml_opt_dataset_init", "ne_datapoint > 0")
def data_of_nothing(arena):
    dataset(arena, ne=0)


@site(TRAINING, "ggml_opt_dataset_init", "ne_label >= 0")
def labels_of_less_than_nothing(arena):
    dataset(arena, ne_label=-1)


@site(TRAINING, "ggml_opt_dataset_init", "ndata > 0")
def no_data(arena):
    dataset(arena, ndata=0, ndata_shard=0)


@site(TRAINING, "ggml_opt_dataset_init", "ndata_shard > 0")
def shards_of_nothing(arena):
    dataset(arena, ndata_shard=0)


@site(TRAINING, "ggml_opt_dataset_shuffle", "idata <= dataset->ndata")
def more_shuffled_than_there_are(arena):
    capi.ggml_opt_dataset_shuffle(Model(arena).context, dataset(arena), 9)


@site(TRAINING, "ggml_opt_dataset_shuffle", "idata % dataset->ndata_shard == 0")
def part_of_a_shard_shuffled(arena):
    capi.ggml_opt_dataset_shuffle(Model(arena).context, dataset(arena, ndata_shard=2), 3)


@site(TRAINING, "ggml_opt_dataset_get_batch", "(labels_batch == nullptr) == (dataset->labels")
def batch_without_its_labels(arena):
    capi.ggml_opt_dataset_get_batch(dataset(arena), arena.weight(1, 2), None, 0)


@site(TRAINING, "ggml_opt_dataset_get_batch", "data_batch->type == dataset->data->type")
def batch_of_another_type(arena):
    batch = arena.weight(1, 2, type=F16)
    capi.ggml_opt_dataset_get_batch(dataset(arena), batch, arena.weight(1, 2), 0)


@site(TRAINING, "ggml_opt_dataset_get_batch", "nb_data_batch % dataset->nbs_data == 0")
def batch_of_part_of_a_shard(arena):
    data = dataset(arena, ndata_shard=4)
    capi.ggml_opt_dataset_get_batch(data, arena.weight(1, 2), arena.weight(1, 2), 0)


@site(TRAINING, "ggml_opt_dataset_get_batch", "nb_labels_batch == shards_per_batch")
def batch_with_other_labels(arena):
    capi.ggml_opt_dataset_get_batch(dataset(arena), arena.weight(1, 2), arena.weight(1, 3), 0)


@site(TRAINING, "ggml_opt_dataset_get_batch", "(ibatch + 1)*shards_per_batch")
def batch_behind_the_last(arena):
    capi.ggml_opt_dataset_get_batch(dataset(arena), arena.weight(1, 2), arena.weight(1, 2), 4)


@site(TRAINING, "ggml_opt_init", "result->opt_period >= 1")
def step_after_no_batch(arena):
    Model(arena, opt_period=0)


@site(TRAINING, "ggml_opt_init", "!result->inputs")
def inputs_without_static_graphs(arena):
    Model(arena, static=False, inputs=arena.tensor(1, 2))


@site(TRAINING, "ggml_opt_init", "result->outputs")
def no_outputs(arena):
    Model(arena, outputs=ffi.NULL)


@site(TRAINING, "ggml_opt_prepare_alloc", "!opt_ctx->static_graphs")
def graph_beside_a_static_one(arena):
    model = Model(arena)
    capi.ggml_opt_prepare_alloc(
        model.context, model.ctx, model.graph(), model.inputs, model.outputs
    )


@site(TRAINING, "ggml_opt_alloc", "!opt_ctx->eval_ready")
def allocation_twice(arena):
    model = Model(arena)
    model.alloc()
    model.alloc()


@site(TRAINING, "ggml_opt_alloc", "no compute context set")
def allocation_without_a_graph(arena):
    Model(arena, static=False).alloc()


@site(TRAINING, "ggml_opt_eval", "opt_ctx->eval_ready")
def evaluation_without_allocation(arena):
    capi.ggml_opt_eval(Model(arena).context, None)


@site(TRAINING, "ggml_opt_eval", "opt_pars.adamw.alpha > 0.0f")
def step_of_no_size(arena):
    model = Model(arena, get_opt_pars=lambda: {"adamw": {"alpha": 0.0}})
    model.alloc(backward=True)
    capi.ggml_opt_eval(model.context, None)


@site(TRAINING, "ggml_opt_epoch", "ggml_opt_epoch requires static graphs")
def epoch_without_static_graphs(arena):
    capi.ggml_opt_epoch(Model(arena, static=False).context, dataset(arena), None, None, 8)


@site(TRAINING, "ggml_opt_epoch", "data->ne[0] == inputs->ne[0]")
def epoch_of_other_data(arena):
    capi.ggml_opt_epoch(Model(arena).context, dataset(arena, ne=2), None, None, 8)


@site(TRAINING, "ggml_opt_epoch", "idata_split % ndata_batch == 0")
def split_inside_a_batch(arena):
    capi.ggml_opt_epoch(Model(arena).context, dataset(arena), None, None, 3)


@site(TRAINING, "ggml_opt_eval", "result->opt_period == opt_ctx->opt_period")
def result_of_another_model(arena):
    result = capi.ggml_opt_result_init()
    arena.callback(capi.ggml_opt_result_free, result)
    for period in (1, 2):
        model = Model(arena, opt_period=period)
        model.alloc()
        capi.ggml_opt_eval(model.context, result)
