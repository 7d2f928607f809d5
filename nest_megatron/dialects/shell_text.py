"""The part of a shell script that decides a command line: assignments, arrays, simple tests, expansion.

Not a shell: loops, functions, ``case`` and command substitution are not run.  What was left out is said.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nest_megatron.dialects.placeholders import expand, names_in

_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)(\+?)=(.*)$", re.ASCII | re.DOTALL)
_ARRAY = re.compile(
    r"^\s*(?:(?:export|declare|local|readonly)(?:\s+-\w+)*\s+)?([A-Za-z_]\w*)(\+?)=\((.*)\)\s*;?\s*$",
    re.ASCII | re.DOTALL,
)
_ARRAY_WORD = re.compile(r"^([A-Za-z_]\w*)(\+?)=\((.*)$", re.ASCII | re.DOTALL)
_ARRAY_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}", re.ASCII)
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)|\$\[([^\]]*)\]")
_SUBSTITUTION = re.compile(r"\$\((?!\()|`")
_FUNCTION = re.compile(r"^\s*(?:function\s+)?[A-Za-z_][\w-]*\s*\(\s*\)\s*\{?\s*$", re.ASCII)
_EXPORTING = ("export", "declare", "local", "readonly")
_TESTS = ("[", "[[", "test")
_ENDS = {"fi": "if block", "done": "loop", "esac": "case block", "}": "function", "&&": "condition"}
_OPENING = {"for": "done", "while": "done", "until": "done", "select": "done", "case": "esac"}
_ARITHMETIC_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number of the first line, text) of each line after joining continuations, quotes and arrays."""
    buffer, quote, depth, first, number = "", "", 0, 1, 1
    i, size = 0, len(text)
    while i < size:
        char = text[i]
        i += 1
        if char == "\\" and quote != "'" and i < size:
            if text[i] != "\n":
                buffer += char + text[i]
            else:
                number += 1
            i += 1
            continue
        if char == "\n":
            number += 1
            if not quote and depth == 0 and not buffer.rstrip().endswith(("&&", "||", "|")):
                yield first, buffer
                buffer, first = "", number
            else:
                buffer += " "
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and (not buffer or buffer[-1].isspace()):
            while i < size and text[i] != "\n":
                i += 1
            continue
        elif char in "()":
            depth = max(0, depth + (1 if char == "(" else -1))
        buffer += char
    yield first, buffer


def split_words(line: str) -> list[str] | None:
    """Return the words of a line, operators (``;``, ``&&``, ``|`` ...) apart; None when quotes are open."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError:
        return None


def _blank_separated(text: str) -> list[str]:
    """Return the words of a variable's value; quotes in it are honoured, as under ``eval`` or ``bash -c``."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


