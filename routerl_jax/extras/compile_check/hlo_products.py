"""FLOPs of matrix products and custom kernels in a compiled program, from their shapes. A multiply-add is two.

Everything else (norms, rotary embeddings, softmax, optimisers) is bound by memory: only its bytes count.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence

import numpy as np

from routerl_jax.extras.compile_check.hlo_text import Computation, Instruction, Shape

_LANES = 128


def product_flops(computation: Computation, instruction: Instruction) -> float:
    """FLOPs of a `dot`, a `convolution` or a library's matrix product; 0 for all others. For custom kernels see `kernel`."""
    shapes = [operand.shape for operand in computation.operands(instruction) if operand.shapes]
    if instruction.opcode == "dot":
        return 2.0 * instruction.shape.size * _contracted(shapes[0], instruction.attribute("lhs_contracting_dims"))
    if instruction.opcode == "convolution":
        return _convolution(instruction, shapes[0], shapes[1])
    target = instruction.attribute("custom_call_target").strip('"')
    if instruction.opcode == "custom-call" and re.search(r"cublas|onednn\$matmul|gemm", target):
        match = re.search(r'"lhs_contracting_dimensions":(\[[^\]]*\])', instruction.rest)
        axes = [int(axis) for axis in json.loads(match.group(1))] if match else [len(shapes[0].dims) - 1]
        return 2.0 * instruction.shape.size * math.prod(shapes[0].dims[axis] for axis in axes)
    return 0.0


def kernel(
    computation: Computation, instruction: Instruction, filled: float = 1.0, grouped: float = 1.0
) -> tuple[float, float] | None:
    """FLOPs and bytes of main memory of a custom call that is a kernel for attention or experts; None for other kernels.

    - Splash attention (training) computes the blocks that its causal mask leaves, whatever segments are in them: two products
      forward; five backward, of which two are computed in both of its kernels.
    - Ragged paged attention (decoding, prefill) reads every row's keys and values once, and multiplies the queries with them.
    - cuDNN's attention is counted without a mask.
    - Grouped products (`jax.lax.ragged_dot` and its gradients) read all groups' matrices, and the rows that are in a group.

    Args:
      filled: for ragged paged attention, the share of each row's pages that holds tokens.
      grouped: for grouped products, the share of the rows that are in a group.
    """
    operands = computation.operands(instruction)
    moved = instruction.bytes + sum(operand.bytes for operand in operands)
    target = instruction.attribute("custom_call_target").strip('"')
    if target.startswith("__cudnn$fmha"):
        q, k = operands[0].shape, operands[1].shape
        products = 5 if "Backward" in target else 2
        return 2.0 * products * q.size * k.dims[1], moved  # [rows, tokens, heads, width]
    if target != "tpu_custom_call":
        return None
    if instruction.name.startswith("splash_mha"):
        return _splash(instruction, operands), moved
    if "ragged_paged_attention" in instruction.name:
        return _paged(instruction, operands, filled)
    if instruction.name.startswith("ragged-dot"):
        return _grouped(instruction, operands, grouped)
    return None


def _grouped(instruction: Instruction, operands: Sequence[Instruction], grouped: float) -> tuple[float, float]:
    shapes = [instruction.shape, *(operand.shape for operand in operands)]
    matrices = next((shape for shape in shapes if len(shape.dims) == 3), None)
    if matrices is None:  # the table of the groups' offsets
        return 0.0, sum(shape.bytes for shape in shapes)
    tables = [shape for shape in shapes if len(shape.dims) == 2]  # of rows, in and out
    moved = matrices.bytes + grouped * sum(shape.bytes for shape in tables)
    return 2.0 * grouped * tables[0].dims[0] * math.prod(matrices.dims[1:]), moved


def _contracted(shape: Shape, axes: str) -> int:
    return math.prod(shape.dims[int(axis)] for axis in re.findall(r"\d+", axes))


