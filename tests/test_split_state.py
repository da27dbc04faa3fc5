"""What a split function may answer: `SplitState`, `TensorInfo` and the check, without a device."""

from __future__ import annotations

from enum import IntEnum
from fractions import Fraction
from types import MappingProxyType

import numpy as np
import pytest

from ggml_cffi.meta._split import SplitAxis, SplitState, TensorInfo, check_answer

F32, Q4_0 = 0, 2


def info(*ne: int, type_: int = F32, block_size: int = 1, name: str = "w") -> TensorInfo:
    full = (*ne, 1, 1, 1, 1)[:4]
    return TensorInfo(name, type_, full, op=0, flags=0, block_size=block_size, nbytes=4)


WIDE = info(64, 12)
BLOCKS = info(128, 12, type_=Q4_0, block_size=32)


def split(axis, *ne, **more):
    return {"axis": axis, "ne": list(ne), "n_segments": 1, **more}


def test_axis_values_are_those_of_ggml():
    assert [int(axis) for axis in SplitAxis] == [0, 1, 2, 3, 10, 11, 98, 99]


# --- TensorInfo


def test_info_has_attributes_and_items():
    tensor = TensorInfo("blk.0.w", 2, (64, 3, 1, 1), 0, 1, 32, 108)
    assert set(tensor.keys()) >= {
        "name",
        "type",
        "ne",
        "op",
        "flags",
        "shape",
        "block_size",
        "nbytes",
    }
    assert all(tensor[key] == getattr(tensor, key) for key in tensor)
    assert dict(tensor) == {key: tensor[key] for key in tensor}
    assert "name" in tensor
    assert "data" not in tensor
    assert len(tensor) == len(tensor.keys())
    with pytest.raises(KeyError, match="data"):
        tensor["data"]
    with pytest.raises(AttributeError):
        tensor.name = "other"


@pytest.mark.parametrize(
    ("ne", "shape"),
    [
        ((7,), (7,)),
        ((1,), (1,)),
        ((7, 3), (3, 7)),
        ((1, 3), (3, 1)),
        ((7, 1, 2), (2, 1, 7)),
        ((7, 1, 1, 5), (5, 1, 1, 7)),
    ],
)
def test_info_shape_is_in_the_order_of_numpy(ne, shape):
    assert info(*ne).shape == shape


# --- answers that pass


@pytest.mark.parametrize(
    "ne",
    [
        [8, 4],
        (8, 4),
        np.array([8, 4]),
        np.array([8, 4], dtype=np.uint8),
        np.array([8.0, 4.0], dtype=np.float32),
        [np.int64(8), 4.0],
        [np.float64(8), True + 3],
        [12, 0],
        range(4, 12, 4),
    ],
)
def test_numbers_of_elements(ne):
    state = check_answer({"axis": 1, "ne": ne, "n_segments": 1}, WIDE, 2)
    assert state == SplitState(SplitAxis.AXIS_1, tuple(int(n) for n in ne))
    assert all(type(n) is int for n in state.ne)
    assert state.is_split
    assert sum(state.shares) == 12


def test_n_segments_and_nr_have_defaults():
    assert check_answer({"axis": 1, "ne": [8, 4]}, WIDE, 2) == SplitState.split(1, [8, 4])
    assert check_answer({"axis": 1, "ne": [8, 4], "nr": None}, WIDE, 2).nr == (1,)


def test_any_mapping_will_do():
    assert check_answer(MappingProxyType(split(1, 8, 4)), WIDE, 2).ne == (8, 4)


@pytest.mark.parametrize(
    "axis", [1, SplitAxis.AXIS_1, np.int32(1), IntEnum("Own", {"ROWS": 1}).ROWS]
)
def test_axis_may_be_any_integer(axis):
    assert check_answer(split(axis, 8, 4), WIDE, 2).axis is SplitAxis.AXIS_1


@pytest.mark.parametrize("axis", [98, 99, SplitAxis.NONE, SplitAxis.UNKNOWN])
@pytest.mark.parametrize("rest", [{}, {"ne": [1, 2, 3]}, {"ne": None, "n_segments": 99}])
def test_no_wish_is_mirrored(axis, rest):
    assert check_answer({"axis": axis, **rest}, WIDE, 2) == SplitState.mirrored()