class Shell:
    """Variables and arrays as assigned so far.

    Args:
        environment: variables that exist before the script starts.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.variables: dict[str, str] = dict(environment)
        self.arrays: dict[str, list[str]] = {}
        self.exported: set[str] = set()

    def expand(self, text: str) -> str:
        """Return ``text`` with known variables, arrays (joined by blanks) and integer arithmetic put in."""
        text = _ARRAY_REFERENCE.sub(lambda match: " ".join(self.arrays.get(match[1], [match[0]])), text)
        text = _ARITHMETIC.sub(lambda match: self._arithmetic(match[1] or match[2] or ""), text)
        return expand(text, self.variables)

    def words(self, raw: list[str]) -> list[str]:
        """Return words after expansion: an array gives its elements, a variable that holds flags is split."""
        found: list[str] = []
        for word in raw:
            array = _ARRAY_REFERENCE.fullmatch(word)
            if array is not None and array[1] in self.arrays:
                found += self.arrays[array[1]]
                continue
            expanded = self.expand(word)
            if word.startswith("$") and expanded != word and (not expanded or " " in expanded.strip()):
                found += _blank_separated(expanded)
            else:
                found.append(expanded)
        return found

    def assign(self, name: str, value: str, *, append: bool) -> None:
        """Set a variable; a command substitution leaves it unassigned."""
        if _SUBSTITUTION.search(_ARITHMETIC.sub("", value)):
            self.variables.pop(name, None)
            return
        text = self.expand(value)
        if name in names_in(text):
            text = re.sub(rf"\$\{{?{name}\b[^}}\s]*\}}?", "", text)
        if append and name in self.arrays:
            self.arrays[name].append(text)
        else:
            self.variables[name] = self.variables.get(name, "") + text if append else text

    def assign_array(self, name: str, raw: list[str], *, append: bool) -> None:
        """Set or extend an array."""
        words = self.words(raw)
        self.arrays[name] = [*self.arrays.get(name, []), *words] if append else words

    def holds(self, condition: list[str]) -> bool | None:
        """Return the verdict of one ``[ ... ]`` test, None when it is more than that."""
        if len(condition) < 3 or condition[0] not in _TESTS:
            return None
        words = [self._or_empty(word) for word in condition[1:]]
        if condition[0] != "test":
            words.pop()
        if words and words[0] == "!":
            inner = self.holds(["test", *condition[2 : 2 + len(words) - 1]])
            return None if inner is None else not inner
        if len(words) == 2 and words[0] in ("-n", "-z"):
            return (words[1] != "") == (words[0] == "-n")
        if len(words) == 3 and words[1] in _COMPARISONS:
            left, right = words[0], words[2]
            if words[1].startswith("-"):
                if not (left.lstrip("-").isdecimal() and right.lstrip("-").isdecimal()):
                    return None
                return _COMPARISONS[words[1]](int(left), int(right))
            return _COMPARISONS[words[1]](left, right)
        return None

    def _or_empty(self, word: str) -> str:
        expanded = self.expand(word)
        return "" if expanded.startswith("$") else expanded

    def _arithmetic(self, expression: str) -> str:
        names = {name: self.variables.get(name, "") for name in re.findall(r"[A-Za-z_]\w*", expression)}
        text = expand(expression, self.variables)
        for name, value in names.items():
            text = re.sub(rf"\$?\{{?\b{name}\b\}}?", value or name, text)
        try:
            return str(_integer(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            # Names in it stay visible, so that the error can name the missing variable.
            return f"$(({expression}))" if not names else f"${{{next(iter(names))}}}"


def _integer(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 2**60:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC_OPERATORS:
        found = _ARITHMETIC_OPERATORS[type(node.op)](_integer(node.left), _integer(node.right))
        if abs(found) < 2**60:
            return found
    raise ValueError("not integer arithmetic")


@dataclass(slots=True)
class _Block:
    """An open block of control flow; verdicts are None when they are not known without running it.

    Args:
        end: the word that closes it.
        test: verdict of the branch's own condition.
        earlier: whether an earlier branch of the same ``if`` was taken.
    """

    end: str
    test: bool | None
    earlier: bool | None = False

    @property
    def runs(self) -> bool | None:
        """Whether the branch is taken."""
        if self.earlier or self.test is False:
            return False
        return None if self.earlier is None else self.test

    @property
    def taken(self) -> bool | None:
        """Whether this branch or an earlier one is taken."""
        return self.earlier if self.earlier else (None if self.earlier is None else self.runs)


def statements(text: str, shell: Shell, left_out: list[str]) -> Iterator[list[str]]:
    """Run the assignments of a script; yield the words of every other command that is surely reached.

    Args:
        left_out: receives one sentence per block that is not run although it assigns or runs something.
    """
    blocks: list[_Block] = []
    for number, line in logical_lines(text):
        if _FUNCTION.match(line):
            blocks.append(_Block("}", None))
            continue
        array = _ARRAY.match(line)
        if array is not None:
            chain = [("", [f"{array[1]}{array[2]}=(", *(split_words(array[3]) or []), ")"])]
        else:
            chain = list(_split_statements(split_words(line) or []))
        reached: bool | None = True
        asking = False  # inside the condition of an if, which may be a chain of tests
        for before, words in chain:
            asking = words[:1] in (["if"], ["elif"]) or (asking and before in ("&&", "||"))
            if asking and words and words[0] in _TESTS:
                blocks[-1].test = _joined(blocks[-1].test, before, shell.holds(words))
                continue
            statement = _enter(words, blocks, shell)
            if not statement:
                continue
            if before == "&&" or before == "||":
                reached = None if reached is None else reached is (before == "&&")
            else:
                reached = True
            verdicts = [*(block.runs for block in blocks), reached]
            if not all(verdicts):
                if False not in verdicts and _matters(statement):
                    _note([*blocks, _Block("&&", reached)], number, left_out)
                continue
            if statement[0] in _TESTS:
                reached = shell.holds(statement)
                continue
            command = _assignments(statement, shell)
            if command:
                yield command


def _matters(statement: list[str]) -> bool:
    """Return whether a statement sets something or gives flags."""
    return any(_ASSIGNMENT.match(word) or word.startswith("--") for word in statement)


def _joined(left: bool | None, between: str, right: bool | None) -> bool | None:
    """Return the verdict of two tests joined by ``&&`` or ``||``; None when it hangs on an unknown one."""
    decisive = between == "||"
    if decisive in (left, right):
        return decisive
    return None if left is None or right is None else right


def _split_statements(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (operator in front, words) of each command of a line."""
    before: str = ""
    statement: list[str] = []
    for word in words:
        if word and set(word) <= set(";&|"):
            yield before, statement
            before, statement = word, []
        else:
            statement.append(word)
    yield before, statement


