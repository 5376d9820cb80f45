"""From the flags of `pdserve up` to the command line of every process it starts."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from ..engine.config import LOG_LEVELS, package_version
from ..transfer.errors import ConfigError
from .front_flags import add_front_arguments, front_config
from .model_flags import (
    ModelSource,
    add_model_arguments,
    add_per_model,
    add_style_arguments,
    aliases_of,
    models_of,
    per_model,
    reasoning_parser_named,
    tool_parser_named,
)
from .supervisor import ChildSpec

MAX_PLAIN_CHARS = 40  # of a model's name in the names of its workers, which have at most 64
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class UpConfig:
    """One system on one machine. What is None is left to the default of the process concerned."""

    models: tuple[ModelSource, ...]
    alias: tuple[str, ...] = ()  # as they are given to the gateways
    prefill: Mapping[str, int] = field(default_factory=dict)  # workers of each model, where it is not 1;
    decode: Mapping[str, int] = field(default_factory=dict)  # 0 for prefill: decode computes the prompts, too
    gateways: int = 1
    host: str = "127.0.0.1"
    port: int = 8000  # of the first gateway, the others follow; 0 = any free one
    max_model_len: Mapping[str, int] = field(default_factory=dict)
    max_queue: int | None = None
    queue_timeout_s: float | None = None
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    max_connections: int | None = None
    api_keys: str | None = None
    shutdown_s: float = 3.0
    drain_timeout_s: float | None = None
    death_bound_s: float | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    request_timeout_s: float | None = None
    cors_origin: tuple[str, ...] = ()
    log_prompts: bool = False
    local_prefill: str | None = None
    chat_template: Mapping[str, str] = field(default_factory=dict)
    tool_call_parser: Mapping[str, str] = field(default_factory=dict)
    reasoning_parser: Mapping[str, str] = field(default_factory=dict)
    keep_alive_s: float | None = None
    link: str | None = None
    lease_cores: str | None = None
    dtype: str | None = None
    block_size: int | None = None
    prefill_block_size: int | None = None
    decode_block_size: int | None = None
    kv_blocks: int | None = None
    prefill_kv_blocks: int | None = None
    chunk_tokens: int | None = None
    max_sequences: int | None = None
    preemption: str | None = None
    swap_memory: str | None = None
    itl_slo_ms: float | None = None
    no_prefix_caching: bool = False
    no_fused_modules: bool = False
    quantization: str | None = None
    device: str | None = None
    prefill_device: str | None = None
    decode_device: str | None = None
    gpu_memory_utilization: float | None = None
    cuda_graphs: str | None = None
    torch_compile: bool = False
    kv_cache_dtype: str | None = None
    check_invariants: bool = False
    trust_remote_code: bool = False
    debug_endpoints: bool = False
    log_level: str = "info"
    log_json: bool = False

    def num_prefill(self, model: ModelSource) -> int:
        return self.prefill.get(model.name, 1)

    def num_decode(self, model: ModelSource) -> int:
        return self.decode.get(model.name, 1)

    def worker_names(self, role: str, model: ModelSource) -> list[str]:
        """`decode-0` and so on; with several models `decode-NAME-0`."""
        count = self.num_prefill(model) if role == "prefill" else self.num_decode(model)
        middle = "" if len(self.models) == 1 else f"{_plain(model.name)}-"
        return [f"{role}-{middle}{i}" for i in range(count)]


def _plain(name: str) -> str:
    """What a worker's name can hold of a model's."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)[:MAX_PLAIN_CHARS]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pdserve up", description="Start and supervise a whole system here.")
    add_model_arguments(parser)
    parser.add_argument("--host", default=UpConfig.host)
    parser.add_argument("--port", type=int, default=UpConfig.port, help="0 takes any free one")
    workers = parser.add_argument_group("workers")
    add_per_model(workers, "--prefill", "N", "prefill workers (of each model, or of the one named)")
    add_per_model(workers, "--decode", "N", "decode workers")
    workers.add_argument("--gateways", type=int, default=UpConfig.gateways, metavar="N", help="on consecutive ports")
    workers.add_argument("--aggregated", action="store_true", help="no prefill workers (the same as --prefill 0)")
    workers.add_argument("--link", choices=("auto", "cuda_ipc", "shm", "zmq"), help="how KV moves")
    workers.add_argument("--lease-cores", choices=("auto", "never"), help="compute on idle neighbours' cores, too")
    workers.add_argument("--local-prefill", choices=("auto", "never"), help="may decode compute prompts itself")
    memory = parser.add_argument_group("model and memory")
    memory.add_argument("--dtype", help="float32, float16 or bfloat16")
    add_per_model(memory, "--max-model-len", "TOKENS", "longest prompt + output")
    memory.add_argument("--block-size", type=int, metavar="TOKENS", help="tokens per KV block, on both sides")
    memory.add_argument("--prefill-block-size", type=int, metavar="TOKENS", help="the same for prefill only")
    memory.add_argument("--decode-block-size", type=int, metavar="TOKENS", help="the same for decode only")
    memory.add_argument("--kv-blocks", type=int, metavar="BLOCKS", help="KV blocks of each decode worker")
    memory.add_argument("--prefill-kv-blocks", type=int, metavar="BLOCKS", help="KV blocks of each prefill worker")
    memory.add_argument("--no-prefix-caching", action="store_true")
    memory.add_argument("--no-fused-modules", action="store_true", help="the model's own modules, not our kernels")
    memory.add_argument("--quantization", choices=("int8", "int4", "fp8"), help="weights in fewer bits (fp8: GPU)")
    memory.add_argument("--device", metavar="DEVICE", help="of all workers: cpu (default), cuda or cuda:N")
    memory.add_argument("--prefill-device", metavar="DEVICE", help="the same for prefill only")
    memory.add_argument("--decode-device", metavar="DEVICE", help="the same for decode only")
    memory.add_argument("--gpu-memory-utilization", type=float, metavar="SHARE", help="of a GPU, for each worker")
    memory.add_argument("--cuda-graphs", choices=("auto", "never"), help="capture and replay decode steps on a GPU")
    memory.add_argument("--torch-compile", action="store_true", help="compile fused layers on a GPU")
    memory.add_argument("--kv-cache-dtype", choices=("auto", "int8"), help="KV in fewer bits (CPU, float32)")
    add_per_model(memory, "--chat-template", "FILE", "instead of the model's own")
    add_style_arguments(memory)
    memory.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    limits = parser.add_argument_group("scheduling")
    limits.add_argument("--chunk-tokens", type=int, metavar="TOKENS", help="prompt tokens computed in one step")
    limits.add_argument("--max-sequences", type=int, metavar="N", help="sequences a decode worker runs at once")
    limits.add_argument("--preemption", choices=("auto", "swap", "recompute"), help="how preempted sequences come back")
    limits.add_argument("--swap-memory", metavar="SIZE", help="host memory for preempted KV of each decode worker")
    limits.add_argument("--max-queue", type=int, metavar="N", help="requests that may wait; the next one gets a 429")
    limits.add_argument("--queue-timeout-s", type=float, metavar="S", help="longest wait before a 503")
    limits.add_argument("--ttft-slo-s", type=float, metavar="S", help="refuse what would start later than this")
    limits.add_argument("--tpot-slo-s", type=float, metavar="S", help="run no more than get a token each in this")
    limits.add_argument("--itl-slo-ms", type=float, metavar="MS", help="of steps, with prompts in them or beside them")
    limits.add_argument("--max-connections", type=int, metavar="N", help="open at a time; the next one gets a 503")
    limits.add_argument("--api-keys", metavar="FILE", help="let only these in (see `pdserve keys api NAME`)")
    add_front_arguments(limits)
    limits.add_argument("--keep-alive-s", type=float, metavar="S", help="silence on a stream before a comment is sent")
    limits.add_argument(
        "--shutdown-s", type=float, default=UpConfig.shutdown_s, metavar="S", help="time for open requests at Ctrl-C"
    )
    limits.add_argument(
        "--drain-timeout-s", type=float, metavar="S", help="time for a drained worker's requests to finish or to move"
    )
    limits.add_argument("--death-bound-s", type=float, metavar="S", help="a process silent for longer is dead")
    limits.add_argument("--check-invariants", action="store_true", help="prove the block pools right at every step")
    logs = parser.add_argument_group("logs")
    logs.add_argument("--version", action="version", version=f"pdserve {package_version()}")
    logs.add_argument("--log-level", choices=LOG_LEVELS, default=UpConfig.log_level)
    logs.add_argument("--debug-endpoints", action="store_true", help="serve /debug/requests")
    logs.add_argument("--log-json", action="store_true", help="one JSON object a line")
    return parser


