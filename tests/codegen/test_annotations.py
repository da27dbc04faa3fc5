"""A wrong annotation is an error that names its file and line."""

from __future__ import annotations

import re

import pytest
from harness import bind, write

from codegen.annotations import AnnotationError

HEADER = """
#include <stddef.h>
#include <stdbool.h>
struct toy_thing;
typedef bool (*toy_visit_t)(int step, void * user_data);
struct toy_thing * toy_make(int size);
void toy_free(struct toy_thing * thing);
int toy_sum(const int * values, size_t n);
int toy_walk(toy_visit_t visit, void * user_data);
"""
GOOD = {
    "toy.h": HEADER,
    "rules.toml": """\
# a comment
[[rule]]
returns = "struct toy_thing *"
set = { ownership = "owned", free = "toy_free" }
""",
    "callbacks.toml": """\
[toy_visit_t]
on_error = "false"
""",
    "toy.toml": """\
[toy_sum]
arrays = { values = "n" }

[toy_walk]
callbacks = { visit = { userdata = "user_data", lifetime = "call" } }
""",
}

SUM = GOOD["toy.toml"]
RULES = GOOD["rules.toml"]

WRONG = {
    "unknown function": ("toy.toml", SUM + "[toy_gone]\nnullable = []\n", 6, "toy_gone"),
    "unknown key": ("toy.toml", "[toy_sum]\nnote = ''\n\nnulable = []\n", 4, "nulable"),
    "unknown parameter": ("toy.toml", SUM + "[toy_free]\nnullable = ['x']\n", 6, "'x'"),
    "unknown length": ("toy.toml", "[toy_sum]\narrays = { values = 'm' }\n", 1, "'m'"),
    "unknown owner": (
        "toy.toml",
        "[toy_sum]\nnote = ''\n[toy_make]\nownership = 'borrowed:ctx'\n",
        3,
        "'ctx'",
    ),
    "unknown userdata": (
        "toy.toml",
        "\n[toy_walk]\ncallbacks = { visit = { userdata = 'data', lifetime = 'call' } }\n",
        2,
        "'data'",
    ),
    "unknown lifetime": (
        "toy.toml",
        "[toy_walk]\n\ncallbacks = { visit = { userdata = 'user_data', lifetime = 'long' } }\n",
        3,
        "'long'",
    ),
    "bad guard": ("toy.toml", "[toy_sum]\nguard = 'maybe'\n", 2, "'maybe'"),
    "bad ownership": ("toy.toml", "[toy_make]\n# why\nownership = 'mine'\n", 3, "'mine'"),
    "bad null": ("toy.toml", "[toy_make]\nnull = 'never'\n", 2, "'never'"),
    "bad error": ("toy.toml", "[toy_make]\nnull_error = 'KeyError'\n", 2, "'KeyError'"),
    "wrong type": ("toy.toml", "[toy_sum]\nnullable = 'values'\n", 2, "nullable must be a list"),
    "no table": ("toy.toml", "toy_sum = 3\n", 1, "no table"),
    "TOML syntax": ("toy.toml", "[toy_sum]\nnullable = [\n\n[toy_free]\n", 4, ""),
    "owned without free": ("toy.toml", "[toy_make]\nfree = ''\n", 1, "free"),
    "unused rule": (
        "rules.toml",
        RULES + '\n[[rule]]\nname = "gone_*"\nset = { guard = "nothrow" }\n',
        6,
        "matches no function",
    ),
    "unknown key in a rule": (
        "rules.toml",
        RULES + '[[rule]]\nreturn = "int"\nset = { guard = "nothrow" }\n',
        5,
        "return",
    ),
    "rule without set": ("rules.toml", RULES + '[[rule]]\nname = "toy_*"\n', 5, "set"),
    "bad value in a rule": (
        "rules.toml",
        RULES + '[[rule]]\nname = "toy_*"\nset = { guard = "x" }\n',
        5,
        "'x'",
    ),
    "parameters in a rule": (
        "rules.toml",
        RULES + '[[rule]]\nname = "toy_*"\nset = { nullable = ["a"] }\n',
        5,
        "nullable",
    ),
    "unknown table of rules": ("rules.toml", RULES + "\n[rules]\n", 6, "rules"),
    "unknown callback": (
        "callbacks.toml",
        GOOD["callbacks.toml"] + "[toy_gone_t]\nused = false\n",
        3,
        "toy_gone_t",
    ),
    "unknown key of a callback": (
        "callbacks.toml",
        "[toy_visit_t]\non_error = 'false'\nlifetime = 'call'\n",
        3,
        "lifetime",
    ),
    "callback that is not annotated": ("callbacks.toml", "", 1, "toy_visit_t"),
    "callback that cannot fail": ("callbacks.toml", "[toy_visit_t]\n", 1, "on_error"),
    "what C gets is no bool": (
        "callbacks.toml",
        "[toy_visit_t]\non_error = 'false'\ngone = 'yes'\n",
        3,
        "gone must be a bool",
    ),
    "bad threads": (
        "callbacks.toml",
        "[toy_visit_t]\non_error = 'false'\nthreads = 'all'\n",
        3,
        "'all'",
    ),
}