def _enter(statement: list[str], blocks: list[_Block], shell: Shell) -> list[str]:
    """Follow control words; return what is left of the statement to run."""
    while statement:
        word = statement[0]
        if word == "if":
            blocks.append(_Block("fi", shell.holds(statement[1:])))
            return []
        if word == "elif" and blocks:
            blocks.append(_Block("fi", shell.holds(statement[1:]), blocks.pop().taken))
            return []
        if word == "else" and blocks:
            blocks.append(_Block("fi", True, blocks.pop().taken))
        elif word in _OPENING:
            blocks.append(_Block(_OPENING[word], None))
            return []
        elif blocks and word == blocks[-1].end:
            blocks.pop()
        elif word not in ("then", "do", "{", "}", "("):
            return statement
        statement = statement[1:]
    return []


def _note(blocks: list[_Block], number: int, left_out: list[str]) -> None:
    """Say once per block that it is not run."""
    kind = _ENDS[next(block.end for block in blocks if block.runs is None)]
    sentence = f"the script's {kind} around line {number} is not run: what it sets is left out"
    if not left_out or left_out[-1].partition(" around ")[0] != sentence.partition(" around ")[0]:
        left_out.append(sentence)


def _assignments(statement: list[str], shell: Shell) -> list[str]:
    """Run the assignments a statement begins with; return the command behind them."""
    array = _ARRAY_WORD.match(statement[0])
    if array is not None:
        inner = [array[3], *statement[1:]]
        inner[-1] = inner[-1].removesuffix(")")
        shell.assign_array(array[1], [word for word in inner if word], append=bool(array[2]))
        return []
    exporting = statement[0] in _EXPORTING
    rest = [word for word in statement[1:] if not word.startswith("-")] if exporting else statement
    for i, word in enumerate(rest):
        match = _ASSIGNMENT.match(word)
        if match is None:
            if not exporting:
                # A variable in front of a command is in the command's environment.
                shell.exported.update(w.partition("=")[0] for w in rest[:i])
                return rest[i:]
            shell.exported.add(word)
            continue
        shell.assign(match[1], match[3], append=bool(match[2]))
        if exporting:
            shell.exported.add(match[1])
    return []
