"""Reading the command line out of a shell script, without running it.

Understood: quotes, line continuations, comments, NAME=value, arrays NAME=(a b) with "${NAME[@]}", $NAME,
${NAME:-default} and $((arithmetic)). What only a shell knows ($HOME, $(date)) stays in the words as it was written.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Word = list[tuple[str, str]]
"""(text, quote) pieces; the quote is ', " or empty."""

_ASSIGNMENT = re.compile(r"^(\w+)(\+?)=(.*)$", re.DOTALL)
_PARAMETER = re.compile(
    r"\$\(\((?P<sum>[^()]*(?:\([^()]*\)[^()]*)*)\)\)|\$(?P<command>\([^)]*\))"
    r"|\$\{(?P<braced>\w+)(?:\[[@*]\])?(?::?[-=](?P<default>[^{}]*(?:\{[^{}]*\}[^{}]*)*))?\}|\$(?P<plain>\w+|[@*#?])"
)
_PLAIN = re.compile(r"[^\s\"'\\$;&|<>()]*")
UNKNOWN = re.compile(r"\$(\w+|\{|\()")
"""What is left of a parameter that only the shell can fill in."""


@dataclass(slots=True)
class Shell:
    """The variables as far as they are known; words are expanded by them."""

    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)

    def assign(self, word: Word) -> bool:
        """Whether the word was an assignment; it is then made."""
        found = _ASSIGNMENT.match(word[0][0]) if word and not word[0][1] else None
        if not found or "." in found[1]:
            return False
        name, value = found[1], self.expanded([(found[3], ""), *word[1:]])
        self.variables[name] = self.variables.get(name, "") + value if found[2] else value
        return True

    def words(self, word: Word) -> list[str]:
        """What the word is when it is expanded: one word, or those of an array; "$@" is nothing."""
        text = "".join(piece for piece, _ in word)
        if text in ("$@", "$*", "${@}"):
            return []
        array = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", text)
        if array and array[1] in self.arrays:
            return self.arrays[array[1]]
        value = self.expanded(word)
        unquoted = len(word) == 1 and not word[0][1] and text.startswith("$")
        return value.split() if unquoted and not UNKNOWN.search(value) else [value]

    def expanded(self, word: Word) -> str:
        return "".join(text if quote == "'" else _PARAMETER.sub(self._parameter, text) for text, quote in word)

    def _parameter(self, match: re.Match[str]) -> str:
        if match["sum"] is not None:
            return self._sum(match["sum"]) or match[0]
        name = match["braced"] or match["plain"]
        if name in self.arrays:
            return " ".join(self.arrays[name])
        if name in self.variables:
            return self.variables[name]
        if match["default"] is not None:
            return self.expanded([(match["default"].strip("\"'"), "")])
        return match[0]

    def _sum(self, text: str) -> str | None:
        names = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda m: self.variables.get(m[1], m[0]), text)
        try:
            return str(_integer(ast.parse(names.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return None


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a script, in the order of the file, after the assignments before it."""
    shell = Shell()
    for statement in _statements(text):
        if statement and statement[0] == [("export", "")]:
            statement = statement[1:]
        while statement and shell.assign(statement[0]):
            name = statement[0][0][0].split("=")[0].rstrip("+")
            statement = statement[1:]
            if statement and statement[0] == [("(", "operator")]:
                end = next((i for i, word in enumerate(statement) if word == [(")", "operator")]), len(statement))
                inner = [part for word in statement[1:end] for part in shell.words(word)]
                shell.arrays[name], statement = shell.arrays.get(name, []) + inner, statement[end + 1 :]
        words = [part for word in statement if word[0][1] != "operator" for part in shell.words(word)]
        if words:
            yield words


def _statements(text: str) -> Iterator[list[Word]]:
    """Words up to a newline, ; or &&. What follows a redirection or a pipe on its line is left out."""
    statement: list[Word] = []
    depth, skipping = 0, False
    for word in _words(text.replace("\r\n", "\n").replace("\\\n", " ")):
        sign = word[0][0] if word[0][1] == "operator" else ""
        depth += {"(": 1, ")": -1}.get(sign, 0)
        if depth <= 0 and (sign in ("\n", ";") or (sign == "&" and not skipping)):
            yield statement
            statement, skipping = [], False
        elif sign in ("<", ">", "|"):
            skipping = True
            if statement and statement[-1] in ([("1", "")], [("2", "")]):
                statement.pop()
        elif not skipping and sign != "\n":
            statement.append(word)
    yield statement


def _words(text: str) -> Iterator[Word]:
    word: Word = []
    position = 0
    while position < len(text):
        char = text[position]
        if char in "\"'":
            end = _closing(text, position)
            word.append(
                (text[position + 1 : end].replace('\\"', '"') if char == '"' else text[position + 1 : end], char)
            )
            position = end + 1
        elif parameter := _PARAMETER.match(text, position):
            word.append((parameter[0], ""))
            position = parameter.end()
        elif char == "#" and not word:
            position = (text + "\n").find("\n", position)
        elif char.isspace() or char in ";&|<>()":
            if word:
                yield word
                word = []
            if not char.isspace() or char == "\n":
                yield [(char, "operator")]
            position += 1
        else:
            escaped = char == "\\"
            plain = _PLAIN.match(text, position + 1 + escaped)
            end = plain.end() if plain else len(text)
            word.append((text[position + escaped : end], "'" if escaped else ""))
            position = end
        if len(word) > 1 and word[-1][1] == word[-2][1] == "":
            word[-2:] = [(word[-2][0] + word[-1][0], "")]
    if word:
        yield word


def _closing(text: str, start: int) -> int:
    quote, position = text[start], start + 1
    while position < len(text) and text[position] != quote:
        position += 2 if text[position] == "\\" and quote == '"' else 1
    if position >= len(text):
        line = text.count("\n", 0, start) + 1
        raise ValueError(f"line {line}: a quotation is not closed")
    return position


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip


def _integer(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_integer(left), _integer(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_integer(operand)
    raise ValueError("not a sum of integers")
