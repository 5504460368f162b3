"""The command `inspect`: describes a model, a tuned state, an adapter or a session file."""

from __future__ import annotations

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from programs.settings import reports_errors
from programs.settings.model_source import resolve
from programs.tools.parsers import BYTES_PER_NUMBER, inspect_parser
from rwkv_batch.errors import StartupError
from rwkv_batch.model.adapters.files import Adapter, read_adapter
from rwkv_batch.model.adapters.merge import kind_of
from rwkv_batch.model.files.gguf_blocks import BlockTensor
from rwkv_batch.model.quant.formats import Format, format_for
from rwkv_batch.model.state import RWKV7, ModelShape, StateFormat
from rwkv_batch.model.tensor_files import FileError, FileKind, files_of, metadata_of, read_json_file, read_tensors
from rwkv_batch.model.weights import Weights, open_weights
from rwkv_batch.translation.prompt_forms import prompt_form
from state_pool.session_file import MAX_FILE_BYTES, InvalidSessionFile, decode

SLOTS = (1, 32, 320, 960)
GPUS_GB = {
    8: "RTX 4060",
    12: "RTX 4070",
    16: "RTX 4080",
    24: "RTX 4090, L4",
    48: "L40S, A6000",
    80: "A100, H100",
    141: "H200",
}
OVERHEAD = 1.1
"""Memory of a GPU relative to weights and states: work space, CUDA graphs, CUDA itself."""
_INT8_BYTES_ON_CPU = 1.05
_ANY_FILE = FileKind(
    "file",
    "path",
    "tensors",
    ".pth, .safetensors, .st or .gguf",
    (".pth", ".pt", ".bin", ".safetensors", ".st", ".state", ".gguf"),
)
_STATE = re.compile(r"att\.time_state$")
_ADAPTER = re.compile(r"\.(lora_A|lora_B|bone|disha|miss)\b|\.(lora_A|lora_B|bone)_expert_\d+$|^moe_info$")
_SHOWN_METADATA = {"general.name": "name", "general.license": "licence"}
_TEMPLATE = "tokenizer.chat_template"
_WORLD = "rwkv-world"
"""llama.cpp's name of the form with the labels User and Assistant."""
_TOKENIZER = "tokenizer_config.json"
_MAX_TEXT = 80


@reports_errors(StartupError, FileError, InvalidSessionFile, OSError)
def main(arguments: Sequence[str]) -> int:
    """Describe a file. Returns the exit code: 2 for a wrong flag, 1 for a file that cannot be read."""
    given, _ = inspect_parser().parse(arguments)
    path = Path(resolve(given.file))
    for name, text in _described(path):
        sys.stdout.write(f"{name:<12}{text}\n")
    for file in files_of(path) if given.checksum else ():
        with file.open("rb") as opened:
            sys.stdout.write(f"{'sha256':<12}{hashlib.file_digest(opened, 'sha256').hexdigest()}  {file.name}\n")
    return 0


def _described(path: Path) -> Iterator[tuple[str, str]]:
    """Yield lines (name, text). Raises StartupError, FileError, InvalidSessionFile or OSError."""
    if path.is_dir():
        is_adapter = any(path.glob("adapter_model.*"))
        yield from _adapter(read_adapter(path)) if is_adapter else _model(open_weights(path))
        if not is_adapter and (path / _TOKENIZER).is_file():
            yield "chat form", chat_form(_folder_template(path / _TOKENIZER))
        return
    metadata = metadata_of(path)
    if metadata.get("format", "").startswith("rwkv-session"):
        yield from _session(path)
        return
    names = read_tensors(path, _ANY_FILE)
    if any(map(_STATE.search, names)):
        yield from _state(path, names)
    elif any(map(_ADAPTER.search, names)):
        yield from _adapter(read_adapter(path))
    else:
        yield from _model(open_weights(path))
    yield from ((name, ascii(metadata[key][:_MAX_TEXT])) for key, name in _SHOWN_METADATA.items() if key in metadata)
    if _TEMPLATE in metadata:
        yield "chat form", chat_form(metadata[_TEMPLATE])


def _folder_template(file: Path) -> str:
    """Return the template of a tokenizer_config.json; "" if there is none. Raises FileError."""
    found = read_json_file(file, dict[str, Any], "model").get("chat_template")
    return found if isinstance(found, str) else msgspec.json.encode(found).decode() if found else ""


def chat_form(template: str) -> str:
    """Return the form that a file brings, and whether prompts have it. Templates are shown, never run."""
    used = "User and Assistant, or the request's template"
    if not template or template == _WORLD:
        return f"{template or 'none in the file'}: labels {used}"
    return f"Jinja, not used (labels are {used}): {template[:_MAX_TEXT]!a}"


