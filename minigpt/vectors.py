"""What numba's Python lacks, in the terms of LLVM: sixteen numbers at once, and what one thread tells another.

LLVM makes one instruction of sixteen numbers, or a few where the processor takes fewer at once. Loops over single
numbers become vectors only where it can prove a lot, and sums over a row end in an addition across the vector: without
both, a small model's products take four fifths of their time for one text, and three fifths for several.
"""

from typing import Any

from llvmlite import ir
from numba import extending
from numba.core import cgutils, types
from numba.extending import models, register_model

WIDTH = 16  # float32 numbers of a vector
_LLVM_VECTOR = ir.VectorType(ir.FloatType(), WIDTH)
intrinsic: Any = extending.intrinsic  # whoever calls what it makes leaves the first argument out
_MIXED = ["contract"]  # a product and a sum in one instruction, rounded once


class VectorType(types.Type):
    """numba's type of sixteen float32 numbers in a register."""

    def __init__(self) -> None:
        super().__init__(name="vector16")


vector = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _LLVM_VECTOR)


@intrinsic
def zeros(_typing: Any) -> Any:
    """Sixteen zeros."""

    def build(_context: Any, _builder: Any, _signature: Any, _values: Any) -> Any:
        return ir.Constant(_LLVM_VECTOR, [0.0] * WIDTH)

    return vector(), build


@intrinsic
def load(_typing: Any, array: Any, place: Any) -> Any:
    """The sixteen numbers from ``place`` on of an array without gaps, counted through all its axes."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        numbers = builder.load(_vector_pointer(context, builder, signature, values))
        numbers.align = array.dtype.bitwidth // 8
        return numbers

    return vector(_gapless(array), types.intp), build


@intrinsic
def add_to(_typing: Any, array: Any, place: Any, numbers: Any) -> Any:
    """Add sixteen numbers to those from ``place`` on of an array without gaps, counted through all its axes."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = _vector_pointer(context, builder, signature, values)
        before = builder.load(pointer)
        stored = builder.store(builder.fadd(before, values[2]), pointer)
        before.align = stored.align = array.dtype.bitwidth // 8
        return context.get_dummy_value()

    return types.void(_gapless(array), types.intp, vector), build


@intrinsic
def fma(_typing: Any, total: Any, number: Any, numbers: Any) -> Any:
    """total + number · numbers, the fused multiply-add."""

    def build(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        undefined, index = ir.Constant(_LLVM_VECTOR, ir.Undefined), ir.IntType(32)
        first = builder.insert_element(undefined, values[1], ir.Constant(index, 0))
        all_alike = builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(index, WIDTH), [0] * WIDTH))
        return builder.fadd(values[0], builder.fmul(all_alike, values[2], flags=_MIXED), flags=_MIXED)

    return vector(vector, types.float32, vector), build


@intrinsic
def add(_typing: Any, a: Any, b: Any) -> Any:
    """a + b, two vectors."""

    def build(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.fadd(*values)

    return vector(vector, vector), build


@intrinsic
def told(_typing: Any, array: Any, i: Any) -> Any:
    """``array[i]`` as another thread told it; what that thread wrote before is then there to read."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, signature, values), "acquire", 8)

    return types.int64(array, types.intp), build


@intrinsic
def tell(_typing: Any, array: Any, i: Any, value: Any) -> Any:
    """``array[i] = value``, after all that this thread has written before."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store_atomic(values[2], _pointer(context, builder, signature, values), "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int64), build


def _pointer(context: Any, builder: Any, signature: Any, values: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, values[0])
    return cgutils.get_item_pointer(context, builder, signature.args[0], array, [values[1]], wraparound=False)


def _vector_pointer(context: Any, builder: Any, signature: Any, values: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, values[0])
    return builder.bitcast(builder.gep(array.data, [values[1]]), _LLVM_VECTOR.as_pointer())


def _gapless(array: Any) -> Any:
    assert array.layout == "C" and array.dtype == types.float32, f"{array}: must be float32 without gaps"
    return array
