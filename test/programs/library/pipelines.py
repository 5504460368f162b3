"""Answers of the rwkv package itself, in its own process: it reads its settings on import.

python -m test.programs.library.pipelines MODEL-WITHOUT-PTH
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from demo.random_weights import random_weights
from rwkv_batch.tokenizer import Tokenizer

CTX = "User: simulate SpaceX mars landing using python\n\nAssistant: <think"
IDS = [187, 510, 1563, 310, 247]
"""The ids of its README."""
_LOOP = 32
_WORDS = 100
"""Token ids below this are one or two ASCII characters."""
PLAIN: dict[str, Any] = {"temperature": 1.0, "top_p": 0.0, "alpha_frequency": 0.0, "alpha_presence": 0.0}
PENALISED: dict[str, Any] = {"temperature": 0, "alpha_frequency": 1.0, "alpha_presence": 0.5, "alpha_decay": 0.9}


def write_ascii_model(path: Path) -> Path:
    """Write a random model of few tokens: the package stops its output at an incomplete character."""
    tensors = random_weights(2, 64)
    table = Tokenizer().byte_table
    shown = torch.tensor([bool(token) and token.isascii() and i < _WORDS for i, token in enumerate(table)])
    tensors["head.weight"][~shown] = 0
    torch.save(tensors, path)
    return path


def script_results(pipeline: Any, args_class: Any) -> dict[str, Any]:
    pieces: list[str] = []
    answers: dict[str, Any] = {
        "plain": pipeline.generate(CTX, token_count=48, args=args_class(**PLAIN), callback=pieces.append)
    }
    answers["text"] = "".join(pieces)
    third = pipeline.encode(answers["plain"])[2]
    for name, more in {"banned": {"token_ban": [third]}, "stopped": {"token_stop": [third]}}.items():
        answers[name] = pipeline.generate(CTX, token_count=48, args=args_class(**PLAIN, **more))
    answers["penalised"] = pipeline.generate(CTX, token_count=48, args=args_class(**PENALISED))
    return answers


def forward_results(model: Any, pipeline: Any) -> dict[str, Any]:
    """Return the results of a script with its own sampling loop.

    API_DEMO_CHAT and the README have such a loop.
    "text": of a loop with penalties; "logits": after token ids in one call, in pieces and one by one, and of each id.
    """
    occurrence: dict[int, float] = {}
    tokens: list[int] = []
    out, state = model.forward(pipeline.encode(CTX), None)
    for _ in range(_LOOP):
        for token, count in occurrence.items():
            out[token] -= 0.4 + count * 0.4
        out[0] -= 1e10
        token = pipeline.sample_logits(out, temperature=1.0, top_p=0.0)
        out, state = model.forward([token], state)
        tokens.append(token)
        occurrence = {old: count * 0.996 for old, count in occurrence.items()}
        occurrence[token] = 1 + occurrence.get(token, 0)
    whole, _ = model.forward(IDS, None)
    _, state = model.forward(IDS[:2], model.generate_zero_state())
    _, state = model.forward(IDS[2], state)
    pieces, _ = model.forward(IDS[3:], state)
    each, _ = model.forward(IDS, None, full_output=True)
    logits = [whole, pieces, *each]
    return {"text": pipeline.decode(tokens), "logits": [one.detach().cpu().numpy().tolist() for one in logits]}


def main() -> None:
    """Print the package's answers as JSON."""
    os.environ.update({"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"})
    from rwkv.model import RWKV
    from rwkv.utils import PIPELINE, PIPELINE_ARGS

    model = RWKV(model=sys.argv[1], strategy="cpu fp32")
    gc.disable()  # the vocabulary is a trie of 200,000 lists
    pipeline = PIPELINE(model, "rwkv_vocab_v20230424")
    print(json.dumps({"text": script_results(pipeline, PIPELINE_ARGS), "forwarded": forward_results(model, pipeline)}))


if __name__ == "__main__":
    main()