def _model(weights: Weights) -> Iterator[tuple[str, str]]:
    shape = weights.shape
    yield "kind", f"model, {weights.path.suffix.removeprefix('.') or 'Hugging Face folder'}"
    yield "model", shape.describe()
    if shape.version == RWKV7:
        yield "ranks", f"w {shape.decay_rank}, a {shape.a_rank}, v {shape.v_rank}, g {shape.gate_rank}"
    yield "translation", f"prompts of the form {prompt_form('auto', str(weights.path))} (--translation-prompt)"
    yield "parameters", f"{weights.num_parameters / 1e6:,.1f} million, {weights.num_bytes / 1e6:,.1f} MB in the file"
    types: dict[str, Counter[str]] = {}
    for name, tensor in weights.tensors.items():
        if tensor.dim() == 2:
            types.setdefault(re.sub(r"^blocks\.\d+\.", "", name), Counter())[_type_name(tensor)] += 1
    for kinds in sorted({tuple(sorted(counter)) for counter in types.values()}):
        matrices = [name for name, counter in types.items() if tuple(sorted(counter)) == kinds]
        yield "type", f"{', '.join(kinds)}: {', '.join(matrices)}"
    yield "memory", f"{'--dtype':<9}{'weights':>9}" + "".join(f"{f'slots: {slots}':>12}" for slots in SLOTS) + "  fits"
    for dtype in BYTES_PER_NUMBER if shape.version == RWKV7 else ("bf16", "fp32"):
        size, slot = weight_bytes(weights, dtype), slot_bytes(shape, dtype)
        cells = "".join(f"{(size + slots * slot) / 1e9:>9.2f} GB" for slots in SLOTS)
        needed = (size + 320 * slot) * OVERHEAD / 1e9
        gpu = next((f"{memory} GB ({names})" for memory, names in GPUS_GB.items() if needed <= memory), "several GPUs")
        yield "", f"{dtype:<9}{size / 1e9:>6.2f} GB{cells}  {gpu}"
    yield "", "memory of weights and states on a GPU; fits: smallest GPU for 320 slots, with 10 % more for work space"


def _type_name(tensor: Any) -> str:
    name = tensor.kind if isinstance(tensor, BlockTensor) else str(tensor.dtype).removeprefix("torch.")
    return str(name)


def weight_bytes(weights: Weights, dtype: str, is_cpu: bool = False) -> float:
    """Return the memory of all weights with a `--dtype`."""
    storage = Format(dtype) if dtype in list(Format) else None
    plain = BYTES_PER_NUMBER[dtype] if storage is None else 2

    def bytes_per_number(name: str) -> float:
        format_ = None if storage is None else format_for(name, storage)
        if format_ is Format.W8A8 and is_cpu:
            return _INT8_BYTES_ON_CPU
        return plain if format_ is None else BYTES_PER_NUMBER[format_]

    return sum(tensor.numel() * bytes_per_number(name) for name, tensor in weights.tensors.items())


def slot_bytes(shape: ModelShape, dtype: str, form: StateFormat | None = None) -> int:
    """Return the memory of one slot. form: that of the WKV state; by default the one that goes with the type."""
    is_fp32 = dtype in ("fp32", "bf16") or shape.version != RWKV7
    form = form or (StateFormat.FP32 if is_fp32 else StateFormat.FP16)
    return shape.slot_bytes(shape.layers, form, 4 if dtype == "fp32" or shape.version != RWKV7 else 2)


def _state(path: Path, tensors: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    states = [tensor for name, tensor in tensors.items() if _STATE.search(name)]
    heads = states[0].shape[-3] if states[0].dim() > 2 else 0
    yield "kind", f"tuned state, {path.suffix.removeprefix('.')}; use it with --state NAME={path}"
    yield "layers", f"{len(states)} x {heads} heads: for a model of {len(states)} layers x {64 * heads}"
    yield "type", ", ".join(sorted({_type_name(tensor) for tensor in states}))
    yield "largest", f"{max(float(tensor.abs().max()) for tensor in states):.3g}"


def _adapter(adapter: Adapter) -> Iterator[tuple[str, str]]:
    kinds = Counter(kind_of(adapter, target, parts) for target, parts in adapter.parts.items())
    ranks = sorted({parts["lora_A"].shape[0] for parts in adapter.parts.values() if "lora_A" in parts})
    layers = {int(found[1]) for target in adapter.parts if (found := re.search(r"blocks\.(\d+)\.", target))}
    yield "kind", f"adapter; use it with --adapter {adapter.path} or --adapter-serve NAME={adapter.path}"
    yield "weights", ", ".join(f"{kind} on {count}" for kind, count in kinds.items()) or "none"
    yield "layers", f"{len(layers | set(adapter.experts))}, experts in {len(adapter.experts)}"
    yield "rank", ", ".join(map(str, ranks)) or "none"
    yield "alpha", str(adapter.config.get("lora_alpha", "not in the file; give a scale as FILE:2.0"))


def _session(path: Path) -> Iterator[tuple[str, str]]:
    with path.open("rb") as file:
        content = decode(file.read(MAX_FILE_BYTES + 1))
    yield "kind", "session; import it with POST /state/import"
    yield "tokens", f"{content.num_tokens}, of which {len(content.replay)} follow the state"
    yield "model", f"fingerprint {content.fingerprint}"
    for name, (dtype, sizes) in content.layout.items():
        yield "part", f"{name}: {dtype} {list(sizes)}"
