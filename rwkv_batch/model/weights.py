"""Opens weight files memory-mapped, recognises the model and checks the tensors.

The tensors determine the model. Reads `.pth`, `.safetensors` and GGUF files, and Hugging Face folders; layouts of names
are those of their modules.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from rwkv_batch.errors import StartupError
from rwkv_batch.model.content_digest import content_digest
from rwkv_batch.model.files.gguf_blocks import BlockTensor, stored
from rwkv_batch.model.gguf_names import names_of_pth
from rwkv_batch.model.huggingface import check_config, is_folder, native_names, read_folder
from rwkv_batch.model.mmap_release import release
from rwkv_batch.model.older import files as older
from rwkv_batch.model.state import HEAD_SIZE, RWKV7, ModelShape
from rwkv_batch.model.tensor_files import FileError, read_tensors
from rwkv_batch.models_folder import ADAPTER_CONFIG
from rwkv_batch.tokenizer import VOCAB_SIZE
from state_pool.origins import FINGERPRINT_SEPARATOR

logger = logging.getLogger(__name__)

ATT_VECTORS = ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "w0", "a0", "k_k", "k_a", "ln_x.weight", "ln_x.bias")
_WHOLE = "use RWKV-7 'x070' or RWKV-6, 5 or 4 'World' weights"
_LOAD_ADAPTER = "load it with --adapter FILE or --adapter-serve NAME=FILE"
UNSUPPORTED_MODELS = (
    (re.compile(r"ffn\.s_emb"), "RWKV-7a with DeepEmbed (rwkv7a-*, keys 'ffn.s_emb*')", _WHOLE),
    (re.compile(r"(^|\.)qkv\."), "RWKV-7b (rwkv7b-*, keys 'qkv.*')", _WHOLE),
    (re.compile(r"(^|\.)enn"), "RWKV-8 (keys 'enn*')", _WHOLE),
    (re.compile(r"(^|[._])rosa"), "RWKV with ROSA (keys 'rosa*')", _WHOLE),
    (
        re.compile(r"ffn\.(router|expert)"),
        "a mixture of experts (keys 'ffn.router*' or 'ffn.expert*')",
        f"{_WHOLE}, or load experts of an adapter with --adapter-serve",
    ),
    (
        re.compile(r"^model\.layers\.\d+\.self_attn\.(time_mixer\.|receptance|x_r$|r_k$|w[012]$)"),
        "ARWKV, a transformers model with RWKV's attention (keys 'self_attn.*')",
        _WHOLE,
    ),
    (
        re.compile(r"^rwkv\.blocks\."),
        "RWKV-4 to 6 in transformers' layout (keys 'rwkv.blocks.*')",
        "give its .pth file",
    ),
    (re.compile(r"^\w+\.(wkv|shift)$"), "a session (keys '*.wkv'), not a model", "import it with POST /state/import"),
    (re.compile(r"^model\.layers\."), "a transformers model other than RWKV-7 (keys 'model.layers.*')", _WHOLE),
    (
        re.compile(r"\.(lora_A|lora_B|bone|disha)(\.default)?(\.weight)?$"),
        "an adapter (keys '*.lora_*' or '*.bone'), not a whole model",
        _LOAD_ADAPTER,
    ),
    (
        re.compile(r"att\.time_(state|offset)$"),
        "a tuned state (keys 'att.time_state'), not a whole model",
        "load it with --state NAME=FILE",
    ),
)
TABLES = ("emb.weight", "head.weight")
"""They have a row per token."""
UNUSED_TENSORS = frozenset(f"blocks.0.att.{name}" for name in ("v0", "v1", "v2"))
"""Present in some files, but the first layer has no value residual."""
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SAMPLE_WHOLE = 1 << 14
SAMPLE_RUN = 32
SAMPLE_RUNS = 4


class WeightsError(StartupError):
    """A weight file cannot be used. The message has the reason and the remedy."""


Change = Callable[[Tensor], Tensor]
"""Changes a weight in fp32, [out, in] or [C] as stored, and keeps its shape."""


@dataclass
class Weights:
    path: Path
    tensors: Mapping[str, Tensor]
    """by name, memory-mapped"""
    shape: ModelShape
    sample_digest: str
    """of names, shapes, dtypes and a sample of each tensor"""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """of adapters, by tensor name"""
    adapters: tuple[str, ...] = ()
    """digests of the adapters that made the changes, in their order"""

    @cached_property
    def fingerprint(self) -> str:
        """Digests of a sample and of all weights, with the adapters. The first call may read the whole file.

        The first half alone is the fingerprint in databases and session files of earlier versions.
        """
        content = content_digest(self.tensors, self.path)
        return FINGERPRINT_SEPARATOR.join(map(self._with_adapters, (self.sample_digest, content)))

    def _with_adapters(self, digest: str) -> str:
        if not self.adapters:
            return digest
        return hashlib.blake2b(" ".join([digest, *self.adapters]).encode(), digest_size=16).hexdigest()

    def tensor(self, name: str) -> Tensor:
        """Return a weight [out, in] or [C] with its change: as stored, or fp32 if an adapter changes it."""
        stored = self.tensors[name]
        change = self.changes.get(name)
        return stored if change is None else change(stored.float())

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors as the file has them."""
        return sum(stored(t).nbytes for t in self.tensors.values())

    @property
    def num_parameters(self) -> int:
        return sum(t.numel() for t in self.tensors.values())


