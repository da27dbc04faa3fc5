"""Model files of one layer, for tests of what goes by names and metadata."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ggml_cffi import GGUFFile, GGUFWriter


def transformer(
    path: Path,
    heads: int,
    kv_heads: int,
    hidden: int,
    kind: str = "f32",
    *,
    fused: bool = False,
    experts: int = 0,
) -> GGUFFile:
    """A file with one layer of the tensors that matter; heads have 32 elements.

    `fused`: gate and up are one. `experts` is how many there are in place of the one.
    """
    width = heads * 32
    with GGUFWriter(path) as writer:
        writer.update(
            {
                "general.architecture": "made",
                "made.block_count": 1,
                "made.embedding_length": width,
                "made.attention.head_count": heads,
                "made.attention.head_count_kv": kv_heads,
                "made.feed_forward_length": hidden,
            }
        )

        def add(name: str, *shape: int) -> None:
            writer.add_tensor(name, np.zeros(shape, np.float32), kind)

        add("token_embd.weight", 100, width)
        add("blk.0.attn_q.weight", width, width)
        add("blk.0.attn_output.weight", width, width)
        if fused:
            add("blk.0.ffn_up.weight", 2 * hidden, width)
        if experts:
            add("blk.0.ffn_down_exps.weight", experts, width, hidden)
        else:
            add("blk.0.ffn_down.weight", width, hidden)
        add("output.weight", 100, width)
    return GGUFFile(path)
