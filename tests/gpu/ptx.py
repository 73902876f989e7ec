"""The text of a compiled kernel, PTX, as a list of instructions in basic blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

BITS = {f"{letter}{bits}": bits for letter in "bus" for bits in (8, 16, 32, 64)} | {"f16": 16, "f32": 32, "f64": 64}
"""The width of each type of number."""

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
DTYPES = {
    kind: np.dtype(UNSIGNED[bits] if kind[0] in "bu" else f"{'i' if kind[0] == 's' else 'f'}{bits // 8}")
    for kind, bits in BITS.items()
} | {"pred": np.dtype(bool)}
"""How numpy sees each type."""

SPACES = "global", "shared", "param", "local"

# Instructions that a warp or a block executes together.
_OF_WARP = "shfl", "redux", "vote", "activemask", "ldmatrix", "stmatrix"


@dataclass(frozen=True)
class Instruction:
    """``@guard name.modifier.….kind arguments``, and the line of Python that it came from."""

    name: str
    modifiers: tuple[str, ...]
    arguments: tuple[str, ...]
    guard: str | None
    text: str

    @property
    def kind(self) -> str:
        """The last type, which is the type of the sources."""
        return self.kinds[-1]

    @cached_property
    def kinds(self) -> list[str]:
        return [modifier for modifier in self.modifiers if modifier in DTYPES]

    @property
    def space(self) -> str:
        return next((modifier for modifier in self.modifiers if modifier in SPACES), "global")

    @property
    def together(self) -> str | None:
        """The threads that wait for each other at this instruction: a "block", a "warp", or None."""
        if self.name in ("bar", "barrier"):
            return "warp" if "warp" in self.modifiers else "block"
        return "warp" if self.name in _OF_WARP else None

    @property
    def is_jump(self) -> bool:
        return self.name in ("bra", "ret", "exit")

    @property
    def access_bytes(self) -> int:
        """The bytes of one element of a load or a store."""
        return 2 if self.name in ("ldmatrix", "stmatrix") else BITS[self.kind] // 8


@dataclass
class Block:
    """A basic block: an instruction that waits comes first, a jump comes last."""

    body: list[Instruction] = field(default_factory=list)
    jump: Instruction | None = None
    target: int = 0
    """The block to which it jumps."""

    @property
    def together(self) -> str | None:
        return self.body[0].together if self.body else None


class Module:
    """One kernel. Its parameters are (name, type) in order, its registers and shared variables are by name."""

    def __init__(self, ptx: str) -> None:
        ptx = re.sub(r"\.section\s.*", "", ptx, flags=re.S)  # debug sections
        ptx = re.sub(r"\.loc\s[^\n]*?//\s*(\S+:\d+)[^\n]*", r".loc \1;", ptx)
        ptx = re.sub(r"/\*.*?\*/|//[^\n]*", "", ptx, flags=re.S)
        head, self.name, parameters, rest = re.split(r"\.entry\s+([\w$]+)\s*\((.*?)\)", ptx, maxsplit=1, flags=re.S)
        body = rest[rest.index("{") + 1 : rest.rindex("}")]
        self.parameters = [(words[-1], words[1][1:]) for words in map(str.split, parameters.split(",")) if words]
        self.shared: dict[str, int] = {}
        self.shared_bytes = 0
        for declaration in re.findall(r"\.shared\s[^;]*", head + body):
            self._declare_shared(declaration)
        self.registers: dict[str, str] = {}
        for kind, names in re.findall(r"\.reg\s+\.(\w+)\s+([^;]*);", body):
            for name in names.split(","):
                self._declare_register(kind, name.strip())
        self.instructions, labels = _statements(re.sub(r"\.(reg|shared|pragma)\s[^;]*;", "", body))
        self.blocks = _blocks(self.instructions, labels)

    def _declare_shared(self, declaration: str) -> None:
        align, kind, name, count = re.findall(r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?", declaration)[
            -1
        ]
        start = -(-self.shared_bytes // int(align or 16)) * int(align or 16)
        self.shared[name] = start
        self.shared_bytes = start + int(count or 0) * BITS[kind] // 8

    def _declare_register(self, kind: str, name: str) -> None:
        many = re.fullmatch(r"(.*)<(\d+)>", name)
        for one in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]:
            self.registers[one] = kind

    def granule(self, space: str) -> int:
        """The smallest number of bytes that the kernel reads or writes at once, at most 4."""
        moves = ("ld", "st", "ldmatrix", "stmatrix")
        return min([4, *(i.access_bytes for i in self.instructions if i.name in moves and i.space == space)])


def _statements(body: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions, and the position of each label."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    line = ""
    for raw in re.sub(r"^\s*[{}]|[{}]\s*$", "", body, flags=re.M).split(";"):
        statement = raw.strip()
        while label := re.match(r"([\w$]+):\s*", statement):
            labels[label[1]] = len(instructions)
            statement = statement[label.end() :]
        if statement.startswith(".loc"):
            line = statement.split()[1]
        elif statement:
            instructions.append(_instruction(statement, line))
    return instructions, labels


def _instruction(statement: str, line: str) -> Instruction:
    guard, name, rest = re.fullmatch(r"(?:@(!?%?[\w$]+)\s+)?([\w.:]+)\s*(.*)", statement, flags=re.S).groups()
    arguments = re.findall(r"(?:[^,{\[]|\{[^}]*\}|\[[^\]]*\])+", rest)
    first, *modifiers = name.split(".")
    text = f"{' '.join(statement.split())} ({line})"
    return Instruction(first, tuple(modifiers), tuple(argument.strip() for argument in arguments), guard, text)


def _blocks(instructions: list[Instruction], labels: dict[str, int]) -> list[Block]:
    """Split into basic blocks: before each wait, after each jump, and at each jump target."""
    targets = {labels[i.arguments[0]] for i in instructions if i.name == "bra"}
    blocks: list[Block] = []
    number: dict[int, int] = {}
    for at, instruction in enumerate(instructions):
        if not blocks or blocks[-1].jump or at in targets or instruction.together:
            number[at] = len(blocks)
            blocks.append(Block())
        if instruction.is_jump:
            blocks[-1].jump = instruction
        else:
            blocks[-1].body.append(instruction)
    number[len(instructions)] = len(blocks)
    for block in blocks:
        block.target = (
            number[labels[block.jump.arguments[0]]] if block.jump and block.jump.name == "bra" else len(blocks)
        )
    return blocks
