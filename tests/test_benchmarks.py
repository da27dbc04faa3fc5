"""The benchmarks run, on little, and nothing has become slower by far.

The bounds are several times what is measured on an idle machine: they are for a fast path that is
no longer taken, not for a machine that has other things to do.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import common, graph_build

pytestmark = pytest.mark.no_sanitizer  # it makes other things slow than those that are


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("benchmarks")


@pytest.fixture
def compiler(need: Any) -> None:
    need(shutil.which("cc"), "C compiler")


def test_calls(compiler: None, folder: Path) -> None:
    from benchmarks import calls

    bare = common.build_extension(folder, "_bare_ggml", "bare")
    made = calls.make_calls(bare, None)
    for call in made:
        call.n = 64
    rounds = calls.measure(made, 3)
    assert len(calls.table(made, rounds)) == 2 + len(made)
    assert calls.ratio(rounds, "ggml_mul_mat", "capi", "bare cffi").low < 5  # 1.2


def test_graph_build(compiler: None, folder: Path) -> None:
    rounds = common.measure(graph_build.subjects(folder, 2), 5, passes=3)
    assert rounds.ratio("objects", "capi").low < 6  # 2
    assert rounds.ratio("capi", "C").low > 1


def test_graph_build_counts_the_nodes_of_32_layers() -> None:
    assert graph_build.build_objects(32) == graph_build.build_capi(32) == 4 + 32 * 29


def test_transfer() -> None:
    from benchmarks import transfer

    found = transfer.measure(1 << 20, 3, n_views=200)
    assert found.keys() == transfer.PAIRS.keys()
    assert found["a view / np.frombuffer"].low < 25  # 6


def test_quants() -> None:
    from benchmarks import quants

    for name in quants.LEAST:
        found = quants.measure(name, 3, shape=(64, 4096), n_threads=1)
        assert found[f"{name} quantize: times faster than gguf"].high > 0.5  # 1.4, 4


def test_gguf(tmp_path: Path) -> None:
    from benchmarks import gguf
    from ggml_cffi import GGUFWriter

    path = tmp_path / "small.gguf"
    words = [f"word {i}" for i in range(3_000)]
    with GGUFWriter(path) as writer:
        writer.set("general.architecture", "small")
        writer.set("tokenizer.ggml.tokens", words)
        writer.set("tokenizer.ggml.scores", np.arange(len(words), dtype=np.float32))
        for i in range(20):
            writer.add_tensor(f"blk.{i}.weight", np.ones((32, 64), np.float32))
    gguf.check(path)
    assert gguf.measure(path, 2)["GGUFReader"].high > 5  # 60


def test_meta_asks_for_splits(compiler: None, folder: Path) -> None:
    from benchmarks import meta
    from benchmarks.transformer import Shape

    found = meta.asking(folder, Shape(3), 3, passes=2)
    assert found["a split function in Python / in C"].low > 1
    assert found["a policy: more for a weight, in calls of an empty function"].low < 20_000  # 2,000


def test_meta_plans_a_large_model_in_the_time_of_a_few_allocations() -> None:
    """1,003 nodes: what is done for each of them anew, and need not be, would exceed it."""
    from benchmarks import meta
    from benchmarks.transformer import Shape

    assert len(dict(Shape(meta.LAYERS).weights())) == 336
    found = meta.planning(Shape(meta.LAYERS), 3, passes=2)
    assert found["planning / ggml's allocation"].low < 6  # 2.5
    assert found["MetaDevice.plan / ggml's allocation"].low < 10  # 3.7
    assert found["Graph.compile / ggml's allocation"].low < 14  # 5.2


def test_meta_computes_on_devices() -> None:
    from benchmarks import meta

    shape = {"width": 64, "hidden": 128, "n_layers": 2, "n_tokens": 4}
    found = meta.computing([1, 2], 3, 2, shape, with_workers=False)
    for what in ("1 CPU device", "2 CPU devices"):
        assert found[f"{what} / one device of 1 thread"].high > 0.3  # two have one thread each


@pytest.mark.rpc
def test_meta_computes_on_workers() -> None:
    from benchmarks import meta

    shape = {"width": 64, "hidden": 128, "n_layers": 2, "n_tokens": 4}
    found = meta.computing([1, 2], 3, 2, shape)
    for what in ("1 worker", "2 workers"):
        assert found[f"{what} / one device of 1 thread"].high > 0.3  # two have one thread each


def test_meta_mends() -> None:
    from benchmarks import meta
    from benchmarks.transformer import Shape

    found, n_copies = meta.mending(Shape(2), Shape(3), 3, 2)
    assert n_copies == 6
    assert found["compiling, mended / by hand"].low < 6  # 1.4
    assert found["running, mended / by hand"].low < 3  # 1


@pytest.mark.parametrize("n_layers", [1, 5])
def test_a_transformer_has_as_many_weights_and_nodes_as_it_says(n_layers: int) -> None:
    from benchmarks.transformer import Shape, Transformer
    from ggml_cffi import device

    model = Transformer(device("CPU"), Shape(n_layers))
    assert len(dict(model.shape.weights())) == 3 + 9 * n_layers
    assert model.graph.n_nodes == 4 + 27 * n_layers
    with model.graph.compile(device("CPU"), n_threads=1) as run:
        logits = run(**model.inputs())
        assert logits.shape == (8, 256) and np.isfinite(logits).all()  # type: ignore[union-attr]


def test_limits_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    options = common.parser("", 1).parse_args(["--check"])
    ratio = common.Ratio("a", "b", 1.0, 2.0, 3.0)
    kept = common.Limit("a / b", ratio, most=2.5)
    missed = common.Limit("a / b", ratio, least=2.5)
    assert common.report("title", {"a / b": ratio}, [kept], options) == 0
    assert common.report("title", {"a / b": ratio}, [missed], options) == 1
    told = capsys.readouterr()
    assert "2.00 (1.00 - 3.00)" in told.out and "expected at least 2.5" in told.err


def test_rpc_counts_the_copies_of_an_all_reduce() -> None:
    """What ggml's fallback does."""
    from benchmarks import rpc

    counts = {1: 0, 2: 2, 3: 4, 4: 8, 5: 10, 6: 12, 8: 24, 16: 64}
    assert {n: rpc.n_copies(n) for n in counts} == counts
    assert [rpc.n_waits(n) for n in (2, 3, 4, 8, 16)] == [2, 4, 2, 3, 4]