def test_good(tmp_path):
    binding = bind(write(tmp_path, GOOD))
    assert [b.name for b in binding.bound] == ["toy_make", "toy_free", "toy_sum", "toy_walk"]
    assert binding.notes == ()


@pytest.mark.parametrize("what", WRONG)
def test_wrong(what, tmp_path):
    file, text, line, word = WRONG[what]
    with pytest.raises(AnnotationError, match=rf"^{re.escape(file)}:{line}: ") as error:
        bind(write(tmp_path, {**GOOD, file: text}))
    assert word in str(error.value)


def test_no_owner(tmp_path):
    """A pointer that nobody is said to own: the place is that of the declaration."""
    with pytest.raises(AnnotationError, match=r"^toy\.h:6: toy_make returns a pointer"):
        bind(write(tmp_path, {**GOOD, "rules.toml": ""}))


def test_no_way_to_free(tmp_path):
    """What the freeing function takes besides must be among what the making one was given."""
    header = HEADER.replace(
        "toy_free(struct toy_thing * thing)", "toy_free(struct toy_thing * thing, double weight)"
    )
    words = r"^toy\.h:6: toy_make: nothing to give toy_free as weight"
    with pytest.raises(AnnotationError, match=words):
        bind(write(tmp_path, {**GOOD, "toy.h": header}))


def test_twice(tmp_path):
    with pytest.raises(AnnotationError, match=r"^toz\.toml:1: toy_sum is annotated twice"):
        bind(write(tmp_path, {**GOOD, "toz.toml": "[toy_sum]\n"}))


def test_lenient(tmp_path):
    """On another release than the pin the same is a note, and the function is left out."""
    folder = write(
        tmp_path, {**GOOD, "rules.toml": "", "toy.toml": SUM + "[toy_gone]\nnullable = []\n"}
    )
    binding = bind(folder, strict=False)
    assert "toy_make" in binding.skipped
    assert len(binding.notes) == 2
    assert any(note.startswith("toy.toml:6: ") for note in binding.notes)


def test_a_callback_of_which_nothing_is_said(tmp_path):
    """On another release than the pin nothing would guard it: the function is left out."""
    header = "typedef void (*toy_step_t)(int step);\nvoid toy_walk(toy_step_t step);\n"
    folder = write(tmp_path, {"toy.h": header})
    with pytest.raises(AnnotationError, match="the function-pointer type toy_step_t is not"):
        bind(folder)
    binding = bind(folder, strict=False)
    assert binding.skipped == {"toy_walk": "the type of its callback, toy_step_t, is not annotated"}


OPERATION = """
enum toy_order { TOY_ORDER_UP, TOY_ORDER_DOWN };
struct ggml_tensor * toy_sort(struct ggml_context * ctx, enum toy_order order);
int toy_size(struct ggml_context * ctx, enum toy_order order);
"""
SORT = "[toy_sort]\nownership = 'borrowed:ctx'\n"


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        (SORT + "op_defaults = { order = 'TOY_ORDER_LEFT' }\n", 1, "TOY_ORDER_LEFT"),
        (SORT + "op_defaults = { size = '1' }\n", 1, "'size'"),
        (SORT + "op = false\nop_defaults = { order = 'TOY_ORDER_UP' }\n", 1, "no operation"),
        (SORT + "[toy_size]\nop_copies = ['ctx']\n", 3, "no operation"),
        (SORT + "[toy_size]\nop_defaults = { order = 'TOY_ORDER_UP' }\n", 3, "no operation"),
    ],
)
def test_wrong_defaults_of_an_operation(text, line, word, tmp_path):
    with pytest.raises(AnnotationError, match=rf"^toy\.toml:{line}: ") as error:
        bind(write(tmp_path, {"toy.h": OPERATION, "toy.toml": text}))
    assert word in str(error.value)