def parse_config(argv: Sequence[str]) -> UpConfig:
    """Read the flags. Raises ConfigError for numbers that cannot work."""
    args = build_parser().parse_args(argv)
    args.models = models_of(args)
    aliases_of(args, args.models)  # a bad one is known before anything is started
    if args.aggregated:
        args.prefill = ["0"]
    for flag, read in (
        ("prefill", int), ("decode", int), ("max_model_len", int), ("chat_template", str),
        ("tool_call_parser", tool_parser_named), ("reasoning_parser", reasoning_parser_named),
    ):  # fmt: skip
        setattr(args, flag, per_model(f"--{flag.replace('_', '-')}", getattr(args, flag), args.models, read))
    front_config(args)  # here already: a gateway that is started would only say so and be started again
    config = UpConfig(**{field.name: getattr(args, field.name) for field in fields(UpConfig)})
    for model in config.models:
        prefill, decode = config.num_prefill(model), config.num_decode(model)
        if prefill < 0 or decode < 1:
            raise ConfigError(f"--prefill {prefill} --decode {decode}: at least one decode worker is needed")
    if len({_plain(model.name) for model in config.models}) < len(config.models):
        raise ConfigError("--model: the names are too much alike to name workers after them")
    if config.itl_slo_ms is not None and not 0 < config.itl_slo_ms < float("inf"):
        raise ConfigError(f"--itl-slo-ms {config.itl_slo_ms} is not a positive number")
    if config.gateways < 1:
        raise ConfigError(f"--gateways {config.gateways}: at least one is needed")
    if not 0 <= config.port <= 65536 - config.gateways:
        raise ConfigError(f"--port {config.port} is not a port number" + (" for all gateways" * (config.gateways > 1)))
    return config


