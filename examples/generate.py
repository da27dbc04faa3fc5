"""Text from a Gemma 3 model in a GGUF file: a transformer with a cache, on one device or several.

python generate.py FILE.gguf "The capital of France is" --tokens 20 --devices CPU,CPU
"""

import argparse
import contextlib

import numpy as np

from ggml_cffi import Context, GGUFFile, Graph, MetaDevice, capi, device, ops
from ggml_cffi.meta import policies

parser = argparse.ArgumentParser()
parser.add_argument("file")
parser.add_argument("prompt", nargs="?", default="The capital of France is")
parser.add_argument("--tokens", type=int, default=20, help="how many are generated")
parser.add_argument("--devices", default="CPU", help="several: the model is split over them")
given = parser.parse_args()

file = GGUFFile(given.file)
meta = file.metadata


def number(key):
    return meta[f"gemma3.{key}"]


LAYERS, WIDTH = number("block_count"), number("embedding_length")
HEADS, KV_HEADS = number("attention.head_count"), number("attention.head_count_kv")
LENGTH = number("attention.key_length")
EPS = number("attention.layer_norm_rms_epsilon")
VOCABULARY = list(meta["tokenizer.ggml.tokens"])
NEOX = capi.GGML_ROPE_TYPE_NEOX  # pairs of numbers that are half a head apart


def tokens_of(text):
    """The longest token that fits, again and again: not the model's own way, but good enough."""
    numbers = {token: i for i, token in enumerate(VOCABULARY)}
    found, text = [meta["tokenizer.ggml.bos_token_id"]], text.replace(" ", "▁")
    while text:
        fits = next(text[:n] for n in range(len(text), 0, -1) if text[:n] in numbers)
        found.append(numbers[fits])
        text = text[len(fits) :]
    return found


def model(ctx, w, caches, n):
    """The graph for n tokens: logits of the last one, and the keys and values of all of them."""
    tokens, places = ctx.input(n, "i32", "tokens"), ctx.input(n, "i32", "places")
    mask = ctx.input((n, PLACES + n), name="mask")
    outputs = {}
    x = ops.get_rows(w["token_embd.weight"], tokens) * WIDTH**0.5
    for i in range(LAYERS):
        base = number("rope.freq_base") if i % 6 == 5 else 10_000.0

        def weight(name, i=i):
            return w[f"blk.{i}.{name}.weight"]

        def norm(x, name, weight=weight):
            return ops.rms_norm(x, EPS) * weight(name)

        def turned(x, n_heads, name, norm=norm, base=base):
            x = norm(ops.reshape_3d(x, LENGTH, n_heads, n), name)
            return ops.rope_ext(x, places, n_dims=LENGTH, mode=NEOX, freq_base=base)

        def heads(x, n_heads, n_tokens):  # of shape (heads, tokens, length)
            return ops.permute(ops.reshape_3d(x, LENGTH, n_heads, n_tokens), 0, 2, 1, 3)

        h = norm(x, "attn_norm")
        q = ops.permute(turned(h @ weight("attn_q").T, HEADS, "attn_q_norm"), 0, 2, 1, 3)
        new = {
            f"cache_k_l{i}": ops.reshape_2d(
                turned(h @ weight("attn_k").T, KV_HEADS, "attn_k_norm"), LENGTH * KV_HEADS, n
            ),
            f"cache_v_l{i}": h @ weight("attn_v").T,
        }
        outputs |= new
        # what is in the cache, and the new rows after it: they are written there between the runs
        k, v = (
            heads(ops.concat(caches[name], rows, 1), KV_HEADS, PLACES + n)
            for name, rows in new.items()
        )
        y = ops.soft_max_ext(q @ ops.permute(k, 1, 0, 2, 3), mask, scale=LENGTH**-0.5) @ v
        y = ops.reshape_2d(ops.cont(ops.permute(y, 0, 2, 1, 3)), LENGTH * HEADS, n)
        x = x + norm(y @ weight("attn_output").T, "post_attention_norm")
        h = norm(x, "ffn_norm")
        y = ops.geglu_split(h @ weight("ffn_gate").T, h @ weight("ffn_up").T)
        x = x + norm(y @ weight("ffn_down").T, "post_ffw_norm")
    x = ops.rms_norm(x[-1:], EPS) * w["output_norm.weight"]
    return outputs | {"logits": x @ w["token_embd.weight"].T}


tokens = tokens_of(given.prompt)
PLACES = len(tokens) + given.tokens  # what the cache has room for
if PLACES > 512:
    parser.error("beyond 512 tokens some layers look at a window only, which is left out here")
devices = given.devices.split(",")
with contextlib.ExitStack() as stack:
    target = device(devices[0])
    if len(devices) > 1:
        policy = policies.gguf(file, [1] * len(devices))
        target = stack.enter_context(MetaDevice(devices, policy))
    ctx = stack.enter_context(Context())
    weights = file.load_into(ctx, target)
    caches = {
        f"cache_{kind}_l{i}": ctx.tensor((PLACES, LENGTH * KV_HEADS), name=f"cache_{kind}_l{i}")
        for i in range(LAYERS)
        for kind in "kv"
    }
    ctx.allocate(target)
    for cache in caches.values():
        cache[...] = 0  # undefined until now

    new, past, compiled = tokens, 0, {}
    for _ in range(given.tokens):
        n = len(new)
        if n not in compiled:  # one graph for the prompt, one for a token
            compiled[n] = Graph(model(ctx, weights, caches, n)).compile(target, n_threads=1)
        seen = np.tril(np.ones((n, n), bool))
        seen = np.hstack([np.broadcast_to(np.arange(PLACES) < past, (n, PLACES)), seen])
        found = compiled[n].run(
            tokens=new, places=past + np.arange(n), mask=np.where(seen, 0, -np.inf)
        )
        for name, cache in caches.items():
            cache[past : past + n] = found[name]
        past += n
        new = [int(found["logits"][-1].argmax())]
        tokens += new
    print("".join(VOCABULARY[i] for i in tokens[1:]).replace("▁", " "))
