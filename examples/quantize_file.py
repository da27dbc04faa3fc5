"""Quantise the weights of a GGUF file: ``quantize_file.py IN.gguf OUT.gguf [TYPE]``.

Without arguments it makes a small file, quantises that and checks the result.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from ggml_cffi import GGUFFile, GGUFWriter, capi, dtypes


def quantize_file(source, target, dtype):
    """Copy `source` to `target`, with matrices in `dtype`; gives the bytes of both's tensors."""
    kind = dtypes.element_type(dtype)
    block = capi.ggml_blck_size(kind)
    with GGUFFile(source) as old, GGUFWriter(target) as new:
        new.update(old.metadata)  # with their types
        for name, tensor in old.tensors.items():
            if len(tensor.shape) >= 2 and tensor.shape[-1] % block == 0:
                new.add_tensor(name, tensor.numpy(), kind)  # read and quantised on closing
            else:  # norms and biases are small, and matter
                new.add_tensor(name, tensor)
        new.close(progress=show)
        before = sum(tensor.nbytes for tensor in old.tensors.values())
    with GGUFFile(target) as new:
        return before, sum(tensor.nbytes for tensor in new.tensors.values())


def show(done, total):
    """The progress, on one line of the terminal."""
    if sys.stderr.isatty():
        print(f"\r{done / total:4.0%}", end="" if done < total else "\n", file=sys.stderr)


def errors(source, target):
    """How far the numbers of each tensor are off, as a part of their size."""
    with GGUFFile(source) as old, GGUFFile(target) as new:
        assert dict(new.metadata) == dict(old.metadata)
        for name, tensor in old.tensors.items():
            numbers = tensor.numpy().astype(np.float32)
            error = np.linalg.norm(new.tensors[name].numpy() - numbers) / np.linalg.norm(numbers)
            yield name, dtypes.type_name(new.tensors[name].type), error


def example(path):
    """Write a file with the weights of two layers."""
    rng = np.random.default_rng(0)
    with GGUFWriter(path) as file:
        file.set("general.architecture", "example")
        for i in range(2):
            file.add_tensor(f"blk.{i}.weight", rng.standard_normal((512, 1024), np.float32))
            file.add_tensor(f"blk.{i}.norm", rng.standard_normal(1024, np.float32))


with tempfile.TemporaryDirectory() as folder:
    if len(sys.argv) > 2:
        source, target = sys.argv[1:3]
    else:
        source, target = Path(folder, "f32.gguf"), Path(folder, "quantized.gguf")
        example(source)
    before, after = quantize_file(source, target, *(sys.argv[3:] or ["q4_K"]))
    print(f"{before:,} bytes became {after:,}: {after / before:.1%}")
    for name, kind, error in errors(source, target):
        print(f"{name:16} {kind:5} {error:.1%}")