def test_mirrored_ignores_ne():
    assert check_answer({"axis": 10}, WIDE, 3) == SplitState.mirrored()
    answer = {"axis": 10, "ne": [1, 2, 3], "n_segments": 1, "nr": [1]}
    assert check_answer(answer, WIDE, 3) == SplitState.mirrored()
    assert check_answer({"axis": 10}, BLOCKS, 3) == SplitState.mirrored()


def test_partial_of_f32():
    assert check_answer({"axis": 11}, WIDE, 2) == SplitState.partial()
    assert not SplitState.partial().is_split
    assert SplitState.partial().shares == ()


def test_segments_and_repeats():
    tensor = info(8, 4 * 6 + 2 * 4 + 2 * 4)
    qkv = SplitState.segments(1, [[12, 12], [4, 4], [4, 4]])
    grouped = SplitState.segments(1, np.array([[12, 12], [4, 4]]), nr=[1, 2])
    assert check_answer(qkv, tensor, 2) == qkv
    assert qkv.nr == (1, 1, 1)
    assert check_answer(grouped, tensor, 2) == grouped
    assert qkv.shares == grouped.shares == (20, 20)
    answer = {"axis": 1, "ne": [12, 12, 4, 4], "n_segments": 2, "nr": np.array([1, 2])}
    assert check_answer(answer, tensor, 2) == grouped


def test_sixteen_segments_on_sixteen_devices():
    tensor = info(4, 256)
    state = SplitState.segments(1, [[1] * 16] * 16)
    assert check_answer(state, tensor, 16).shares == (16,) * 16


def test_one_device_takes_all():
    assert check_answer(split(1, 12), WIDE, 1).shares == (12,)


def test_blocks_on_axis_0_only():
    assert check_answer(split(0, 96, 32), BLOCKS, 2).ne == (96, 32)
    assert check_answer(split(1, 11, 1), BLOCKS, 2).ne == (11, 1)


# --- answers of the wrong type


@pytest.mark.parametrize("answer", [None, 1, "mirrored", [1, [8, 4]], SplitAxis.MIRRORED, object()])
def test_answer_that_is_no_state(answer):
    with pytest.raises(TypeError, match=r"tensor 'w'.*expected a SplitState or a mapping"):
        check_answer(answer, WIDE, 2)


@pytest.mark.parametrize("axis", [None, "1", 1.0, True, np.bool_(True), np.float32(1), [1]])
def test_axis_of_the_wrong_type(axis):
    with pytest.raises(TypeError, match=r"tensor 'w': axis is .*expected an int"):
        check_answer(split(axis, 8, 4), WIDE, 2)


@pytest.mark.parametrize(
    "ne", [None, 12, "84", b"84", {8: 4}, iter([8, 4]), {8, 4}, np.array(12), memoryview(b"84")]
)
def test_ne_that_is_no_sequence(ne):
    with pytest.raises(TypeError, match=r"tensor 'w': ne is .*expected a sequence"):
        check_answer({"axis": 1, "ne": ne}, WIDE, 2)


@pytest.mark.parametrize("bad", [True, np.bool_(True), None, "8", 8j, [8], Fraction(8), b"8"])
def test_number_of_the_wrong_type(bad):
    with pytest.raises(TypeError, match=r"tensor 'w': ne\[1\] is .*expected an integer"):
        check_answer({"axis": 1, "ne": [4, bad]}, WIDE, 2)
    with pytest.raises(TypeError, match=r"nr\[0\] is .*expected an integer"):
        check_answer({"axis": 1, "ne": [4, 8], "nr": [bad]}, WIDE, 2)
    with pytest.raises(TypeError, match=r"n_segments is .*expected an integer"):
        check_answer({"axis": 1, "ne": [4, 8], "n_segments": bad}, WIDE, 2)


def test_arrays_of_the_wrong_type():
    with pytest.raises(TypeError, match="expected an integer"):
        check_answer({"axis": 1, "ne": np.array([True, True])}, WIDE, 2)
    with pytest.raises(TypeError, match="expected an integer"):
        check_answer({"axis": 1, "ne": np.array([[8], [4]])}, WIDE, 2)


# --- answers with a wrong value