def place_workers(prefill: int, decode: int, cpus: Sequence[int]) -> tuple[list[int], list[int]]:
    """The core of each prefill and of each decode worker.

    With enough cores every worker has its own; with fewer, the two pools still share none as long as there are two.
    """
    if prefill == 0 or len(cpus) == 1:
        return [cpus[i % len(cpus)] for i in range(prefill)], [cpus[i % len(cpus)] for i in range(decode)]
    share = round(len(cpus) * prefill / (prefill + decode))
    share = min(max(share, 1), len(cpus) - 1)
    ours, theirs = cpus[:share], cpus[share:]
    return [ours[i % len(ours)] for i in range(prefill)], [theirs[i % len(theirs)] for i in range(decode)]


def gateway_names(config: UpConfig) -> list[str]:
    return ["gateway"] if config.gateways == 1 else [f"gateway-{i}" for i in range(config.gateways)]


def _flags(**values: str | int | float | bool | Sequence[str] | None) -> list[str]:
    """`block_size=16` as ["--block-size", "16"]; True is a bare flag, None and False are nothing, a list repeats."""
    flags: list[str] = []
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif value is not None and value is not False:
            for one in [value] if isinstance(value, str | int | float) else value:
                flags += [flag, str(one)]
    return flags


def _named(values: Mapping[str, object], config: UpConfig) -> list[str]:
    """`[NAME=]VALUE` for each model that has one."""
    return [str(value) if len(config.models) == 1 else f"{name}={value}" for name, value in values.items()]