def open_weights(path: str | Path) -> Weights:
    """Open and check a weight file or a Hugging Face folder.

    Reads only names, shapes, dtypes and samples. The tensors map the file; do not write to them. Raises WeightsError
    with the file and the remedy.
    """
    path = Path(path)
    try:
        if (path / ADAPTER_CONFIG).is_file():
            raise WeightsError(f"model path {path} is the folder of an adapter; {_LOAD_ADAPTER}")
        tensors = read_folder(path) if is_folder(path) else read_tensors(path)
        weights = weights_from(native_names(names_of_pth(tensors)), path)
        check_config(path, weights.shape)
        return weights
    except FileError as error:
        raise WeightsError(str(error)) from error


def weights_from(tensors: Mapping[str, Tensor], path: Path = Path("in-memory")) -> Weights:
    """Check tensors that came from `path`, by their names. Raises WeightsError. They are [out, in] and [C]."""
    tensors = _without_padding(path, tensors)
    shape = _recognise(path, tensors)
    _check(path, tensors, shape)
    sample_digest = _sample_digest(tensors)
    for tensor in tensors.values():
        release(tensor)  # reading a sample maps many pages
    return Weights(path, tensors, shape, sample_digest)


def _without_padding(path: Path, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors with the vocabulary's rows [V, C] of the tables: others could be sampled, and mean no text."""
    cut = {
        name: tensor[:VOCAB_SIZE]
        for name, tensor in tensors.items()
        if name in TABLES and len(tensor.shape) == 2 and len(tensor) > VOCAB_SIZE
    }
    unused = max((len(tensors[name]) - len(tensor) for name, tensor in cut.items()), default=0)
    if not unused:
        return tensors
    logger.warning(
        "model file %s has %d rows more than the World vocabulary of %d tokens; they are not used",
        path,
        unused,
        VOCAB_SIZE,
    )
    return {**tensors, **cut}


def _recognise(path: Path, tensors: Mapping[str, Tensor]) -> ModelShape:
    for pattern, description, remedy in UNSUPPORTED_MODELS:
        found = [name for name in tensors if pattern.search(name)]
        if found:
            raise WeightsError(f"model file {path} is {description}, found in {', '.join(found[:3])}; {remedy}")
    version = older.version_of(tensors) or RWKV7
    required = ("blocks.0.att.r_k", "blocks.0.att.w1") if version == RWKV7 else ()
    for name in ("emb.weight", *required, "head.weight"):
        if name not in tensors:
            raise WeightsError(
                f"model file {path} is not {version}: it has no {name!r} (it has {len(tensors)} tensors)"
            )
    numbers = {int(m.group(1)) for name in tensors if (m := re.match(r"blocks\.(\d+)\.", name))}
    layers = max(numbers) + 1
    if numbers != set(range(layers)):
        missing = min(set(range(layers)) - numbers)
        raise WeightsError(f"model file {path} has {layers} layers but none numbered {missing}; the file is incomplete")
    return _shape(tensors, layers) if version == RWKV7 else older.shape_of(tensors, version, layers)


def _shape(tensors: Mapping[str, Tensor], layers: int) -> ModelShape:
    last, size = f"blocks.{layers - 1}.att", partial(older.matrix_size, tensors)
    return ModelShape(
        layers=layers,
        width=size("emb.weight", 1),
        vocab=size("emb.weight", 0),
        ffn=size("blocks.0.ffn.key.weight", 0),
        decay_rank=size(f"{last}.w1", 1),
        a_rank=size(f"{last}.a1", 1),
        v_rank=size(f"{last}.v1", 1),
        gate_rank=size(f"{last}.g1", 1),
    )


def outside_layers(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors outside layers by name, for all versions."""
    norms = (f"{norm}.{part}" for norm in ("ln_out", "blocks.0.ln0") for part in ("weight", "bias"))
    table = (shape.vocab, shape.width)
    return {**dict.fromkeys(TABLES, table), **dict.fromkeys(norms, (shape.width,))}


def expected_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor of an RWKV-7; vectors as [C] (files may have [1, 1, C])."""
    c, f = shape.width, shape.ffn
    expected = outside_layers(shape)
    for i in range(shape.layers):
        block = f"blocks.{i}"
        expected |= {f"{block}.{norm}.{part}": (c,) for norm in ("ln1", "ln2") for part in ("weight", "bias")}
        expected |= {f"{block}.att.{name}": (c,) for name in ATT_VECTORS}
        expected |= {f"{block}.att.{name}.weight": (c, c) for name in ("receptance", "key", "value", "output")}
        expected[f"{block}.att.r_k"] = (shape.heads, HEAD_SIZE)
        ranks = {"w": shape.decay_rank, "a": shape.a_rank, "g": shape.gate_rank}
        if i > 0:
            ranks["v"] = shape.v_rank
            expected[f"{block}.att.v0"] = (c,)
        for letter, rank in ranks.items():
            expected |= {f"{block}.att.{letter}1": (c, rank), f"{block}.att.{letter}2": (rank, c)}
        expected |= {f"{block}.ffn.x_k": (c,), f"{block}.ffn.key.weight": (f, c), f"{block}.ffn.value.weight": (c, f)}
    return expected


def _check(path: Path, tensors: Mapping[str, Tensor], shape: ModelShape) -> None:
    if shape.width == 0 or shape.width % shape.head_size:
        raise WeightsError(
            f"model file {path}: 'emb.weight' is {tuple(tensors['emb.weight'].shape)}; "
            f"the width must be a multiple of the head size {shape.head_size}"
        )
    if shape.version == RWKV7:
        expected = expected_shapes(shape)
    else:
        expected = outside_layers(shape) | older.expected_shapes(shape, tensors)
    for name, size in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise WeightsError(
                f"model file {path} ({shape.version}) lacks the tensor {name!r} of shape {size}; the file is incomplete"
            )
        _check_tensor(path, name, tensor, size)
    unknown = [name for name in tensors if name not in expected and name not in UNUSED_TENSORS]
    if unknown:
        raise WeightsError(
            f"model file {path} has {len(unknown)} tensors that {shape.version} does not have "
            f"({', '.join(unknown[:3])}); it is another model"
        )


def _check_tensor(path: Path, name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    squeezed = tuple(size for size in tensor.shape if size != 1) if tensor.dim() == 3 else tuple(tensor.shape)
    if expected not in (squeezed, tuple(tensor.shape)) or 0 in expected:
        raise WeightsError(f"model file {path}: tensor {name!r} has shape {tuple(tensor.shape)}, expected {expected}")
    if tensor.dtype not in FLOATS:
        raise WeightsError(f"model file {path}: tensor {name!r} is {tensor.dtype}; it must be bf16, fp16, fp32 or fp64")
    if not _sample(tensor).isfinite().all():
        raise WeightsError(f"model file {path}: tensor {name!r} has NaN or infinity; the file is damaged")


def _sample(tensor: Tensor) -> Tensor:
    """Return a tensor as fp32, or samples of a large one.

    A vector or small matrix is returned whole. The samples are a few runs, which touch few mapped pages.
    """
    if isinstance(tensor, BlockTensor):
        return tensor.sample(SAMPLE_RUNS)
    flat = tensor.reshape(-1)
    if flat.numel() > SAMPLE_WHOLE:
        flat = torch.cat(
            [flat[start : start + SAMPLE_RUN] for start in range(0, flat.numel(), flat.numel() // SAMPLE_RUNS)]
        )
    return flat.float()


def _sample_digest(tensors: Mapping[str, Tensor]) -> str:
    """Hash all names, shapes, dtypes and a sample of each tensor."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        digest.update(_sample(tensor).numpy().tobytes())
    return digest.hexdigest()