def _convolution(instruction: Instruction, lhs: Shape, rhs: Shape) -> float:
    """The TPU compiler writes products as convolutions, with batch and head axes as spatial ones. Only positions of the window
    on an entry count: those on padding, and those between dilated entries, don't."""
    labels = instruction.attribute("dim_labels")
    sides = re.fullmatch(r"(\w+)_(\w+)->(\w+)", labels)
    if sides is None:
        raise ValueError(f"the convolution {instruction.name} has dim_labels={labels!r}, which can't be read")
    lhs_labels, rhs_labels, output_labels = sides.groups()
    window = dict(re.findall(r"(\w+)=(\S+)", instruction.attribute("window").strip("{}")))
    spatial = sorted(label for label in lhs_labels if label.isdigit())

    def per_axis(key: str, default: str) -> list[str]:
        return window[key].split("x") if key in window else [default] * len(spatial)

    strides, pads = per_axis("stride", "1"), per_axis("pad", "0_0")
    lhs_dilation, rhs_dilation = per_axis("lhs_dilate", "1"), per_axis("rhs_dilate", "1")
    taps = 1
    for i, label in enumerate(spatial):
        inside = lhs.dims[lhs_labels.index(label)]
        positions = np.arange(instruction.shape.dims[output_labels.index(label)])[:, None] * int(strides[i])
        positions = (
            positions + np.arange(rhs.dims[rhs_labels.index(label)]) * int(rhs_dilation[i]) - int(pads[i].split("_")[0])
        )
        dilation = int(lhs_dilation[i])
        taps *= int(((positions >= 0) & (positions <= (inside - 1) * dilation) & (positions % dilation == 0)).sum())
    batch, features = (instruction.shape.dims[output_labels.index(label)] for label in "bf")
    return 2.0 * taps * batch * features * rhs.dims[rhs_labels.index("i")]


def _splash(instruction: Instruction, operands: Sequence[Instruction]) -> float:
    arrays = [
        operand.shape.dims for operand in operands if len(operand.shape.dims) in (3, 4) and "f" in operand.shape.dtype
    ]
    q, k = arrays[0], arrays[1]  # [rows,] heads, tokens, width
    queries, keys, width = q[-2], k[-2], q[-1]
    kind = "dkv" if "_dkv" in instruction.name else "dq" if "_dq" in instruction.name else "fwd"
    suffix = "" if kind == "fwd" else f"_{kind}"
    rows, columns = (
        _block(instruction, f"block_{side}{suffix}", size) for side, size in (("q", queries), ("kv", keys))
    )
    grid = -(-queries // rows), -(-keys // columns)
    causal = any(dims in ((queries, _LANES), (8, queries)) for dims in (o.shape.dims for o in operands if _is_ids(o)))
    blocks = grid[0] * grid[1]
    if causal:  # it has the queries' positions: the mask is causal, and blocks above the diagonal are left out
        blocks = sum(min(-(-(i + 1) * rows // columns), grid[1]) for i in range(grid[0]))
    visited = [o.shape.dims for o in operands if o.shape.dtype == "s8" and len(o.shape.dims) == 3]
    if visited:  # the grid is no wider than the most blocks that any row of it visits
        blocks = min(blocks, visited[0][-2] * visited[0][-1])
    products = {"fwd": 2, "dq": 3, "dkv": 4}[kind]
    return 2.0 * products * math.prod(q[:-2]) * width * blocks * rows * columns


def _is_ids(operand: Instruction) -> bool:
    return operand.shape.dtype == "s32" and len(operand.shape.dims) == 2


def _block(instruction: Instruction, name: str, size: int) -> int:
    match = re.search(rf'{name}\\*": (\d+)', instruction.rest)
    return min(int(match.group(1)), size) if match else size


def _paged(instruction: Instruction, operands: Sequence[Instruction], filled: float) -> tuple[float, float]:
    table = next(o.shape.dims for o in operands if _is_ids(o))  # [rows, pages of a row]
    pages = max((o.shape for o in operands), key=lambda shape: len(shape.dims))  # [all, tokens, k and v heads, width]
    queries, heads, width = instruction.shape.dims
    rows, tokens = table[0], queries // table[0]
    cached = max(table[1] * pages.dims[1] * filled, tokens)
    pairs = queries * (cached - (tokens - 1) / 2)
    item_bytes = pages.bytes / pages.size
    moved = rows * cached * pages.dims[2] * width * item_bytes
    moved += instruction.bytes + sum(o.bytes for o in operands if o.shape is not pages)
    return 4.0 * heads * width * pairs, moved
