"""Stop rules and an automaton that finds any of many stop strings.

The cost per byte does not depend on the number of strings (Aho and Corasick, 1975). Rows with the same stops share an
automaton.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from rwkv_batch.request import GenerateRequest
from rwkv_batch.tokenizer import END_OF_TEXT


class Node:
    """A state of the automaton: the longest suffix of the text that is a prefix of a stop."""

    __slots__ = ("children", "depth", "longest")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        """length of that prefix in bytes"""
        self.longest = 0
        """length of the longest stop that ends here; 0: none"""
        self.children: dict[int, Node | range] = {}
        """by the next byte; a range of the sorted stops until the node is created"""


class StopAutomaton:
    """Finds a set of byte strings in streams. Nodes are created when texts reach them.

    Engine thread only. Each row keeps its `Node`.
    """

    def __init__(self, strings: Iterable[bytes]) -> None:
        self._strings = sorted({string for string in strings if string})
        # A field of the nodes would create reference cycles, which only the garbage collector frees.
        self._fallbacks: dict[Node, Node] = {}
        """by node, except the root: its longest proper suffix that is a prefix of a stop"""
        self.root = self._node(0, range(len(self._strings)))
        self.first_bytes = bytes(self.root.children)
        """the first bytes of all strings"""

    def advance(self, node: Node, piece: bytes) -> tuple[Node, int | None]:
        """Read a piece of text. Returns the next node and the start of the earliest stop that ends in the piece.

        The start is a byte offset in `piece`, negative if the stop began before it. None: no stop ends here.
        """
        if node is self.root and len(piece.translate(None, self.first_bytes)) == len(piece):
            return node, None
        found: int | None = None
        for end, byte in enumerate(piece, 1):
            node = self._step(node, byte)
            if node.longest and (found is None or end - node.longest < found):
                found = end - node.longest
        return node, found

    def _step(self, node: Node, byte: int) -> Node:
        while byte not in node.children:
            if node is self.root:
                return node
            node = self._fallbacks[node]
        child = node.children[byte]
        return self._grow(node, byte, child) if isinstance(child, range) else child

    def _grow(self, parent: Node, byte: int, stops: range) -> Node:
        """Create the child that these stops share.

        All its ancestors exist, so recursion is limited by a stop's length.
        """
        child = parent.children[byte] = self._node(parent.depth + 1, stops)
        fallback = self.root if parent is self.root else self._step(self._fallbacks[parent], byte)
        self._fallbacks[child] = fallback
        child.longest = child.longest or fallback.longest
        return child

    def _node(self, depth: int, stops: range) -> Node:
        node = Node(depth)
        start = stops.start
        for index in stops:
            string = self._strings[index]
            if len(string) == depth:
                node.longest = depth
                start = index + 1
            elif index + 1 == stops.stop or self._strings[index + 1][depth] != string[depth]:
                node.children[string[depth]] = range(start, index + 1)
                start = index + 1
        return node


class StopRules:
    """Ends of a row's text: token ids, and byte strings at any position."""

    def __init__(self, request: GenerateRequest, byte_table: list[bytes]) -> None:
        ids = set(request.stop_ids)
        if request.ignore_eos:
            ids.discard(END_OF_TEXT)
        else:
            ids.add(END_OF_TEXT)
        self.ids = frozenset(ids)
        # A blank line may span merged tokens ("。\n" + "\n"), so a stop id of newlines alone is also matched as text.
        blank = {byte_table[i] for i in ids if len(byte_table[i]) > 1 and not byte_table[i].strip(b"\n")}
        self.automaton = StopAutomaton(blank | set(request.stop_strings))


class StopRulesCache:
    """The rules of running rows, shared between equal requests."""

    def __init__(self, byte_table: list[bytes]) -> None:
        self._byte_table = byte_table
        self._rules: weakref.WeakValueDictionary[object, StopRules] = weakref.WeakValueDictionary()

    def build(self, request: GenerateRequest) -> StopRules:
        """Return the rules of a request, cached while a running row uses them."""
        key = (request.ignore_eos, frozenset(request.stop_ids), frozenset(request.stop_strings))
        rules = self._rules.get(key)
        if rules is None:
            rules = self._rules[key] = StopRules(request, self._byte_table)
        return rules
