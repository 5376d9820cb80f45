"""Compiles the GPU kernels for GPUs that are not here; a script, since Triton does not interpret and compile in one go.

    python tests/kernels/compile_triton.py 90 80 100

prints a line of JSON for each variant: compute capability, its name, and the shared memory that a program takes. All
are compiled for the first architecture, the most basic ones for the others.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pdserve.kernels.attention_triton import DECODE_TILES, PREFILL_TILES, PREFILL_TILES_FLOAT32
from pdserve.kernels.attention_triton_decode import attend_splits, combine_splits, list_splits
from pdserve.kernels.attention_triton_prefill import attend_tiles
from pdserve.kernels.rows_triton import gate_rows, norm_rows, turn_heads
from pdserve.kernels.triton_tuning import Tiles

SCALARS = {"score_scale", "score_cap", "eps", "q_eps", "k_eps"}
STRIDES = {"q_token_stride", "q_head_stride", "x_stride", "row_stride"}
INTEGERS = {"num_seqs", "num_splits", "max_blocks", "window", "q_heads", *STRIDES}
FLOAT32 = {"partial", "partial_sums", "k_scales", "v_scales"}
BASIC = {"decode", "prefill"}  # tiles that must fit every GPU
FLOAT = {"q", "output", "sinks", "x", "weight", "qkv", "cos", "sin", "q_weight", "k_weight", "joined"}


@dataclass(frozen=True)
class Variant:
    arch: int
    tiles: Tiles
    dtype: str = "bf16"
    cache: str = "bf16"
    k_head_dim: int = 128
    v_head_dim: int = 128
    group: int = 4
    block_size: int = 16
    everything: bool = False  # window, soft cap and sinks

    @property
    def constants(self) -> dict[str, int | bool]:
        pads = [max(16, triton.next_power_of_2(dim)) for dim in (self.k_head_dim, self.v_head_dim)]
        return {
            "SINKS": self.everything, "WINDOWED": self.everything, "CAPPED": self.everything,
            "SCALED": self.cache != self.dtype, "KV_HEADS": 8, "HEADS": 8 * self.group, "GROUP": self.group,
            "K_DIM": self.k_head_dim, "V_DIM": self.v_head_dim, "K_PAD": pads[0], "V_PAD": pads[1],
            "BLOCK_SIZE": self.block_size, "M": self.tiles.rows or max(16, triton.next_power_of_2(self.group)),
            "BLOCK_N": self.tiles.keys, "SPLITS": 16, "SEQS": 128,
            "SIZE": 4096, "PAD": 4096, "BLOCK": 1024,
            "NORMED": True, "ROTARY": 64, "HEAD_DIM": self.k_head_dim, "HALF_PAD": 32, "REST_PAD": pads[0],
        }  # fmt: skip


def shared_bytes(kernel: triton.JITFunction, variant: Variant) -> int:  # type: ignore[type-arg]
    """Compile a kernel down to machine code."""
    constants = {name: value for name, value in variant.constants.items() if name in kernel.arg_names}
    types, aligned = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            types[name] = "constexpr"
            continue
        if name in SCALARS or name in INTEGERS:
            types[name] = "fp32" if name in SCALARS else "i32"
        elif name in ("k_cache", "v_cache"):
            types[name] = "*" + variant.cache
        elif name in FLOAT32 or name in FLOAT:
            types[name] = "*fp32" if name in FLOAT32 else "*" + variant.dtype
        else:
            types[name] = "*i64" if name in ("context_lens", "block_tables") else "*i32"
        if types[name].startswith("*") or name in STRIDES:
            aligned[place,] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        ASTSource(kernel, types, places, aligned),
        target=GPUTarget("cuda", variant.arch, 32),
        options=variant.tiles.launch,
    )
    assert compiled.asm["cubin"]
    return int(compiled.metadata.shared)


def variants(arch: int) -> dict[str, tuple[triton.JITFunction, Variant]]:  # type: ignore[type-arg]
    decode, prefill = Variant(arch, DECODE_TILES[0]), Variant(arch, PREFILL_TILES[0])
    return {
        "decode": (attend_splits, decode),
        "prefill": (attend_tiles, prefill),
        "list": (list_splits, decode),
        "norm": (norm_rows, decode),
        "turn": (turn_heads, decode),
        "gate": (gate_rows, decode),
        "combine": (combine_splits, replace(decode, everything=True)),
        "decode-largest": (attend_splits, replace(decode, tiles=DECODE_TILES[-1], block_size=128)),
        "decode-everything": (attend_splits, replace(decode, everything=True, cache="fp8e4nv", k_head_dim=80, group=7)),
        "decode-fp32": (attend_splits, replace(decode, dtype="fp32", cache="fp32", k_head_dim=64, v_head_dim=64)),
        "prefill-largest": (attend_tiles, replace(prefill, tiles=PREFILL_TILES[-1])),
        "prefill-everything": (
            attend_tiles,
            replace(prefill, everything=True, dtype="fp16", cache="i8", k_head_dim=192, v_head_dim=128, group=3),
        ),
        "prefill-wide": (attend_tiles, replace(prefill, k_head_dim=256, v_head_dim=256)),
        "prefill-fp32": (
            attend_tiles,
            replace(prefill, tiles=PREFILL_TILES_FLOAT32[0], dtype="fp32", cache="fp32", k_head_dim=64, v_head_dim=64),
        ),
    }


def main() -> None:
    full_arch, *other_archs = (int(argument) for argument in sys.argv[1:])
    for arch in (full_arch, *other_archs):
        for name, (kernel, variant) in variants(arch).items():
            if arch == full_arch or name in BASIC:
                print(json.dumps([arch, name, shared_bytes(kernel, variant)]), flush=True)


if __name__ == "__main__":
    main()
