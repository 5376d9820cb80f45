"""From command-line flags to a loaded engine: what prefill and decode workers set up in the same way."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..transfer.device import Device
from ..transfer.device_cuda import open_device
from ..transfer.errors import ConfigError
from .block_pool import BlockPool
from .budget import WorstStep, kv_room_bytes, measure_need, prove
from .checkpoint import fingerprint, resolve, served_name
from .fused import compile_layers
from .grammar import TokenizerSource
from .graphs import Capture, DecodeGraphs, GraphMode, capture_decode_steps, capture_for
from .kv_cache import KVCache, parse_size, plan_num_blocks
from .memory import CudaMemory
from .model import LoadedModel, load_model
from .quantized import WEIGHT_FORMATS, WeightFormat
from .runner import Runner

log = logging.getLogger(__name__)

KV_CACHE_DTYPES = ("auto", "int8")


@dataclass(frozen=True)
class EngineConfig:
    """Which model runs, on what, and with how much KV."""

    model: str
    served_model_name: str
    dtype: str = "float32"
    device: str = "cpu"
    block_size: int = 16
    kv_blocks: int | None = None
    kv_memory_bytes: int | None = None
    max_model_len: int | None = None
    prefix_caching: bool = True
    trust_remote_code: bool = False
    fused_modules: bool = True
    quantization: WeightFormat | None = None
    torch_compile: bool = False
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9


@dataclass(frozen=True)
class Engine:
    model: LoadedModel
    cache: KVCache
    pool: BlockPool
    tokenizer: TokenizerSource | None = None  # for grammars; without one they are refused
    worst: WorstStep | None = None  # on a GPU: what must fit at any time
    capture: Capture | None = None  # on a GPU, unless it is not wanted: how decode steps are captured
    device: Device | None = None  # whose memory other workers may open; None on the processor, or without CuPy

    def warm_up(self, runner: Runner) -> DecodeGraphs | None:
        """Decode a token for real, capture decode steps, and see that the largest step fits. Raises ConfigError."""
        runner.warm_up(self.pool)
        if self.worst is None:
            return None
        graphs = None
        if self.capture is not None:
            graphs = capture_decode_steps(runner, self.pool, self.worst.max_rows, self.capture)
        prove(runner, self.worst)
        return graphs


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="directory, .gguf file, hub id, or `demo`")
    parser.add_argument("--served-model-name", help="name in the API (default: the directory's name, or `demo`)")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default=EngineConfig.dtype)
    parser.add_argument("--device", default=EngineConfig.device, help="cpu, cuda or cuda:N")
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=EngineConfig.gpu_memory_utilization, metavar="SHARE",
        help="of the GPU's memory, for weights, KV and all else of this worker",
    )  # fmt: skip
    parser.add_argument("--block-size", type=int, default=EngineConfig.block_size, help="tokens per KV block")
    parser.add_argument("--kv-blocks", type=int, help="KV blocks in the pool")
    parser.add_argument("--kv-memory", help="memory for the KV pool, such as 512M or 2G; instead of --kv-blocks")
    parser.add_argument(
        "--kv-cache-dtype", choices=KV_CACHE_DTYPES, default=EngineConfig.kv_cache_dtype,
        help="auto: that of the model; int8: a scale for every token and head; CPU, float32",
    )  # fmt: skip
    parser.add_argument("--max-model-len", type=int, help="longest prompt + output (default: the model's)")
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument(
        "--no-fused-modules", action="store_true", help="run the model's own modules instead of our kernels"
    )
    parser.add_argument(
        "--quantization", choices=WEIGHT_FORMATS,
        help="weights in int8 (per output) or int4 (per 32); on a GPU by torchao, and fp8 too",
    )  # fmt: skip
    parser.add_argument("--torch-compile", action="store_true", help="on a GPU: compile fused layers (slow to start)")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Check and freeze what `add_engine_arguments` parsed. Raises ConfigError."""
    if not 1 <= args.block_size <= 4096:
        raise ConfigError(f"--block-size {args.block_size} is not between 1 and 4096")
    for flag, value in (("--kv-blocks", args.kv_blocks), ("--max-model-len", args.max_model_len)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} {value} is not a positive number")
    if not 0 < args.gpu_memory_utilization <= 1:
        raise ConfigError(f"--gpu-memory-utilization {args.gpu_memory_utilization:g} is not above 0 and at most 1")
    if args.kv_cache_dtype == "int8" and (args.device != "cpu" or args.dtype != "float32"):
        raise ConfigError("--kv-cache-dtype int8 needs --device cpu and --dtype float32")
    return EngineConfig(
        model=args.model,
        served_model_name=args.served_model_name or served_name(args.model),
        dtype=args.dtype,
        device=args.device,
        block_size=args.block_size,
        kv_blocks=args.kv_blocks,
        kv_memory_bytes=parse_size(args.kv_memory) if args.kv_memory else None,
        max_model_len=args.max_model_len,
        prefix_caching=not args.no_prefix_caching,
        trust_remote_code=args.trust_remote_code,
        fused_modules=not args.no_fused_modules,
        quantization=args.quantization,
        torch_compile=args.torch_compile,
        kv_cache_dtype=args.kv_cache_dtype,
        gpu_memory_utilization=args.gpu_memory_utilization,
    )


def build_engine(config: EngineConfig, worst: WorstStep, graphs: GraphMode) -> Engine:
    """Load the model and set its KV pool up. Raises ConfigError for whatever cannot work."""
    if config.device == "cpu":
        torch.set_num_threads(1)  # one pinned thread per worker: OpenMP barriers across busy cores cost milliseconds
    path: Path = resolve(config.model)
    model = load_model(
        path,
        fingerprint=fingerprint(path),
        dtype=config.dtype,
        device=config.device,
        max_model_len=config.max_model_len,
        trust_remote_code=config.trust_remote_code,
        fused_modules=config.fused_modules,
        quantization=config.quantization,
    )
    if config.torch_compile:
        compile_layers(model.module)
    source = TokenizerSource(path, model.vocab_size, model.eos_token_ids, config.trust_remote_code)
    return engine_of(model, config, worst, graphs, source)


def engine_of(
    model: LoadedModel, config: EngineConfig, worst: WorstStep, graphs: GraphMode, source: TokenizerSource | None = None
) -> Engine:
    """A KV pool for a model that is loaded already. Raises ConfigError where there is no room for it."""
    if config.kv_cache_dtype == "int8":
        model = replace(model, layout=replace(model.layout, dtype="int8"))
    device = model.module.device
    room, capture, on_gpu = None, None, device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)  # where kernels are launched that are not told
        memory, capture = CudaMemory(device), capture_for(device, graphs)
        room = kv_room_bytes(
            memory,
            config.gpu_memory_utilization,
            measure_need(model, config.block_size, worst, memory, capture),
        )
    num_blocks = plan_num_blocks(
        model.layout, config.block_size, config.kv_blocks, config.kv_memory_bytes, device, room
    )
    pool = BlockPool(num_blocks, config.block_size, prefix_caching=config.prefix_caching)
    cache = KVCache(model.layout, num_blocks, config.block_size, device)
    log.info(
        "loaded %s: %d layers, %d KV blocks of %d tokens (%.0f MB), context %d",
        config.served_model_name,
        model.layout.num_layers,
        num_blocks,
        config.block_size,
        num_blocks * config.block_size * model.layout.bytes_per_token / 1e6,
        model.max_model_len,
    )
    shared = open_device(cache.device.index or 0) if on_gpu else None
    return Engine(model, cache, pool, source, worst if on_gpu else None, capture, shared)