def test_rpc_models_what_a_link_takes() -> None:
    from benchmarks import rpc

    near, far = rpc.Link(1e9, 0.0), rpc.Link(1e9, 0.001)
    messages = (2 * 10 * rpc.TENSOR + 2 * rpc.ADDITION) * 8e-9
    assert rpc.all_reduce(2, 1_000_000, 10, near) == pytest.approx(0.032 + messages)
    assert rpc.all_reduce(2, 1_000_000, 10, far) == pytest.approx(0.034 + messages)
    ideal = rpc.Link(float("inf"), 0.0)
    for model in rpc.MODELS:
        alone, half, most = (model.seconds(n, 1, rpc.Machine(), ideal) for n in (1, 2, 8))
        assert half == pytest.approx(alone / 2)
        assert most == pytest.approx(alone / 8)
        assert model.seconds(16, 1, rpc.Machine(), ideal) > alone / 16  # 8 heads for keys


def test_rpc_prints_the_table_of_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import rpc

    assert rpc.main(["--model"]) == 0
    document = Path(__file__).parent.parent / "docs" / "scaling.md"
    assert capsys.readouterr().out in document.read_text("utf-8")


@pytest.mark.rpc
def test_rpc_measures_next_to_the_model() -> None:
    from benchmarks import hosts, rpc

    if missing := hosts.lacking():
        pytest.skip(f"there is no {missing} here")
    shape = {"width": 64, "hidden": 128, "n_layers": 2}
    ratios, said = rpc.measure([1, 2], {"1 Gbit/s": 1e9}, 3, 2, passes=2, shape=shape)
    assert len(said) == 1
    assert {name.partition(": ")[2] for name in ratios} == {
        *("speed", "without reduction", "the model's speed", "time / the model's")
    }
    assert len(ratios) == 5
    assert ratios["1 Gbit/s, 2 workers: time / the model's"].low < 10  # 1


def test_gpu_compares_a_meta_device_with_what_it_is_made_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where there is no GPU, on the CPU."""
    from benchmarks import gpu
    from ggml_cffi import capi, device, devices

    shape = {"width": 64, "hidden": 128, "n_layers": 2}
    found = gpu.measure(device("CPU"), 3, 2, 2, shape)
    assert found.keys() == gpu.PAIRS.keys()
    assert all(ratio.high > 0.2 for ratio in found.values())
    if not any(one.type == capi.GGML_BACKEND_DEVICE_TYPE_GPU for one in devices()):
        assert gpu.main([]) == 0
        assert "there is no GPU here" in capsys.readouterr().err