@pytest.mark.parametrize("axis", [4, 5, 9, 12, -1, 97, 100, 2**40, -(2**70)])
def test_axis_that_does_not_exist(axis):
    with pytest.raises(ValueError, match=r"tensor 'w': axis is .*expected AXIS_0 \(0\)"):
        check_answer(split(axis, 8, 4), WIDE, 2)


def test_axis_3_cannot_be_written():
    with pytest.raises(ValueError, match=r"axis is 3, .*expected 0, 1 or 2"):
        check_answer(split(3, 1, 1), info(4, 4, 4, 2), 2)


@pytest.mark.parametrize("bad", [8.5, float("nan"), float("inf"), -float("inf"), np.float32("nan")])
def test_float_that_is_no_integer(bad):
    with pytest.raises(ValueError, match=r"tensor 'w': ne\[1\] is .*expected an integer"):
        check_answer({"axis": 1, "ne": [4, bad]}, WIDE, 2)


@pytest.mark.parametrize(
    ("ne", "total"), [([8, 5], 13), ([0, 0], 0), ([2**62, 2**62], 2**63), ([1e300, 0], ...)]
)
def test_sum_must_be_that_of_the_tensor(ne, total):
    with pytest.raises(ValueError, match=r"tensor 'w': ne = .* sums up to .*expected ne\[1\] = 12"):
        check_answer({"axis": 1, "ne": ne}, WIDE, 2)


def test_negative_share():
    with pytest.raises(ValueError, match=r"tensor 'w': ne\[0\] is -4, expected at least 0"):
        check_answer(split(1, -4, 16), WIDE, 2)


@pytest.mark.parametrize("ne", [[], [12], [4, 4, 4], [0] * 300])
def test_wrong_number_of_devices(ne):
    with pytest.raises(ValueError, match=r"tensor 'w': ne has length \d+, expected 2"):
        check_answer({"axis": 1, "ne": ne}, WIDE, 2)


def test_a_huge_answer_is_refused_by_its_length():
    with pytest.raises(ValueError, match="length 1000000000000, expected 2"):
        check_answer({"axis": 1, "ne": range(10**12)}, WIDE, 2)


@pytest.mark.parametrize("n_segments", [0, -1, 17, 2**32, 2**64])
def test_number_of_segments(n_segments):
    with pytest.raises(ValueError, match=r"n_segments is -?\d+, expected 1 to 16"):
        check_answer({"axis": 1, "ne": [8, 4], "n_segments": n_segments}, WIDE, 2)


@pytest.mark.parametrize("nr", [0, -1, 13, 2**32, 2**32 + 1])
def test_repeats_out_of_range(nr):
    with pytest.raises(ValueError, match=r"nr\[0\] is -?\d+, expected 1 to ne\[1\] = 12"):
        check_answer(split(1, 8, 4, nr=[nr]), WIDE, 2)


def test_repeats_of_nothing_are_limited():
    answer = {"axis": 1, "ne": [8, 4, 0, 0], "n_segments": 2, "nr": [1, 4_000_000_000]}
    with pytest.raises(ValueError, match=r"nr\[1\] is 4000000000, expected 1 to"):
        check_answer(answer, WIDE, 2)


def test_repeats_need_one_number_for_each_segment():
    with pytest.raises(ValueError, match="nr has length 2, expected 1"):
        check_answer(split(1, 8, 4, nr=[1, 1]), WIDE, 2)


@pytest.mark.parametrize("axis", [10, 11])
@pytest.mark.parametrize("more", [{"n_segments": 2}, {"nr": [2]}, {"n_segments": 2, "nr": [1, 1]}])
def test_whole_tensors_have_one_segment(axis, more):
    with pytest.raises(ValueError, match=r"MIRRORED|PARTIAL|nr has length"):
        check_answer({"axis": axis, "ne": [0] * 4, **more}, WIDE, 2)


def test_partial_is_for_f32():
    with pytest.raises(ValueError, match="axis is PARTIAL and the type 2, expected F32"):
        check_answer({"axis": 11}, BLOCKS, 2)


@pytest.mark.parametrize("ne", [[100, 28], [16, 112], [127, 1]])
def test_axis_0_is_cut_between_blocks(ne):
    with pytest.raises(ValueError, match=r"ne\[0\] is \d+, expected a multiple of 32, the block"):
        check_answer({"axis": 0, "ne": ne}, BLOCKS, 2)


