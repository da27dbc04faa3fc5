"""The functions of capi that are written by hand: their annotations say `override`, and why.

Each calls the guarded C function of its name, as the generated ones do, and raises as they do.
"""

from __future__ import annotations

from .allocators import (
    ggml_backend_sched_reserve_size,
    ggml_gallocr_reserve_n,
    ggml_gallocr_reserve_n_size,
)
from .devices import (
    ggml_backend_cuda_get_device_description,
    ggml_backend_load,
    ggml_backend_load_all,
    ggml_backend_load_all_from_path,
    ggml_backend_meta_device,
    ggml_backend_vk_get_device_description,
)
from .files import gguf_get_meta_data, gguf_set_arr_data, gguf_set_tensor_data
from .numbers import ggml_quantize_chunk, ggml_rope_yarn_corr_dims
from .plans import ggml_graph_compute
from .process import ggml_log_get, ggml_log_set, ggml_set_abort_callback
from .training import (
    ggml_build_backward_expand,
    ggml_opt_dataset_get_batch_host,
    ggml_opt_fit,
    ggml_opt_init,
    ggml_opt_result_pred,
)
from .transfers import (
    ggml_backend_tensor_get_2d,
    ggml_backend_tensor_get_2d_async,
    ggml_backend_tensor_set_2d,
    ggml_backend_tensor_set_2d_async,
)

__all__ = [
    "ggml_backend_cuda_get_device_description",
    "ggml_backend_load",
    "ggml_backend_load_all",
    "ggml_backend_load_all_from_path",
    "ggml_backend_meta_device",
    "ggml_backend_sched_reserve_size",
    "ggml_backend_tensor_get_2d",
    "ggml_backend_tensor_get_2d_async",
    "ggml_backend_tensor_set_2d",
    "ggml_backend_tensor_set_2d_async",
    "ggml_backend_vk_get_device_description",
    "ggml_build_backward_expand",
    "ggml_gallocr_reserve_n",
    "ggml_gallocr_reserve_n_size",
    "ggml_graph_compute",
    "ggml_log_get",
    "ggml_log_set",
    "ggml_opt_dataset_get_batch_host",
    "ggml_opt_fit",
    "ggml_opt_init",
    "ggml_opt_result_pred",
    "ggml_quantize_chunk",
    "ggml_rope_yarn_corr_dims",
    "ggml_set_abort_callback",
    "gguf_get_meta_data",
    "gguf_set_arr_data",
    "gguf_set_tensor_data",
]