def child_specs(
    config: UpConfig, paths: Sequence[Path], port: int, sockets: Path, cpus: Sequence[int]
) -> list[ChildSpec]:
    """The command line of every process. `paths` are the models' resolved directories, `sockets` holds the ipc
    sockets."""
    names = gateway_names(config)
    controls = [f"ipc://{sockets}/{name}" for name in names]
    common = _flags(
        trust_remote_code=config.trust_remote_code,
        log_level=config.log_level,
        log_json=config.log_json,
        death_bound_s=config.death_bound_s,
        exit_with_parent=os.getpid(),
    )
    gateway = _gateway_models(config, paths) + common + _flags(
        host=config.host,
        max_queue=config.max_queue,
        queue_timeout_s=config.queue_timeout_s,
        ttft_slo_s=config.ttft_slo_s,
        tpot_slo_s=config.tpot_slo_s,
        local_prefill=config.local_prefill,
        max_connections=config.max_connections,
        api_keys=config.api_keys and str(Path(config.api_keys).resolve()),
        shutdown_s=config.shutdown_s,
        max_model_len=_named(config.max_model_len, config),
        chat_template=_named(config.chat_template, config),
        tool_call_parser=_named(config.tool_call_parser, config),
        reasoning_parser=_named(config.reasoning_parser, config),
        keep_alive_s=config.keep_alive_s,
        alias=config.alias,
        debug_endpoints=config.debug_endpoints,
        requests_per_minute=config.requests_per_minute,
        tokens_per_minute=config.tokens_per_minute,
        max_concurrent=config.max_concurrent,
        request_timeout_s=config.request_timeout_s,
        cors_origin=config.cors_origin,
        log_prompts=config.log_prompts,
    )
    worker = common + _flags(
        gateway=controls,
        drain_timeout_s=config.drain_timeout_s,
        link=config.link,
        lease_cores=config.lease_cores,
        dtype=config.dtype,
        chunk_tokens=config.chunk_tokens,
        no_prefix_caching=config.no_prefix_caching,
        no_fused_modules=config.no_fused_modules,
        quantization=config.quantization,
        gpu_memory_utilization=config.gpu_memory_utilization,
        torch_compile=config.torch_compile,
        kv_cache_dtype=config.kv_cache_dtype,
        check_invariants=config.check_invariants,
    )
    prefill = worker + _flags(
        device=config.prefill_device or config.device,
        block_size=config.prefill_block_size or config.block_size,
        kv_blocks=config.prefill_kv_blocks,
    )
    decode = worker + _flags(
        device=config.decode_device or config.device,
        cuda_graphs=config.cuda_graphs,
        block_size=config.decode_block_size or config.block_size,
        kv_blocks=config.kv_blocks,
        max_sequences=config.max_sequences,
        preemption=config.preemption,
        swap_memory=config.swap_memory,
        itl_slo_ms=config.itl_slo_ms,
    )
    counts = (sum(map(config.num_prefill, config.models)), sum(map(config.num_decode, config.models)))
    prefill_cpus, decode_cpus = map(iter, place_workers(*counts, cpus))
    # The workers' own sockets go to that directory too, so that a killed worker's are cleared away with the rest.
    env = {"XDG_RUNTIME_DIR": str(sockets)}
    worker_env = env | ONE_THREAD
    specs = []
    for i, (name, control) in enumerate(zip(names, controls, strict=True)):
        command = _python("gateway", gateway + _flags(port=port + i, listen=control))
        specs.append(ChildSpec(name, command, env, stops_first=True))
    for model, path in zip(config.models, paths, strict=True):
        mine = _flags(
            model=str(path), served_model_name=model.name, max_model_len=config.max_model_len.get(model.name)
        )
        for role, flags, cores in (("prefill", prefill, prefill_cpus), ("decode", decode, decode_cpus)):
            for name in config.worker_names(role, model):
                command = _python(role, mine + flags + _flags(name=name, cpu=next(cores)))
                specs.append(ChildSpec(name, command, worker_env))
    return specs


def _gateway_models(config: UpConfig, paths: Sequence[Path]) -> list[str]:
    if len(paths) == 1:
        return _flags(model=str(paths[0]), served_model_name=config.models[0].name)
    return _flags(model=[f"{model.name}={path}" for model, path in zip(config.models, paths, strict=True)])


def _python(room: str, arguments: Sequence[str]) -> tuple[str, ...]:
    # -P: whatever folder the user stands in must not be importable (its `kernels/` or `json.py` would be found first)
    return (sys.executable, "-P", "-m", f"pdserve.{room}", *arguments)
