"""`python -m ggml_cffi split`: where the tensors of a file go."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _release import needs_meta

from ggml_cffi import GGUFFile, GGUFWriter, _split_report, device, rpc
from ggml_cffi.__main__ import main

pytestmark = needs_meta


SHAPES = {
    "token_embd": (100, 256),
    "blk.0.attn_q": (256, 256),
    "blk.0.attn_k": (128, 256),
    "blk.0.attn_v": (128, 256),
    "blk.0.attn_output": (256, 256),
    "blk.0.ffn_up": (512, 256),
    "blk.0.ffn_down": (256, 512),
    "output": (100, 256),
}


def write(path: Path, shapes: Mapping[str, tuple[int, ...]], kv_heads: int = 4) -> None:
    """A file of one layer with these weights."""
    with GGUFWriter(path) as writer:
        writer.update(
            {
                "general.architecture": "made",
                "made.block_count": 1,
                "made.embedding_length": 256,
                "made.attention.head_count": 8,
                "made.attention.head_count_kv": kv_heads,
                "made.feed_forward_length": 512,
            }
        )
        for name, shape in shapes.items():
            writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model <1>.gguf"
    write(path, SHAPES)
    return path


def as_json(capsys: Any, *arguments: object) -> Any:
    assert main(["split", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_tensor_and_every_byte(model: Path, capsys: Any) -> None:
    found = as_json(capsys, model, "--devices", "CPU,CPU", "--ratios", "3,1")
    tensors = {one["name"]: one for one in found["tensors"]}
    assert len(tensors) == 8
    down = tensors["blk.0.ffn_down.weight"]
    assert down["split"] == "split along axis 0: 384 + 128"
    assert down["axis"] == 0 and down["shares"] == [384, 128]
    assert down["nbytes"] == [384 * 256 * 4, 128 * 256 * 4]
    assert down["kind"] == "feed-forward" and down["type"] == "f32"
    whole = tensors["token_embd.weight"]
    assert whole["split"] == "mirrored" and whole["nbytes"] == [100 * 256 * 4] * 2
    assert whole["axis"] is None and whole["shares"] == []
    assert whole["why"] == "each device needs all of it"
    assert tensors["output.weight"]["split"] == "split along axis 1: 75 + 25"
    for j, room in enumerate(found["devices"]):
        assert room["nbytes"] == sum(one["nbytes"][j] for one in tensors.values())
        assert room["nbytes"] == sum(room["kinds"].values())
    assert found["fits"] is True


def test_for_people(model: Path, capsys: Any) -> None:
    assert main(["split", str(model), "--devices", "CPU,CPU,CPU,CPU,CPU"]) == 0
    out = capsys.readouterr().out
    assert "4 KV heads are too few for 5 devices" in out
    assert out.count("device ") == 6 and "fits" in out


def test_an_output_that_is_tied(model: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "tied.gguf"
    with GGUFFile(model) as file, GGUFWriter(path) as writer:
        writer.update(dict(file.metadata))
        writer.add_tensor("token_embd.weight", file.tensors["token_embd.weight"].numpy())
    (embedding,) = as_json(capsys, path, "--devices", "CPU,CPU")["tensors"]
    assert embedding["split"] == "mirrored"
    assert embedding["why"] == "tied: it is the output as well"
    assert main(["split", str(path), "--devices", "CPU,CPU"]) == 0
    assert "mirrored  tied: it is the output as well" in capsys.readouterr().out


@pytest.mark.parametrize("devices", ["CPU", "CPU,CPU"])
def test_one_kv_head(tmp_path: Path, capsys: Any, devices: str) -> None:
    path = tmp_path / "one.gguf"
    write(path, SHAPES | {"blk.0.attn_k": (32, 256), "blk.0.attn_v": (32, 256)}, kv_heads=1)
    ratios = ",".join("10"[: devices.count("CPU")])
    found = as_json(capsys, path, "--devices", devices, "--ratios", ratios)
    attention = [one for one in found["tensors"] if one["kind"] == "attention"]
    assert len(attention) == 4
    for one in attention:
        assert one["split"] == "mirrored" and one["why"] == "1 KV head cannot be cut"


def test_compressed_keys_and_values(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "mla.gguf"
    shapes = {name: shape for name, shape in SHAPES.items() if name[-2:] not in ("_k", "_v")}
    write(path, shapes | {"blk.0.attn_kv_a_mqa": (96, 256), "blk.0.attn_kv_b": (512, 64)})
    tensors = as_json(capsys, path, "--devices", "CPU,CPU")["tensors"]
    (output,) = [one for one in tensors if one["name"] == "blk.0.attn_output.weight"]
    assert output["split"] == "mirrored"
    assert output["why"] == "there is no cut for attn_kv_a_mqa.weight"


def test_a_dense_part_beside_experts(tmp_path: Path, capsys: Any) -> None:
    """Each is of a length of its own: 512 is the metadata's."""
    path = tmp_path / "arctic.gguf"
    shapes = SHAPES | {"blk.0.ffn_up": (896, 256), "blk.0.ffn_down": (256, 896)}
    write(
        path,
        shapes | {"blk.0.ffn_up_exps": (2, 512, 256), "blk.0.ffn_down_exps": (2, 256, 512)},
    )
    tensors = as_json(capsys, path, "--devices", "CPU,CPU", "--ratios", "3,1")["tensors"]
    shares = {one["name"]: one["shares"] for one in tensors}
    assert shares["blk.0.ffn_up.weight"] == shares["blk.0.ffn_down.weight"] == [640, 256]
    assert shares["blk.0.ffn_up_exps.weight"] == [384, 128]
    assert shares["blk.0.ffn_down_exps.weight"] == [384, 128]