def test_one_element_cannot_be_shared():
    with pytest.raises(ValueError, match=r"of shape \(64,\) has 1: .*more than one element"):
        check_answer(split(1, 1, 0), info(64, 1), 2)
    with pytest.raises(ValueError, match=r"axis is 1 in ggml's order"):
        check_answer(split(1, 1), info(64), 1)


def test_one_block_cannot_be_shared():
    with pytest.raises(ValueError, match="more than one block of 32 elements"):
        check_answer(split(0, 32, 0), info(32, 12, type_=Q4_0, block_size=32), 2)


@pytest.mark.parametrize(
    ("axis", "ne"), [(0, (8, 4, 2)), (0, (8, 4, 1, 2)), (1, (8, 8, 1, 2)), (2, (8, 4, 8))]
)
@pytest.mark.parametrize("answer", [{"ne": [2, 2], "nr": [2]}, {"ne": [2] * 4, "n_segments": 2}])
def test_segments_need_what_ggml_can_write(axis, ne, answer):
    with pytest.raises(ValueError, match=rf"segments or repeats on axis {axis}.*expected"):
        check_answer({"axis": axis, **answer}, info(*ne), 2)


def test_segments_of_three_dimensions_on_axis_1():
    assert check_answer({"axis": 1, "ne": [2, 2], "nr": [2]}, info(8, 8, 3), 2).shares == (4, 4)


def test_a_ggml_without_repeats():
    with pytest.raises(ValueError, match="which this ggml lacks, expected ones"):
        check_answer({"axis": 1, "ne": [4, 2], "nr": [2]}, WIDE, 2, repeats=False)
    assert check_answer(split(1, 8, 4, nr=[1]), WIDE, 2, repeats=False).ne == (8, 4)


@pytest.mark.parametrize("key", ["n_segment", "Axis", "data", 0, None])
def test_unknown_key(key):
    with pytest.raises(
        ValueError, match=r"tensor 'w': unknown key .*expected axis, ne, n_segments"
    ):
        check_answer({**split(1, 8, 4), key: 1}, WIDE, 2)


def test_missing_keys():
    with pytest.raises(ValueError, match="axis is missing"):
        check_answer({"ne": [8, 4]}, WIDE, 2)
    with pytest.raises(ValueError, match="ne is missing"):
        check_answer({"axis": 1}, WIDE, 2)


def test_states_are_checked_like_mappings():
    for state in (
        SplitState.split(1, [8, 5]),
        SplitState(SplitAxis.AXIS_1, (8, 4), 2, (1, 1)),
        SplitState(SplitAxis.AXIS_1, (8, 4), 1, (2,)),
        SplitState(SplitAxis.MIRRORED, (), 2, (1, 1)),
        SplitState(4, (8, 4)),
    ):
        with pytest.raises(ValueError, match="tensor 'w'"):
            check_answer(state, WIDE, 2)
    with pytest.raises(TypeError, match="axis"):
        check_answer(SplitState("1", (8, 4)), WIDE, 2)


def test_messages_are_short_and_in_one_line():
    class Loud:
        def __repr__(self):
            return "loud\n" * 1000

    class Mute:
        def __repr__(self):
            raise RuntimeError

    for answer in (Loud(), Mute(), [0] * 10**6):
        with pytest.raises(TypeError) as caught:
            check_answer(answer, WIDE, 2)
        assert len(str(caught.value)) < 500
        assert "\n" not in str(caught.value)


# --- constructors


def test_constructors():
    assert SplitState.mirrored() == SplitState(SplitAxis.MIRRORED)
    assert SplitState.split(0, [np.int64(3), 1.0]) == SplitState(SplitAxis.AXIS_0, (3, 1))
    assert hash(SplitState.split(0, [3, 1])) == hash(SplitState.split(0, (3, 1)))
    with pytest.raises(AttributeError):
        SplitState.mirrored().axis = SplitAxis.AXIS_0


