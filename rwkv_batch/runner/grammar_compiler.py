"""Creates the compiler of grammars for a model. Its libraries are loaded on demand: few engines need them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rwkv_batch.tokenizer import Tokenizer

if TYPE_CHECKING:
    from sampling.grammar.compiler import GrammarCompiler


def make_compiler(tokenizer: Tokenizer, vocab: int, device: torch.device) -> GrammarCompiler:
    """Return a compiler for a vocabulary. device: of the logits"""
    from sampling.grammar.compile_sandbox import CompileSandbox
    from sampling.grammar.compiler import GrammarCompiler
    from sampling.grammar.masks import mask_threads

    table = tokenizer.byte_table
    return GrammarCompiler(table, tokenizer.encode_bytes, vocab, CompileSandbox(table, vocab), mask_threads(device))