@pytest.mark.parametrize(
    ("policy", "split"),
    [("mirror", "mirrored"), ("axis0", "split along axis 0: 256 + 256"), ("axis1", "128 + 128")],
)
def test_other_policies(model: Path, capsys: Any, policy: str, split: str) -> None:
    found = as_json(capsys, model, "--devices", "CPU,CPU", "--policy", policy)
    (down,) = [one for one in found["tensors"] if one["name"] == "blk.0.ffn_down.weight"]
    assert down["split"].endswith(split)


def test_what_does_not_fit(model: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = device("CPU")
    small = type(cpu.memory)(1000, 2000)
    monkeypatch.setattr(type(cpu), "memory", property(lambda self: small))
    assert main(["split", str(model), "--devices", "CPU"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_devices_named_twice_share_their_memory(model: Path) -> None:
    cpu = device("CPU")
    with GGUFFile(model) as file:
        report = _split_report.make(file, [cpu, cpu], [1, 1], "auto")
        alone = _split_report.make(file, [cpu], [1], "mirror")
    assert report.devices[0].free == pytest.approx(alone.devices[0].free / 2, rel=0.2)


def test_the_drawing(model: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.svg"
    assert main(["split", str(model), "--devices", "CPU,CPU", "--svg", str(out)]) == 0
    root = ET.fromstring(out.read_text(encoding="utf-8"))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    titles = [one.text for one in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum("feed-forward" in str(title) for title in titles) == 2
    widths = [float(one.get("width", 0)) for one in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert max(widths) > 100


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--devices", "XPU"], "there is no device 'XPU'"),
        (["--devices", ","], "expected 1 to 16 names"),
        (["--devices", "CPU", "--ratios", "1,2"], "2 ratios for 1 devices"),
        (["--devices", "CPU", "--policy", "magic"], "invalid choice: 'magic'"),
        (["--devices", "CPU", "--svg", "/no/such/folder/x.svg"], "No such file"),
    ],
)
def test_what_cannot_be_done(model: Path, capsys: Any, arguments: list[str], text: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["split", str(model), *arguments])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_what_is_no_model(tmp_path: Path, capsys: Any) -> None:
    for path, text in ((tmp_path / "none.gguf", "No such file"), (tmp_path, "no regular file")):
        with pytest.raises(SystemExit) as ended:
            main(["split", str(path), "--devices", "CPU"])
        assert ended.value.code == 2
        assert text in capsys.readouterr().err


def test_metadata_without_sense(model: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "short.gguf"
    with GGUFFile(model) as file, GGUFWriter(path) as writer:
        writer.update(dict(file.metadata) | {"made.block_count": 2})
        writer.set("made.attention.head_count", [8])
    with pytest.raises(SystemExit) as ended:
        main(["split", str(path), "--devices", "CPU"])
    assert ended.value.code == 2
    assert "made.attention.head_count has 1 numbers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        ((1 << 30) - 1, "1024 MiB"),
        (1 << 30, "1 GiB"),
        (3 << 40, "3 TiB"),
        (2_048_000 << 40, "1.953 EiB"),
        (1 << 63, "8 EiB"),
        (5 << 79, "2.5 YiB"),
        ((1 << 90) + 1, "1024 YiB"),
        (1 << 100, "1048576 YiB"),
    ],
)
def test_sizes(n: int, text: str) -> None:
    assert _split_report.size(n) == text


@pytest.mark.rpc
def test_devices_of_workers(model: Path, capsys: Any) -> None:
    with rpc.Server(port=0) as one, rpc.Server(port=0) as other:
        devices = f"{one.address},CPU,{one.address},{other.address}"
        rooms = as_json(capsys, model, "--devices", devices)["devices"]
    names = [room["name"] for room in rooms]
    assert names[1] == device("CPU").name
    assert names[0] == names[2] != names[3]
    assert rooms[0]["free"] == pytest.approx(rooms[3]["free"] / 2, rel=0.2)


@pytest.mark.rpc
@pytest.mark.parametrize(("endpoint", "code"), [("127.0.0.1:1", 1), ("somewhere:far", 2)])
def test_a_worker_that_is_not_there_or_no_endpoint(
    model: Path, capsys: Any, endpoint: str, code: int
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["split", str(model), "--devices", endpoint])
    assert ended.value.code == code
    assert endpoint in capsys.readouterr().err