@pytest.mark.parametrize(
    ("axis", "ne", "nr", "error"),
    [
        (10, [[1, 2]], None, ValueError),
        (3, [[1, 2]], None, ValueError),
        (1, [], None, ValueError),
        (1, [[]], None, ValueError),
        (1, [[1, 2], [3]], None, ValueError),
        (1, [[1]] * 17, None, ValueError),
        (1, [[1] * 17], None, ValueError),
        (1, [[1, 2]], [1, 2], ValueError),
        (1, [[1, 2.5]], None, ValueError),
        (1, [1, 2], None, TypeError),
        (1, [[1, True]], None, TypeError),
        (1, [[1, 2]], 1, TypeError),
        (True, [[1, 2]], None, TypeError),
    ],
)
def test_constructors_refuse(axis, ne, nr, error):
    with pytest.raises(error, match=r"SplitState: .*expected"):
        SplitState.segments(axis, ne, nr)


@pytest.mark.parametrize(
    ("tensor", "axis", "ratios", "granularity", "ne"),
    [
        (WIDE, 1, [1, 1], 1, (6, 6)),
        (WIDE, 1, [3, 1], 1, (9, 3)),
        (WIDE, 1, [1, 1, 1], 1, (4, 4, 4)),
        (WIDE, 1, [1, 1], 4, (4, 8)),
        (WIDE, 1, [0, 1], 1, (0, 12)),
        (WIDE, 1, [1, 0], 1, (12, 0)),
        (WIDE, 1, [1, 1, 0], 5, (5, 7, 0)),
        (WIDE, 1, [0.1, 0.2], 1, (4, 8)),
        (WIDE, 1, np.array([0.5, 0.5], dtype=np.float32), 1, (6, 6)),
        (WIDE, 1, [Fraction(1, 3), Fraction(2, 3)], 1, (4, 8)),
        (WIDE, 1, [1], 1, (12,)),
        (WIDE, 1, [1, 1], 100, (0, 12)),
        (BLOCKS, 0, [1, 1], 1, (64, 64)),
        (BLOCKS, 0, [2, 1], 1, (64, 64)),
        (BLOCKS, 0, [3, 1], 1, (96, 32)),
        (BLOCKS, 0, [3, 1], 64, (64, 64)),
        (BLOCKS, 0, [1, 1, 1], 48, (0, 0, 128)),
        (BLOCKS, 1, [1, 1, 1], 1, (4, 4, 4)),
    ],
)
def test_by_ratio(tensor, axis, ratios, granularity, ne):
    state = SplitState.by_ratio(tensor, axis, ratios, granularity)
    assert state == SplitState(SplitAxis(axis), ne)
    assert check_answer(state, tensor, len(ne)) == state


@pytest.mark.parametrize(
    ("axis", "ratios", "granularity", "error"),
    [
        (1, [], 1, ValueError),
        (1, [0, 0], 1, ValueError),
        (1, [1, -1], 1, ValueError),
        (1, [1, float("nan")], 1, ValueError),
        (1, [1, float("inf")], 1, ValueError),
        (1, [1, 10**400], 1, ValueError),
        (1, [1, Fraction(10**5000, 3)], 1, ValueError),
        (1, [1] * 17, 1, ValueError),
        (1, [1, 1], 0, ValueError),
        (1, [1, 1], 1.5, ValueError),
        (2, [1, 1], 1, ValueError),
        (3, [1, 1], 1, ValueError),
        (10, [1, 1], 1, ValueError),
        (1, [1, True], 1, TypeError),
        (1, [1, "1"], 1, TypeError),
        (1, [1, 1j], 1, TypeError),
        (1, [1, 1], "4", TypeError),
        ("1", [1, 1], 1, TypeError),
    ],
)
def test_by_ratio_refuses(axis, ratios, granularity, error):
    with pytest.raises(error, match=r"split of tensor 'w': .*expected"):
        SplitState.by_ratio(WIDE, axis, ratios, granularity)


def test_by_ratio_covers_the_axis_on_any_ratios():
    rng = np.random.default_rng(0)
    for _ in range(300):
        n_devs = int(rng.integers(1, 17))
        tensor = info(32 * int(rng.integers(2, 40)), 7, type_=Q4_0, block_size=32)
        ratios = rng.random(n_devs) * rng.integers(0, 2, n_devs)
        ratios[int(rng.integers(n_devs))] = 1
        state = SplitState.by_ratio(tensor, 0, ratios, int(rng.integers(1, 100)))
        assert sum(state.ne) == tensor.ne[0]
        assert all(n == 0 for n, ratio in zip(state.ne, ratios, strict=True) if ratio == 0)
